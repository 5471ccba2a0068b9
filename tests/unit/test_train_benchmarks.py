"""The benchmarks of training at tiny sizes: they run, and tell what they should. Times are not
judged."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import run_benchmark
from bosch.run import progress
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
