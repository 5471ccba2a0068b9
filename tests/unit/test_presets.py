"""The named setups. The paper's values are literals here; [ours] marks what it leaves open."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bosch.assets import asset_folder
from bosch.known_models import PAPER_MODELS
from bosch.methods._settings import default_settings
from bosch.model import ModelShape, read_model_config, read_shape
from bosch.recipes import presets, sweep
from bosch.recipes.command import parse_command
from bosch.recipes.presets import check_lengths, choose, paper, scaled_paper, tiny, warnings
from bosch.recipes.recover import main
from bosch.run.errors import UserError
from bosch.run.files import write_sealed_json
from bosch.training import rehearsal
from tests.own_models import write_own_model

SIX_TASKS = tuple(f"niah_{kind}_{n}" for kind in ("single", "multikey") for n in (1, 2, 3))


def test_paper_models() -> None:
    for name, shape, micro_batch, max_layers in (
        ("1.7B", (28, 8, 32_768), 8, 4),
        ("8B", (36, 8, 32_768), 4, 4),  # "between" 8 and 2 [ours]
        ("14B", (40, 8, 32_768), 4, 4),  # likewise
        ("30B-A3B", (48, 4, 40_960), 2, 8),
    ):
        model = f"Qwen/Qwen3-{name}-Base"
        assert read_shape(model) == ModelShape(*shape)
        assert paper(model).train.micro_batch_sequences == micro_batch
        # Stage 3: at most 4 layers of 8 groups, 8 layers of 4 [ours].
        assert paper(model).mask.max_layers == max_layers


@pytest.mark.parametrize("model", PAPER_MODELS)
def test_paper_preset_has_the_values_of_the_paper(model: str) -> None:
    config = paper(model)
    assert config.model == model
    assert (config.ratio, config.window, config.method) == (0.75, 1_024, "bosch_paper")
    assert config.sink == "none"  # windows have none in the paper
    search = default_settings(config.method, config.mask)
    assert (search.optimizer, search.objective) == ("nomad", "accuracy")  # B.2, equation 4
    assert (search.kappa, search.keep_best) == (100, False)  # ends with stage 3's mask
    assert search.layers_at_once(read_shape(model).num_groups) == mask_layers(model)
    assert config.calibration.answers == "expected"

    assert (config.calibration.examples, config.calibration.length) == (64, 32_768)
    assert config.calibration.tasks == SIX_TASKS  # equal shares of the six [ours]
    assert config.calibration.questions_per_context == 1

    mask = config.mask
    assert (mask.alpha, mask.gamma, mask.kappa, mask.max_variables) == (100, 0.2, 100, 49)
    assert mask.ratio_buckets == (0, 0.25, 0.5, 0.75, 1)  # [ours, fits figure 1]
    assert (mask.razor_recent_share, mask.razor_texts) == (1 / 4, 1)

    assert config.data.source == ("prolong-64k",)
    assert (config.data.tokens, config.data.sequence_length) == (2_500_000_000, 32_768)
    assert config.data.document_mask is True  # [ours]

    train = config.train
    assert train.batch_sequences * config.data.sequence_length == 64 * 32_768 == 2_097_152
    # These three are ProLong's [ours].
    assert (train.betas, train.weight_decay, train.clip_norm) == ((0.9, 0.95), 0.1, 1.0)
    rates = (train.peak_learning_rate, train.warmup_share, train.floor_share)
    assert (*rates, train.precision) == (1e-5, 0.1, 0, "bf16")
    # [ours]: torch's flash kernel, or flash-attn where it is installed
    assert (train.attention, train.kernels) == ("auto", "liger")
    assert (train.objective, train.trained) == ("next-token", "all")
    assert config.data.repeats == 0

    evaluation = config.eval
    tokens = [share * config.data.tokens / 1e9 for share in evaluation.checkpoints]
    assert tokens == pytest.approx([0, 0.65, 1.3, 1.95, 2.5])  # tables 15 and 16, rounded there
    assert evaluation.niah_tasks == SIX_TASKS
    assert evaluation.niah_lengths == (4_096, 8_192, 16_384, 32_768)
    assert evaluation.suites == ("niah", "longbench")
    assert evaluation.niah_samples == 500  # RULER's [ours]
    assert evaluation.longbench_data == "zai-org/LongBench"  # 21 sets and GSM8K
    assert (evaluation.longbench_categories, evaluation.longbench_rows) == ("paper", None)  # seven


def mask_layers(model: str) -> int:
    """Layers of a subproblem of stage 3: 4 of 8 groups; 8 of 4 [ours]."""
    return 8 if "30B" in model else 4


def dry_run(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed before the sentence on what is missing offline."""
    with pytest.raises(UserError, match="on the hub, which cannot be reached: pass --model DIR"):
        main([*words, "--dry-run", "--show-settings"])
    return " ".join(capsys.readouterr().out.split())


