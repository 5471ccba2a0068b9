"""What a run holds so far: settings, mask, scores, losses, times. Read from its folder, or from an
archive, a file of finished runs (`bosch sweep` --rows).

A missing or damaged part of a folder does not stop the reading; `problems` names it. An archive has
a JSON line for each run: all that reports read of it, with the scores of single examples, without
weights and texts.
"""

import gzip
import math
import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

from bosch.config import fill_in
from bosch.eval.results import EXAMPLE, PREDICTIONS, SCORES
from bosch.eval.suites._reporting import Cell, Row, Samples, condition, reporting_of
from bosch.masks.mask import GroupMask, MaskFile, read_mask
from bosch.model import ModelInfo
from bosch.model_files import read_json_object
from bosch.run import files
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.stage import SHARED, flatten, follow_reference
from bosch.sink import Sink

# eval/window/128 and eval/length/4096 hold more evaluations: the column that names the condition.
VARIANTS = {"window": "window", "length": "text_tokens"}
# What an archive has of a run besides its mask, rows and samples, and of a row of metrics.jsonl.
COPIED_FIELDS = (
    *("name", "commit", "config", "mask_cost", "stage_seconds", "ending"),
    "made_from",
)
# Stages that read files of the user's: texts, questions, plug-ins.
READING_FILES = ("calibration", "mask", "tokens", "eval/dense")
LOSSES = ("validation_loss", "dense_validation_loss")
LESSONS = ("lesson_flops", "lesson_seconds")  # a step's share of the stored lessons
TRAINING_FIELDS = (
    *("step", "tokens", "loss", "flops", "data_seconds", "compute_seconds"),
    *LESSONS,
    *(f"{loss}{which}" for loss in LOSSES for which in ("", "_by_sequence", "_by_position")),
)
Found = TypeVar("Found")
EvaluationKey = tuple[int | None, str, str]  # step (None: the dense model), suite, condition


@dataclass(frozen=True)
class Spent:
    """On a training so far, with the lessons stored for its tokens."""

    flops: float
    hours: float
    lacks_lessons: bool = False  # it had some, and what they took is unknown


