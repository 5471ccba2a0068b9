"""What a run folder holds so far: settings, mask, scores, losses, times.

A missing or damaged part does not stop the reading; `problems` names it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bosch.config import fill_in
from bosch.eval.report.scores import condition
from bosch.eval.report.statistics import Samples
from bosch.eval.results import PREDICTIONS, SCORES
from bosch.eval.suites._reporting import Row, reporting_of
from bosch.masks.mask import MaskFile, read_mask
from bosch.model_files import read_json_object
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import MANIFEST, read_lines
from bosch.run.stage import flatten, follow_reference

# eval/window/128 and eval/length/4096 hold more evaluations: the column that names the condition.
VARIANTS = {"window": "window", "length": "text_tokens"}
EvaluationKey = tuple[int | None, str, str]  # step (None: the dense model), suite, condition


@dataclass(frozen=True)
class RunResults:
    path: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)  # from run.json
    mask: MaskFile | None = None
    rows: Sequence[Row] = ()  # results of its evaluations; step None: the dense model
    variants: Sequence[Row] = ()  # results under other windows and in longer texts
    samples: Mapping[EvaluationKey, Samples] = field(default_factory=dict)
    training: Sequence[Row] = ()  # metrics.jsonl
    mask_cost: Mapping[str, Any] = field(default_factory=dict)  # seconds, evaluations, ...
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # of complete stages
    problems: Sequence[str] = ()
    commit: str | None = None  # of the code that started the run
    differences: str = ""  # further settings that are part of its setup

    @property
    def model(self) -> str:
        return Path(str(self.config.get("model", self.mask.model.id if self.mask else "?"))).name

    @property
    def method(self) -> str:
        """The method's name and its options."""
        name = self.mask.method if self.mask else str(self.config.get("method", "?"))
        section = self.config.get("mask")
        options = section.get("options", ()) if isinstance(section, dict) else ()
        return " ".join([name, *map(str, options)])

    @property
    def ratio(self) -> float | None:
        """As requested: the ratio that a mask realizes may differ a little."""
        if self.mask:
            requested = self.mask.ratio_asked
            return self.mask.mask.ratio if requested is None else requested
        return self.config.get("ratio")

    @property
    def window(self) -> int | None:
        return self.mask.mask.window_tokens if self.mask else self.config.get("window")

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def validation_losses(self) -> dict[int, float]:
        """By step."""
        rows = [row for row in self.training if "validation_loss" in row]
        return {row["step"]: row["validation_loss"] for row in rows}

    @property
    def dense_validation_loss(self) -> float | None:
        """Of the model that the hybrid came from."""
        return next((row.get("dense_validation_loss") for row in self.training), None)

    def spent(self, name: str) -> dict[int, float]:
        """What the training has used up by each number of tokens: `flops`, or `hours`."""
        names = ("flops",) if name == "flops" else ("data_seconds", "compute_seconds")
        total, spent = 0.0, {}
        for row in self.training:
            total += sum(row.get(name, 0.0) for name in names) / (1 if name == "flops" else 3600)
            spent[row["tokens"]] = total
        return spent if total else {}

    @property
    def setup(self) -> str:
        """The same for runs that differ only in the seed: model, method, ratio, window, and any
        other setting in which the runs that are read together differ."""
        ratio = "?" if self.ratio is None else f"{self.ratio:g}"
        setup = f"{self.model} {self.method} r{ratio} W{self.window}"
        return f"{setup}, {self.differences}" if self.differences else setup

    @property
    def trained_tokens(self) -> int | None:
        """Without the tokens that a learned mask was trained on."""
        rows = [row for row in self.training if isinstance(row.get("tokens"), int)]
        before = next((row["tokens"] for row in rows if row.get("step") == 0), 0)
        return max((row["tokens"] - before for row in rows), default=None)


def read_run(path: Path) -> RunResults:
    if not is_run(path):
        raise MissingFileError(
            f"{path} is not a run folder: it has no run.json, no mask, no evaluation and no "
            "training. Name the folder of a run, such as runs/NAME."
        )
    problems: list[str] = []
    record = read_json(path / "run.json", problems)
    config, mask = record.get("config"), None
    if (path / "mask" / "mask.json").is_file():
        try:
            mask = read_mask(path / "mask" / "mask.json")
        except UserError as error:
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
        commit=record.get("commit"),
    )


def is_run(path: Path) -> bool:
    marks = ("run.json", "mask/mask.json", "eval", "train/metrics.jsonl")
    return any((path / mark).exists() for mark in marks)


def distinguish_runs(runs: Sequence[RunResults]) -> list[RunResults]:
    """Give runs of one setup that differ in more than the seed a setup of their own: by the
    settings in which they differ, or by name where settings and seed are the same."""
    settings = [
        {n: value for n, value in flatten(run.config).items() if n not in ("model", "seed")}
        | _weights(run)
        for run in runs
    ]
    setups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        setups.setdefault(run.setup, []).append(place)
    result = list(runs)
    for places in setups.values():
        seen = []
        for place in places if len(places) > 1 else ():
            run, mine = runs[place], settings[place]
            others = [settings[other] for other in places]
            differences = [
                f"{name} {value}"
                for name, value in mine.items()
                if any(other.get(name) != value for other in others)
            ]
            if run.seed is None or (run.seed, mine) in seen:
                differences.append(run.name)
            seen.append((run.seed, mine))
            result[place] = replace(run, differences=", ".join(differences))
    return result


