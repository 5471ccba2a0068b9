"""What a run folder has to show, as far as the run has come: settings, mask, scores, losses, times.

Reading never fails on a part that is missing or damaged; it is named in `problems` instead.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bosch.config import fill_in
from bosch.eval.report.measures import Row, condition, headline_metric
from bosch.eval.report.statistics import Samples
from bosch.eval.results import SCORES
from bosch.masks.mask import MaskFile, read_mask
from bosch.run.errors import MissingFileError
from bosch.run.manifest import MANIFEST
from bosch.run.plan import REFERENCE, follow_reference

PREDICTIONS = "predictions.jsonl"  # a row an example, as eval/runner.py writes them
# Evaluations in eval/window/128 and eval/length/4096: the column that their rows get.
VARIANTS = {"window": "window", "length": "text_tokens"}
Place = tuple[int | None, str, str]  # step (None: the dense model), suite, condition


@dataclass(frozen=True)
class RunResults:
    path: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)  # of run.json
    mask: MaskFile | None = None
    rows: Sequence[Row] = ()  # of its evaluations; step None: the dense model
    variants: Sequence[Row] = ()  # of those under other windows and in longer texts
    samples: Mapping[Place, Samples] = field(default_factory=dict)  # scores of single examples
    training: Sequence[Row] = ()  # metrics.jsonl
    mask_cost: Mapping[str, Any] = field(default_factory=dict)  # seconds, evaluations, ...
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # of complete stages
    problems: Sequence[str] = ()
    commit: str | None = None  # of the code that began it
    apart: str = ""  # what else tells it from runs of its model, method, ratio and window

    @property
    def model(self) -> str:
        return Path(str(self.config.get("model", self.mask.model.id if self.mask else "?"))).name

    @property
    def method(self) -> str:
        """With the settings that were given to it alone."""
        name = self.mask.method if self.mask else str(self.config.get("method", "?"))
        section = self.config.get("mask")
        options = section.get("options", ()) if isinstance(section, dict) else ()
        return " ".join([name, *map(str, options)])

    @property
    def ratio(self) -> float | None:
        """As it was asked: what runs of one kind have in common."""
        if self.mask:
            asked = self.mask.ratio_asked
            return self.mask.mask.ratio if asked is None else asked
        return self.config.get("ratio")

    @property
    def window(self) -> int | None:
        return self.mask.mask.window_tokens if self.mask else self.config.get("window")

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def setting(self) -> tuple[Any, ...]:
        """What it has in common with the run of another method that it is compared with."""
        return self.model, self.ratio, self.window, self.seed

    @property
    def validation_losses(self) -> dict[int, float]:
        """By step."""
        rows = [row for row in self.training if "validation_loss" in row]
        return {row["step"]: row["validation_loss"] for row in rows}

    @property
    def kind(self) -> str:
        """What runs with other seeds share: model, method, ratio and window, and other settings
        where those differ between the runs that were read together."""
        ratio = "?" if self.ratio is None else f"{self.ratio:g}"
        kind = f"{self.model} {self.method} r{ratio} W{self.window}"
        return f"{kind}, {self.apart}" if self.apart else kind

    @property
    def trained_tokens(self) -> int | None:
        """Without those that went into the mask."""
        rows = [row for row in self.training if isinstance(row.get("tokens"), int)]
        before = next((row["tokens"] for row in rows if row.get("step") == 0), 0)
        return max((row["tokens"] - before for row in rows), default=None)


def read_run(path: Path) -> RunResults:
    """Everything the folder has. FileNotFoundError if it is no run's folder at all."""
    if not is_run(path):
        raise MissingFileError(
            f"{path} is no run folder: it has no run.json, no mask, no evaluation and no training."
        )
    problems: list[str] = []
    told = read_json(path / "run.json", problems)
    config = told.get("config")
    mask = None
    if (path / "mask" / "mask.json").is_file():
        try:
            mask = read_mask(path / "mask" / "mask.json")
        except ValueError as error:
            problems.append(str(error))
    training = _read_lines(path / "train" / "metrics.jsonl", problems)
    rows, samples = _read_evaluations(path, training, problems)
    return RunResults(
        path=path,
        name=path.resolve().name,
        config=fill_in(config) if config and isinstance(config, dict) else {},
        mask=mask,
        rows=[row for row in rows if not condition(row)],
        variants=[row for row in rows if condition(row)],
        samples=samples,
        training=training,
        mask_cost=_mask_cost(path, mask, problems),
        stage_seconds=_stage_seconds(path, problems),
        problems=problems,
        commit=told.get("commit"),
    )


def is_run(path: Path) -> bool:
    marks = ("run.json", "mask/mask.json", "eval", "train/metrics.jsonl")
    return any((path / mark).exists() for mark in marks)


