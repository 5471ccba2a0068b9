"""recipes/evaluate_model.py: folders, rows, floors, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from bosch.assets import asset_folder
from bosch.config import Config, EvalConfig, JudgingConfig
from bosch.data.tokenizer_files import describe_tokenizer
from bosch.eval import runner
from bosch.eval.examples import load_examples
from bosch.eval.judging import Judging, judge, judging_of, load_judged
from bosch.eval.lm_eval_bridge import results_of
from bosch.eval.results import collect_results, describe_evaluation
from bosch.eval.settings import FAST, Label, SuiteRun
from bosch.eval.suites import longbench, niah
from bosch.eval.suites._interface import Example, Request, Result, Task
from bosch.hybrid.materialize import materialize
from bosch.masks.mask import GroupMask, MaskFile
from bosch.model import read_model_info
from bosch.recipes import evaluate_model, presets
from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder
from bosch.run.manifest import DamagedArtifactError, write_sealed_json
from bosch.run.stage import Artifact

MODEL = asset_folder("tiny-qwen3-2layer")
ROW = {"run", "step", "tokens", "suite", "task", "length", "metric", "value", "stderr", "n"}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two-layer model with a window of 64 in six of its eight groups."""
    folder = tmp_path_factory.mktemp("training") / "step-000004"
    mask = GroupMask.from_rows([[1, 1] + [0] * 6] * 2, 64)
    record = MaskFile(mask, read_model_info(MODEL), "by hand", settings={}, seed=0, provenance={})
    materialize(MODEL, record, folder)
    return folder


# --------------------------------------------------------------------------------- in recover.py


def complete_step(run: Path, config: Config, step: int, hybrid: Path, **options: Any) -> None:
    """Evaluate a step as recover.py does: step 0 is the hybrid, the others are in the training's
    folder."""
    source = Artifact.load(hybrid.parent if step else hybrid)
    with RunFolder(run, **options) as folder:
        folder.complete(evaluate_model.build_step(config, run, step, 512 * step, source))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, hybrid: Path) -> Path:
    """A run whose dense model and step 4 were evaluated with the smoke preset."""
    root = tmp_path_factory.mktemp("runs")
    config, run = presets.smoke(), root / "one"
    with RunFolder(run) as folder:
        folder.complete(evaluate_model.build(config))
    complete_step(run, config, 4, hybrid)
    return run


def test_every_score_is_a_row_and_follows_from_saved_predictions(run: Path) -> None:
    folder = run / "eval" / "step-000004"
    scores = read_json(folder / "niah" / "scores.json")
    rows = [row for row in scores["rows"] if row["metric"] == "string_match_all"]
    assert all(set(row) == ROW for row in rows)
    assert {(row["run"], row["step"], row["tokens"]) for row in rows} == {("one", 4, 4 * 2 * 256)}
    predictions = read_lines(folder / "niah" / "predictions.jsonl")
    for task in ("niah_single_1", "niah_multikey_2"):
        mine = [p["scores"]["string_match_all"] for p in predictions if p["task"] == task]
        (row,) = [row for row in rows if row["task"] == task]
        assert (row["value"], row["n"]) == (100 * sum(mine) / len(mine), len(mine))
    # multikey_3 does not fit into 256 tokens: it is left out, and counts in no average.
    assert ["niah_multikey_3" in reason for reason in scores["left_out"]] == [True]
    means = {row["task"]: row["value"] for row in rows}
    assert means["average"] == pytest.approx((means["single"] + means["multikey"]) / 2)
    assert read_json(folder / "longbench" / "scores.json")["rows"][-1]["task"] == "average"


def test_the_floor_is_counted_on_the_examples(run: Path) -> None:
    floor = read_json(run / "eval" / "step-000004" / "niah" / "scores.json")["floor"]
    assert floor["window_tokens"] == 64
    settings = niah.Settings(lengths=(256,))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for row in floor["rows"]:
        if row["task"].startswith("niah"):
            task = Task(row["task"], row["length"])
            (example,) = niah.build_examples(settings, task, tokenizer, limit=1)
            assert row["value"] == 100 * niah.floor(example, 64)
    assert {"single", "multikey", "average"} < {row["task"] for row in floor["rows"]}
    # The dense model has no window.
    shared = run.parent / "shared"
    (dense,) = shared.glob("eval-dense-*")
    assert "floor" not in read_json(dense / "niah" / "scores.json")


