"""Benchmarks at tiny sizes: they run, print a table and write JSON. Times are not checked."""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

from benchmarks import _measure, gpu, latency, real_model, switches
from benchmarks.__main__ import run_benchmark
from benchmarks.experiments import graph
from benchmarks.experiments._points import DENSE, STATIC, Models, Side, uneven_counts
from bosch.config import TrainConfig
from bosch.eval.results import PREDICTIONS
from bosch.eval.rows import write_rows
from bosch.plugins import list_plugins, load_plugin
from bosch.run.errors import UserError
from bosch.run.files import write_sealed_json

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


def test_a_token_of_a_hybrid_launches_three_operators_a_layer_more_than_dense(
    tmp_path: Path,
) -> None:
    """With a static sink. 45 a layer were asked for, which transformers' blocks take by themselves;
    with Liger's kernels, as on GPUs, it is fewer."""
    ways = ["dynamic", "dynamic, Liger"]
    rows = run(tmp_path, "launches", "--sinks", "static", "--ways", *ways, "--device", "cpu")
    dense, dense_fused, static, fused = (row["value"] for row in rows)
    assert dense <= static <= dense + 3
    assert dense_fused <= fused <= dense_fused + 3 < 45


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
        run_benchmark("gpu", ["--rows", str(tmp_path)])
    assert stop.value.code == 0
    assert "CUDA" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="--only sinks"):
        run_benchmark("gpu", ["--device", "cpu", "--only", "sinks"])


def gpu_row(name: str, value: float | None, **others: Any) -> dict[str, Any]:
    what, _, point = name.rpartition(", ")
    row = {"name": name, "value": value, "unit": "tokens/s", "what": what, "point": point}
    row |= {"experiment": "prefill", "commit": "new", "date": "2026-02-28"}
    return row | {"code": gpu.code_fingerprint()} | others


def write_gpu_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sentences_say_what_is_faster_what_missed_and_what_became_slower(tmp_path: Path) -> None:
    before = {"code": "older", "commit": "0123456789", "date": "2026-01-31"}
    path = write_gpu_rows(
        tmp_path / "rows.jsonl",
        gpu_row("late, a", 100, tokens=8192, **before),
        gpu_row("early, a", 100, tokens=8192, **before),
        gpu_row("late, a", 80, tokens=8192, dense=100, computed=85),
        gpu_row("late, b", 300, tokens=65536, dense=100, computed=400),
        gpu_row("early, a", 95, tokens=8192, dense=50),
        gpu_row("never, a", 10, tokens=8192, dense=50),
        {**gpu_row("broken", None), "failed": "UserError: no"},
    )
    sentences = gpu.conclude(path, "cuda", {"graph": "was ended by its limit"})
    assert sentences == [
        "late: faster than dense from 64k tokens on (0.80 at 8k, 3.00 at 64k of dense's speed)",
        "early: faster than dense at every length (1.90 at 8k of dense's speed)",
        "never: not faster than dense (0.20 at 8k of dense's speed)",
        "below the computed speed: late, b 300 of 400 tokens/s (0.75)",
        "slower than the last time: late, a 80 of 100 tokens/s (2026-01-31, commit 01234567)",
        "failed: broken (UserError: no)",
        "not measured to the end: graph was ended by its limit. The same command goes on",
    ]


def test_measured_windows_become_the_rates_that_auto_chooses_by(tmp_path: Path) -> None:
    kind = {"tokens": 4096, "gradients": True, "documents": False, "experiment": "windows"}
    kind |= {"window_tokens": 16, "flops": 10, "full_flops": 100, "full_kernel": "sdpa"}
    kind |= {"dense": 5.0}
    path = write_gpu_rows(
        tmp_path / "rows.jsonl",
        gpu_row("window, flex", 30.0, kernel="flex", **kind),
        gpu_row("window, flex static", 20.0, kernel="flex static", **kind),
        gpu_row("window, varlen", 90.0, kernel="varlen", failed="differs", **kind),
        gpu_row("prefill, a", 100.0, tokens=8192),
    )
    gpu.keep_rates(path, "cpu")
    ((device, rows),) = json.loads((tmp_path / "rates.json").read_text()).items()
    assert device == platform.machine()
    of_call = {"tokens": 4096, "gradients": True, "documents": False}
    flex, full = (
        {"backend": "flex", "window_tokens": 16},
        {"backend": "sdpa", "window_tokens": None},
    )
    assert rows == [
        of_call | flex | {"sink": False, "calls_per_second": 30.0, "flops_per_second": 300.0},
        of_call | flex | {"sink": True, "calls_per_second": 20.0, "flops_per_second": 200.0},
        of_call | full | {"sink": False, "calls_per_second": 5.0, "flops_per_second": 500.0},
    ]


