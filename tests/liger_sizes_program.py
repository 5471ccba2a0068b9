"""Liger's kernels, run by Triton's interpreter, at the sizes of real models and on sharded weights:
`TRITON_INTERPRET=1 python tests/liger_sizes_program.py loss divergence sharded hidden mlp heads`.

Prints each part that agrees with torch. In fp32 and fp16: the interpreter's bf16 gives NaN. A
separate program, because Triton chooses its interpreter for the whole process.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bosch.training import parallel
from bosch.training.loss import Lesson, head_loss, model_loss
from bosch.training.model_start import start_model
from bosch.training.parallel import Switches, leave_world, start_world, whole
from tests.liger_program import fix_the_interpreter
from tests.model_factory import packed_positions, random_tokens
from tests.plain_training import model_folder

DTYPES = (torch.float32, torch.float16)
# Of the outputs and gradients, in norm. In fp16 a value has 11 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def main() -> None:
    fix_the_interpreter()
    for part in sys.argv[1:]:
        PARTS[part]()
        print(part, flush=True)


def heads() -> None:
    """The norm of 16 heads over 2,048 tokens, as many rows as bring Liger to its block kernel."""
    seen = watch_kernels()
    norms(16, 2_048, 128, [torch.float16])
    assert seen == {"_block_rms_norm_forward_kernel", "_block_rms_norm_backward_kernel"}, seen


def hidden() -> None:
    seen = watch_kernels()
    norms(1, 24, 4_096)
    assert seen == {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}, seen


def watch_kernels() -> set[str]:
    """The norm kernels that have run, by name."""
    from liger_kernel.ops import rms_norm

    seen: set[str] = set()

    class Watched:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(rms_norm, name)

        def __getitem__(self, grid: Any) -> Any:
            seen.add(self.name)
            return self.kernel[grid]

    for name in [name for name in vars(rms_norm) if name.endswith("ward_kernel")]:
        setattr(rms_norm, name, Watched(name))
    return seen


def norms(
    num_heads: int, num_tokens: int, size: int, dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * exact.to(x.dtype)

    def liger(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True, None)
        return out

    compare(liger, plain, (1, num_tokens, num_heads, size), (size,), dtypes=dtypes)


def mlp() -> None:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def liger(a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = LigerSiLUMulFunction.apply(a, b)
        return out

    shape = (1, 12, 12_288)
    compare(liger, lambda a, b: F.silu(a) * b, shape, shape)


def loss() -> None:
    """Times 1, as otherwise Liger multiplies the weight's gradient row by row, and the interpreter
    takes minutes for 151,936 rows. tests/liger_program.py has another scale."""
    losses(151_936, 1.0)


def divergence() -> None:
    """Not in fp16, where Liger's gradient of a mean over all tokens underflows."""
    lesson = Lesson(torch.randn(6, 64), torch.randn(5_000, 64) * 0.05, temperature=2.0)
    losses(5_000, 1 / 20, lesson, dtypes=[torch.float32])


def losses(
    num_classes: int,
    scale: float,
    lesson: Lesson | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Of six tokens, the last of which has no target."""
    labels = torch.randint(num_classes, (1, 6))
    labels[0, -1] = -100
    by = {
        kernels: lambda hidden, weight, kernels=kernels: head_loss(
            hidden * 0.5, weight * 0.05, labels, scale, kernels, lesson
        )
        for kernels in ("liger", "torch")
    }
    compare(by["liger"], by["torch"], (1, 6, 64), (num_classes, 64), dtypes=dtypes)


def compare(
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Outputs and gradients of a function of these inputs."""
    for dtype in dtypes:
        torch.manual_seed(0)
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        results = []
        for function in (plain, ours):
            # * 1: Liger writes its gradients into its inputs' storage.
            out = function(*(x * 1 for x in inputs))
            given = torch.ones_like(out)
            if out.ndim:
                given.normal_(generator=torch.Generator().manual_seed(1))
            results.append([out.detach().clone(), *torch.autograd.grad(out, inputs, given)])
        for expected, found in zip(*results, strict=True):
            check(found, expected, TOLERANCE[dtype])


def check(found: Tensor, expected: Tensor, tolerance: float) -> None:
    difference = torch.linalg.norm(found.float() - expected.float())
    assert difference <= tolerance * torch.linalg.norm(expected.float()), (found, expected)


def sharded() -> None:
    """A step of our training's model with weights as fully_shard hands them over: in fp32 from
    offloaded shards, and as copies in half precision; activations are computed twice."""
    parallel.MixedPrecisionPolicy = lambda param_dtype, reduce_dtype: MixedPrecisionPolicy(
        torch.float16, reduce_dtype
    )
    ids = random_tokens(1, 24)
    labels = torch.roll(ids, -1, 1)
    inputs = {"input_ids": ids, "position_ids": packed_positions(10, 14)}
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder), hybrid=False, num_hidden_layers=1)
        for precision, tolerance in (("fp32", 1e-5), ("bf16", 2e-2)):
            results = []
            for kernels in ("torch", "liger"):
                switches = Switches(
                    start_world(), precision, True, precision == "fp32", True, False
                )
                model: Any = start_model(Path(folder), switches, kernels)
                assert isinstance(model.model.layers[0], FSDPModule)
                value = model_loss(model, inputs, labels, 1 / 24)
                value.backward()
                gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
                results.append({"loss": value.detach(), **gradients})
            for name, expected in results[0].items():
                check(results[1][name], expected, tolerance)
    leave_world()


PARTS = {
    "sharded": sharded,
    "heads": heads,
    "hidden": hidden,
    "mlp": mlp,
    "loss": loss,
    "divergence": divergence,
}

if __name__ == "__main__":
    main()
