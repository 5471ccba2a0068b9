"""Benchmarks at tiny sizes: they run, print a table and write JSON. Times are not checked."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from benchmarks import _measure, attention, gpu, latency, switches, train
from benchmarks.__main__ import run_benchmark
from bosch.config import TrainConfig
from bosch.plugins import list_plugins, load_plugin
from bosch.run.errors import UserError

TINY_LATENCY = "--chunk 16 --tokens 2 --window 8 --device cpu".split()


def run(folder: Path, name: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark and return the rows that it writes."""
    path = folder / "new folder" / "result.json"
    run_benchmark(name, [*arguments, "--out", str(path)])
    result = json.loads(path.read_text())
    assert result["benchmark"] == name
    assert {"date", "machine", "packages"} <= result.keys()
    return result["rows"]


def test_attention_compares_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--lengths 40 80 --window 8 --heads 4 --groups 2 --head-size 16 --rounds 2"
    arguments += " --backends sdpa varlen --sinks none static tokens=2 --device cpu"
    rows = run(tmp_path, "attention", *arguments.split())
    sides = [
        (tokens, passes, sink)
        for passes in ("forward", "forward and backward")
        for tokens in (40, 80)
        for sink in ("none", "static", "tokens=2")
    ]
    assert [(row["tokens"], row["pass"], row["sink"]) for row in rows] == sides
    assert all(row["value"] > 0 and row["backend"] == "sdpa" for row in rows)
    output = capsys.readouterr().out
    assert "varlen at 40 tokens" in output  # why it was skipped
    assert "forward and backward │    sdpa │   static │" in output


