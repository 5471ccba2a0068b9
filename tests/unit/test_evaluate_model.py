"""recipes/evaluate_model.py: folders, rows, floors, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.assets import asset_folder
from bosch.config import Config
from bosch.eval import runner
from bosch.eval.results import collect_results
from bosch.eval.suites import longbench, niah
from bosch.recipes import evaluate_model, presets
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact
from tests.hybrid_folders import embedded_hybrid

MODEL = asset_folder("tiny-qwen3-2layer")
ROW = {"run", "step", "tokens", "suite", "task", "length", "metric", "value", "stderr", "n"}


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_hybrid(tmp_path_factory.mktemp("training"))


def complete_step(run: Path, config: Config, step: int, hybrid: Path) -> None:
    """Evaluate a step as recover.py does: step 0 is the hybrid, the others are in the training's
    folder."""
    source = Artifact.load(hybrid.parent if step else hybrid)
    with RunFolder(run) as folder:
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
    scores = json.loads((folder / "niah" / "scores.json").read_text())
    rows = [row for row in scores["rows"] if row["metric"] == "string_match_all"]
    assert all(set(row) == ROW for row in rows)
    assert {(row["run"], row["step"], row["tokens"]) for row in rows} == {("one", 4, 4 * 2 * 256)}
    predictions = read_lines(folder / "niah" / "predictions.jsonl")
    for task in ("niah_single_1", "niah_multikey_2"):
        mine = [p["scores"]["string_match_all"] for p in predictions if p["task"] == task]
        (row,) = [row for row in rows if row["task"] == task]
        assert (row["value"], row["n"]) == (100 * sum(mine) / len(mine), len(mine))
    means = {row["task"]: row["value"] for row in rows}
    assert means["average"] == pytest.approx((means["single"] + means["multikey"]) / 2)
    scores = json.loads((folder / "longbench" / "scores.json").read_text())
    assert scores["rows"][-1]["task"] == "average"


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
    # Without multikey_3: whether its examples fit is only known by building them.
    tasks = config.eval.niah_tasks[:5]
    settings = replace(config.eval, niah_tasks=tasks, prefill_chunk=64)  # changes no result
    complete_step(other, replace(config, eval=settings), 0, hybrid)
    rows = collect_results(other / "eval", "two")
    assert read_lines(other / "eval" / "results.jsonl") == rows
    assert {row["run"] for row in rows} == {"two"}
    assert list(dict.fromkeys(row["step"] for row in rows)) == [None, 0]
    assert list((other / "tb").glob("events*"))


def command(*arguments: object) -> None:
    evaluate_model.main([str(argument) for argument in arguments])


def test_the_command_shows_a_table_and_continues_where_it_stopped(
    hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, narrow = tmp_path / "judged", tmp_path / "narrow"
    options = ("--model", hybrid, "--suite", "niah", "longbench", "--lengths", 256, "--limit", 1)
    options = (*options, "--niah-tasks", "niah_single_2", "--out")
    command(*options, judged)
    said = capsys.readouterr().out
    assert re.search(r"niah_single_2 +│ +string_match_all", said)
    assert "floor of a window of 64 tokens" in said
    assert "the first 1 examples of each task" in said
    command(*options, judged)
    assert "judged: complete, reused" in capsys.readouterr().out
    with pytest.raises(UserError, match="limit: 1 -> 2"):
        command(*options, judged, "--limit", 2)
    # Another window, without the speed-ups: another evaluation.
    command(*options, narrow, "--window", 8, "--plain")
    first, second = (hash_file(out / "niah" / "predictions.jsonl") for out in (judged, narrow))
    assert first != second
    scores = json.loads((narrow / "niah" / "scores.json").read_text())
    assert scores["floor"]["window_tokens"] == 8


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