def test_the_preset_paper_is_printed_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    """`--dry-run --show-settings` prints it before anything is fetched, and then what is missing
    offline."""
    printed = dry_run("--preset", "paper", "--model", "Qwen/Qwen3-1.7B-Base", capsys=capsys)
    for expected in (
        "--method bosch_paper",
        "--sink none",
        "optimizer nomad",
        "--mask.kappa 100",
        "--train.objective next-token",
        "--train.trained all",
        "--train.peak-learning-rate 1e-05",
    ):
        assert expected in printed


def test_large_models_get_our_search_with_sinks(capsys: pytest.CaptureFixture[str]) -> None:
    printed = dry_run("--model", "Qwen/Qwen3-8B-Base", capsys=capsys)
    for expected in ("preset large", "--method bosch", "--sink static", "optimizer guided"):
        assert expected in printed
    config = presets.large("Qwen/Qwen3-8B-Base")
    learned = config.train.objective, config.train.trained, config.calibration.answers
    assert learned == ("distill", "lora", "own-words")
    # 150 steps of the paper's batch.
    assert config.data.tokens == 150 * 64 * 32_768
    same = paper("Qwen/Qwen3-8B-Base")
    assert (config.window, config.eval.niah_lengths) == (same.window, same.eval.niah_lengths)


def model_folder(folder: Path, positions: int) -> str:
    config = read_model_config(asset_folder("tiny-qwen3")) | {"max_position_embeddings": positions}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_paper_settings_shrink_with_the_positions_of_the_model(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "short", positions=4_096)
    config = scaled_paper(model)
    assert config.window == 128  # 1,024 * 4,096 / 32,768
    assert config.calibration.length == config.data.sequence_length == 4_096
    assert config.train.batch_sequences == 512  # 2,097,152 tokens
    assert config.eval.niah_lengths == (512, 1_024, 2_048, 4_096)
    assert paper(model) == config
    short = presets.large(model_folder(tmp_path / "shorter", positions=2_048))
    assert short.eval.niah_lengths == (512, 1_024, 2_048)  # none into which no needle fits
    # They do not grow with them.
    config = scaled_paper(model_folder(tmp_path / "long", positions=262_144))
    assert (config.calibration.length, config.window) == (32_768, 1_024)


def test_a_big_gpu_gets_the_preset_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "short", positions=4_096)
    monkeypatch.setattr(presets, "TOY_BYTES", 0)
    monkeypatch.setattr(presets, "SMALL_WEIGHTS", 1_000)
    monkeypatch.setattr(rehearsal, "gpu_memory_gb", lambda: 80.0)
    config, [line] = choose(None, model)
    assert config == presets.large(model)
    assert "data.sequence_length: 32768 -> 4096; " in line
    known, [line] = choose(None, "Qwen/Qwen3-8B-Base")
    assert known == presets.large("Qwen/Qwen3-8B-Base")
    # The paper's 4 at once would not fit its GPUs by our figures, and change no result.
    assert (known.train.attention, known.train.micro_batch_sequences) == ("auto", None)
    assert line.startswith("preset large")
    other, _ = choose("tiny", "Qwen/Qwen3-8B-Base")
    assert other == replace(tiny(), model="Qwen/Qwen3-8B-Base")


def test_a_laptop_gets_the_preset_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Real ones have as few positions as 2,048.
    model = model_folder(tmp_path / "real", positions=2_048)
    monkeypatch.setattr(rehearsal, "gpu_memory_gb", lambda: None)
    # By its few weights, though they are not here.
    assert presets.for_stage({"model": model}) == tiny(model)
    monkeypatch.setattr(presets, "TOY_BYTES", 0)
    for most in (1_000, 10_000_000):  # without a GPU, and with few parameters
        monkeypatch.setattr(presets, "SMALL_WEIGHTS", most)
        config, [line] = choose(None, model)
        assert "preset small, for models of up to 1.5B parameters" in line
        assert config == presets.for_stage({"model": model})
        assert (config.sink, config.window, config.calibration.length) == ("auto", 128, 1_024)
        assert config.train.objective == "distill"
        check_lengths(config)
        assert config.eval.precision == "auto"
        monkeypatch.setattr(rehearsal, "gpu_memory_gb", lambda: 80.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, precision in (((9, 0), "bf16"), ((7, 5), "fp32")):  # a T4 has no bf16
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of=capability: of)
        config = presets.small(model)
        assert config.eval.precision == "fp32"
        assert config.train.precision == precision