def test_another_run_reuses_the_dense_model_s_evaluation_and_the_examples(
    run: Path, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longbench, "build_examples", None)
    monkeypatch.setattr(niah, "build_examples", None)
    said: list[str] = []
    config, other = presets.smoke(), run.parent / "two"
    with RunFolder(other, say=said.append) as folder:
        folder.complete(evaluate_model.build(config))
    assert ["eval/dense: complete, reused from" in line for line in said] == [True]
    config = replace(config, eval=replace(config.eval, prefill_chunk=64))  # changes no result
    # Without multikey_3: whether its examples fit is only known by building them.
    settings = replace(config.eval, niah_tasks=presets.smoke().eval.niah_tasks[:5])
    config = replace(config, eval=settings)
    complete_step(other, config, 0, hybrid)
    rows = collect_results(other / "eval", "two")
    assert read_lines(other / "eval" / "results.jsonl") == rows
    assert {row["run"] for row in rows} == {"two"}
    assert list(dict.fromkeys(row["step"] for row in rows)) == [None, 0]
    assert list((other / "tb").glob("events*"))


def test_a_complete_evaluation_is_reused_and_other_settings_are_refused(
    run: Path, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "predict", None)
    config, said = presets.smoke(), []
    complete_step(run, config, 4, hybrid, say=said.append)
    assert any("eval/step-000004: complete" in line for line in said)
    config = replace(config, eval=replace(config.eval, niah_samples=2))
    with pytest.raises(UserError, match=r"limit: 1 -> 2"):
        complete_step(run, config, 4, hybrid)


def test_predictions_are_scored_again_without_the_model(run: Path, tmp_path: Path) -> None:
    source = run / "eval" / "step-000004"
    folder = tmp_path / "again"
    shutil.copytree(source, folder)
    (folder / "niah" / "scores.json").unlink()
    evaluation = runner.Evaluation(
        load_model=lambda: pytest.fail("the model is not needed"),
        tokenizer=AutoTokenizer.from_pretrained(MODEL),
        suites=[SuiteRun("niah", niah.Settings(lengths=(256,)), 1)],
        examples_folder=run.parent / "shared",
        label=Label("one", 4, 4 * 2 * 256),
        window_tokens=64,
    )
    runner.evaluate(evaluation, folder)
    name = "niah/scores.json"
    assert (folder / name).read_bytes() == (source / name).read_bytes()


# ------------------------------------------------------------------------------- shared examples


def load(run: SuiteRun, folder: Path, task: Task) -> list[Example]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known_by = describe_tokenizer(tokenizer).hash
    return load_examples(run, task, tokenizer, known_by, folder)


def test_examples_are_built_once_shared_and_sealed(tmp_path: Path) -> None:
    settings, task = longbench.Settings(toy_rows=6), Task("toy_count")
    three = load(SuiteRun("longbench", settings, 3), tmp_path, task)
    assert len(three) == 3
    (path,) = tmp_path.rglob("*.jsonl")
    written = path.stat().st_mtime_ns
    assert load(SuiteRun("longbench", settings, 2), tmp_path, task) == three[:2]
    assert path.stat().st_mtime_ns == written
    everything = load(SuiteRun("longbench", settings), tmp_path, task)
    assert len(everything) == 6
    assert everything[:3] == three
    assert {p.name for p in tmp_path.rglob("*.jsonl")} == {"first-00003.jsonl", "first-all.jsonl"}
    load(SuiteRun("longbench", replace(settings, seed=1), 1), tmp_path, task)
    assert len(list(tmp_path.glob("examples-*"))) == 2
    path.write_text(path.read_text().replace("Paragraph 1", "Paragraph 7", 1))
    with pytest.raises(DamagedArtifactError, match=r"first-00003\.jsonl"):
        load(SuiteRun("longbench", settings, 3), tmp_path, task)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_all_examples_between_them_by_their_text(world: int) -> None:
    sizes = (900, 100, 500, 100, 400)
    examples = [Example(i, "x" * size, (), 1) for i, size in enumerate(sizes)]
    parts = [runner.share_of_rank(examples, rank, world) for rank in range(world)]
    assert [example.index for part in parts for example in part] == [1, 3, 4, 2, 0]
    if world == 2:
        assert [len(part) for part in parts] == [4, 1]  # 1,100 and 900 characters


