"""How long a run takes, as it is said before it begins: counted work over a measured speed."""

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bosch.eval.settings import SuiteRun
from bosch.eval.suites import longbench
from bosch.recipes import duration, presets
from bosch.recipes.command import parse_command
from bosch.recipes.recover import time_of
from bosch.training import rehearsal
from tests.attention_rates import make_up_rates


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "matmul_speed", lambda dtype: 1e11)


def test_time_grows_with_the_work_of_each_stage() -> None:
    config = presets.tiny()
    usual = duration.stage_seconds(config)
    assert usual.keys() == {"search", "evaluation", "training", duration.REST}

    steps = replace(config, data=replace(config.data, held_out_sequences=0))
    more = replace(steps, data=replace(steps.data, tokens=2 * config.data.tokens))
    of_steps = duration.stage_seconds(steps)["training"]
    assert duration.stage_seconds(more)["training"] == pytest.approx(2 * of_steps)
    # Eight sequences are read by the hybrid at step 0 and seven others, once by the dense model:
    # each costs about a quarter of one of the 192 that are trained on, which the teacher reads too.
    held_out = usual["training"] / of_steps - 1
    assert held_out == pytest.approx(8 * (8 + 1) / 4 / 192, rel=0.1)
    more = replace(config, calibration=replace(config.calibration, examples=96))
    assert duration.stage_seconds(more)["search"] == pytest.approx(2 * usual["search"])
    # The dense model, step 0 and two checkpoints; with one checkpoint less, three models.
    fewer = replace(config, eval=replace(config.eval, checkpoints=(0.0, 1.0)))
    assert 0.7 < duration.stage_seconds(fewer)["evaluation"] / usual["evaluation"] < 0.8
    ranking = replace(config, method="interleave")
    assert "search" not in duration.stage_seconds(ranking)
    own_words = replace(config, calibration=replace(config.calibration, answers="own-words"))
    assert duration.stage_seconds(own_words)["calibration"] > 0
    untrained = duration.stage_seconds(config, zero_shot=True)
    assert untrained.keys() == {"search", "evaluation", duration.REST}
    # From a share of the tokens.
    learned = duration.stage_seconds(replace(config, method="l1_gates"))
    assert 0 < learned["learning the mask"] < learned["training"]


def test_a_mask_is_learned_without_a_training_too() -> None:
    config = replace(presets.tiny(), method="l1_gates")
    usual, untrained = duration.stage_seconds(config), duration.stage_seconds(config, True)
    assert "training" not in untrained
    assert untrained["learning the mask"] == usual["learning the mask"] > 0
    # With all tokens for the mask too, where none are left to train on.
    steps = replace(config, data=replace(config.data, held_out_sequences=0))
    every = replace(steps, mask=replace(config.mask, options=("token_share=1",)))
    of_steps, longer = (
        duration.stage_seconds(one, True)["learning the mask"] for one in (steps, every)
    )
    assert longer == pytest.approx(of_steps / 0.4, rel=0.02)
    assert of_steps < usual["learning the mask"]  # held-out text is read on the way too


def test_step_0_is_evaluated_whatever_the_checkpoints_are() -> None:
    config = presets.tiny()
    without = replace(config, eval=replace(config.eval, checkpoints=(0.5, 1.0)))
    usual, same = duration.stage_seconds(config), duration.stage_seconds(without)
    assert same["evaluation"] == usual["evaluation"]
    assert same[duration.REST] == usual[duration.REST]


def test_prompts_that_are_cut_are_counted_as_they_are_cut() -> None:
    run = SuiteRun("longbench", longbench.Settings(max_prompt_tokens=300))
    config = presets.tiny()
    assert {length for _, length, _ in duration.texts_of(run, config)} == {300}
    longer = replace(run, settings=longbench.Settings())  # than the model reads
    assert {length for _, length, _ in duration.texts_of(longer, config)} == {2_048}


def test_passes_over_the_calibration_set_are_those_of_the_method() -> None:
    config = presets.tiny()  # 8 layers of 8 groups
    probing = replace(config, method="single_group")
    assert duration.search_passes(probing) == 1 + 8 * 9 / 2

    def with_starts(*names: str) -> float:
        return duration.search_passes(replace(config, mask=replace(config.mask, starts=names)))

    more = with_starts("single_group") - with_starts()
    assert more == pytest.approx(1 + 8 * 9 / 2 + 1)  # 1: its mask
    assert with_starts("apl") - with_starts("razor") == pytest.approx(3 - 0.7)


@pytest.mark.parametrize("method", ["bosch", "bosch_layer"])
def test_nothing_is_searched_where_there_is_nothing_to_choose(method: str) -> None:
    config = replace(presets.tiny(), method=method)
    passes = [duration.search_passes(replace(config, ratio=r)) for r in (0.0, 0.5, 0.95, 1.0)]
    assert (passes[0], passes[-1]) == (0, 0)
    assert passes[1] > 20
    # Of 8 layers .95 are all; of 64 groups they are not.
    assert (passes[2] == 0) == (method == "bosch_layer")