def tell_apart(runs: Sequence[RunResults]) -> list[RunResults]:
    """Runs of one kind shall differ in the seed alone: others are told apart by the settings in
    which they differ, and what has settings and seed of a run before it by its name."""
    settings = [_flatten(run.config) | _weights(run) for run in runs]
    kinds: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        kinds.setdefault(run.kind, []).append(place)
    told = list(runs)
    for places in kinds.values():
        seen = []
        for place in places if len(places) > 1 else ():
            run, own = runs[place], settings[place]
            others = [settings[other] for other in places]
            apart = [f"{k} {v}" for k, v in own.items() if any(o.get(k) != v for o in others)]
            if run.seed is None or (run.seed, own) in seen:
                apart.append(run.name)
            seen.append((run.seed, own))
            told[place] = replace(run, apart=", ".join(apart))
    return told


def _weights(run: RunResults) -> dict[str, Any]:
    """Which model it began with, where the mask is not for weights of its own."""
    if run.mask is None or "weights=learned" in run.method.split():
        return {}
    mark = run.mask.model.weight_hash or run.mask.model.revision
    return {"weights": mark[:12]} if mark else {}


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that decide what a run of this model and seed is: `train.schedule` -> value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name not in ("model", "seed"):
            flat[name] = value
    return flat


# ---------------------------------------------------------------------------------- evaluations


def _read_evaluations(
    path: Path, training: Sequence[Row], problems: list[str]
) -> tuple[list[Row], dict[Place, Samples]]:
    tokens_at = {0: 0} | {row.get("step"): row.get("tokens") for row in training}
    folders: list[tuple[Path, dict[str, Any]]] = [(p, {}) for p in (path / "eval").glob("*/")]
    for name, column in VARIANTS.items():
        for one in (path / "eval" / name).glob("[0-9]*/"):
            folders.append((one, {column: int(one.name.removesuffix("-dense"))}))
    rows: list[Row] = []
    samples: dict[Place, Samples] = {}
    for folder, columns in sorted(folders, key=lambda item: (sum(item[1].values()), item[0])):
        for file in sorted(_follow(folder, problems).glob(f"*/{SCORES}")):
            told = read_json(file, problems).get("rows")
            found = told if isinstance(told, list) else []
            kept = [r | _completed(r, tokens_at) | columns for r in found if _is_row(r)]
            if len(kept) < len(found):
                problems.append(f"{file}: {len(found) - len(kept)} rows without a value left out")
            rows += kept
            if kept:
                place = (kept[0]["step"], kept[0]["suite"], condition(kept[0]))
                samples[place] = _read_samples(file.parent, place[1], problems)
    return rows, samples


def _read_samples(folder: Path, suite: str, problems: list[str]) -> Samples:
    """Scores of single examples, in percent, by the metric that counts."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    num_left_out = 0
    for row in _read_lines(folder / PREDICTIONS, problems):
        try:
            scores, cell, index = row["scores"], (row["task"], row["length"]), row["index"]
            value = float(scores[headline_metric(suite, cell[0]) or next(iter(scores))])
        except (KeyError, TypeError, ValueError, StopIteration):
            value = math.nan
        if math.isfinite(value):
            found.setdefault(cell, {})[index] = 100 * value
        else:
            num_left_out += 1
    if num_left_out:
        problems.append(f"{folder / PREDICTIONS}: {num_left_out} rows without a score left out")
    return found


def _is_row(row: Any) -> bool:
    names = ("step", "suite", "task", "length", "metric", "value")
    if not isinstance(row, dict) or any(name not in row for name in names):
        return False
    return isinstance(row["value"], int | float) and math.isfinite(row["value"])


def _completed(row: Row, tokens_at: Mapping[Any, Any]) -> dict[str, Any]:
    known = row.get("tokens")
    tokens = tokens_at.get(row["step"]) if known is None else known
    return {"tokens": tokens, "n": row.get("n") or 0}


# --------------------------------------------------------------------------------------- files


def _follow(folder: Path, problems: list[str]) -> Path:
    try:
        return follow_reference(folder)
    except (ValueError, KeyError, TypeError):
        problems.append(f"{folder / REFERENCE} is damaged: it names no folder")
        return folder


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        problems.append(f"{path} is damaged: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of a file that may still be growing: its last line can be half written."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            if number < len(lines):
                problems.append(f"{path}, line {number} is damaged: {error}")
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _mask_cost(path: Path, mask: MaskFile | None, problems: list[str]) -> dict[str, Any]:
    """What the method noted of itself: in time.json, and in mask.json the summary of a search or
    the tokens that a learned mask took."""
    cost = read_json(path / "mask" / "time.json", problems)
    return cost | dict(mask.settings) | dict(mask.score_trace or {}) if mask else cost


def _stage_seconds(path: Path, problems: list[str]) -> dict[str, float]:
    """Wall time of each complete stage, all attempts together."""
    found = {}
    for stage in ("calibration", "mask", "model", "tokens", "train"):
        told = read_json(_follow(path / stage, problems) / MANIFEST, problems).get("wall_seconds")
        if isinstance(told, list):
            found[stage] = float(sum(told))
    return found