# ------------------------------------------------------------------------------ the command line


def command(*arguments: object) -> None:
    evaluate_model.main([str(argument) for argument in arguments])


def test_the_command_shows_a_table_and_continues_where_it_stopped(
    hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", hybrid, "--suite", "niah", "longbench", "--lengths", 256, "--limit", 1)
    options = (*options, "--niah-tasks", "niah_single_2", "--out", tmp_path / "judged")
    command(*options)
    said = capsys.readouterr().out
    assert "niah_single_2   string_match_all" in said
    assert "floor of a window of 64 tokens" in said
    assert "the first 1 examples of each task" in said
    before = hash_file(tmp_path / "judged" / "niah" / "predictions.jsonl")
    command(*options)
    assert "judged: complete, reused" in capsys.readouterr().out
    # Another window, without the speed-ups: another evaluation.
    other = (*options[:-1], tmp_path / "narrow", "--window", 8, "--plain")
    command(*other)
    assert hash_file(tmp_path / "narrow" / "niah" / "predictions.jsonl") != before
    scores = read_json(tmp_path / "narrow" / "niah" / "scores.json")
    assert scores["floor"]["window_tokens"] == 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--suite", "naih"), "suite naih: .*'niah'"),
        (("--suite",), "--suite .*gsm8k, longbench, niah"),
        (("--suite", "lm-eval:"), "--suite lm-eval:: "),
        (("--lengths", 4096), "--niah-lengths 4096: .* 2,048"),
        (("--lengths", 256, "--essays", "none.json"), r"^none\.json "),
        (("--lengths", 256, "--window", 8), "--window 8: tiny-qwen3-2layer"),
        (("--suite", "longbench", "--longbench-data", "none.zip"), r"^none\.zip "),
        (("--suite", "gsm8k", "--gsm8k-data", "none"), "^none .*test"),
        (("--suite", "longbench", "--longbench-data", str(MODEL)), f"{MODEL} .*narrativeqa"),
        (("--niah-tasks", "niah_single_9", "--lengths", 256), "'niah_single_9'"),
        (("--options", "niah.sede=1"), "suite option niah: sede=1: .*'seed'"),
        (("--options", "niah.seed=many"), "suite option niah: seed=many: .*42"),
        (("--options", "seed=1"), "suite option seed=1: .*niah"),
        (("--options", "longbench.seed=1"), r"suite option longbench\.seed=1: .*niah"),
        (("--options", "niah.samples=0"), "not 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    arguments: tuple[object, ...], named: str, tmp_path: Path
) -> None:
    out = tmp_path / "judged"
    with pytest.raises(UserError, match=named):
        command("--model", "tiny-qwen3-2layer", *arguments, "--limit", 1, "--out", out)
    assert not out.exists()  # the same folder serves the right command


def test_recover_judges_by_the_suites_it_is_asked_for() -> None:
    config = EvalConfig(suites=("gsm8k",), options=("gsm8k.tasks=gsm8k,gsm8k_cot",), samples=3)
    (run,) = judging_of(Config(eval=config)).suites
    assert (run.name, run.settings.tasks, run.limit) == ("gsm8k", ("gsm8k", "gsm8k_cot"), 3)
    with pytest.raises(UserError, match=r"eval\.suites"):
        EvalConfig(suites=())


# --------------------------------------------------------------------------------------- the model


def test_yarn_stretches_the_positions_and_keeps_their_base(tmp_path: Path) -> None:
    model = load_judged(MODEL, Judging((), yarn=2))
    plain = AutoConfig.from_pretrained(MODEL)
    assert model.config.max_position_embeddings == plain.max_position_embeddings
    assert model.config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": plain.rope_parameters["rope_theta"],
        "factor": 2.0,
        "original_max_position_embeddings": plain.max_position_embeddings,
    }
    rope, size = model.model.rotary_emb, plain.head_dim
    assert rope.attention_scaling == pytest.approx(1.0693, abs=1e-4)  # 0.1 ln 2 + 1
    slowest = plain.rope_parameters["rope_theta"] ** (-(size - 2) / size)
    assert rope.inv_freq[0] == pytest.approx(1.0)  # left as it is
    assert rope.inv_freq[-1] == pytest.approx(slowest / 2, rel=1e-6)  # half as fast
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--yarn 3: .*yarn"):
        load_judged(tmp_path, Judging((), yarn=3))