def test_a_kernel_for_windows_that_computes_something_else_is_seen() -> None:
    windows = load_plugin(gpu.PACKAGE, "windows")
    rows = [
        gpu_row("window, a", speed, dense=10.0, title="window", kernel=kernel, **others)
        for kernel, speed, others in (
            ("flex", 30.0, {"difference": 0.0}),
            ("flex static", 20.0, {}),
            ("varlen", 40.0, {"difference": 0.5}),
        )
    ]
    assert windows.conclude(rows) == [
        "window: varlen is the fastest, 4.00 of full attention's speed; "
        "with a static sink flex takes 1.50 times as long",
        "largest difference from sdpa or flex, of outputs and gradients: flex 0, varlen 0.5",
    ]


def test_points_with_rows_of_this_code_are_not_measured_again(tmp_path: Path) -> None:
    names = [point.name for point in gpu.points_left("plans", "cpu", tmp_path / "none.jsonl")]
    first, second, third, *others = names

    def attempt(point: str, *rows: dict[str, Any], ends: bool = True, **more: Any) -> list[Any]:
        events = [{"event": gpu.BEGINS}, *rows, *([{"event": gpu.ENDS}] if ends else [])]
        facts = {"point": point, "attempt": 1, "code": gpu.code_fingerprint()} | more
        return [row | facts for row in events]

    row = gpu_row("a row", 1.0)
    path = write_gpu_rows(
        tmp_path / "rows.jsonl",
        *attempt(first, row),
        *attempt(second, row, code="of other code"),
        *attempt(third, row, row | {"name": "another", "failed": "it may be mended"}),
        *attempt(others[0], row, ends=False),  # it was cut
    )
    left = [point.name for point in gpu.points_left("plans", "cpu", path)]
    # What was never begun comes first: a point that is cut each time keeps none waiting.
    assert left == [second, *others[1:], third, others[0]]
    assert [row["name"] for row in gpu.known_rows(path).values() if "failed" in row] == ["another"]
    with path.open("a") as file:  # tried again, and cut: the failure stays
        file.write(f"{json.dumps(attempt(third, attempt=2, ends=False)[0])}\n")
    assert [row["name"] for row in gpu.known_rows(path).values() if "failed" in row] == ["another"]
    mended = path.read_text() + "".join(f"{json.dumps(row)}\n" for row in attempt(third, attempt=3))
    path.write_text(mended)
    assert [point.name for point in gpu.points_left("plans", "cpu", path)] == left[:-2] + left[-1:]
    assert not [row for row in gpu.known_rows(path).values() if "failed" in row]


def test_an_experiment_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert gpu.run_in_process("plans", "cpu", path, limit=0.2) == "was ended by its limit"
    assert not path.exists()


def test_experiments_have_limits_that_the_usual_minutes_hold() -> None:
    names = {*gpu.EXPERIMENTS, *gpu.ELSEWHERE}
    assert set(list_plugins(gpu.PACKAGE)) == names
    minutes = [load_plugin(gpu.PACKAGE, name).MINUTES for name in names]
    assert all(0 < each <= gpu.Options().minutes for each in minutes)


def test_layers_of_a_searched_mask_differ() -> None:
    config = _measure.read_shape("Qwen3-1.7B")
    counts = uneven_counts(config, 0.75)
    assert sum(counts) == 0.25 * config.num_hidden_layers * config.num_key_value_heads
    assert len(set(counts)) > 3
    assert max(counts) <= config.num_key_value_heads


def test_a_step_over_a_static_cache_asks_the_host_nothing() -> None:
    """Or no graph could be captured of it."""

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert "_local_scalar_dense" not in str(func)
            return func(*args, **(kwargs or {}))

    models = Models(torch.device("cpu"))
    for side in (DENSE, STATIC, Side("first tokens", sink="tokens=4")):
        model: Any = models.of(side)
        with torch.no_grad():
            cache = StaticCache(config=model.config, max_cache_len=128)
            token = graph.next_logits(model, models.ids(100), cache).argmax(-1)
            graph.next_logits(model, token, cache)
            with Asked():
                graph.next_logits(model, token, cache)


