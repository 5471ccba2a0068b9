"""Recomputes from rows of single questions how models differ, and adds rows of new evaluations.

    python -m benchmarks pairs --rows benchmarks/results/real-length.jsonl
    python -m benchmarks pairs --rows rows.jsonl --add dense=RUN/eval/dense new=RUN/eval/step-000075

With several files of rows models are compared by the tasks of all of them together, as the mean of
two suites.

A row is a question: who answered it, its task, length and number there, and its scores, of which
the first counts, or `--score`. A model is compared with `--baseline` on the questions that both
were asked: the mean of the tasks, listed in the order of the file, the difference in points, and in
brackets its 95 % interval, for which questions are drawn within each task. Intervals say nothing of
other seeds, masks or calibration sets, but that of the mean of the models in `--together`, which
are one method by several of them; with `--beside` each of these is compared with another one, as
another method by the same set. `kept` is, of what the baseline answers, the share that the model
answers too: less than the share of the averages, as a model also answers what the baseline does
not. `bosch compare` has differences and `kept` as well.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks._measure import (
    BenchmarkOptions,
    Row,
    append_rows,
    difference_of_sets,
    read_rows,
    shown_difference,
)
from bosch.eval.results import PREDICTIONS
from bosch.eval.rows import read_rows as read_predictions
from bosch.run.errors import MissingFileError, UserError
from bosch.run.stage import follow_reference

TITLE = "against {baseline}"
COLUMNS = {"model": "model", "length": "length:,", "n": "questions", "%": "value:.1f"}
COLUMNS |= {"difference": "difference", "kept, %": "kept_interval", "by task": "by_task"}
REPLICATES = 10_000

Scores = dict[str, dict[int, float]]  # of a model: task -> number of the question -> points


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    # One question a line. --add appends to the first.
    rows: tuple[Path, ...] = (Path("benchmarks/results/real-length.jsonl"),)
    baseline: str = "dense"  # the model that others are compared with
    score: str | None = None  # which of a question's scores, as quarter_1; None: its first
    together: tuple[str, ...] = ()  # models that differ in seed or calibration set alone
    # As many models, with which those of --together are compared one by one; none: the baseline.
    beside: tuple[str, ...] = ()
    add: tuple[str, ...] = ()  # evaluations to append to the rows first: NAME=FOLDER


def measure(options: Options) -> Iterator[Row]:
    added = [read_evaluation(named) for named in options.add]  # all, before one is appended
    if added:
        options.rows[0].parent.mkdir(parents=True, exist_ok=True)
        append_rows(options.rows[0], itertools.chain.from_iterable(added))
    models_of = read_models(options)
    shown = ", ".join(map(str, options.rows))
    if not models_of:
        raise UserError(f"--score {options.score}: no question in {shown} has it.")
    names = {name for models in models_of.values() for name in models}
    if options.beside and len(options.beside) != len(options.together):
        raise UserError(
            f"--beside names {len(options.beside)}, --together {len(options.together)}."
        )
    asked = {"together": options.together, "beside": options.beside}
    for flag, wanted in ({"baseline": (options.baseline,)} | asked).items():
        for name in wanted:
            if name not in names:
                known = ", ".join(sorted(names))
                raise UserError(f"--{flag} {name}: {shown} has {known}.")
    for (length, score), models in models_of.items():
        for name, ours in models.items():
            row = {"model": name, "length": length, "score": score}
            yield row | compared(ours, models.get(options.baseline))
        others = options.beside or [options.baseline] * len(options.together)
        pairs = [
            (models[name], models.get(other))
            for name, other in zip(options.together, others, strict=True)
            if name in models
        ]
        if len(pairs) > 1:
            row = {"model": f"mean of {len(pairs)}", "length": length, "score": score}
            yield row | mean_of(pairs)


def read_models(options: Options) -> dict[tuple[int, str], dict[str, Scores]]:
    """By length and kind of score, which tasks of one suite have in common; of several files by
    length, the models that are in all of them."""
    found: dict[tuple[int, str], dict[str, Scores]] = defaultdict(dict)
    in_all: list[set[str]] = []
    for file in options.rows:
        if not file.is_file():
            raise MissingFileError(f"{file} does not exist. --add NAME=FOLDER makes it.")
        in_all.append(set())
        for row in read_rows(file):
            score = options.score or next(iter(row["scores"]))
            if score not in row["scores"]:
                continue  # a question of another suite
            kind = score if len(options.rows) == 1 else "all"
            tasks = found[row["length"], kind].setdefault(row["model"], {})
            answers, index = tasks.setdefault(row["task"], {}), row["index"]
            if answers.setdefault(index, 100 * row["scores"][score]) != 100 * row["scores"][score]:
                what = f"question {index} of {row['task']} by {row['model']} has two scores"
                raise UserError(f"{file}: {what}; keep one of the rows.")
            in_all[-1].add(row["model"])
    known = set.intersection(*in_all)
    return {
        key: {name: scores for name, scores in models.items() if name in known}
        for key, models in found.items()
    }


def read_evaluation(named: str) -> list[Row]:
    """The questions of all suites that `bosch evaluate`, or a run, has in a folder: NAME=FOLDER."""
    name, equals, given = named.partition("=")
    folder = Path(given)
    if equals and folder.is_dir():
        folder = follow_reference(folder)  # a run's dense model is shared
    files = sorted(folder.glob(f"*/{PREDICTIONS}"))
    if not (name and equals and files):
        raise UserError(f"--add {named}: expected NAME=FOLDER with SUITE/{PREDICTIONS} in it.")
    asked = ("task", "length", "index", "scores")
    found = (row for file in files for row in read_predictions(file))
    return [{"model": name} | {key: row[key] for key in asked} for row in found]


def compared(ours: Scores, theirs: Scores | None) -> Row:
    """Means over tasks, of the questions that both were asked. theirs: None if the baseline was
    asked nothing of the kind."""
    both = {task: sorted(set(ours[task]) & set((theirs or ours).get(task, {}))) for task in ours}
    both = {task: numbers for task, numbers in both.items() if numbers}
    means = task_means(ours, both)
    row: Row = {
        "questions": sum(map(len, both.values())),
        "value": fmean(means.values()) if means else float("nan"),
        "unit": "%",
        "difference": "",
        "kept": None,
        "kept_interval": "",
        "tasks": list(means),
        "by_task": ", ".join(f"{mean:.0f}" for mean in means.values()),
    }
    if theirs is None or theirs is ours or not both:
        return row
    # Of a question that is answered in part the smaller part of the two is kept.
    kept = {
        task: {number: min(ours[task][number], theirs[task][number]) for number in numbers}
        for task, numbers in both.items()
    }
    # The same questions are drawn for all three.
    random = np.random.default_rng(0)
    drawn = {name: np.zeros(REPLICATES) for name in ("ours", "theirs", "kept")}
    for task, numbers in both.items():
        places = random.integers(len(numbers), size=(REPLICATES, len(numbers)))
        for name, scores in (("ours", ours), ("theirs", theirs), ("kept", kept)):
            values = np.array([scores[task][number] for number in numbers])
            drawn[name] += values[places].mean(1) / len(both)
    baseline = fmean(task_means(theirs, both).values())
    points, counts = row["value"] - baseline, [len(numbers) for numbers in both.values()]
    row["difference"] = shown_difference(points, drawn["ours"] - drawn["theirs"], counts)
    if baseline:
        row["kept"] = 100 * fmean(task_means(kept, both).values()) / baseline
        known = drawn["theirs"] > 0  # of nothing no share is kept
        low, high = np.percentile(100 * drawn["kept"][known] / drawn["theirs"][known], [2.5, 97.5])
        row["kept_interval"] = f"{row['kept']:.0f} [{low:.0f}, {high:.0f}]"
    return row


def mean_of(pairs: Sequence[tuple[Scores, Scores | None]]) -> Row:
    """Of models, each beside the one that it is compared with, of the questions that all of them
    were asked. Each question counts as answered by the mean of the models, and how they differ is
    in the interval."""
    asked = [each for pair in pairs for each in pair if each is not None]
    tasks = [task for task in pairs[0][0] if all(task in each for each in asked)]
    both = {task: sorted(set.intersection(*(set(each[task]) for each in asked))) for task in tasks}
    both = {task: numbers for task, numbers in both.items() if numbers}
    mean = {
        task: {number: fmean(ours[task][number] for ours, _ in pairs) for number in numbers}
        for task, numbers in both.items()
    }
    row = compared(mean, None)
    compared_with = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    if len(compared_with) == len(pairs) and both:
        row["difference"] = difference_of_sets(
            [
                np.array(
                    [
                        [ours[task][n] - theirs[task][n] for n in numbers]
                        for ours, theirs in compared_with
                    ]
                )
                for task, numbers in both.items()
            ]
        )
    return row


def task_means(scores: Scores, asked: Mapping[str, list[int]]) -> dict[str, float]:
    return {task: fmean(scores[task][number] for number in asked[task]) for task in asked}