def test_out_of_memory_is_a_missing_point_and_so_are_longer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_steps(model: Any, pieces: Any, *others: Any) -> Iterator[tuple[float, int]]:
        if sum(ids.shape[1] for ids in pieces) > 20:
            raise torch.OutOfMemoryError
        return iter([(1.0, 100)])

    monkeypatch.setattr(latency, "run_steps", run_steps)
    arguments = "--lengths 16 40 80 --ratios 0 --windows 8".split()
    rows = run(tmp_path, "latency", *TINY_LATENCY, *arguments)
    missing = {row["tokens"]: row["missing"] for row in rows}
    assert missing == {16: None, 40: "out of memory", 80: "out of memory"}
    assert all(row["prefill_tokens_per_second"] is None for row in rows if row["missing"])
    said = "40 tokens, ratio 0.75, window 8, sink none: out of memory"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("latency --model Qwen3-8C", "--model Qwen3-8C: .*'Qwen3-8B'"),
        ("latency --device cuda", "--device cuda"),
        ("latencie", "'latencie' .*'latency'"),
        ("rehearse --gpu H201", "--gpu H201: .*'H200'"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: str, named: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    name, *rest = arguments.split()
    with pytest.raises(UserError, match=named):
        run_benchmark(name, rest)


def test_without_a_gpu_nothing_is_measured_and_that_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        run_benchmark("gpu", ["--out", str(tmp_path / "gpu.json")])
    assert stop.value.code == 0
    assert "CUDA" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()
    assert re.fullmatch(r"[^A-Z ]+\.json", gpu.default_file().name)


def test_a_part_that_fails_is_named_and_the_others_keep_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(train.CPU_OPTIONS[0], model="none_such")
    monkeypatch.setattr(train, "CPU_OPTIONS", wrong)
    arguments = ["--device", "cpu", "--only", "attention", "train", "latency"]
    with pytest.raises(SystemExit) as stop:
        run_benchmark("gpu", [*arguments, "--out", str(tmp_path / "gpu.json")])
    assert stop.value.code == 1
    *rows, verdict = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert verdict["verdict"].startswith("failed: train (UserError); slower than computed: not")
    (failed,) = [row for row in rows if "failed" in row]
    assert failed["benchmark"] == "train"
    assert "none_such" in failed["failed"]
    assert {row["benchmark"] for row in rows if "failed" not in row} == {"attention", "latency"}
    assert "none_such" in capsys.readouterr().err  # the whole traceback


def test_figures_below_the_computed_ones_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(options: object) -> Iterator[dict[str, Any]]:
        for name, speed in (("fast", 95.0), ("slow", 60.0)):
            yield {"name": name, "value": 0.0, "speed": speed, "figure": "speed", "computed": 100.0}
        yield {"name": "other", "value": 1.0}

    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(attention, "COLUMNS", {"": "name"})
    *_, verdict = gpu.measure_parts(["attention"], "cuda")
    expected = "failed: nothing; slower than computed: slow (60, computed 100)"
    assert verdict["verdict"] == expected


def test_every_part_takes_both_devices() -> None:
    able = {
        name
        for name in list_plugins("benchmarks")
        if hasattr(load_plugin("benchmarks", name), "GPU_OPTIONS")
    }
    assert able | gpu.TESTS.keys() == set(gpu.PARTS)
    assert all(hasattr(load_plugin("benchmarks", name), "CPU_OPTIONS") for name in able)
    with pytest.raises(UserError, match="--only sinks"):
        run_benchmark("gpu", ["--device", "cpu", "--only", "sinks"])


def test_switches_are_those_of_the_training() -> None:
    found = list(switches.switches())
    last = sorted(found, key=switches.is_fp8)[-2:]
    assert last == [("precision", "fp8"), ("precision", "fp8-rowwise")]
    assert {("compile", True), ("activation_checkpointing", False), ("kernels", "torch")} <= {
        *found
    }
    assert not {"objective", "max_steps", "compile False"} & {name for name, _ in found}
    assert switches.values_of(bool | Literal["some"] | None) == [True, False, "some"]
    assert not switches.values_of(tuple[float, float] | None)
    defaults = vars(TrainConfig())
    assert all(defaults[name] != value for name, value in found)


@pytest.mark.slow
def test_the_program_for_gpus_runs_to_its_end_on_the_cpu(tmp_path: Path) -> None:
    """As `make gpu DEVICE=cpu` starts it."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--out", str(out)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    *rows, verdict = json.loads(out.read_text())["rows"]
    assert verdict["verdict"] == "failed: nothing; slower than computed: not asked on a CPU"
    by_part = {name: [row for row in rows if row["benchmark"] == name] for name in gpu.PARTS}
    assert list(dict.fromkeys(row["benchmark"] for row in rows)) == list(gpu.PARTS)
    for part in gpu.TESTS:
        assert "passed" in {row["outcome"] for row in by_part[part]} <= {"passed", "skipped"}
    assert any("killed" in row["name"] for row in by_part["stages"] if row["outcome"] == "passed")
    compiled = [row["graphs"] for row in by_part["switches"] if row["switch"] == "compile True"]
    assert compiled > [0]
    assert {row["ratio"] for row in by_part["latency"]} == {0.0, 0.75}


def test_a_shape_is_that_of_a_known_model_or_of_a_folder(tmp_path: Path) -> None:
    # Qwen3's model cards: 1.7B, 8.2B and 14.8B parameters.
    for name, billions in {"Qwen3-1.7B": 1.7, "Qwen/Qwen3-8B-Base": 8.2, "qwen3-14b": 14.8}.items():
        config = _measure.read_shape(name)
        model = _measure.make_model(config, torch.device("meta"), torch.bfloat16, "sdpa")
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)
    config.save_pretrained(tmp_path)
    assert _measure.read_shape(str(tmp_path)).hidden_size == config.hidden_size
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path}.*config.json"):
        _measure.read_shape(str(tmp_path))


@pytest.mark.slow
def test_the_claims_quoted_in_the_docs_are_those_of_the_frozen_rows(tmp_path: Path) -> None:
    rows = run(tmp_path, "claims", "--folder", str(tmp_path))
    kept = Path(__file__).parents[2] / "docs" / "results" / "claims.csv"
    assert (tmp_path / "claims.csv").read_text() == kept.read_text()
    # benchmarks/frozen/study.md has this one too.
    found = [r for r in rows if (r["what"], r["suite"]) == ("with keep_best minus fisher", "niah")]
    assert [round(row["value"], 1) for row in found] == [-2.4, -0.1, 0.0, -13.1]
    assert {"two-layer-truth.png", "kappa.png"} <= {path.name for path in tmp_path.iterdir()}