@dataclass(frozen=True)
class RunResults:
    path: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)  # from run.json
    mask: MaskFile | None = None
    rows: Sequence[Row] = ()  # results of its evaluations; step None: the dense model
    variants: Sequence[Row] = ()  # results under other windows and in longer texts
    samples: Mapping[EvaluationKey, Samples] = field(default_factory=dict)
    # Of the examples of each part, texts and questions, one hash. Earlier evaluations have none.
    examples: Mapping[EvaluationKey, Mapping[Cell, str]] = field(default_factory=dict)
    training: Sequence[Row] = ()  # metrics.jsonl
    mask_cost: Mapping[str, Any] = field(default_factory=dict)  # seconds, evaluations, ...
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # of complete stages
    ending: Mapping[str, Any] = field(default_factory=dict)  # of a training that --hours ended
    problems: Sequence[str] = ()
    commit: str | None = None  # of the code that started the run
    # Of stages that read files, a fingerprint of what decides them besides their inputs: `config`
    # has the files' names, this their content. Earlier archives have none.
    made_from: Mapping[str, str] = field(default_factory=dict)
    # Further settings in which it differs from runs that are read with it.
    differences: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that tells runs apart. The mask's own facts come before the configured ones;
        the ratio is the requested one, since the ratio that a mask realizes may differ a little."""
        found: dict[str, Any] = dict.fromkeys(("ratio", "window", "seed")) | {"method": "?"}
        found |= {"model": self.mask.model.id if self.mask else "?"} | flatten(self.config)
        options = found.get("mask.options")
        words = [str(option) for option in options] if isinstance(options, list | tuple) else []
        found |= {"mask.options": " ".join(words), "model": Path(str(found["model"])).name}
        if self.mask:
            mask, asked = self.mask.mask, self.mask.ratio_asked
            # The mask says what the run really has. A config of an earlier commit may say less, as
            # a sink of `auto`.
            found |= {"method": self.mask.method, "window": mask.window_tokens}
            found["sink"] = str(mask.sink)
            found["ratio"] = mask.ratio if asked is None else asked
            # The model that it started from. A learned mask comes with weights of its own.
            weights = self.mask.model.weight_hash or self.mask.model.revision
            if weights and "weights=learned" not in words:
                found["weights"] = weights[:12]
        return found

    @property
    def method(self) -> str:
        """The method's name and its options."""
        return f"{self.settings['method']} {self.settings['mask.options']}".strip()

    @property
    def setup(self) -> str:
        """The same for runs that differ only in the seed: model, method, ratio, window, and any
        other setting in which the runs that are read together differ."""
        model, ratio, window = (self.settings[name] for name in ("model", "ratio", "window"))
        shown = "?" if ratio is None else f"{ratio:g}"
        return f"{model} {self.method} r{shown} W{window}{self.described_differences}"

    @property
    def described_differences(self) -> str:
        return "".join(f", {name} {value}" for name, value in self.differences.items())

    @property
    def has_lessons(self) -> bool:
        """Whether it was trained on stored lessons."""
        train = self.config.get("train", {})
        stored = train.get("objective") == "distill" and train.get("stored_shares") is not None
        return stored and bool(self.training)

    def spent_until(self, tokens: float | None) -> Spent | None:
        """On the training until then. None: never, or nothing was recorded."""
        counts, rows = [row["tokens"] for row in self.training], self.training
        if tokens is None or not counts or not counts[0] <= tokens <= counts[-1]:
            return None
        if not all(any(row.get(name) for row in rows) for name in ("flops", "compute_seconds")):
            return None

        def total(*names: str) -> float:
            # A share of a gap is usually closed between two logged steps.
            sums = np.cumsum([sum(row.get(name, 0.0) for name in names) for row in rows])
            return float(np.interp(tokens, counts, sums))

        steps = [row for row in rows if row.get("flops")]
        lacks = self.has_lessons and not all(name in row for row in steps for name in LESSONS)
        seconds = total("data_seconds", "compute_seconds", "lesson_seconds")
        return Spent(total("flops", "lesson_flops"), seconds / 3600, lacks)

    @property
    def trained_tokens(self) -> int | None:
        """Without the tokens that a learned mask was trained on."""
        before = next((row["tokens"] for row in self.training if row.get("step") == 0), 0)
        return max((row["tokens"] - before for row in self.training), default=None)


def read_runs(given: Sequence[Path | RunResults]) -> list[RunResults]:
    """Runs from folders and archives, each with a unique name."""
    runs: dict[Hashable, RunResults] = {}
    for one in given:
        if isinstance(one, RunResults):
            members = [one]
        else:
            # Not resolved: where a run's folder is a link, `shared` lies beside the link.
            path = Path(os.path.abspath(one))
            members = read_archive(path) if is_archive(path) else [read_run(path)]
        for run in members:  # one that was given twice is read once
            place = run.path.resolve()  # one that a link names too is read once
            runs[place, str(run.config), run.method, run.mask and run.mask.model] = run
    names = [run.name for run in runs.values()]
    named: dict[str, RunResults] = {}
    for run in runs.values():
        # Names are keys of a comparison, and two sweeps may have folders of one name.
        unique = names.count(run.name) == 1
        name = run.name if unique else f"{run.path.parent.name}/{run.name}"
        while name in named:
            name += "'"
        named[name] = replace(run, name=name)
    # Runs of one setup that differ in more than the seed get a setup of their own: by the settings
    # in which they differ, or by name where settings and seed are the same.
    found: list[RunResults] = []
    for run in named.values():
        mine = run.settings
        alike = [other.settings for other in named.values() if other.setup == run.setup]
        differences = {
            name: value
            for name, value in mine.items()
            if name != "seed" and any(other.get(name) != value for other in alike)
        }
        again = mine["seed"] is None or mine in [other.settings for other in found]
        if len(alike) > 1 and again:
            differences["run"] = run.name
        found.append(replace(run, differences=differences))
    return found


# ----------------------------------------------------------------------------------- run folders


def is_run(path: Path) -> bool:
    marks = ("run.json", "mask/mask.json", "eval", "train/metrics.jsonl")
    return any((path / mark).exists() for mark in marks)


