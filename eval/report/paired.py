"""A model beside another on the same examples: how many points above it, and how much it keeps of
what the other answers.

What the dense model cannot answer tells nothing about windows, since it is wrong in both. So there
are two numbers: the difference over all examples, and of those that the other model answers the
share that this one answers too. Where an example is answered in part, the smaller part of the two
is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from bosch.eval.report.compare import Comparison
from bosch.eval.report.intervals import (
    Estimate,
    Numbers,
    Point,
    estimate,
    gap_at,
    make_curve,
    resample_examples,
    unseen,
)
from bosch.eval.report.runs import RunResults, read_evaluation
from bosch.eval.results import DTYPE, EXAMPLE, PREDICTIONS, SCORES, read_scores
from bosch.eval.suites._reporting import ReportedScore, Samples, reporting_of
from bosch.run.errors import UserError
from bosch.run.files import read_lines
from bosch.run.stage import follow_reference

# Settings of a suite that only say which of its examples are used. Others decide what they are.
CHOICES = {"tasks", "lengths", "samples", "datasets", "categories"}
# Settings that name files. Two names may be of the same content, which the examples' hashes show.
NAMES_OF_FILES = {"essays", "punkt", "data", "gsm8k", "squad", "hotpot", "english_words"}


@dataclass(frozen=True)
class Paired:
    score: ReportedScore
    value: float  # percent, on the examples that both answered
    other: float
    difference: Estimate  # points above the other model
    kept: Estimate  # share of what the other answers; undefined if that is nothing
    num_examples: int
    unseen: float  # points that it may differ by if no example does


def pair(score: ReportedScore, ours: Samples, other: Samples) -> Paired | None:
    """None: there are no common examples in a part of the score, or its parts are unknown."""
    known = {cell: ours.get(cell, {}).keys() & other.get(cell, {}).keys() for cell in score.weights}
    if not known or not all(known.values()):
        return None
    mine, both, theirs = {}, {}, {}
    for cell, indexes in known.items():
        mine[cell] = {index: ours[cell][index] for index in sorted(indexes)}
        theirs[cell] = {index: other[cell][index] for index in mine[cell]}
        both[cell] = {index: min(mine[cell][index], theirs[cell][index]) for index in mine[cell]}
    points = {
        step: Point(sum(w * fmean(samples[cell].values()) for cell, w in score.weights.items()))
        for step, samples in {None: theirs, 0: mine, 1: both}.items()
    }
    # A curve of two points: the score, and what of it is the other model's too.
    drawn = resample_examples([mine, both], theirs, score.weights, score.suite)
    curve = make_curve(RunResults(Path(), ""), score, points, drawn)

    def kept(tokens: Numbers, values: Numbers, dense: Numbers) -> Numbers:
        return values[..., 1] / np.where(dense > 0, dense, np.nan)

    return Paired(
        score=score,
        value=points[0].value,
        other=points[None].value,
        difference=estimate([curve], gap_at(0)),
        kept=estimate([curve], kept),
        num_examples=sum(map(len, known.values())),
        unseen=unseen(score.weights, known),
    )


def beside_dense(comparison: Comparison) -> Iterator[tuple[RunResults, int, Paired]]:
    """Of each run and headline the first and the last checkpoint, beside the dense model."""
    for run in comparison.runs:
        for score in comparison.headlines:
            curve = comparison.curves[run.name, score]
            steps = curve.steps
            for step in sorted({*steps[:1], *steps[-1:]}):
                # The curve's score: of the tasks and lengths that this run was asked.
                if found := at_step(run, curve.score, step):
                    yield run, step, found


def at_step(run: RunResults, score: ReportedScore, step: int) -> Paired | None:
    """A checkpoint beside the dense model."""
    ours, dense = (run.samples.get((each, score.suite, ""), {}) for each in (step, None))
    return pair(score, ours, dense)


def examples_of(predictions: Path) -> dict[tuple[str, int, int], str]:
    """What each example is, as a hash. Evaluations of earlier versions do not say it."""
    rows = [row for _, row in read_lines(predictions) if row and EXAMPLE in row]
    return {(row["task"], row["length"], row["index"]): row[EXAMPLE] for row in rows}


def differing_dtypes(folder: Path, other: Path) -> Iterator[str]:
    """A line for each suite that the two answered in different number formats."""
    dtypes = [
        {row["suite"]: row[DTYPE] for row in rows if DTYPE in row}
        for rows, _ in (read_evaluation(follow_reference(each)) for each in (folder, other))
    ]
    for suite in dtypes[0].keys() & dtypes[1].keys():
        ours, theirs = (each[suite] for each in dtypes)
        if ours != theirs:
            yield f"{suite}: {folder} is in {ours}, {other} in {theirs}; near ties differ by that"


def pair_evaluations(folder: Path, other: Path) -> Iterator[Paired]:
    """Two folders of evaluations: every score of the suites that both have."""
    places = [follow_reference(each) for each in (folder, other)]  # a run's dense model is shared
    (our_rows, ours), (_, theirs) = map(read_evaluation, places)
    for suite in ours:
        if not ours[suite] or not theirs.get(suite):
            continue  # the scores of single examples are unknown, as of lm-eval's tasks
        mine, their = (read_scores(path / suite / SCORES)["settings"] for path in places)
        examples = [examples_of(path / suite / PREDICTIONS) for path in places]
        known = CHOICES | (NAMES_OF_FILES if all(examples) else set())
        differing = [n for n in mine if n not in known and mine[n] != their.get(n)]
        if differing:
            names = ", ".join(f"{name} {mine[name]} and {their.get(name)}" for name in differing)
            raise UserError(
                f"{other} cannot be compared with {folder} on {suite}: their examples differ in "
                f"{names}. Evaluate both models with the same options."
            )
        mine, their = examples
        both = mine.keys() & their.keys()
        if num_other := sum(mine[key] != their[key] for key in both):
            raise UserError(
                f"{other} cannot be compared with {folder} on {suite}: {num_other} of "
                f"{len(both)} examples have another text, as with another tokenizer or changed "
                "data. Evaluate both models on the same texts."
            )
        common = ours[suite].keys() & theirs[suite].keys()
        # Averages that a suite wrote are of all its tasks.
        has_all = common == ours[suite].keys()
        rows = [
            row
            for row in our_rows
            if row["suite"] == suite and (has_all or (row["task"], row["length"] or 0) in common)
        ]
        for score in reporting_of(suite).reported_scores(rows):
            if found := pair(score, ours[suite], theirs[suite]):
                yield found