def test_the_tables_of_the_docs_are_those_of_the_rows() -> None:
    assert gpu.BEGIN + "\n" + gpu.tables() + gpu.END in gpu.DOCS.read_text("utf-8")


def test_wheels_for_machines_without_a_network_have_the_tested_versions() -> None:
    folder = Path(__file__).parents[2] / "launch"
    tested = set((folder / "constraints.txt").read_text().splitlines())
    lines = (folder / "gpu-packages.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in line for line in pinned)
    names = {line.partition("==")[0].lower() for line in tested if "==" in line}
    known = [line for line in pinned if line.partition("==")[0].lower() in names]
    assert len(known) > 5
    assert {line.lower() for line in known} <= {line.lower() for line in tested}


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
def test_the_plan_for_gpus_goes_on_after_a_kill(tmp_path: Path) -> None:
    """As `make gpu DEVICE=cpu` starts it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "gpu",
        "--device",
        "cpu",
        "--rows",
        str(tmp_path),
    ]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"gpu: decoding, 512, dense"):  # within the second experiment
                process.kill()
                break
    (path,) = tmp_path.glob("*.jsonl")
    before = path.read_text()
    assert {row["experiment"] for row in gpu.read_rows(path)} == {"plans", "windows", "decoding"}
    subprocess.run(command, check=True, cwd=root)
    after = path.read_text()
    assert after.startswith(before)  # nothing of the killed call was measured again
    rows = gpu.read_rows(path)
    assert list(dict.fromkeys(row["experiment"] for row in rows)) == [*gpu.EXPERIMENTS]
    ended = [row["point"] for row in rows if row.get("event") == gpu.ENDS]
    assert len(set(ended)) == len(ended)
    again = subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE, text=True)
    assert path.read_text() == after
    assert again.stdout.count("has all its rows of this code") == len(gpu.EXPERIMENTS)
    assert "failed: nothing" in again.stdout


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


def test_pairs_are_of_the_questions_that_both_models_were_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluation(name: str, right: dict[str, list[int]]) -> str:
        rows = [
            {
                "task": task,
                "length": 64,
                "index": index,
                "prediction": "x",
                "scores": {"right": one, "wrong": 1 - one},
            }
            for task, ones in right.items()
            for index, one in enumerate(ones)
        ]
        write_rows(tmp_path / name / "own_formats" / PREDICTIONS, rows)
        return f"{name}={tmp_path / name}"

    # The third question on a list was asked of the dense model alone, and each task counts as much.
    evaluations = [
        evaluation("dense", {"list": [1, 1, 0], "word": [1, 1, 1, 1]}),
        evaluation("worse", {"list": [0, 0], "word": [1, 1, 1, 0]}),
        evaluation("same", {"list": [1, 1], "word": [1, 1, 1, 1]}),
    ]
    file = tmp_path / "rows.jsonl"
    dense, worse, same = run(tmp_path, "pairs", "--rows", str(file), "--add", *evaluations)
    assert dense["value"] == pytest.approx((200 / 3 + 100) / 2)
    assert (worse["questions"], worse["value"], worse["by_task"]) == (6, 37.5, "0, 75")
    # Of the lists each is lost, of the words one in four: drawn four times, none to three of them.
    assert re.fullmatch(r"-62\.5 \[-87\.5, -50\.0\]", worse["difference"])
    # Of two questions of a task at most all may differ, which is half of the mean of both.
    assert same["difference"] == "+0.0 [±50.0]"
    assert (dense["kept"], worse["kept"], same["kept"]) == (None, 37.5, 100)
    # Of the words half to all, as drawn above, and no list.
    assert re.fullmatch(r"38 \[12, 50\]", worse["kept_interval"])
    assert "by task" in capsys.readouterr().out
    shared = tmp_path / "run" / "eval" / "dense"  # as a run has its dense model
    shared.mkdir(parents=True)
    shutil.copytree(tmp_path / "dense", tmp_path / "shared" / "dense")
    write_sealed_json(shared / "reference.json", {"folder": "../../../shared/dense"})
    again = tmp_path / "again.jsonl"
    with pytest.raises(UserError, match="--add none"):
        run(tmp_path, "pairs", "--rows", str(again), "--add", evaluations[1], "none=nowhere")
    assert not again.exists()
    rows = run(tmp_path, "pairs", "--rows", str(again), "--add", f"dense={shared}", evaluations[1])
    assert rows == [dense, worse]
    # Half of what `worse` loses, and of two models the mean may be anything.
    together = ["--together", "worse", "same"]
    mean = run(tmp_path, "pairs", "--rows", str(file), *together)[-1]
    assert (mean["model"], mean["value"], mean["by_task"]) == ("mean of 2", 68.75, "50, 88")
    low, high = re.fullmatch(r"-31\.2 \[(.+), (.+)\]", mean["difference"]).groups()
    assert float(low) < -200
    assert float(high) > 200
    # Each beside another one: the first loses all of it, the second wins as much.
    pairs = [*together, "--beside", "same", "worse"]
    mean = run(tmp_path, "pairs", "--rows", str(file), *pairs)[-1]
    assert mean["difference"].startswith("+0.0 [")
    with pytest.raises(UserError, match="--beside names 1, --together 2"):
        run(tmp_path, "pairs", "--rows", str(file), *together, "--beside", "same")
    other = run(tmp_path, "pairs", "--rows", str(file), "--baseline", "worse")[0]
    assert other["difference"].startswith("+62.5 [+50.0,")
    # One question in two files: once is enough, two scores of it are refused.
    twice = ["pairs", "--rows", str(file), str(again)]
    assert run(tmp_path, *twice)[0]["questions"] == dense["questions"]
    again.write_text(again.read_text().replace('"right": 1', '"right": 0'))
    with pytest.raises(UserError, match="question 0 of list by dense has two scores"):
        run(tmp_path, *twice)
    assert other["kept"] == 100  # it answers more than the other, and all of that too
    assert run(tmp_path, "pairs", "--rows", str(file), "--score", "wrong")[1]["value"] == 62.5
    # Two suites together: the tasks of both, of the models that both were asked.
    needles = tmp_path / "needles.jsonl"
    given = [
        {"model": name, "task": "needle", "length": 64, "index": 0, "scores": {"found": found}}
        for name, found in (("dense", 1.0), ("worse", 1.0))
    ]
    write_rows(needles, given)
    dense, worse = run(tmp_path, "pairs", "--rows", str(file), str(needles))
    assert (worse["model"], worse["questions"], worse["by_task"]) == ("worse", 7, "0, 75, 100")
    assert worse["difference"].startswith("-41.7 [")
    with pytest.raises(UserError, match="--score other: no question"):
        run(tmp_path, "pairs", "--rows", str(file), "--score", "other")
    with pytest.raises(UserError, match=r"other: .* has dense, same, worse"):
        run(tmp_path, "pairs", "--rows", str(file), "--baseline", "other")
    with pytest.raises(UserError, match=r"--together other: .* has dense"):
        run(tmp_path, "pairs", "--rows", str(file), "--together", "same", "other")
    with pytest.raises(UserError, match="NAME=FOLDER"):
        run(tmp_path, "pairs", "--rows", str(file), "--add", f"empty={tmp_path / 'none'}")


def test_a_search_by_several_sets_is_compared_with_the_mask_of_one() -> None:
    """The difference over sets that docs/real-masks.md has, from the committed rows."""
    results = Path("benchmarks/results")
    rows = [
        row
        for name in ("real-formats", "real-calibration")
        for row in _measure.read_rows(results / f"{name}.jsonl")
    ]
    mix = [
        row for row in rows if (row["method"], row["ratio"]) == ("bosch", 0.75) and row.get("tasks")
    ]
    razor = real_model.Baseline("razor", seed=0)
    # Needles of a seed are compared with the dense model's of that seed.
    dense = real_model.Baseline(real_model.DENSE)
    assert [dense.of(row, rows)["seed"] for row in mix] == [row["seed"] for row in mix]
    each = [real_model.formats_against(row, razor, rows) for row in mix]
    over_sets = {real_model.formats_against(row, razor, rows, over_sets=True) for row in mix}
    page = Path("docs/real-masks.md").read_text()
    assert len(each) >= 3
    assert len(over_sets) == 1
    assert all(difference in page for difference in (*each, *over_sets))
