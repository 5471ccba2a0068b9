"""Checks of settings, the way from a command line to them, and --kv-budget."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bosch import config as settings
from bosch.command_line import parse as parse_options
from bosch.command_line import with_options
from bosch.config import Config, TrainConfig, fill_in, parse_count, shared_fields
from bosch.masks.kv_budget import with_kv_budget
from bosch.masks.mask import read_mask, write_mask
from bosch.methods._settings import default_settings
from bosch.recipes import evaluate_model, presets, recover, search_mask
from bosch.recipes.command import Command, parse_command
from bosch.run.errors import UserError
from bosch.sink import Sink
from tests.masks import small_record
from tests.sampled import sampled


def parse(*arguments: str) -> Command:
    return parse_command(arguments)


def test_token_counts_are_read_as_people_write_them() -> None:
    texts = "2.5B 300M 16k 4096 1_000 1.005M"  # the last is no whole number in binary
    counts = [2_500_000_000, 300_000_000, 16_000, 4096, 1000, 1_005_000]
    assert [parse_count(text) for text in texts.split()] == counts
    for text in ("", "2.5", "1..5M", "-3", "2.5Q"):
        with pytest.raises(UserError, match=re.escape(repr(text))):
            parse_count(text)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: Config(ratio=float("nan")), "ratio", "nan"),
        (lambda: Config(window=0), "window", "0"),
        (lambda: settings.CalibrationConfig(6, 512, 4), "questions_per_context", "4"),
        (lambda: settings.MaskConfig(ratio_buckets=(0.5, 0.25)), "ratio_buckets", "(0.5, 0.25)"),
        (lambda: settings.DataConfig(tokens=100), "data.tokens", "100"),
        (lambda: TrainConfig(betas=(0.9, 1.0)), "train.betas", "(0.9, 1.0)"),
        (lambda: TrainConfig(temperature=0.0), "temperature", "0"),
        (lambda: settings.RunEvaluationConfig(niah_lengths=(5, 2)), "eval.niah_lengths", "(5, 2)"),
        (
            lambda: settings.RunEvaluationConfig(checkpoints=(0.0, 2.5)),
            "eval.checkpoints",
            "(0.0, 2.5)",
        ),
    ],
)
def test_impossible_settings_are_named(make: Callable[[], object], name: str, value: str) -> None:
    with pytest.raises(UserError, match=name) as refused:
        make()
    assert value in str(refused.value)


def test_dials_and_sections_override_the_preset() -> None:
    command = parse("--preset", "smoke", "--ratio", "0.5", "--calibration.length=1k", "--seed", "3")
    calibration = replace(presets.smoke().calibration, length=1000)
    expected = replace(presets.smoke(), ratio=0.5, seed=3, calibration=calibration, sink="static")
    assert command.config == expected


def test_a_word_can_set_a_list_even_to_none() -> None:
    for word, starts in (("starts=razor,kvzip", ("razor", "kvzip")), ("starts=", ())):
        found = with_options("bosch", settings.MaskConfig(), [word])
        assert found == settings.MaskConfig(starts=starts)
    with pytest.raises(UserError, match="kappa=: write NAME=VALUE"):
        with_options("bosch", settings.MaskConfig(), ["kappa="])


@pytest.mark.parametrize("preset", sampled(["small", "paper", "smoke", "tiny"], slice(1)))
def test_the_more_particular_number_of_examples_wins(preset: str) -> None:
    usual = presets.PRESETS[preset]("tiny-qwen3").eval
    for words, niah, longbench in (
        ("", usual.niah_samples, usual.longbench_rows),
        ("--eval.samples 5", 5, 5),
        ("--eval.samples 5 --eval.niah-samples 10", 10, 5),
        ("--eval.niah-samples 10 --eval.samples 5", 10, 5),
        ("--eval.longbench-rows 3 --eval.samples 5", 5, 3),
        ("--eval.longbench-rows None --eval.samples 5", 5, None),
        ("--eval.niah-samples 10", 10, usual.longbench_rows),
        ("--eval.samples None", usual.niah_samples, usual.longbench_rows),
    ):
        given = ["--preset", preset, "--model", "tiny-qwen3", *words.split()]
        found = parse(*given).config.eval
        assert (found.niah_samples, found.longbench_rows) == (niah, longbench), words
        # As run.json keeps it, and as a preset is varied.
        assert settings.RunEvaluationConfig(**asdict(found)) == replace(found) == found
    for options, niah, longbench in (
        ({}, 500, None),
        ({"samples": 5}, 5, 5),
        ({"samples": 5, "niah_samples": 10}, 10, 5),
        ({"samples": 5, "longbench_rows": None}, 5, None),
    ):
        made = settings.EvaluationConfig(**options)
        assert (made.niah_samples, made.longbench_rows) == (niah, longbench)


def test_the_command_of_the_evaluation_has_it_too() -> None:
    shared = shared_fields(settings.EvaluationConfig, presets.tiny().eval)
    usual = {"model": "tiny-qwen3", "settings": settings.EvaluationConfig(**shared)}
    for words, niah, longbench in (
        ("", 10, 8),  # the preset's
        ("--samples 5", 5, 5),
        ("--samples 5 --niah-samples 12", 12, 5),
    ):
        options = parse_options(evaluate_model.Options, words.split(), usual)
        found = options.settings.niah_samples, options.settings.longbench_rows
        assert found == (niah, longbench)


def options_shown(capsys: pytest.CaptureFixture[str], option: str) -> set[str]:
    with pytest.raises(SystemExit, match="0"):
        parse(option)
    return {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:3] == "  -"}


def test_help_shows_50_options_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = (options_shown(capsys, option) for option in ("--help", "--help-all"))
    assert 20 < len(short) <= 50
    assert short < everything
    assert {"--from", "--mask.alpha", "--eval.niah-lengths", "--help-all"} <= everything
    assert parse("--mask.alpha", "7").config.mask.alpha == 7  # not in --help, and works
    assert "--mask.alpha" not in short


def test_help_shows_the_defaults_of_the_preset_and_comes_beside_a_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ("--help --preset smoke", "--preset smoke -h", "--ratio many --help"):
        with pytest.raises(SystemExit, match="0"):
            parse(*words.split())
        window = 32 if "smoke" in words else 64
        assert f"current token (default: {window})" in " ".join(capsys.readouterr().out.split())


def test_help_comes_also_where_the_model_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--model", "not/there", "--preset", "small", "--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "note: the defaults are shown as without these options: " in told
    assert "current token (default: 64)" in told


def test_unknown_option_suggests_the_nearest() -> None:
    for option, meant in {
        "--ration": "--ratio",
        "--length": "--calibration.length",
        "--train.lerning-rate": "--train.peak-learning-rate",
        "--mask.gama": "--mask.gamma",  # not in --help
    }.items():
        with pytest.raises(UserError, match=rf"{option}.* {meant}\?"):
            parse(option, "3")


def test_run_folder_is_named_after_what_tells_runs_apart() -> None:
    for arguments, folder in {
        "--ratio 0.5 --method fisher": "runs/tiny-qwen3-fisher-r0.5",
        "--model Qwen/Qwen3-8B-Base --seed=7": "runs/Qwen3-8B-Base-bosch-r0.75-s7",
        "--run-dir elsewhere/mine": "elsewhere/mine",
        # The sink, unless it is what `auto` means.
        "--method bosch_paper --sink static": "runs/tiny-qwen3-bosch_paper-r0.75",
        "--method bosch_paper --sink=none": "runs/tiny-qwen3-bosch_paper-r0.75-none",
        "--preset paper --model tiny-qwen3": "runs/tiny-qwen3-bosch_paper-r0.75-none",
    }.items():
        assert parse(*arguments.split()).run_path == Path(folder)


def test_the_sink_is_the_same_with_every_method_unless_it_is_given(tmp_path: Path) -> None:
    methods = ("bosch", "bosch_paper", "bosch_single", "bosch_multi", "bosch_layer", "interleave")
    assert {parse("--method", name).config.sink for name in methods} == {"static"}
    assert {parse("--method", n, "--preset", "paper").config.sink for n in methods} == {"none"}
    # A mask of before keeps its own.
    mask = replace(small_record().mask, sink=Sink("tokens", 4))
    write_mask(tmp_path / "mask.json", replace(small_record(), mask=mask))
    words = ("--method", "from_file", "--mask.options", f"path={tmp_path / 'mask.json'}")
    found = parse(*words)
    assert found.config.sink == "tokens=4"
    assert "tokens" not in found.run_path.name
    assert parse(*words, "--sink", "none").run_path.name == f"{found.run_path.name}-none"


def test_a_run_from_before_a_setting_has_its_default() -> None:
    stored = json.loads(json.dumps(asdict(Config(seed=3))))
    del stored["mask"]["options"], stored["train"]
    assert fill_in(stored) == json.loads(json.dumps(asdict(Config(seed=3))))


def test_the_smallest_ratio_that_fits_is_taken_and_said(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}
    shape |= {"num_attention_heads": 32, "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | shape))
    config = replace(presets.paper(str(tmp_path)), method="fisher")
    for budget, method, ratio, line in (
        # Qwen3-8B: 36 layers x 8 groups of 4 * 128 bytes a token. At 131,072 tokens the dense model
        # needs 18 GiB, a group 64 MiB, and with a window of 1,024 half of one less 1/2 KiB:
        # (288 - m) / 16 + m * 1,023 / 2^21 <= 4 first holds at m = 226.
        ("4GiB@128k", "fisher", 226 / 288, "ratio 0.784722, 3.99 GiB in use at 131,072 tokens"),
        # Whole layers: 2 layers are 16 groups, and 29 of 36 layers are 232 groups.
        ("4GiB@128k", "interleave", 29 / 36, "ratio 0.805556, 3.61 GiB in use at 131,072 tokens"),
        (
            "20 gb@131072",
            "fisher",
            0,
            "ratio 0, 19.3 GB in use at 131,072 tokens, of the dense model",
        ),
    ):
        settings = default_settings(method, config.mask)
        found, said = with_kv_budget(replace(config, method=method), budget, settings)
        assert (found.ratio, said) == (ratio, f"--kv-budget {budget}: {line}")
    with pytest.raises(UserError, match=r"too small .* it needs 151 MB in use at 131,072 tokens"):
        with_kv_budget(config, "150MB@128k", settings)
    # First tokens are held too: m * 2,047 / 2^21.
    found, _ = with_kv_budget(replace(config, sink="tokens=1024"), "4GiB@128k", settings)
    assert found.ratio == 228 / 288
    # Every other layer has a window of 512 of its own: 18 layers x 8 groups are left to choose, and
    # the others hold 18 * 8 * 511 / 2^21 = .035 GiB: (144 - m) / 16 + m * 1,023 / 2^21 <= 3.965.
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 512}
    own = {"model_type": "qwen3", "use_sliding_window": True} | shape | layers
    (tmp_path / "config.json").write_text(json.dumps(own))
    found, _ = with_kv_budget(config, "4GiB@128k", settings)
    assert found.ratio == 82 / 144


def test_recover_and_search_mask_take_it_in_place_of_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 layers x 8 groups of 4 * 16 bytes a token: 64 KiB a group, 1,984 bytes with the window."""
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "smoke", "--method", "random_groups", "--kv-budget", "512KiB@1k"]
    line = "--kv-budget 512KiB@1k: ratio 0.5625, 465 KiB in use at 1,024 tokens\n"
    recover.main([*words, "--dry-run"])
    assert line in capsys.readouterr().out
    with pytest.raises(UserError, match="--sink static needs calibration examples"):
        search_mask.main([*words, "--run-dir", "run"])
    search_mask.main([*words, "--run-dir", "run", "--sink", "none"])
    assert line in capsys.readouterr().out
    assert read_mask(tmp_path / "run" / "mask" / "mask.json").mask.num_windowed == 9
    for main in (recover.main, search_mask.main):
        with pytest.raises(UserError, match=r"--ratio 0\.5 both"):
            main([*words, "--ratio=0.5"])
