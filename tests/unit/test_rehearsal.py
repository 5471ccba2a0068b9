"""The rehearsal of a training step (training/rehearsal.py) against real steps, and what it sees."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import bosch.training.loss
import bosch.training.parallel
from benchmarks import rehearse
from benchmarks._measure import read_shape
from bosch.config import TrainConfig
from bosch.masks.mask import num_windowed
from bosch.recipes import presets, recover
from bosch.run.dist import leave_ranks
from bosch.run.errors import UserError
from bosch.training import rehearsal
from bosch.training.fitting import make_plan
from bosch.training.model_start import read_config
from bosch.training.rehearsal import Plan, Rehearsal, as_hybrid, choose_fitting, rehearse_here
from tests.attention_rates import make_up_rates
from tests.live_memory_program import SEQ_LEN, measured_peak
from tests.model_factory import tiny_model
from tests.plain_training import launch_two

# What the CPU computes by default; for the real runs to be compared with.
STEP = TrainConfig(batch_sequences=32, micro_batch_sequences=1)
ON_CPU = replace(STEP, batch_sequences=4, attention="reference", kernels="torch")
ON_CPU = replace(ON_CPU, activation_checkpointing=True, compile=False)
WIDTHS: dict[str, int] = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
WIDTHS |= {"num_attention_heads": 16, "num_key_value_heads": 8}
MIDDLE = Qwen3Config(
    **(WIDTHS | {"vocab_size": 65_536, "num_hidden_layers": 3, "max_position_embeddings": 8192}),
    tie_word_embeddings=False,
)


def middle(kernels: str = "torch", gpus: int = 8, **changes: Any) -> Plan:
    return Plan(as_hybrid(MIDDLE, 0.75, 1024), replace(STEP, **changes), 8192, gpus, kernels)


@cache
def as_it_is() -> Rehearsal:
    return rehearse_here(middle())


def weights_of(plan: Plan) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.model)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"activation_checkpointing": "attention", "attention": "sdpa"}),
        ("qwen3", {"precision": "fp32"}),  # not sharded
        ("qwen3", {"precision": "fp32", "trained": "lora"}),  # as `small` has it on older GPUs
        *(
            pytest.param(family, changes, marks=pytest.mark.slow)
            for family, changes in (
                ("qwen3", {}),
                ("qwen3", {"activation_checkpointing": "matmuls", "sync_every_micro_batch": False}),
                ("qwen3", {"micro_batch_sequences": 2, "activation_checkpointing": False}),
                ("qwen3_moe", {}),
                ("qwen3", {"activation_checkpointing": "matmuls"}),
                ("qwen3", {"sync_every_micro_batch": False}),
            )
        ),
    ],
)
def test_rehearsed_peaks_are_real(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model: Any = tiny_model(family, max_position_embeddings=SEQ_LEN)
    model.save_pretrained(tmp_path)
    settings = replace(ON_CPU, **changes)
    real = measured_peak(tmp_path, settings)
    leave_ranks()
    plan = Plan(read_config(tmp_path), settings, SEQ_LEN, 1, "torch")
    assert rehearse_here(plan).peak_bytes == pytest.approx(real, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [1, 2])
def test_so_is_that_of_two_ranks_with_the_width_of_a_real_model(
    sharing: int, tmp_path: Path
) -> None:
    """Qwen3-0.6B with 3 of its 28 layers; in fp32, as bf16 takes a CPU minutes. Also where both
    share each sequence."""
    settings = replace(ON_CPU, precision="fp32", context_parallel=sharing)
    shape: dict[str, Any] = {"vocab_size": 151_936, "num_hidden_layers": 3, **WIDTHS}
    config = as_hybrid(Qwen3Config(**shape, tie_word_embeddings=True), 0.75, 64)
    model = tmp_path / "m"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    described = json.dumps(asdict(settings))
    launch_two("live_memory_program.py", model, described, tmp_path / "peak")
    real = int((tmp_path / "peak").read_text())
    plan = Plan(config, settings, SEQ_LEN, 2, "torch")
    assert rehearse_here(plan).peak_bytes == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    ("layers", "groups", "ratio"),
    [(5, 3, 0.75), (30, 3, 0.5), (7, 5, 0.5), (24, 2, 0.95), (3, 4, 0.33), (2, 1, 0.5), (4, 8, 1)],
)
def test_the_rehearsed_hybrid_has_the_ratio_of_the_run(
    layers: int, groups: int, ratio: float
) -> None:
    heads = {"num_key_value_heads": groups, "num_attention_heads": 2 * groups}
    config = as_hybrid(Qwen3Config(num_hidden_layers=layers, **heads), ratio, 64)
    num_full = config.bosch["num_full"]
    assert layers * groups - sum(num_full) == num_windowed(ratio, layers, groups)
    assert max(num_full) - min(num_full) <= 1


def test_state_is_divided_among_gpus_and_offloading_takes_it_off_them() -> None:
    shard = weights_of(middle()) / 8
    peak, offloaded = as_it_is().peak, rehearse_here(middle(cpu_offload=True)).peak
    assert peak["optimizer"] == pytest.approx(8 * shard, rel=0.01)
    assert min(peak["gradients"], peak["weights"]) >= 4 * shard
    assert offloaded["optimizer"] == 0
    # At least the parameters and gradients too, but not what is gathered or computed.
    assert sum(offloaded.values()) <= sum(peak.values()) - 16 * shard * 0.99
    assert offloaded["activations"] == pytest.approx(peak["activations"], rel=0.01)


def test_gpus_that_share_a_sequence_share_what_is_computed_of_it() -> None:
    alone, shared = as_it_is().peak, rehearse_here(middle(context_parallel=4)).peak
    assert shared["optimizer"] == alone["optimizer"]
    assert shared["activations"] < 0.4 * alone["activations"]
    with pytest.raises(UserError, match="context_parallel 3 does not divide the 8 processes"):
        middle(context_parallel=3)


def test_an_evaluation_has_the_whole_model_on_every_gpu_and_must_fit_too() -> None:
    plan = middle()
    needed = rehearsal.evaluation_bytes(plan)
    assert 2 * weights_of(plan) < needed < 4 * weights_of(plan)
    assert needed == rehearsal.evaluation_bytes(middle(gpus=2))
    assert Rehearsal({"loss": 10**9}, 70 * 10**9).fits(80)
    assert not Rehearsal({"loss": 10**9}, 75 * 10**9).fits(80)


def test_liger_takes_less_and_the_step_leaves_nothing_behind() -> None:
    from triton.runtime.jit import KernelInterface

    launch, resize = KernelInterface.__getitem__, torch.UntypedStorage.resize_
    assert rehearse_here(middle("liger")).peak_bytes < 0.95 * as_it_is().peak_bytes
    assert KernelInterface.__getitem__ is launch
    assert torch.UntypedStorage.resize_ is resize
    assert not torch.distributed.is_initialized()


def test_whole_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = middle()
    logits = plan.seq_len * MIDDLE.vocab_size * 4  # fp32
    assert as_it_is().peak_bytes < logits
    monkeypatch.setattr(bosch.training.loss, "CHUNK_ROWS", plan.seq_len)
    assert rehearse_here(plan).peak["loss"] > logits


def test_a_plan_that_cannot_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"32 sequences .* 5 processes"):
        middle(gpus=5)
    with pytest.raises(UserError, match=r"8,193 tokens .* 8,192 positions"):
        replace(middle(), seq_len=8193)


def test_the_largest_micro_batch_that_fits_is_taken_among_those_that_divide_the_share() -> None:
    plan = middle(micro_batch_sequences=4)  # of 4 sequences on each of 8 GPUs
    gigabytes = {1: 40, 2: 60, 3: 70, 4: 90}

    def made_up(plan: Plan) -> Rehearsal:
        return Rehearsal({"loss": gigabytes[plan.micro_batch] * 10**9})

    def fitting(memory_gb: float, is_named: bool = False) -> int | None:
        return choose_fitting(plan, memory_gb, is_named, made_up).micro_batch_sequences

    fits = {gb: fitting(gb) for gb in (96, 95.9, 66, 65.9, 46)}
    assert fits == {96: 4, 95.9: 2, 66: 2, 65.9: 1, 46: 1}  # with 6 GB to spare
    with pytest.raises(UserError, match=r"4 x 8,192 tokens .* 90 GB .* No smaller .*cpu_offload"):
        fitting(45.9)
    assert fitting(96, True) == 4  # one that the user has named
    with pytest.raises(UserError, match=r"90 GB .* it has 80. Set .*micro_batch_sequences to 2,"):
        fitting(80, True)


def test_the_fastest_way_that_fits_is_taken_before_a_smaller_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 GPUs on two machines: a node with the whole state, and what is recomputed."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.delenv("FSDP_ACTIVATION_CHECKPOINTING", raising=False)
    more: dict[Any, int] = {False: 40, "matmuls": 20, "attention": 10, True: 0}

    def made_up(plan: Plan) -> Rehearsal:
        one = plan.of_a_node()
        assert one.micro_batch == plan.micro_batch
        state = 30 if one.num_gpus == 8 else 15
        kept = more[plan.settings.activation_checkpointing]
        return Rehearsal({"loss": (state + kept + 2 * plan.micro_batch) * 10**9})

    def fitting(memory_gb: float, **changes: Any) -> tuple[object, ...]:
        plan = middle(gpus=16, micro_batch_sequences=2, **changes)
        found = choose_fitting(plan, memory_gb, False, made_up)
        recompute = found.activation_checkpointing
        return found.shard_within_node, recompute, found.micro_batch_sequences

    assert fitting(80) == (True, False, 2)
    assert fitting(79.9) == (True, "attention", 2)  # compiled: matrix products are kept anyway
    assert fitting(79.9, compile=False) == (True, "matmuls", 2)
    assert fitting(40) == (True, True, 2)
    assert fitting(39.9) == (False, "attention", 2)
    assert fitting(24.9) == (False, True, 1)
    assert fitting(80, activation_checkpointing=True) == (True, True, 2)
    assert fitting(80, shard_within_node=False) == (False, False, 2)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    assert fitting(80) == (True, True, 2)


def test_each_change_makes_the_computed_training_faster() -> None:
    """The table of docs/own-model.md: tokens/s of a GPU, and its share of the peak, in percent."""
    model = as_hybrid(read_shape("Qwen3-8B"), 0.75, 1024)
    found = []
    for recomputed, changes in (
        ("all", {"compile": False}),
        ("all", {}),
        ("but attention", {}),
        ("but attention", {"flash": 3}),
        ("but attention", {"flash": 3, "precision": "fp8"}),
    ):
        options: Any = rehearse.Options(**changes)
        seconds, mfu = rehearse.seconds_of_a_token(model, options, recomputed)
        found.append((round(1 / seconds), round(100 * mfu)))
    # The first by hand: linear layers 3.2 s (1,984 TFLOP), attention 1.5 (376), 1.1 and .45.
    assert found == [(5234, 29), (5919, 32), (6355, 35), (6901, 38), (8715, 48)]


def test_measured_rates_of_a_gpu_take_the_place_of_the_rule_for_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = as_hybrid(read_shape("Qwen3-8B"), 0.75, 1024)

    def seconds(recomputed: str, **options: Any) -> tuple[float, str]:
        asked = rehearse.Options(**options)
        found, _ = rehearse.seconds_of_a_token(model, asked, recomputed)
        return found * asked.seq_len, asked.place

    all_of_h200, rule = seconds("none", gpu="H200")
    assert rule == "attention by a share of the peak, as flash-attn 2"
    speeds = {(False, False): 4e14, (False, True): 5e14, (True, False): 1e14, (True, True): 2e14}
    make_up_rates(monkeypatch, tmp_path, "NVIDIA H200 NVL", speeds)
    # 36 layers of 32 heads of 128 channels, a quarter with all of 32,768 keys. A pair is 4 FLOPs a
    # channel forward and 8 backward.
    full = 36 * 8 * 128 * 32768 * 32769 // 2
    windowed = 36 * 24 * 128 * (1024 * 1025 // 2 + (32768 - 1024) * 1024)
    by_rule = 12 * (full + windowed) / (0.25 * 989e12)
    by_rates = 12 * full / 5e14 + 12 * windowed / 2e14
    found, named = seconds("none", gpu="H200")
    assert named == "attention by the rates measured on NVIDIA H200 NVL"
    assert found - all_of_h200 == pytest.approx(by_rates - by_rule)
    # The forward pass once more.
    again, _ = seconds("all", gpu="H200")
    assert again - seconds("but attention", gpu="H200")[0] == pytest.approx(
        4 * full / 4e14 + 4 * windowed / 1e14
    )
    # Another GPU has none, and a version that is named counts.
    assert seconds("none", gpu="H100") == (all_of_h200, rule)
    assert seconds("none", gpu="H200", flash=2) == (all_of_h200, rule)


@pytest.mark.slow
def test_too_large_a_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that seems to have a GPU with 10 MB left, in the real second process."""
    monkeypatch.setattr(rehearsal, "gpu_memory_gb", lambda: rehearsal.MARGIN_GB + 0.01)
    run = tmp_path / "run"
    with pytest.raises(UserError, match="No smaller number of sequences fits"):
        recover.main(["--preset", "smoke", "--train.batch-sequences", "1", "--run-dir", str(run)])
    assert not run.exists()


@pytest.mark.slow
def test_recover_rehearses_on_gpus_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    recover.main(["--preset", "smoke", "--rehearse", "2"])
    table = capsys.readouterr().out
    assert "tiny-qwen3-2layer, 256 tokens" in table
    assert "optimizer" in table


@pytest.mark.slow
def test_a_teacher_takes_its_weights_and_more_for_the_loss() -> None:
    taught = make_plan(presets.smoke(), 2, "torch")
    plan = replace(taught, settings=replace(taught.settings, objective="next-token"))
    alone, with_teacher = (rehearsal.rehearse(one).peak for one in (plan, taught))
    assert with_teacher["weights"] > 1.2 * alone["weights"]
    assert with_teacher["optimizer"] == alone["optimizer"]
