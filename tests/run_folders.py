"""Made-up run folders, laid out as the stages write them, for tests of what reads runs."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bosch.data.toy_world.tasks import DATASETS as TOY_DATASETS
from bosch.eval import averages
from bosch.eval.results import EXAMPLE, Label, make_rows, write_scores
from bosch.eval.rows import write_rows
from bosch.eval.suites import longbench, niah
from bosch.eval.suites._interface import Example, Scored, Task
from bosch.masks.mask import GroupMask, MaskFile, write_mask
from bosch.model import ModelInfo, find_model, read_model_info
from bosch.recipes import presets
from bosch.recipes.command import parse_command
from bosch.run.fingerprint import fingerprint
from bosch.sink import Sink

MODEL = ModelInfo("tiny-qwen3", None, "0" * 32, 4, 4, 8, 16)
STEP_TOKENS = 1_000
LENGTHS = (512, 1024)

# The share of right answers at a step (None: the dense model) in a task.
Skill = Callable[[int | None, str], float]


def recovering(start: float, end: float) -> Skill:
    """Every task on a straight line from step 0 to step 200."""
    return lambda step, task: 1.0 if step is None else start + (end - start) * step / 200


@dataclass(frozen=True)
class FakeRun:
    method: str = "bosch"
    ratio: float = 0.75
    seed: int = 0
    steps: tuple[int | None, ...] = (None, 0, 100, 200)  # evaluated; None: the dense model
    lengths: tuple[int, ...] = LENGTHS  # of its needles
    samples: int = 8  # examples per task and length
    with_samples: bool = True  # write the predictions
    text: str = "essays"  # that its examples are made of
    learning_tokens: int = 0  # of a learned mask; training continues after them
    version: str = "0.2.0"  # of the package that chose the mask
    skill: Skill = lambda step, task: 0.9 if step is None else 0.1 + step / 400

    @property
    def name(self) -> str:
        seed = f"-s{self.seed}" if self.seed else ""
        return f"tiny-qwen3-{self.method}-r{self.ratio:g}{seed}"

    @property
    def provenance(self) -> dict[str, Any]:
        return {"packages": {"bosch-hybrid": self.version}}

    def write(self, runs: Path) -> Path:
        """Write the whole folder. Returns its path."""
        folder = runs / self.name
        folder.mkdir(parents=True)
        config = replace(presets.tiny(), method=self.method, ratio=self.ratio, seed=self.seed)
        content = {"config": asdict(config), "command": ["--method", self.method]}
        (folder / "run.json").write_text(json.dumps(content))
        self.write_mask(folder)
        last = max((step for step in self.steps if step), default=0)
        if last:
            write_metrics(folder, last, self.learning_tokens)
        for step in self.steps:
            self.write_evaluation(folder, step)
        return folder

    def write_as(self, command: Sequence[str], runs: Path) -> Path:
        """Write what recover.py would have written for this command and the embedded model."""
        folder = self.write(runs)
        config = parse_command(command).config
        content = {"config": asdict(config), "command": [*command]}
        (folder / "run.json").write_text(json.dumps(content))
        model = find_model(presets.TINY_MODEL)
        assert model is not None
        info = read_model_info(model)
        count = round(self.ratio * info.num_groups)
        windowed = [(layer, group) for layer in range(info.num_layers) for group in range(count)]
        mask = GroupMask.from_windowed(windowed, info.num_layers, info.num_groups, 64)
        mask = replace(mask, sink=Sink.parse(config.sink))
        record = MaskFile(mask, info, self.method, provenance=self.provenance)
        write_mask(folder / "mask" / "mask.json", record)
        for stage in ("mask", "eval/step-000000"):
            (folder / stage).mkdir(exist_ok=True)
            (folder / stage / "manifest.json").write_text('{"wall_seconds": [61.5]}')
        return folder

    def write_mask(self, folder: Path) -> None:
        (folder / "mask").mkdir()
        total = MODEL.num_layers * MODEL.num_groups
        places = [(i // MODEL.num_groups, i % MODEL.num_groups) for i in range(total)]
        random.Random(f"{self.method}{self.seed}").shuffle(places)
        windowed = places[: round(self.ratio * total)]
        mask = GroupMask.from_windowed(windowed, MODEL.num_layers, MODEL.num_groups, 64)
        trace = {"evaluations": 123, "dense": {"accuracy": 0.98}, "hybrid": {"accuracy": 0.5}}
        settings = {"learning_tokens": self.learning_tokens} if self.learning_tokens else {}
        made = {"seed": self.seed, "score_trace": trace, "provenance": self.provenance}
        record = MaskFile(mask, MODEL, self.method, self.ratio, settings, **made)
        write_mask(folder / "mask" / "mask.json", record)
        cost = {"method": self.method, "seconds": 61.5, "layer_forwards": 4567.8}
        (folder / "mask" / "time.json").write_text(json.dumps(cost))

    def write_evaluation(self, folder: Path, step: int | None) -> None:
        name = "dense" if step is None else f"step-{step:06}"
        tokens = None if step is None else self.learning_tokens + step * STEP_TOKENS
        label = Label(self.name, step, tokens)
        metrics = (niah.METRIC, "string_match_part")
        groups = niah.GROUPS.values()
        tasks = {Task(task, n): metrics for n in self.lengths for group in groups for task in group}
        scored = self.answers(step, tasks)
        results = averages.summarize(niah, niah.Settings(lengths=self.lengths), scored)
        write_suite(folder / "eval" / name / "niah", label, scored, results, self.with_samples)
        scored = self.answers(step, {Task(x): (toy.metric,) for x, toy in TOY_DATASETS.items()})
        results = averages.summarize(longbench, longbench.Settings(), scored)
        write_suite(folder / "eval" / name / "longbench", label, scored, results, self.with_samples)

    def answers(self, step: int | None, tasks: Mapping[Task, Sequence[str]]) -> list[Scored]:
        """An example is right if the skill exceeds its difficulty, which all models share."""
        scored = []
        for task, metrics in tasks.items():
            difficulty = random.Random(f"{task}")
            for index in range(self.samples):
                right = float(self.skill(step, task.name) > difficulty.random())
                example = Example(index, f"{self.text} {task.name}", ("7",), 8)
                scored.append(Scored(task, example, dict.fromkeys(metrics, right)))
        return scored


def write_suite(
    folder: Path, label: Label, scored: list[Scored], results: Any, with_samples: bool
) -> None:
    folder.mkdir(parents=True)
    if with_samples:
        rows: list[Mapping[str, Any]] = [
            {"task": item.task.name, "length": item.task.length, "index": item.example.index}
            | {"prediction": "7", "scores": dict(item.scores)}
            | {EXAMPLE: fingerprint(item.example.prompt)}
            for item in scored
        ]
        write_rows(folder / "predictions.jsonl", rows)
    write_scores(folder, {"rows": make_rows(label, folder.name, results)})


def write_metrics(folder: Path, last_step: int, learning_tokens: int = 0) -> None:
    rows: list[Mapping[str, Any]] = [{"step": 0, "tokens": learning_tokens, "validation_loss": 3.0}]
    for step in range(10, last_step + 1, 10):
        row = {"step": step, "tokens": learning_tokens + step * STEP_TOKENS, "loss": 3 - step / 200}
        row |= {"learning_rate": 1e-4, "flops": 1e12, "data_seconds": 0.5, "compute_seconds": 8.5}
        rows.append(row | ({"validation_loss": 3 - step / 250} if step % 50 == 0 else {}))
    write_rows(folder / "train" / "metrics.jsonl", rows)