def test_offline_gsm8k_is_left_out_where_it_is_not_here(tmp_path: Path) -> None:
    words = ["--preset", "large", "--model", "tiny-qwen3", "--eval.longbench-data", str(tmp_path)]
    command = parse_command(words)
    assert "longbench" in command.config.eval.suites
    assert command.config.eval.longbench_categories == "official"
    assert any(line.startswith("GSM8K is left out") for line in command.chosen_by)
    named = parse_command([*words, "--eval.gsm8k-data", str(tmp_path)])
    assert named.config.eval.longbench_categories == "paper"


def test_packed_tokens_have_the_repeats_that_they_have(tmp_path: Path) -> None:
    words = ["--preset", "small", "--model", "tiny-qwen3", "--data.tokens-from", str(tmp_path)]
    write_sealed_json(tmp_path / "tokens.json", {"repeats": 0.5})
    assert parse_command(words).config.data.repeats == 0.5
    write_sealed_json(tmp_path / "tokens.json", {})
    assert parse_command(words).config.data.repeats == 0
    with pytest.raises(UserError, match=r"--data\.repeats changes nothing"):
        parse_command([*words, "--data.repeats", "0.3"])
    with pytest.raises(UserError, match=r"--data\.held-out-sequences changes nothing"):
        parse_command([*words, "--data.held-out-sequences", "3"])
    write_sealed_json(tmp_path / "tokens.json", {"num_held_out_sequences": 5})
    assert parse_command(words).config.data.held_out_sequences == 5


def test_small_is_judged_by_all_that_is_there(tmp_path: Path) -> None:
    words = ["--preset", "small", "--model", "tiny-qwen3"]
    command = parse_command(words)
    assert command.config.eval.suites == ("niah", "own_formats")
    assert command.config.eval.niah_tasks == SIX_TASKS
    assert any(line.startswith("LongBench is left out") for line in command.chosen_by)
    data = ["--eval.longbench-data", str(tmp_path)]
    command = parse_command([*words, *data])
    assert command.config.eval.suites == ("niah", "own_formats", "longbench")
    assert command.config.eval.longbench_categories == "official"  # needs no GSM8K
    assert not any("LongBench" in line for line in command.chosen_by)
    # Suites that are named stay as they are.
    named = parse_command([*words, *data, "--eval.suites", "niah"]).config.eval
    assert named.suites == ("niah",)


def test_what_decides_whether_a_model_has_recovered_is_counted(tmp_path: Path) -> None:
    until = ["--train.until", "recovered", "--model", "tiny-qwen3"]
    tiny = [*until, "--preset", "tiny"]  # whose LongBench has 8 rows
    parse_command([*tiny, "--eval.suites", "niah", "--eval.niah-samples", "25"])
    rows = ["--eval.suites", "longbench", "--eval.longbench-rows"]
    parse_command([*tiny, *rows, "25", "--eval.niah-samples", "1"])
    for judged in (["--eval.suites", "niah", "own_formats", "--eval.niah-samples", "24"],
                   [*rows, "24"],
                   ["--eval.suites", "longbench_v2", "--eval.samples", "24"]):  # fmt: skip
        with pytest.raises(UserError, match="takes 25 examples a task, not 24"):
            parse_command([*tiny, *judged])
    # The rows of a suite that is there by itself, of which a run has 5 otherwise.
    data = ["--preset", "small", "--eval.longbench-data", str(tmp_path)]
    assert parse_command([*until, *data]).config.eval.longbench_rows == 25
    assert parse_command([*until[2:], *data]).config.eval.longbench_rows == 5


@pytest.mark.parametrize("preset", ["small", "brief"])
def test_many_windows_are_searched_for_and_few_are_ranked(preset: str) -> None:
    def method_of(*options: str) -> str:
        words = ("--preset", preset, "--model", "tiny-qwen3", *options)
        return parse_command(words).config.method

    assert method_of() == method_of("--ratio", ".875") == "razor"
    assert method_of("--ratio", ".9") == method_of("--ratio", ".95") == "bosch"
    assert method_of("--kv-budget", "1GiB@1k") == "bosch"  # the ratio is known later
    assert method_of("--ratio", ".5", "--method", "bosch") == "bosch"
    assert method_of("--ratio", ".95", "--method", "razor") == "razor"


def test_brief_is_small_with_less_of_everything() -> None:
    small, brief = presets.small("tiny-qwen3"), presets.brief("tiny-qwen3")
    assert 2 * brief.data.tokens == small.data.tokens
    assert (brief.eval.suites, brief.train) == (small.eval.suites, small.train)
    assert brief.eval.checkpoints == (0, 1)


