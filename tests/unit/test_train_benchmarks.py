"""The benchmarks of training at tiny sizes: they run, and tell what they should. Times are not
judged."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bosch import progress
from recipes.benchmark import run_benchmark
from recipes.presets import SMOKE_MODEL
from training.parallel import leave_world


@pytest.fixture(autouse=True)
def as_a_new_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    leave_world()
    progress.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the Trainer's
def test_train_compares_our_loop_with_the_trainer(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = f"--model {SMOKE_MODEL} --length 64 --window 8 --batch 1 --steps 1 --rounds 1"
    run_benchmark("train", [*arguments.split(), "--device", "cpu", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["side"] for row in rows] == ["Trainer, dense", "ours, dense", "ours, ratio 0.75"]
    assert rows[0]["value"] == 1
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_sweep_keeps_what_is_done_and_counts_what_is_regained(tmp_path: Path) -> None:
    arguments = f"--model {SMOKE_MODEL} --window 8 --methods interleave --seq-len 64 --batches 2"
    arguments += f" --budgets 512 --lengths 256 --samples 1 --work {tmp_path}"
    rows = []
    for rates in (["1e-3"], ["1e-3", "1e-2"]):
        out = tmp_path / "result.json"
        run_benchmark("train_sweep", [*arguments.split(), "--out", str(out), "--rates", *rates])
        rows.append(json.loads(out.read_text())["rows"])
    assert rows[0][0] == rows[1][0]  # its time too: it was not run again
    assert [row["peak_learning_rate"] for row in rows[1]] == [1e-3, 1e-2]
    for row in rows[1]:
        assert row["losses"][0] == rows[1][0]["losses"][0] != row["losses"][1]
        start, end = row["niah"]
        assert row["value"] * (row["niah_dense"] - start) == pytest.approx(100 * (end - start))