def read_run(path: Path) -> RunResults:
    if not is_run(path):
        problem = f"{path} is not a run folder: it has no run.json, mask, evaluation or training"
        raise MissingFileError(f"{problem}. Name the folder of a run, such as runs/NAME.")
    reader = _Reader()
    # Each part on its own: a run that is still going on has no mask yet, or no training, and what
    # it has is shown.
    record, mask = reader.read_json(path / "run.json"), None
    config = record.get("config")
    if (path / "mask" / "mask.json").is_file():
        mask = reader.attempt(lambda: read_mask(path / "mask" / "mask.json"), None)
    lines = reader.read_lines(path / "train" / "metrics.jsonl")
    training = [row for row in lines if isinstance(row.get("tokens"), int)]
    rows, samples, examples = reader.read_evaluations(path / "eval")
    # What the method recorded: in time.json, and in mask.json the summary of a search or the number
    # of tokens a learned mask was trained on.
    cost = reader.read_json(path / "mask" / "time.json")
    stage_seconds = {}
    for stage in ("calibration", "mask", "model", "tokens", "answers", "lessons", "train"):
        manifest = reader.read_json(reader.follow(path / stage) / files.MANIFEST)
        attempts = manifest.get("wall_seconds")
        if isinstance(attempts, list):
            stage_seconds[stage] = float(sum(attempts))
    made_from = {}
    for stage in READING_FILES:
        started = reader.read_json(reader.follow(path / stage) / files.STARTED)
        if "settings" in started:
            made_from[stage] = fingerprint(started["settings"])
    return RunResults(
        path=path,
        name=path.resolve().name,
        config=read_config(config, mask) if config and isinstance(config, dict) else {},
        mask=mask,
        rows=[row for row in rows if not condition(row)],
        variants=[row for row in rows if condition(row)],
        samples=samples,
        examples=examples,
        training=training,
        mask_cost=cost | dict(mask.settings) | dict(mask.score_trace or {}) if mask else cost,
        stage_seconds=stage_seconds,
        ending=reader.read_json(path / "train" / files.ENDING),
        problems=reader.problems,
        commit=record.get("commit"),
        made_from=made_from,
    )


def read_config(stored: Mapping[str, object], mask: MaskFile | None) -> dict[str, Any]:
    """A config as a run stored it. Earlier runs stored the sink as `auto`, which depended on the
    method then; their mask has the one that they had."""
    config = fill_in(stored)
    if config["sink"] == "auto" and mask is not None:
        config["sink"] = str(mask.mask.sink)
    return config


def read_evaluation(folder: Path) -> tuple[list[Row], dict[str, Samples]]:
    """All results of one evaluation, and by suite the scores of single examples."""
    rows: list[Row] = []
    samples: dict[str, Samples] = {}
    for suite_rows, suite_samples, _ in _Reader().read_evaluation(folder):
        rows += suite_rows
        samples[suite_rows[0]["suite"]] = suite_samples
    return rows, samples