def test_a_model_is_judged_in_the_precision_asked_for() -> None:
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = load_judged(MODEL, Judging((), precision=precision))
        assert model.dtype == dtype
        assert model.config._attn_implementation == "bosch"  # no mask of all pairs of positions


def test_longbench_prompts_are_cut_where_longbench_cuts_them() -> None:
    # LongBench/config/model2maxlen.json: models with 4k, 8k, 16k and 32k positions.
    expected = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500, 40960: 31500}
    for positions, tokens in expected.items():
        request = Request(JudgingConfig(), positions)
        settings, _ = longbench.configure(request)
        assert settings.max_prompt_tokens == tokens


def test_only_the_batch_in_half_precision_counts_among_speed_settings() -> None:
    judging = Judging((SuiteRun("niah", niah.Settings(), 3),), precision="fp32")
    fast = replace(judging, generation=replace(FAST, batch=2, draft_answers=False))
    assert judging.facts() == fast.facts()
    assert replace(judging, precision="bf16").facts() != replace(fast, precision="bf16").facts()
    stretched = replace(judging, yarn=2.0)
    assert judging.facts() != stretched.facts() != replace(stretched, yarn_from=1024).facts()


def test_more_examples_than_the_default_are_built() -> None:
    config = Config(eval=EvalConfig(samples=600, longbench_data="toy"))
    needles, tasks = judging_of(config).suites
    assert (needles.settings.samples, tasks.settings.toy_rows) == (600, 600)
    few = judging_of(Config(eval=EvalConfig(samples=3))).suites
    assert (few[0].settings.samples, few[1].settings.toy_rows) == (500, 50)


