"""What our code does on a machine with a GPU, on the CPU (tests/pretended_gpu.py): which device and
number format it takes, where it keeps states, what it measures. The attention is in
test_flash_stand_ins.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bosch import kernels
from bosch.config import Config, MaskConfig
from bosch.data.loader import Loader
from bosch.eval.evaluate import (
    EvaluationPlan,
    check_attention,
    device_and_type,
    load_for_evaluation,
)
from bosch.eval.generate import Generator
from bosch.eval.settings import FAST, GenerationSettings
from bosch.eval.suites._interface import Example
from bosch.hybrid.conversion import deploy
from bosch.hybrid.materialize import _device_with_room
from bosch.kernels import fuse_forward
from bosch.model import load_for_search
from bosch.run.errors import UserError
from bosch.run.memory import has_gpu
from bosch.search import mask_stage
from bosch.search.settings import NO_ACCELERATIONS, Accelerations
from bosch.training.checkpoint import random_state, set_random_state
from bosch.training.metrics import StepTimer, peak_flops
from bosch.training.parallel import choose_device
from bosch.training.schedule import make_schedule
from tests.hybrid_folders import WINDOW, plain_folder, tiny_tokenizer
from tests.model_factory import MIXED, tiny_model
from tests.plain_training import SEQ_LEN, SETTINGS, tokens_in_memory
from tests.pretended_gpu import CUDA, Gpu, pretended_gpu
from tests.search_cases import answered_calibration, evaluator_of, random_masks, small_model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with pretended_gpu(monkeypatch) as gpu:
        yield gpu


def test_every_stage_takes_the_gpu_and_its_number_format(gpu: Gpu) -> None:
    assert device_and_type(EvaluationPlan(())) == ("cuda:0", torch.bfloat16)
    mask_stage.check(replace(Config(), mask=MaskConfig(attention="varlen")), None)
    with pytest.raises(UserError, match=r"mask\.attention varlen cannot run here"):
        mask_stage.check(
            replace(Config(), mask=MaskConfig(attention="varlen", precision="fp32")), None
        )
    assert choose_device({}) == CUDA
    assert "set_device" in gpu.calls
    assert choose_device({"ACCELERATE_USE_CPU": "true"}).type == "cpu"
    assert has_gpu({})  # of search and evaluation
    assert not has_gpu({"ACCELERATE_USE_CPU": "true"})
    with pytest.raises(UserError, match="process 1 on this machine has no GPU"):
        choose_device({"LOCAL_RANK": "1"})


def test_evaluations_decode_in_batches_which_the_flash_kernels_cannot(gpu: Gpu) -> None:
    assert Generator(tiny_model("qwen3").bfloat16(), tiny_tokenizer()).batch == 16
    plan = EvaluationPlan((), attention="varlen")
    with pytest.raises(UserError, match=r"eval\.attention varlen .* Set eval\.batch to 1"):
        check_attention(plan)
    check_attention(replace(plan, generation=GenerationSettings(batch=1)))


def test_models_that_only_compute_forward_have_fused_kernels_on_a_gpu(gpu: Gpu) -> None:
    pytest.importorskip("liger_kernel")
    model = deploy(tiny_model("qwen3"), MIXED, WINDOW)
    names = ("norm", "layers.2.self_attn", "layers.2.self_attn.q_norm", "layers.2.mlp")
    modules = [model.base_model.get_submodule(name) for name in names]
    assert not any("forward" in vars(module) for module in modules)
    fuse_forward(model)
    assert all("forward" in vars(module) for module in modules)
    other: Any = tiny_model("llama", hidden_act="gelu")  # Liger's MLP would compute silu
    fuse_forward(other)
    assert "forward" not in vars(other.model.layers[0].mlp)


def test_search_and_evaluation_load_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fused = plain_folder(tmp_path / "model"), list[object]()
    monkeypatch.setattr(kernels, "fuse_forward", fused.append)
    loaded = [load_for_search(folder), load_for_evaluation(folder, EvaluationPlan(()))]
    assert fused == loaded


def test_a_hybrid_is_checked_on_the_gpu_if_there_is_room(gpu: Gpu, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model")
    needed = (folder / "model.safetensors").stat().st_size
    for free, device in ((needed, "cpu"), (2 * needed, "cuda")):
        gpu.free_bytes = free
        assert _device_with_room(folder) == device


def test_search_keeps_states_on_the_gpu(gpu: Gpu) -> None:
    model = small_model()
    model.config.bosch_backend = "sdpa"
    calibration, masks = answered_calibration(model), random_masks(8)
    plain = evaluator_of(model, calibration, accelerations=NO_ACCELERATIONS)
    expected = [value.value for value in plain.score(masks)]
    # 4 texts: of half of the free memory, or of what is given, each has room for two states.
    state = 47 * model.config.hidden_size * 4
    gpu.free_bytes = 2 * 4 * 2 * state
    given = Accelerations(memory_gb=4 * 2 * state / 2**30)
    for accelerations in (Accelerations(), given):
        evaluator = evaluator_of(model, calibration, accelerations=accelerations)
        assert {h.capacity_bytes for h in evaluator.haystacks.values()} == {2 * state}
        assert [value.value for value in evaluator.score(masks)] == expected
        assert evaluator.work < plain.work


def test_answers_are_the_same_when_few_caches_fit_beside_the_model(gpu: Gpu) -> None:
    model, tokenizer = deploy(tiny_model("qwen3"), MIXED, WINDOW), tiny_tokenizer()
    model.config.bosch_backend = "sdpa"
    texts = [Example(number, "word " * (4 + number), ("x",), 6) for number in range(5)]
    examples = [(("niah", "any", number), text) for number, text in enumerate(texts)]
    found = []
    for gpu.free_bytes in (2**34, 0):
        done = Generator(model, tokenizer, replace(FAST, draft_answers=False)).generate(examples)
        found.append({each.key: each.tokens for each in done})
    assert found[0] == found[1]
    assert len(found[0]) == 5


def test_training_is_measured_on_the_gpu(gpu: Gpu) -> None:
    schedule = make_schedule(SETTINGS, 960, SEQ_LEN, (1.0,), 1, "cuda")
    timer = StepTimer(small_model(), schedule, CUDA)
    batch = Loader(tokens_in_memory(), 4).batch(0)
    pinned = batch.pin().to(CUDA)
    assert torch.equal(pinned.ids_BT, batch.ids_BT)
    timer.record("compute")
    assert "synchronize" in gpu.calls
    figures = timer.figures(batch)
    assert figures["memory_gb"] == 3
    assert figures["mfu"] == pytest.approx(figures["tflops_per_device"] / 989)
    gpu.name = "a GPU of tomorrow"
    assert peak_flops(CUDA) is None


def test_a_checkpoint_keeps_the_gpus_generator(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    state, restored = torch.arange(16, dtype=torch.uint8), list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    set_random_state(random_state())
    assert restored == [state]
