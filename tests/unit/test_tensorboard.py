"""metrics.jsonl and the TensorBoard files made from it, read back as TensorBoard reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from bosch.eval.eval_stage import publish
from bosch.eval.report.tensorboard import rebuild_tensorboard
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_sealed_json
from bosch.run.tensorboard import read_metrics
from bosch.training.metrics import MetricsLog
from tests.run_folders import FakeRun
from tests.small_disk import small_disk
from tests.smoke_chain import points

STEPS, TOKENS = "niah/average/512/score", "tokens/niah/average/512/score"  # its curves


def open_log(run: Path, first: int) -> MetricsLog:
    log = MetricsLog(run / "train", 0)
    if first == 1:
        log.start(0)
        log.write({"step": 0, "tokens": 0})
    log.start(first)
    return log


def write_steps(run: Path, first: int, last: int) -> None:
    log = open_log(run, first)
    for step in range(first, last + 1):
        log.write({"step": step, "tokens": 100 * step, "loss": float(step), "skipped": "spike"})


def test_damaged_lines_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(tmp_path, 1, 3)
    path = tmp_path / "train" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 4, "tok')
    write_steps(tmp_path, 4, 4)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace("1.0", "1.5"), *lines[2:], ""]))
    with caplog.at_level("INFO", "bosch"):
        assert [row["step"] for row in read_metrics(path)] == [0, 2, 3, 4]
    assert f"{path}, line 2" in caplog.text


def test_a_training_does_not_resume_with_rows_missing(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 4)
    path = tmp_path / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for missing in (0, 2, 4):
        content = "".join(lines[:missing] + lines[missing + 1 :])
        path.write_text(content)
        with pytest.raises(UserError, match=rf"{path}.*--fresh train"):
            open_log(tmp_path, 5)
        assert path.read_text() == content


def write_scores(run: Path, step: int | None, value: float) -> Path:
    folder = run / "eval" / ("dense" if step is None else f"step-{step:06d}") / "niah"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = None if step is None else 100 * step
    row = {"run": run.name, "step": step, "tokens": tokens, "suite": "niah", "task": "average"}
    row |= {"length": 512, "metric": "score", "value": value, "stderr": 0.1, "n": 8}
    (folder / "scores.json").write_text(json.dumps({"rows": [row]}))
    return folder


def test_a_late_evaluation_takes_its_place(tmp_path: Path) -> None:
    for step in (0, 9):
        write_scores(tmp_path, step, float(step))
        rebuild_tensorboard(tmp_path)
    write_scores(tmp_path, 5, 5.0)
    folder = tmp_path / "tb"  # with a file of a clock that went back since
    (folder / "events.out.tfevents.9999999999.host.1.0").write_bytes(b"")
    rebuild_tensorboard(tmp_path)
    curves = {STEPS: [(0, 0), (5, 5), (9, 9)], TOKENS: [(0, 0), (500, 5), (900, 9)]}
    assert points(tmp_path / "tb") == curves
    assert [file.name for file in folder.iterdir()] == ["events.out.tfevents.0000000003.bosch"]


def test_the_dense_model_is_a_horizontal_line_even_if_its_scores_are_shared(tmp_path: Path) -> None:
    run, shared = tmp_path / "run", tmp_path / "shared" / "eval-dense-0123"
    for step in (0, 9):
        write_scores(run, step, float(step))
    shutil.copytree(write_scores(tmp_path / "other", None, 7.0), shared / "niah")
    (run / "eval" / "dense").mkdir()
    reference = {"folder": "../../../shared/eval-dense-0123", "facts": {}}
    write_sealed_json(run / "eval" / "dense" / "reference.json", reference)
    rebuild_tensorboard(run)
    (dense,) = (tmp_path / "shared").glob("dense-*")
    assert points(dense) == {STEPS: [(0, 7), (9, 7)], TOKENS: [(0, 7), (900, 7)]}


def test_settings_are_in_tensorboard(tmp_path: Path) -> None:
    run = FakeRun("fisher", seed=3, steps=(None, 0, 100)).write(tmp_path)
    rebuild_tensorboard(run)
    reader = EventAccumulator(str(run / "tb")).Reload()
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    values = {name: it.string_value or it.number_value for name, it in hparams.items()}
    expected: dict[str, Any] = {"run": run.name, "model": "tiny-qwen3", "method": "fisher"}
    expected |= {"ratio": 0.75, "window": 64, "unit": "group", "seed": 3, "tokens": 98_304}
    expected |= {"KV saved": "60% at 512 tokens", "train.clip_norm": 1.0}
    assert values.items() >= expected.items()


def test_tokens_until_shares_of_a_gap_are_closed_are_in_tensorboard(tmp_path: Path) -> None:
    run, average = FakeRun("fisher").write(tmp_path), "niah/average/string_match_all"
    rebuild_tensorboard(run)
    curves = points(run / "tb")
    (dense,) = (tmp_path / "shared").glob("dense-*")
    begin, middle, end = (value for _, value in curves[average])
    half = (begin + points(dense)[average][0][1]) / 2
    crossing = 100_000 * (1 + (half - middle) / (end - middle))  # between steps 100 and 200
    assert curves["niah/tokens to 50%"] == [(200, pytest.approx(crossing, rel=1e-3))]
    assert "niah/tokens to 90%" not in curves  # never
    reader = EventAccumulator(str(run / "tb")).Reload()
    content = reader.SummaryMetadata("_hparams_/experiment").plugin_data.content
    metrics = HParamsPluginData.FromString(content).experiment.metric_infos
    assert {"niah/tokens to 50%", "niah/tokens to 90%"} <= {each.name.tag for each in metrics}


def test_what_is_missing_or_damaged_is_rebuilt(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    write_scores(tmp_path, 0, 4.0)
    shutil.rmtree(tmp_path / "tb")
    rebuild_tensorboard(tmp_path)
    curves = points(tmp_path / "tb")
    assert curves["train/loss"] == [(1, 1.0), (2, 2.0)]
    (events,) = (tmp_path / "tb").iterdir()
    events.write_bytes(events.read_bytes()[:-40])
    publish(tmp_path)
    assert points(tmp_path / "tb") == curves
    (events,) = (tmp_path / "tb").iterdir()
    events.unlink()
    events.mkdir()  # a folder in its place
    publish(tmp_path)
    assert points(tmp_path / "tb") == curves
    with pytest.raises(MissingFileError, match="none"):
        rebuild_tensorboard(tmp_path / "none")


def test_a_full_disk_ends_the_log_with_a_clear_error_and_loses_no_row(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", kilobytes=32) as full_soon:
        log = open_log(full_soon, 0)
        written: list[int] = []
        with pytest.raises(UserError, match=r"metrics\.jsonl"):  # noqa: PT012
            for step in range(500):
                log.write({"step": step, "tokens": step, "loss": 1.0, "note": "x" * 200})
                written.append(step)
        rows = read_metrics(full_soon / "train" / "metrics.jsonl")
        assert [row["step"] for row in rows] == written
        shutil.rmtree(full_soon / "tb")  # makes room
        open_log(full_soon, 1).write({"step": 1, "tokens": 1})
        assert len(read_metrics(full_soon / "train" / "metrics.jsonl")) == 2


def test_training_and_evaluations_share_a_file_and_resume_in_it(tmp_path: Path) -> None:
    """A training that evaluates itself, is killed, and resumes before the evaluated step."""
    log = open_log(tmp_path, 1)
    for step in (1, 2, 3, 4):
        log.write({"step": step, "tokens": 100 * step, "loss": float(step)})
        if step == 2:
            write_scores(tmp_path, 2, 7.0)
            rebuild_tensorboard(tmp_path)
    resumed = open_log(tmp_path, 3)
    resumed.write({"step": 3, "tokens": 300, "loss": 3.5})
    expected = {
        "train/loss": [(1, 1.0), (2, 2.0), (3, 3.5)],
        "tokens/train/loss": [(100, 1.0), (200, 2.0), (300, 3.5)],
        STEPS: [(2, 7.0)],
        TOKENS: [(200, 7.0)],
    }
    assert points(tmp_path / "tb") == expected
    assert len(list((tmp_path / "tb").iterdir())) == 1
    rebuild_tensorboard(tmp_path)
    assert points(tmp_path / "tb") == expected