@dataclass(frozen=True)
class _Reader:
    """Reads what can be read, and notes what cannot."""

    problems: list[str] = field(default_factory=list)

    def attempt(self, read: Callable[[], Found], default: Found) -> Found:
        try:
            return read()
        except UserError as error:
            self.problems.append(str(error))
            return default

    def follow(self, folder: Path) -> Path:
        place = self.attempt(lambda: follow_reference(folder), folder)
        if place != folder and not place.is_dir():  # a linked run may have left `shared` behind
            place = self.attempt(lambda: follow_reference(folder.resolve()), folder)
        if place != folder and not place.is_dir():
            advice = f"copy a run together with {SHARED}"
            self.problems.append(f"{folder} names {place}, which is not there; {advice}")
        return place

    def read_json(self, path: Path) -> dict[str, Any]:
        """The object in a file; empty if there is no file, or a damaged one."""
        return self.attempt(lambda: read_json_object(path), {}) if path.is_file() else {}

    def read_lines(self, path: Path) -> list[dict[str, Any]]:
        """The rows of a file that may still be growing: its last line may be half written."""
        rows = []
        for number, row in files.read_lines(path):
            if row is None:
                self.problems.append(f"{path}, line {number} is damaged")
            else:
                rows.append(row)
        return rows

    def read_evaluations(
        self, folder: Path
    ) -> tuple[list[Row], dict[EvaluationKey, Samples], dict[EvaluationKey, dict[Cell, str]]]:
        # The run's own evaluations first, then other windows and lengths from small to large:
        # tables keep this order.
        places: list[tuple[int, Path, dict[str, int]]] = [(0, p, {}) for p in folder.glob("*/")]
        for name, column in VARIANTS.items():
            for path in (folder / name).glob("*/"):
                if (digits := path.name.removesuffix("-dense")).isdecimal():
                    places.append((int(digits), path, {column: int(digits)}))
        rows: list[Row] = []
        samples: dict[EvaluationKey, Samples] = {}
        examples: dict[EvaluationKey, dict[Cell, str]] = {}
        for _, path, columns in sorted(places, key=lambda place: place[:2]):
            for suite_rows, suite_samples, suite_examples in self.read_evaluation(path):
                valid: list[Row] = [{**row, **columns} for row in suite_rows]
                rows += valid
                key = (valid[0]["step"], valid[0]["suite"], condition(valid[0]))
                samples[key], examples[key] = suite_samples, suite_examples
        return rows, samples, examples

    def read_evaluation(self, folder: Path) -> Iterator[tuple[list[Row], Samples, dict[Cell, str]]]:
        """Of each suite, if it has a result."""
        for file in sorted(self.follow(folder).glob(f"*/{SCORES}")):
            written = self.read_json(file).get("rows")
            written = written if isinstance(written, list) else []
            valid = [row for row in written if _is_row(row)]
            if num_damaged := len(written) - len(valid):
                self.problems.append(f"{file}: left out {num_damaged} rows without a value")
            if valid:
                path = file.with_name(PREDICTIONS)
                predictions = self.read_lines(path)
                samples = self._read_samples(path, predictions, valid[0]["suite"])
                yield valid, samples, hash_examples(predictions)

    def _read_samples(self, file: Path, rows: Sequence[Row], suite: str) -> Samples:
        """Scores of single examples, in percent, by the metric that counts. file: of the rows."""
        headline = reporting_of(suite).headline_metric
        samples: dict[tuple[str, int], dict[int, float]] = {}
        num_read = 0
        for row in rows:
            try:
                scores, cell, index = row["scores"], (row["task"], row["length"] or 0), row["index"]
                # The metric that counts, as in the suite's averages. A suite that names none has
                # one metric, or means its first.
                value = float(scores[headline(cell[0]) or next(iter(scores))])
            except (KeyError, TypeError, ValueError, StopIteration):
                continue
            if math.isfinite(value):
                samples.setdefault(cell, {})[index] = 100 * value
                num_read += 1
        if num_damaged := len(rows) - num_read:
            self.problems.append(f"{file}: left out {num_damaged} rows without a score")
        return samples


def hash_examples(predictions: Sequence[Row]) -> dict[Cell, str]:
    """Of each part whose examples all have a hash, one of all."""
    found: dict[Cell, dict[int, str | None]] = {}
    for row in predictions:
        with suppress(KeyError, TypeError):
            found.setdefault((row["task"], row["length"] or 0), {})[row["index"]] = row.get(EXAMPLE)
    return {
        cell: fingerprint(sorted(each.items()))
        for cell, each in found.items()
        if all(each.values())
    }


def _is_row(row: object) -> bool:
    names = ("step", "tokens", "suite", "task", "length", "metric", "value", "n")
    if not isinstance(row, dict) or any(name not in row for name in names):
        return False
    return isinstance(row["value"], int | float) and math.isfinite(row["value"])


# -------------------------------------------------------------------------------------- archives


def is_archive(path: Path) -> bool:
    """By its name and first line: benchmarks also write rows into runs/. One that is damaged, or
    cannot be read, is named when it is read."""
    if not (path.name.endswith((".jsonl", ".jsonl.gz")) and path.is_file()):
        return False
    try:
        first = _read_content(path).partition(b"\n")[0]
    except UserError:
        return True
    ((_, record),) = files.parse_lines(first + b"\n")
    return record is None or {"mask", "rows", "samples"} <= record.keys()


