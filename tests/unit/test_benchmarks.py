"""Benchmarks at tiny sizes: they run, print a table and write JSON. Times are not judged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks import _inference, _memory, _models, _timing, attention, gpu, latency
from benchmarks.__main__ import run_benchmark
from bosch.backends import reference
from bosch.hybrid.models import deploy
from bosch.masks.mask import GroupMask, num_windowed
from bosch.run import progress
from tests.model_factory import MIXED, kv_entries, random_tokens, tiny_model

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY_LATENCY = "latency --preset mini --rounds 1 --chunk 16 --tokens 2 --window 8".split()
RunBenchmark = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def threads_and_lines_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    progress.close()


@pytest.fixture
def run(tmp_path: Path) -> RunBenchmark:
    """The JSON that a benchmark writes."""

    def run_and_read(name: str, *arguments: str) -> dict[str, Any]:
        path = tmp_path / "new folder" / "result.json"
        run_benchmark(name, [*arguments, "--device", "cpu", "--out", str(path)])
        result: dict[str, Any] = json.loads(path.read_text())
        assert result["benchmark"] == name
        assert {"date", "machine", "packages", "rows"} <= result.keys()
        return result

    return run_and_read


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


# ------------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize("extra", [[], ["--gradients"]])
def test_attention_compares_windows_and_a_mask_with_full(
    run: RunBenchmark, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    arguments = "--lengths 40 80 --windows 8 64 --heads 4 --groups 2 --head-size 16 --rounds 2"
    rows = run("attention", *arguments.split(), *extra)["rows"]
    # A window of 64 hides nothing of 40 tokens. The mask is one more side, of the last window.
    sides = [(40, 8, "sdpa"), (40, 8, "T x T mask")]
    sides += [(80, 8, "sdpa"), (80, 64, "sdpa"), (80, 64, "T x T mask")]
    assert [(row["tokens"], row["window"], row["backend"]) for row in rows] == sides
    assert all(row["value"] > 0 and "at_least" not in row for row in rows)
    assert "T x T mask" in capsys.readouterr().out.split("window ms")[1]


def test_attention_leaves_out_a_backend_that_refuses(
    run: RunBenchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = ["--backends", "sdpa", "varlen"]
    arguments = "--lengths 40 --windows 8 --head-size 16 --rounds 1 --with-mask 0"
    rows = run("attention", *arguments.split(), *backends)["rows"]
    assert [row["backend"] for row in rows] == ["sdpa"]
    assert "varlen 8 at 40 tokens is left out" in capsys.readouterr().out


def test_decode_compares_hybrids_with_the_dense_model(
    run: RunBenchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--lengths 24 48 --window 8 --ratios 0 0.5 1 --tokens 2 --rounds 1"
    rows = run("decode", *arguments.split(), "--prefill-rounds", "1")["rows"]
    assert [row["side"] for row in rows] == ["dense", "ratio 0", "ratio 0.5", "ratio 1"] * 2
    for row in rows:
        z = _models.spread_mask(row["ratio"], 4, 8)
        expected = GroupMask.from_rows(z, 8).kv_bytes(row["tokens"], head_dim=64, bytes_per_value=4)
        assert row["kv_bytes"] == expected
    assert "(1.00x)" in capsys.readouterr().out


def test_latency_keeps_every_point_and_draws_both_figures(
    run: RunBenchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "figures.png"
    arguments = "--lengths 20 40 --ratios 0 0.75 --windows 4 8".split()
    rows = run(*TINY_LATENCY, *arguments, "--picture", str(picture))["rows"]
    points = [(20, 0, 8), (20, 0.75, 8), (20, 0.75, 4), (40, 0, 8), (40, 0.75, 8), (40, 0.75, 4)]
    assert [(row["tokens"], row["ratio"], row["window"]) for row in rows] == points
    for row in rows:
        assert row["missing"] is None
        assert row["prefill_tokens_per_second"] > 0
        assert row["decode_tokens_per_second"] > 0
        z = _models.spread_mask(row["ratio"], 4, 8)
        mask = GroupMask.from_rows(z, row["window"])
        assert row["kv_bytes"] == mask.kv_bytes(row["tokens"], head_dim=64, bytes_per_value=4)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "decode tokens/s" in capsys.readouterr().out


def test_latency_skips_what_is_left_when_its_time_is_over(run: RunBenchmark) -> None:
    arguments = "--lengths 20 40 --ratios 0 --windows 8 --minutes 0".split()
    rows = run(*TINY_LATENCY, *arguments)["rows"]
    assert {row["missing"] for row in rows} == {"out of time"}


@pytest.mark.parametrize("hybrid", [False, True])
def test_latency_takes_the_weights_of_a_folder(
    run: RunBenchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str], hybrid: bool
) -> None:
    model = tiny_model("llama", attention="sdpa")
    (deploy(model, MIXED, 8) if hybrid else model).save_pretrained(tmp_path / "model")
    arguments = "--lengths 20 --ratios 0.75 --windows 8 --model".split()
    (row,) = run(*TINY_LATENCY, *arguments, str(tmp_path / "model"))["rows"]
    assert row["kv_bytes"] == GroupMask.from_rows(_models.spread_mask(0.75, 3, 4), 8).kv_bytes(
        20, head_dim=16, bytes_per_value=4
    )
    assert "its own weights" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a CPU process is limited on Linux")
def test_out_of_memory_is_a_missing_point_and_so_are_longer_ones(tmp_path: Path) -> None:
    # 4096 tokens of the mini model have a cache of 67 MB; the limit is a process's own, hence one.
    arguments = "--lengths 16 4096 8192 --ratios 0 --windows 8 --chunk 4096 --memory-gb 0.03"
    path = tmp_path / "latency.json"
    result = run_command(*TINY_LATENCY, *arguments.split(), "--device", "cpu", "--out", str(path))
    assert result.returncode == 0, result.stderr
    missing = {(row["tokens"], row["ratio"]): row for row in json.loads(path.read_text())["rows"]}
    for ratio in (0, 0.75):
        assert missing[16, ratio]["missing"] is None
        assert missing[4096, ratio]["missing"] == missing[8192, ratio]["missing"] == "out of memory"
        assert missing[4096, ratio]["prefill_tokens_per_second"] is None
    assert result.stdout.count("out of memory\n") >= 2


def test_the_search_forward_is_compared_with_the_dense_one(run: RunBenchmark) -> None:
    rows = run("search_forward", *"--length 40 --window 8 --ratios 0.5 1 --rounds 1".split())[
        "rows"
    ]
    assert [row["side"] for row in rows] == ["dense", "ratio 0.5", "ratio 1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("latency --model Qwen3-8C", "did you mean 'Qwen3-8B'"),
        ("decode --device cuda", "no CUDA device"),
        ("latencie", "did you mean 'latency'"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: str, message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("told on a machine without a GPU")
    name, *rest = arguments.split()
    with pytest.raises(ValueError, match=message):
        run_benchmark(name, rest)


# ---------------------------------------------------------------------------------------------- gpu


def test_without_a_gpu_nothing_is_measured_and_that_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as stop:
        run_benchmark("gpu", ["--out", str(tmp_path / "gpu.json")])
    assert stop.value.code == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_a_benchmark_without_a_part_for_a_gpu_is_named() -> None:
    with pytest.raises(ValueError, match="--only decode: nothing of this benchmark is for a GPU"):
        gpu.gpu_parts(("attention", "decode"))


SMALL_PARTS: dict[str, dict[str, Any]] = {
    "attention": {"lengths": (40,), "windows": (8,), "rounds": 1},
    "latency": {"model": "mini", "lengths": (20,), "windows": (4,), "window": 8, "chunk": 16},
    "search_forward": {"model": "mini", "length": 40, "window": 8, "rounds": 1},
}


def test_the_parts_for_a_gpu_run_at_a_tiny_size_on_a_cpu() -> None:
    parts = gpu.gpu_parts()
    assert set(SMALL_PARTS) <= set(parts)
    for name, small in SMALL_PARTS.items():
        rows = gpu.measure_part(name, parts[name], device="cpu", **small)
        assert rows
        assert {row["benchmark"] for row in rows} == {name}


def test_the_file_of_a_gpu_run_names_device_and_date() -> None:
    name = gpu.default_file().name
    assert name == name.lower()
    assert " " not in name
    assert name.endswith(".json")


# ------------------------------------------------------------------------------------------- pieces


def test_sides_run_in_turns_as_often_each() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = _timing.time_in_turns(sides, rounds=3, device=CPU, least_seconds=0.0)
    assert calls == ["a", "a", "b", "b"] + ["a", "b"] * 3  # two of each first, uncounted
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_a_speedup_is_the_median_of_the_rounds() -> None:
    # By hand: 2, 3 and 10 times; the machine was busy in the last round.
    assert _timing.speedup([2.0, 6.0, 10.0], [1.0, 2.0, 1.0]) == 3.0


@pytest.mark.parametrize(("tokens", "text"), [(65536, "64k"), (2**20, "1M"), (1000, "1000")])
def test_lengths_are_written_as_in_the_paper(tokens: int, text: str) -> None:
    assert _timing.short(tokens) == text


def test_the_peak_of_a_piece_of_work_is_seen_and_forgotten() -> None:
    memory = _memory.PeakMemory(CPU)
    before = memory.read()
    if before is None:
        pytest.skip("this system does not count the peak of a piece of work")
    torch.ones(50_000_000)
    after, later = memory.read(), _memory.PeakMemory(CPU).read()
    assert after is not None
    assert later is not None
    assert after - before > 150e6  # of 200 MB
    assert after - later > 150e6


@pytest.mark.parametrize("ratio", [0, 0.25, 1 / 3, 0.5, 0.875, 1])
def test_a_spread_mask_meets_the_budget_and_is_even(ratio: float) -> None:
    z = _models.spread_mask(ratio, 28, 8)
    windowed = [row.count(0) for row in z]
    assert sum(windowed) == num_windowed(ratio, 28, 8)
    assert max(windowed) - min(windowed) <= 1
    assert all(row == sorted(row, reverse=True) for row in z)


def test_the_shapes_have_the_parameters_their_names_say() -> None:
    # Qwen3's model cards: 1.7B, 8.2B and 14.8B parameters.
    for name, billions in {"Qwen3-1.7B": 1.7, "Qwen/Qwen3-8B-Base": 8.2, "qwen3-14b": 14.8}.items():
        config, folder = _models.read_shape(name)
        assert folder is None
        model = _models.make_dense(config, torch.device("meta"), torch.bfloat16, "sdpa")
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)


def test_the_paper_preset_is_the_papers_study() -> None:
    # presets.md, "latency study".
    study = latency.Options(preset="paper").study(CPU)
    assert study.model == "Qwen3-8B"
    assert [_timing.short(tokens) for tokens in study.lengths] == ["64k", "256k", "512k", "1M"]
    assert study.chunk == 8192
    assert (study.ratios, study.window) == ((0, 0.25, 0.5, 0.75, 0.875), 1024)
    assert (study.windows, study.window_ratio) == ((256, 512, 1024, 2048, 4096), 0.75)


def test_a_prompt_in_chunks_and_tokens_fill_the_cache_of_the_mask() -> None:
    model, ids = deploy(tiny_model("qwen3"), MIXED, 8), random_tokens(1, 30)
    cache = _inference.empty_cache(model)
    steps = [*_inference.prefill(model, ids, cache, 16), *_inference.decode(model, ids, cache, 3)]
    assert [step.tokens for step in steps] == [16, 14, 1, 1, 1]
    full = [sum(row) for row in MIXED]
    assert kv_entries(cache) == [n * 33 + (4 - n) * 7 for n in full]


def test_a_ratio_is_set_on_a_hybrid_as_it_is() -> None:
    model = deploy(tiny_model("qwen3"), MIXED, 8)
    _models.set_hybrid(model, 0.5, 4)
    cache = DynamicCache(config=model.config)
    for _ in _inference.prefill(model, random_tokens(1, 30), cache):
        pass
    assert kv_entries(cache) == [2 * 30 + 2 * 3] * 3


def test_the_ideal_is_the_ratio_of_visible_pairs() -> None:
    calls = [attention.make_call(40, CPU, attention.Options(head_size=8)) for _ in range(2)]
    full, windowed = (
        int(reference.visible(call, w).sum()) for call, w in zip(calls, (None, 8), strict=True)
    )
    assert attention.ideal_speedup(40, 8) == pytest.approx(full / windowed)
