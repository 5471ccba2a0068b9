"""Liger's kernels, run by Triton's interpreter, against torch:
`TRITON_INTERPRET=1 python tests/liger_program.py models forward loss divergence sharded`.

Prints each part that agrees. A separate program, because Triton chooses its interpreter for the
whole process. In fp32 and fp16: the interpreter's bf16 gives NaN.
"""

import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[1]))

from bosch.attention.cache import CACHE
from bosch.calibration import Calibration, Haystack, Question
from bosch.config import TrainConfig
from bosch.data.loader import IGNORED
from bosch.hybrid.conversion import deploy
from bosch.hybrid.models import families_with
from bosch.kernels import choose_kernels, fuse_forward, rotation_of
from bosch.run.dist import leave_ranks
from bosch.search.score import Evaluator
from bosch.search.settings import Accelerations
from bosch.training import parallel
from bosch.training.loss import Lesson, head_loss, install_kernels, model_loss
from bosch.training.model_start import start_model
from bosch.training.parallel import start_world, whole
from tests.model_factory import packed_positions, random_tokens, tiny_model
from tests.plain_training import model_folder

# Of the outputs and gradients, in norm. In fp16 a value has 11 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def fix_the_interpreter() -> None:
    """Fix two bugs of triton's interpreter: numbers reach a kernel as Python floats, which have no
    `to`, and libdevice's rsqrt does not compute anything."""
    from liger_kernel.ops import rms_norm

    convert = interpreter._implicit_cvt

    def convert_floats_too(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert_floats_too
    rms_norm.rsqrt = lambda value: tl.math.rsqrt(value)  # looked up when a kernel runs


def loss_and_gradients(
    model: Any, inputs: dict[str, Any], labels: Tensor, scale: float
) -> dict[str, Tensor]:
    loss = model_loss(model, inputs, labels, scale)
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def models() -> None:
    """Norms, MLPs and loss of each family; other models keep torch's classes."""
    kernels, _ = choose_kernels("auto", torch.device("cpu"))
    assert kernels == "liger", kernels
    ids = random_tokens(2, 11)
    inputs, labels = {"input_ids": ids}, torch.roll(ids, -1, 1)
    labels[:, -1] = IGNORED
    for family in families_with("kernels_compared"):
        plain: Any = tiny_model(family, num_hidden_layers=1, initializer_range=0.1)
        plain = deploy(plain, [[1, 0, 1, 0]], 4).train()
        ours = copy.deepcopy(plain)
        install_kernels(plain, "torch")
        expected = loss_and_gradients(plain, inputs, labels, 1 / 20)
        install_kernels(ours, kernels)
        found = loss_and_gradients(ours, inputs, labels, 1 / 20)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        is_dense = not hasattr(ours.config, "num_experts")
        for module in (ours.model.norm, *[ours.model.layers[0].mlp] * is_dense):
            assert module.forward.__func__.__module__.startswith("liger_kernel"), module
        other: Any = tiny_model(family, num_hidden_layers=1)
        assert "liger" not in type(other.model.norm).__module__


def forward() -> None:
    """Models that only compute forward, dense, hybrid and in search mode: padded batches that are
    prefilled and then decode, and single rows as a search computes them. Also of copies."""
    ids, z = random_tokens(2, 9), ((1, 0, 1, 0), (0, 1, 0, 0))
    padding = torch.ones(2, 10, dtype=torch.long)
    padding[1, :4] = 0
    for family in families_with("kernels_compared"):
        stock: Any = tiny_model(family, num_hidden_layers=2, initializer_range=0.1)
        module = sys.modules[type(stock).__module__]
        before = dict(vars(module))
        for plain in (stock, deploy(stock, z, 4)):
            changed = copy.deepcopy(plain)
            fuse_forward(changed)
            assert vars(module) == before  # of other models
            for layer in changed.model.layers:
                assert rotation_of(layer.self_attn).__module__.startswith("liger_kernel")
            fused = copy.deepcopy(changed)
            for parameter in changed.parameters():
                parameter.data.zero_()
            found, expected = ([] for _ in range(2))
            search: Any = {"bosch_mask": z, "bosch_window": 4} if plain is stock else {}
            for model, outputs in ((fused, found), (plain, expected)):
                with torch.no_grad():
                    outputs.append(model(ids, use_cache=False, **search).logits)
                    prompt = model(ids, use_cache=True, attention_mask=padding[:, :9])
                    cache = {CACHE: prompt[CACHE]}
                    further: Any = {"attention_mask": padding, **cache}
                    outputs += [prompt.logits, model(ids[:, :1], **further).logits]
                    if plain is stock:
                        questions = tuple(Question(range(n, n + 1), range(1), "") for n in (4, 8))
                        one = Calibration([Haystack(ids[0], questions)])
                        evaluator, use = Evaluator(model, one, 4), Accelerations(prefixes=False)
                        rows_NC = evaluator.hidden_states(evaluator.haystacks[0], z, use)
                        outputs.append(rows_NC)
            for one, other in zip(found, expected, strict=True):
                check(one, other, TOLERANCE[torch.float32])
                assert not torch.equal(one, other)  # of other kernels
            assert torch.equal(fused(ids).logits, plain(ids).logits)  # with gradients


def loss() -> None:
    """With the vocabulary of a real model. Times 1, as otherwise Liger multiplies the weight's
    gradient row by row, and the interpreter takes minutes for 151,936 rows."""
    losses(151_936, 1.0, None, list(TOLERANCE))


def divergence() -> None:
    """Not in fp16, where Liger's gradient of a mean over all tokens underflows."""
    lesson = Lesson(torch.randn(6, 64), torch.randn(5_000, 64) * 0.05, temperature=2.0)
    losses(5_000, 1 / 20, lesson, [torch.float32])


def losses(
    num_classes: int, scale: float, lesson: Lesson | None, dtypes: Sequence[torch.dtype]
) -> None:
    """Of six tokens, the last of which has no target."""
    labels = torch.randint(num_classes, (1, 6))
    labels[0, -1] = IGNORED
    for dtype in dtypes:
        results = []
        for kernels in ("torch", "liger"):
            torch.manual_seed(0)
            shapes = (1, 6, 64), (num_classes, 64)
            hidden, weight = (torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)
            value = head_loss(hidden * 0.5, weight * 0.05, labels, scale, kernels, lesson)
            results.append([value.detach(), *torch.autograd.grad(value, (hidden, weight))])
        for expected, found in zip(*results, strict=True):
            check(found, expected, TOLERANCE[dtype])


def check(found: Tensor, expected: Tensor, tolerance: float) -> None:
    difference = torch.linalg.norm(found.float() - expected.float())
    assert difference <= tolerance * torch.linalg.norm(expected.float()), (found, expected)


def sharded() -> None:
    """A step of our training's model with weights as fully_shard hands them over: in fp32 from
    offloaded shards, and as copies in half precision; activations are computed twice."""
    parallel.MixedPrecisionPolicy = lambda param_dtype=None, reduce_dtype=None: (
        MixedPrecisionPolicy(param_dtype and torch.float16, reduce_dtype)
    )
    ids, device = random_tokens(1, 24), start_world()
    inputs = {"input_ids": ids, "position_ids": packed_positions(10, 14)}
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder), hybrid=False, num_hidden_layers=1)
        for precision, tolerance in (("fp32", 1e-5), ("bf16", 2e-2)):
            results = []
            for kernels in ("torch", "liger"):
                how: Any = {"precision": precision, "kernels": kernels}
                how["cpu_offload"] = precision == "fp32"
                settings = TrainConfig(**how, activation_checkpointing=True)
                model: Any = start_model(Path(folder), settings, device)
                assert isinstance(model.model.layers[0], FSDPModule)
                results.append(loss_and_gradients(model, inputs, torch.roll(ids, -1, 1), 1 / 24))
            for name, expected in results[0].items():
                check(results[1][name], expected, tolerance)
    leave_ranks()


if __name__ == "__main__":
    fix_the_interpreter()
    for part in sys.argv[1:]:
        globals()[part]()
        print(part, flush=True)