def _read_content(archive: Path) -> bytes:
    try:
        content = archive.read_bytes()
        return gzip.decompress(content) if archive.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} cannot be read ({error}); name another file.") from error


def append_run(archive: Path, run: RunResults) -> None:
    """Add a run as the last line. The file is replaced at once: a kill leaves the old one. Sweeps
    that share it wait for each other."""
    record: dict[str, Any] = {name: getattr(run, name) for name in COPIED_FIELDS}
    record["mask"] = None
    if run.mask is not None:
        record["mask"] = asdict(run.mask)
        record["mask"]["mask"]["sink"] = str(run.mask.mask.sink)
    record["rows"] = [*run.rows, *run.variants]
    record["samples"] = [
        [*key, *cell, [scores.get(index) for index in range(max(scores) + 1)]]
        for key, cells in run.samples.items()
        for cell, scores in cells.items()
    ]
    record["examples"] = [
        [*key, *cell, one] for key, cells in run.examples.items() for cell, one in cells.items()
    ]
    record["training"] = [{n: row[n] for n in TRAINING_FIELDS if n in row} for row in run.training]
    # Sealed: a line that was damaged in copying is named when it is read, and no run is read half.
    line = files.sealed_lines([record])
    archive.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(archive.with_name(f".{archive.name}.lock")):
        before = archive.read_bytes() if archive.is_file() else b""
        if archive.suffix == ".gz":
            line = gzip.compress(line)
        elif before:
            before = before.rstrip(b"\n") + b"\n"  # reading allows a last line without one
        files.write_atomically(archive, before + line)


def read_archive(archive: Path) -> list[RunResults]:
    """Of several lines on one run (same name and settings), the last one."""
    runs: dict[Hashable, RunResults] = {}
    content = _read_content(archive)
    for number, record in files.parse_lines(content.rstrip(b"\n") + b"\n"):  # a torn line counts
        try:
            if record is None:
                raise ValueError("its checksum differs")
            run = _parse_run(archive, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{archive}, line {number} is not a run that `bosch sweep --rows` wrote "
                f"({error!r}). Delete the line, or name another file."
            ) from error
        runs[run.path, str(run.config), run.method, run.mask and run.mask.model] = run
    return list(runs.values())


def _parse_run(archive: Path, record: Mapping[str, Any]) -> RunResults:
    mask = record["mask"]
    if mask is not None:
        groups = GroupMask(
            z=tuple(map(tuple, mask["mask"]["z"])),
            window_tokens=mask["mask"]["window_tokens"],
            unit=mask["mask"]["unit"],
            sink=Sink.parse(mask["mask"].get("sink", "none")),  # earlier archives have none
            own_windows=tuple(mask["mask"].get("own_windows", ())),  # the same
        )
        mask = MaskFile(**mask | {"mask": groups, "model": ModelInfo(**mask["model"])})
    samples: dict[EvaluationKey, Any] = {}
    for step, suite, under, task, length, scores in record["samples"]:
        known = {index: score for index, score in enumerate(scores) if score is not None}
        samples.setdefault((step, suite, under), {})[task, length] = known
    examples: dict[EvaluationKey, dict[Cell, str]] = {}
    for step, suite, under, task, length, one in record.get("examples", []):  # earlier: none
        examples.setdefault((step, suite, under), {})[task, length] = one
    return RunResults(
        path=files.path_inside(archive, record["name"], archive, flat=True),
        name=record["name"],
        commit=record["commit"],
        config=read_config(record["config"], mask),
        mask=mask,
        rows=[row for row in record["rows"] if not condition(row)],
        variants=[row for row in record["rows"] if condition(row)],
        samples=samples,
        examples=examples,
        training=record["training"],
        mask_cost=record["mask_cost"],
        stage_seconds=record["stage_seconds"],
        ending=record.get("ending", {}),  # earlier archives have none
        made_from=record.get("made_from", {}),  # the same
    )