def test_a_small_model_without_preset_gets_settings_that_fit_it(tmp_path: Path) -> None:
    """Its positions hold the needle tasks only at full length, with fewer questions a text."""
    texts = [Path(__file__).read_text()] * 4
    short = str(write_own_model(tmp_path, "llama", texts, max_position_embeddings=512))
    config, [line] = choose(None, short)
    assert config.data.source == ("toy",)
    assert config.calibration.essays == config.eval.longbench_data == "toy"
    assert (config.window, config.calibration.length, config.data.sequence_length) == (32, 512, 256)
    assert config.calibration.questions_per_context < 4
    assert config.eval.niah_lengths == (512,)
    assert config.data.tokens == tiny().data.tokens
    assert config.train.batch_sequences * 256 == tiny().train.batch_sequences * 512
    assert "eval.niah_lengths: [512, 1024] -> [512]; " in line
    check_lengths(config)
    presets.check_needles(config)
    with pytest.raises(UserError, match=r"niah-lengths 120: no single task can be built"):
        presets.check_needles(replace(config, eval=replace(config.eval, niah_lengths=(120, 512))))


def test_windows_and_lengths_that_do_not_fit_and_training_for_days_get_warnings() -> None:
    config = replace(tiny(), window=1_500)  # of texts of 512 and 1,024
    (warning,) = warnings(config)
    assert "data.sequence_length 512, eval.niah_lengths 1,024" in warning
    assert warnings(replace(config, ratio=0.0)) == warnings(tiny()) == []
    longer = replace(tiny(), eval=replace(tiny().eval, niah_lengths=(512, 2_048)))
    (warning,) = warnings(longer)
    assert "texts of 2,048 tokens" in warning
    assert "--data.sequence-length 2048" in warning
    if not torch.cuda.is_available():
        (warning,) = warnings(paper())
        assert "2,500,000,000 tokens takes days" in warning


def test_whole_weights_have_a_rate_of_their_own() -> None:
    words = ["--preset", "small", "--model", "tiny-qwen3", "--calibration.essays", "toy"]
    whole = ["--train.trained", "all"]
    rate = 1e-5
    command = parse_command([*words, *whole])
    assert command.config.train.peak_learning_rate == rate
    (line,) = (each for each in command.chosen_by if "whole weights" in each)
    assert "--train.peak-learning-rate 1e-05" in line
    named = parse_command([*words, *whole, "--train.peak-learning-rate", "0.0001"])
    assert named.config.train.peak_learning_rate == 1e-4
    assert not any("whole weights" in each for each in named.chosen_by)
    for same in ([], ["--train.trained", "lora-keep-qk"]):
        assert parse_command([*words, *same]).config.train.peak_learning_rate == 8e-4


def test_an_option_that_the_method_lacks_is_named() -> None:
    words = ["--preset", "small", "--model", "tiny-qwen3", "--calibration.essays", "toy"]
    words += ["--mask.kappa", "9", "--mask.precision", "fp32"]
    (line,) = (each for each in parse_command(words).chosen_by if "changes nothing" in each)
    assert line.startswith("--mask.kappa 9 changes nothing: method razor ")
    searched = parse_command([*words, "--method", "bosch"])
    assert not any("changes nothing" in each for each in searched.chosen_by)


def test_a_run_that_goes_on_is_judged_by_the_suites_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongBench may have been fetched meanwhile."""
    run = str(tmp_path / "run")
    words = ["--preset", "small", "--model", "tiny-qwen3", "--run-dir", run]
    begun = parse_command(words).config
    assert "longbench" not in begun.eval.suites
    monkeypatch.setattr(presets, "is_on_this_machine", lambda data: True)
    later = parse_command(words).config
    assert "longbench" in later.eval.suites
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": asdict(begun)}))
    assert parse_command(words).config.eval == begun.eval
    suites = ["--eval.suites", "niah", "longbench"]
    assert parse_command([*words, *suites]).config.eval.suites == ("niah", "longbench")


def test_suites_are_of_the_folder_that_hours_or_a_variant_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "small", "--model", "tiny-qwen3", "--calibration.essays", "toy"]
    begun = parse_command(words)
    monkeypatch.setattr(presets, "is_on_this_machine", lambda data: True)
    begun.run_path.mkdir(parents=True)
    (begun.run_path / "run.json").write_text(json.dumps({"config": asdict(begun.config)}))
    assert "longbench" not in parse_command(words).config.eval.suites
    # Other runs, which have not begun.
    assert "longbench" in parse_command([*words, "--hours", "500"]).config.eval.suites
    given = sweep.Options(methods=("razor",), ratios=("0.75",), vary=("window=32,64",))
    varied = sweep.list_chains(given, words)
    assert all("longbench" in chain.config.eval.suites for chain in varied)


def test_a_run_s_folder_may_be_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_command(["--run-dir", "."]).run_path == tmp_path
    assert parse_command(["--run-dir", "one"]).run_path == Path("one")
