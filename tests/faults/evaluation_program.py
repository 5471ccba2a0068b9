"""Runs evaluations in processes that are killed. A program, so that torch is imported only once.

    python evaluation_program.py '[["whole", [null]], ["killed", [0.3]], ["killed", [null]]]'

Each job is a folder and, for each rank, the moment of its SIGKILL: a share of all points, or null
for none. The first job counts the points. A point is an operation on a file in the folder, or one
of three moments when a prediction is appended: before its line, in the middle, after it. So tests
reach every kind of moment without a clock. With several ranks only the moments of predictions are
points, because the operations of ranks that wait for each other depend on timing. Prints the exit
codes.
"""

import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.assets import asset_folder
from bosch.eval import runner
from bosch.eval.settings import GenerationSettings, Label, SuiteRun
from bosch.eval.suites import longbench, niah
from bosch.run.folder import RunFolder
from bosch.run.stage import Stage
from tests.kill_points import OPERATIONS, POINT, watch_operations

SUITES = (
    SuiteRun("niah", niah.Settings(lengths=(256,)), 2),
    SuiteRun("longbench", longbench.Settings(datasets=("toy_labels", "toy_count")), 3),
)
COUNTED = {1: OPERATIONS, 2: (POINT,)}  # by the number of ranks


class TwoSteps:
    """A file that writes each line in two parts, as a full buffer does."""

    def __init__(self, file: Any, folder: Path) -> None:
        self.file, self.folder = file, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, line: bytes) -> None:
        for part in (line[:20], line[20:]):
            sys.audit(POINT, str(self.folder))
            self.file.write(part)
            self.file.flush()
        sys.audit(POINT, str(self.folder))


def evaluate(folder: Path, kill_at: int | None, rank: int, world: int) -> None:
    append = runner.append_line
    runner.append_line = lambda file, *line: append(TwoSteps(file, folder), *line)
    seen = [
        watch_operations(folder, at=kill_at if ranks == world else None, operations=operations)
        for ranks, operations in COUNTED.items()
    ]
    model = asset_folder("tiny-qwen3-2layer")
    evaluation = runner.Evaluation(
        load_model=lambda: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(model),
        suites=SUITES,
        examples_folder=folder / "shared",
        label=Label("run", 5, 40_960),
        generation=GenerationSettings(batch=4),
        window_tokens=64,
        rank=rank,
        world=world,
    )
    stage = Stage("evaluation", run=lambda out: runner.evaluate(evaluation, out), ranks="all")
    with RunFolder(folder, rank, world) as run:
        run.complete(stage)
    folder.with_suffix(".points").write_text(json.dumps([number for [number] in seen]))


def run_job(
    folder: Path, kills: Sequence[float | None], num_points: Sequence[int]
) -> list[int | None]:
    """The exit codes of a job's processes, which run in parallel."""
    context = multiprocessing.get_context("fork")
    processes = []
    for rank, share in enumerate(kills):
        kill_at = None if share is None else max(1, round(share * num_points[len(kills) - 1]))
        arguments = (folder, kill_at, rank, len(kills))
        processes.append(context.Process(target=evaluate, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def main() -> None:
    root, codes = Path.cwd(), []
    num_points: list[int] = []
    for name, kills in json.loads(sys.argv[1]):
        codes.append(run_job(root / name, kills, num_points))
        if not num_points:
            num_points = json.loads((root / f"{name}.points").read_text())
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