def test_predictions_of_one_model_are_not_used_for_another(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--limit", 1, "--lengths", 256, "--niah-tasks", "niah_single_1", "niah_single_2")
    options = (*options, "--out", tmp_path / "judged")
    written = runner.append_line

    def fail_after_the_first(*arguments: Any) -> None:
        written(*arguments)
        raise RuntimeError("killed")

    monkeypatch.setattr(runner, "append_line", fail_after_the_first)
    with pytest.raises(RuntimeError, match="killed"):
        command("--model", hybrid, *options)
    monkeypatch.undo()
    with pytest.raises(UserError, match="judged"):
        command("--model", MODEL, *options)
    command("--model", hybrid, *options)
    assert len(read_lines(tmp_path / "judged" / "niah" / "predictions.jsonl")) == 2


@pytest.fixture
def begun(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An evaluation that was killed before a call of a function of the runner."""
    settings = niah.Settings(lengths=(256,), tasks=("niah_single_1",))
    judging = Judging((SuiteRun("niah", settings, 2),))

    def begin(killed_before: str) -> tuple[Path, Any]:
        def evaluate() -> None:
            judge(hybrid, judging, Label("one", 4, 4), tmp_path / "out", tmp_path / "examples")

        with monkeypatch.context() as patch:
            patch.setattr(runner, killed_before, raise_killed)
            with pytest.raises(RuntimeError, match="killed"):
                evaluate()
        return tmp_path / "out", evaluate

    return begin


def raise_killed(*_: Any) -> None:
    raise RuntimeError("killed")


def test_a_damaged_prediction_of_an_unfinished_evaluation_is_made_again(
    begun: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, evaluate = begun("write_rows")
    evaluate()
    wanted = (folder / "niah" / "predictions.jsonl").read_bytes()
    shutil.rmtree(folder)
    begun("write_rows")
    (path,) = (folder / ".work").glob("niah-*.jsonl")
    first, second = path.read_text().splitlines(keepends=True)
    row = json.loads(second)
    changed = json.dumps(row | {"prediction": "42"}) + "\n"
    path.write_text(first + changed + "[" * 50_000 + "\n" + '{"task": []}\n' + first)
    with caplog.at_level("INFO", "bosch"):
        evaluate()
    assert f"{path}, line 2" in caplog.text
    assert (folder / "niah" / "predictions.jsonl").read_bytes() == wanted


@pytest.mark.parametrize("damage", ["changed", "a line less", "no row"])
def test_damaged_predictions_of_an_unfinished_evaluation_are_named(damage: str, begun: Any) -> None:
    folder, evaluate = begun("write_rows")
    evaluate()  # all is scored, but no manifest protects it yet
    path = folder / "niah" / "predictions.jsonl"
    content = path.read_text()
    first, _ = content.splitlines(keepends=True)
    changed = {"changed": content.replace('"prediction": "', '"prediction": "4', 1)}
    changed |= {"a line less": first, "no row": first + '{"task": []}\n'}
    path.write_text(changed[damage])
    with pytest.raises(DamagedArtifactError, match=str(path)):
        evaluate()
    path.unlink()
    evaluate()
    assert path.read_text() == content


def test_examples_of_another_task_are_refused(begun: Any) -> None:
    folder, evaluate = begun("write_rows")
    (seal,) = folder.parent.glob("examples/examples-*/first-*.json")
    content = json.loads(seal.read_text())
    del content["checksum"]
    for changes in ({"task": "another"}, {"xxh3": "another"}):
        write_sealed_json(seal, content | changes)
        with pytest.raises(DamagedArtifactError, match=seal.stem):
            evaluate()
    write_sealed_json(seal, {"something": "else"})
    with pytest.raises(DamagedArtifactError, match=seal.name):
        evaluate()


def test_a_new_version_of_a_suite_is_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, task = SuiteRun("longbench", longbench.Settings(toy_rows=1)), Task("toy_count")
    before = Judging((run,)).facts()
    load(run, tmp_path, task)
    monkeypatch.setattr(longbench, "VERSION", 2, raising=False)
    assert Judging((run,)).facts() != before
    load(run, tmp_path, task)
    assert len(list(tmp_path.glob("examples-*"))) == 2


# ------------------------------------------------------------------------------------------ lm-eval


@pytest.mark.parametrize("setting", ["essays", "data", "gsm8k"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_with_other_content_is_another_setting(
    tmp_path: Path, setting: str, kind: str
) -> None:
    named = tmp_path / "texts"
    file = named if kind == "file" else named / "a.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("One.")
    suite = niah if setting == "essays" else longbench
    settings = suite.Settings(**{setting: str(named)})
    judging = Judging((SuiteRun(suite.__name__.split(".")[-1], settings),))
    before = judging.facts()
    assert judging.facts() == before
    file.write_text("Two.")
    assert judging.facts() != before


def test_lm_eval_s_numbers_become_rows() -> None:
    """Output of lm-eval 0.4.13 for these two tasks, shortened."""
    needles = {"alias": "x", "4096,none": -1, "1024,none": 0.5, "1024_stderr,none": 0.1}
    sums = {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"}
    counts = {"niah_single_1": {"effective": 4}, "gsm8k": {"effective": 8}}
    found = {"results": {"niah_single_1": needles, "gsm8k": sums}, "n-samples": counts}
    assert list(results_of(found)) == [
        Result("niah_single_1", 1024, "string_match_all", 0.5, 0.1, 4),
        Result("gsm8k", 0, "exact_match strict-match", 0.25, None, 8),
    ]


def test_lm_eval_runs_a_task_or_is_named_as_missing(tmp_path: Path) -> None:
    arguments = ("--model", "tiny-qwen3-2layer", "--suite", "lm-eval:niah_single_1", "--limit", 1)
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=how_to_install("lm-eval", "lm-eval")):
            command(*arguments, "--out", tmp_path / "judged")
        return
    command(*arguments, "--lengths", 256, "--out", tmp_path / "judged")
    (row,) = read_json(tmp_path / "judged" / "lm-eval" / "scores.json")["rows"]
    assert (row["task"], row["length"], row["n"]) == ("niah_single_1", 256, 1)
    assert describe_evaluation(tmp_path / "judged")
