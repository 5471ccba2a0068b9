"""What a run holds so far: settings, mask, scores, losses, times. Read from its folder, or from an
archive, a file of finished runs (sweep.py --rows).

A missing or damaged part of a folder does not stop the reading; `problems` names it. An archive has
a JSON line for each run: all that reports read of it, with the scores of single examples, without
weights and texts.
"""

import gzip
import math
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bosch.config import fill_in
from bosch.eval.results import PREDICTIONS, SCORES
from bosch.eval.suites._reporting import Row, Samples, condition, reporting_of
from bosch.masks.mask import GroupMask, MaskFile, read_mask
from bosch.model import ModelInfo
from bosch.model_files import read_json_object
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import (
    MANIFEST,
    parse_lines,
    path_inside,
    read_lines,
    sealed_lines,
    write_atomically,
)
from bosch.run.stage import flatten, follow_reference

# eval/window/128 and eval/length/4096 hold more evaluations: the column that names the condition.
VARIANTS = {"window": "window", "length": "text_tokens"}
# What an archive has of a run besides its mask, rows and samples, and of a row of metrics.jsonl.
COPIED_FIELDS = ("name", "commit", "config", "mask_cost", "stage_seconds")
TRAINING_FIELDS = (
    *("step", "tokens", "loss", "validation_loss", "dense_validation_loss"),
    *("flops", "data_seconds", "compute_seconds"),
)
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
    # Further settings in which it differs from runs that are read with it.
    differences: Mapping[str, object] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """Everything that tells runs apart. The mask's own facts come before the configured ones;
        the ratio is the requested one, since the ratio that a mask realizes may differ a little."""
        settings = flatten(self.config)
        model, method = settings.get("model", "?"), str(settings.get("method", "?"))
        ratio, window = settings.get("ratio"), settings.get("window")
        if self.mask:
            method, window = self.mask.method, self.mask.mask.window_tokens
            ratio = self.mask.ratio_asked
            ratio = self.mask.mask.ratio if ratio is None else ratio
            model = settings.get("model", self.mask.model.id)
            # The model that it started from. A learned mask comes with weights of its own.
            weights = self.mask.model.weight_hash or self.mask.model.revision
            if weights and "weights=learned" not in _words(settings.get("mask.options")):
                settings["weights"] = weights[:12]
        known = {"model": Path(str(model)).name, "method": method, "ratio": ratio, "window": window}
        return settings | known | {"mask.options": " ".join(_words(settings.get("mask.options")))}

    @property
    def model(self) -> str:
        return str(self.settings["model"])

    @property
    def method(self) -> str:
        """The method's name and its options."""
        return f"{self.settings['method']} {self.settings['mask.options']}".strip()

    @property
    def ratio(self) -> Any:
        return self.settings["ratio"]

    @property
    def window(self) -> Any:
        return self.settings["window"]

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    @property
    def setup(self) -> str:
        """The same for runs that differ only in the seed: model, method, ratio, window, and any
        other setting in which the runs that are read together differ."""
        ratio = "?" if self.ratio is None else f"{self.ratio:g}"
        further = [f"{name} {value}" for name, value in self.differences.items()]
        return ", ".join([f"{self.model} {self.method} r{ratio} W{self.window}", *further])

    def training_points(self, name: str) -> list[tuple[int, float]]:
        """Tokens and value where the training recorded one of this name."""
        rows = (row for row in self.training if isinstance(row.get("tokens"), int))
        return [
            (row["tokens"], row[name]) for row in rows if isinstance(row.get(name), int | float)
        ]

    @property
    def dense_validation_loss(self) -> float | None:
        """Of the model that the hybrid came from."""
        return next((row.get("dense_validation_loss") for row in self.training), None)

    def spent(self, axis: str) -> dict[int, float]:
        """What the training had used up at each number of tokens: `flops`, or `hours`."""
        names = ("flops",) if axis == "flops" else ("data_seconds", "compute_seconds")
        total, spent = 0.0, {}
        for row in self.training:
            total += sum(row.get(name, 0.0) for name in names) / (1 if axis == "flops" else 3600)
            spent[row["tokens"]] = total
        return spent if total else {}

    @property
    def trained_tokens(self) -> int | None:
        """Without the tokens that a learned mask was trained on."""
        rows = [row for row in self.training if isinstance(row.get("tokens"), int)]
        before = next((row["tokens"] for row in rows if row.get("step") == 0), 0)
        return max((row["tokens"] - before for row in rows), default=None)


def _words(options: object) -> list[str]:
    return [str(option) for option in options] if isinstance(options, list | tuple) else []


def read_runs(given: Sequence[Path | RunResults]) -> list[RunResults]:
    """Runs from folders and archives, each with a unique name. A run given twice is read once."""
    runs: dict[Hashable, RunResults] = {}
    for one in given:
        if isinstance(one, RunResults):
            members = [one]
        else:
            members = read_archive(one) if is_archive(one) else [read_run(one.resolve())]
        runs |= {_identity(run): run for run in members}
    names = [run.name for run in runs.values()]
    named: dict[str, RunResults] = {}
    for run in runs.values():
        unique = names.count(run.name) == 1
        name = run.name if unique else f"{run.path.parent.name}/{run.name}"
        while name in named:
            name += "'"
        named[name] = replace(run, name=name)
    return list(_distinguish(list(named.values())))