def _weights(run: RunResults) -> dict[str, str]:
    """The model that it started from. A learned mask comes with weights of its own."""
    if run.mask is None or "weights=learned" in run.method.split():
        return {}
    mark = run.mask.model.weight_hash or run.mask.model.revision
    return {"weights": mark[:12]} if mark else {}


# ---------------------------------------------------------------------------------- evaluations


def _read_evaluations(
    path: Path, training: Sequence[Row], problems: list[str]
) -> tuple[list[Row], dict[EvaluationKey, Samples]]:
    tokens_at = {0: 0} | {row.get("step"): row.get("tokens") for row in training}
    folders: list[tuple[Path, dict[str, int]]] = [(p, {}) for p in (path / "eval").glob("*/")]
    for name, column in VARIANTS.items():
        for one in (path / "eval" / name).glob("*/"):
            if (number := one.name.removesuffix("-dense")).isdecimal():
                folders.append((one, {column: int(number)}))
    rows: list[Row] = []
    samples: dict[EvaluationKey, Samples] = {}
    for folder, columns in sorted(folders, key=lambda item: (sum(item[1].values()), item[0])):
        for file in sorted(_follow(folder, problems).glob(f"*/{SCORES}")):
            written = read_json(file, problems).get("rows")
            written = written if isinstance(written, list) else []
            valid = [r | _completed(r, tokens_at) | columns for r in written if _is_row(r)]
            if len(valid) < len(written):
                num_left_out = len(written) - len(valid)
                problems.append(f"{file}: left out {num_left_out} rows without a value")
            rows += valid
            if valid:
                key = (valid[0]["step"], valid[0]["suite"], condition(valid[0]))
                samples[key] = _read_samples(file.parent, key[1], problems)
    return rows, samples


def _read_samples(folder: Path, suite: str, problems: list[str]) -> Samples:
    """Scores of single examples, in percent, by the metric that counts."""
    headline = reporting_of(suite).headline_metric
    samples: dict[tuple[str, int], dict[int, float]] = {}
    num_left_out = 0
    for row in _read_lines(folder / PREDICTIONS, problems):
        try:
            scores, cell, index = row["scores"], (row["task"], row["length"] or 0), row["index"]
            value = float(scores[headline(cell[0]) or next(iter(scores))])
        except (KeyError, TypeError, ValueError, StopIteration):
            value = math.nan
        if math.isfinite(value):
            samples.setdefault(cell, {})[index] = 100 * value
        else:
            num_left_out += 1
    if num_left_out:
        problems.append(f"{folder / PREDICTIONS}: left out {num_left_out} rows without a score")
    return samples


def _is_row(row: object) -> bool:
    names = ("step", "suite", "task", "length", "metric", "value")
    if not isinstance(row, dict) or any(name not in row for name in names):
        return False
    return isinstance(row["value"], int | float) and math.isfinite(row["value"])


def _completed(row: Row, tokens_at: Mapping[object, int | None]) -> dict[str, int | None]:
    known = row.get("tokens")
    tokens = tokens_at.get(row["step"]) if known is None else known
    return {"tokens": tokens, "n": row.get("n") or 0}


# --------------------------------------------------------------------------------------- files


def _follow(folder: Path, problems: list[str]) -> Path:
    try:
        return follow_reference(folder)
    except UserError as error:
        problems.append(str(error))
        return folder


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a file; empty if there is no file, or a damaged one."""
    try:
        return read_json_object(path) if path.is_file() else {}
    except UserError as error:
        problems.append(str(error))
        return {}


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of a file that may still be growing: its last line may be half written."""
    lines = read_lines(path)
    problems += [f"{path}, line {line.number} is damaged" for line in lines if line.content is None]
    return [line.content for line in lines if line.content is not None]


def _mask_cost(path: Path, mask: MaskFile | None, problems: list[str]) -> dict[str, Any]:
    """What the method recorded: in time.json, and in mask.json the summary of a search or the
    number of tokens a learned mask was trained on."""
    cost = read_json(path / "mask" / "time.json", problems)
    return cost | dict(mask.settings) | dict(mask.score_trace or {}) if mask else cost


def _stage_seconds(path: Path, problems: list[str]) -> dict[str, float]:
    """Wall time of each complete stage, summed over all attempts."""
    seconds = {}
    for stage in ("calibration", "mask", "model", "tokens", "train"):
        manifest = read_json(_follow(path / stage, problems) / MANIFEST, problems)
        attempts = manifest.get("wall_seconds")
        if isinstance(attempts, list):
            seconds[stage] = float(sum(attempts))
    return seconds