def lines_on(*words: str) -> list[str]:
    command = parse_command(words)
    return time_of(command)


def test_measured_rates_say_how_long_attention_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this device, whichever it is."""
    words = ["--preset", "smoke", "--hours", "9", "--run-dir", str(tmp_path / "run")]
    command = parse_command(words)
    config, promise = command.config, command.promise
    assert promise is not None
    assert "; attention counts as products of matrices" in promise.lines()[-1]
    kinds = [(windowed, gradients) for windowed in (False, True) for gradients in (False, True)]
    make_up_rates(monkeypatch, tmp_path, platform.machine(), dict.fromkeys(kinds[1:], 1e8))
    by_rule = duration.stage_seconds(config)
    (line,) = duration.describe_time(None, config, zero_shot=False)
    assert line.endswith("; attention counts as products of matrices")  # a part is not measured
    # As fast as products: but for what a training and an evaluation reach of these, the same.
    make_up_rates(monkeypatch, tmp_path, platform.machine(), dict.fromkeys(kinds, 1e11))
    as_fast = duration.stage_seconds(config)
    assert as_fast["search"] == pytest.approx(by_rule["search"])
    assert 0.5 * by_rule["training"] < as_fast["training"] < by_rule["training"]
    make_up_rates(monkeypatch, tmp_path, platform.machine(), dict.fromkeys(kinds, 1e8))
    slow = duration.stage_seconds(config)
    assert slow["training"] > 2 * by_rule["training"]
    assert slow["search"] > 2 * by_rule["search"]
    assert slow["evaluation"] > 2 * by_rule["evaluation"]
    (line,) = duration.describe_time(None, config, zero_shot=False)
    assert f"; attention by the rates measured on {platform.machine()}" in line
    again = parse_command([*words[:-1], str(tmp_path / "other")]).promise
    assert again is not None
    assert again.lines()[-1].endswith(f"measured on {platform.machine()}")


def test_a_long_run_names_its_shorter_form(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "tiny-qwen3", "--calibration.essays", "toy"]
    (line,) = lines_on("--preset", "small", *words)
    assert line.startswith("time here, of the whole run: about ")
    monkeypatch.setattr(rehearsal, "matmul_speed", lambda dtype: 1e8)
    _, offer = lines_on("--preset", "small", *words)
    assert "--preset brief: about " in offer
    assert len(lines_on("--preset", "brief", *words)) == 1
    for own in ("--data.tokens 60k", "--eval.samples 60", "--eval.checkpoints 0 .25 .5 1"):
        changed = [*words, *own.split()]
        _, offer = lines_on("--preset", "small", *changed)
        (short,) = lines_on("--preset", "brief", *changed)
        of_brief = short.partition(": ")[2].partition(";")[0]
        assert offer == f"a shorter form of it, by --preset brief: {of_brief}"


def test_a_long_run_without_a_shorter_form_is_offered_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "matmul_speed", lambda dtype: 1e8)
    words = ["--model", "tiny-qwen3", "--calibration.essays", "toy", "--eval.samples", "25"]
    (line,) = lines_on("--preset", "small", *words, "--train.until", "recovered")
    assert line.startswith("time here")


def test_gpus_that_take_no_part_change_nothing_and_those_of_a_launch_share_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = presets.tiny()  # two sequences a step, which eight could not share
    alone = duration.stage_seconds(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert duration.stage_seconds(config) == alone
    assert duration.describe_room(config, num_gpus=8, zero_shot=True)
    # Two processes, each with a GPU.
    monkeypatch.setattr(duration, "choose_device", lambda environment: torch.device("cuda"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = duration.stage_seconds(config)
    for name in ("search", "evaluation", "training"):
        assert shared[name] == pytest.approx(alone[name] / 2), name


def test_a_repeated_run_is_offered_no_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "matmul_speed", lambda dtype: 1e8)
    monkeypatch.setattr(presets, "name_of", lambda preset, config: "small")  # by its model
    (tmp_path / "run.json").write_text(json.dumps({"config": asdict(presets.tiny())}))
    assert len(lines_on("--config", str(tmp_path))) == 1
    assert len(lines_on("--preset", "tiny")) == 2


def test_the_number_format_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {name: duration.number_format(name) for name in ("auto", "fp32", "bf16")}
    assert formats == {"auto": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert duration.number_format("auto") == torch.bfloat16


def test_what_is_no_product_is_as_slow_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {torch.float32: 1e11, torch.bfloat16: 8e11}
    monkeypatch.setattr(rehearsal, "matmul_speed", speeds.__getitem__)
    # Of 10 seconds in fp32, 6 of products become .75, and 4 stay.
    assert rehearsal.work_speed(torch.float32) == 1e11
    assert rehearsal.work_speed(torch.bfloat16) == pytest.approx(10 / 4.75 * 1e11)