def _distinguish(runs: Sequence[RunResults]) -> Iterator[RunResults]:
    """Give runs of one setup that differ in more than the seed a setup of their own: by the
    settings in which they differ, or by name where settings and seed are the same."""
    settings, setups = [run.settings for run in runs], [run.setup for run in runs]
    for place, (run, mine, setup) in enumerate(zip(runs, settings, setups, strict=True)):
        alike = [s for s, other in zip(settings, setups, strict=True) if other == setup]
        differences = {
            name: value
            for name, value in mine.items()
            if name != "seed" and any(other.get(name) != value for other in alike)
        }
        if len(alike) > 1 and (run.seed is None or mine in settings[:place]):
            differences["run"] = run.name
        yield replace(run, differences=differences)


# ----------------------------------------------------------------------------------- run folders


def is_run(path: Path) -> bool:
    marks = ("run.json", "mask/mask.json", "eval", "train/metrics.jsonl")
    return any((path / mark).exists() for mark in marks)


def read_run(path: Path) -> RunResults:
    if not is_run(path):
        raise MissingFileError(
            f"{path} is not a run folder: it has no run.json, no mask, no evaluation and no "
            "training. Name the folder of a run, such as runs/NAME."
        )
    problems: list[str] = []
    record = read_json(path / "run.json", problems)
    config = record.get("config")
    mask = None
    if (path / "mask" / "mask.json").is_file():
        try:
            mask = read_mask(path / "mask" / "mask.json")
        except UserError as error:
            problems.append(str(error))
    training = _read_lines(path / "train" / "metrics.jsonl", problems)
    rows, samples = _read_evaluations(path, training, problems)
    # What the method recorded: in time.json, and in mask.json the summary of a search or the number
    # of tokens a learned mask was trained on.
    cost = read_json(path / "mask" / "time.json", problems)
    stage_seconds = {}
    for stage in ("calibration", "mask", "model", "tokens", "train"):
        attempts = read_json(_follow(path / stage, problems) / MANIFEST, problems)
        if isinstance(seconds := attempts.get("wall_seconds"), list):
            stage_seconds[stage] = float(sum(seconds))
    return RunResults(
        path=path,
        name=path.resolve().name,
        config=fill_in(config) if config and isinstance(config, dict) else {},
        mask=mask,
        rows=[row for row in rows if not condition(row)],
        variants=[row for row in rows if condition(row)],
        samples=samples,
        training=training,
        mask_cost=cost | dict(mask.settings) | dict(mask.score_trace or {}) if mask else cost,
        stage_seconds=stage_seconds,
        problems=problems,
        commit=record.get("commit"),
    )


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
            valid = []
            for row in filter(_is_row, written):
                known = row.get("tokens")
                tokens = tokens_at.get(row["step"]) if known is None else known
                valid.append(row | {"tokens": tokens, "n": row.get("n") or 0} | columns)
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


# -------------------------------------------------------------------------------------- archives


def is_archive(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz")) and path.is_file()


def append_run(archive: Path, run: RunResults) -> None:
    """Add a run as the last line. The file is replaced at once: a kill leaves the old one."""
    record: dict[str, Any] = {name: getattr(run, name) for name in COPIED_FIELDS}
    record["mask"] = run.mask and asdict(run.mask)
    record["rows"] = [*run.rows, *run.variants]
    record["samples"] = [
        [*key, *cell, [scores.get(index) for index in range(max(scores) + 1)]]
        for key, cells in run.samples.items()
        for cell, scores in cells.items()
    ]
    record["training"] = [
        {name: row[name] for name in TRAINING_FIELDS if name in row} for row in run.training
    ]
    line = sealed_lines([record])
    before = archive.read_bytes() if archive.is_file() else b""
    if before and archive.suffix != ".gz":
        before = before.rstrip(b"\n") + b"\n"  # reading allows a last line without one
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(archive, before + (gzip.compress(line) if archive.suffix == ".gz" else line))


def read_archive(archive: Path) -> list[RunResults]:
    """Of several lines on one run (same name and settings), the last one."""
    runs = {}
    try:
        content = archive.read_bytes()
        content = gzip.decompress(content) if archive.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} cannot be read ({error}); name another file.") from error
    for number, record in parse_lines(content.rstrip(b"\n") + b"\n"):  # a torn line counts
        try:
            if record is None:
                raise ValueError("its checksum differs")
            run = _parse_run(archive, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{archive}, line {number} is not a run that sweep.py --rows wrote ({error!r}). "
                "Delete the line, or name another file."
            ) from error
        runs[_identity(run)] = run
    return list(runs.values())


def _identity(run: RunResults) -> Hashable:
    return run.path, str(run.config), run.method, run.mask and run.mask.model


def _parse_run(archive: Path, record: Mapping[str, Any]) -> RunResults:
    mask = record["mask"]
    if mask is not None:
        rows = [tuple(row) for row in mask["mask"]["z"]]
        groups = GroupMask(**mask["mask"] | {"z": tuple(rows)})
        mask = MaskFile(**mask | {"mask": groups, "model": ModelInfo(**mask["model"])})
    samples: dict[EvaluationKey, dict[tuple[str, int], dict[int, float]]] = {}
    for step, suite, under, task, length, scores in record["samples"]:
        known = {index: score for index, score in enumerate(scores) if score is not None}
        samples.setdefault((step, suite, under), {})[task, length] = known
    copied: dict[str, Any] = {name: record[name] for name in COPIED_FIELDS}
    return RunResults(
        path=path_inside(archive, record["name"], archive, flat=True),
        mask=mask,
        rows=[row for row in record["rows"] if not condition(row)],
        variants=[row for row in record["rows"] if condition(row)],
        samples=dict[EvaluationKey, Samples](samples),
        training=record["training"],
        **copied | {"config": fill_in(record["config"])},
    )
