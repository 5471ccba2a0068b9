"""What came out, in one sentence for each run: level with the dense model, or how far from it. And
the scores that a model card shows.

The numbers are those of eval/report/paired.py, on the examples that both models answered.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from bosch.eval.report.compare import Comparison, compare
from bosch.eval.report.intervals import LEVEL
from bosch.eval.report.paired import Paired, at_step
from bosch.eval.report.runs import RunResults
from bosch.eval.report.tables import MISSING, show_change, show_estimate, show_points, show_tokens
from bosch.eval.suites._reporting import ReportedScore
from bosch.run.plain_text import markdown, markdown_table

LEVEL_POINTS = 5.0  # an interval around zero that reaches further than this is not called level
MOST_SCORES = 4  # in the sentence; a suite without an average has a score for each task


def verdict(comparison: Comparison, run: RunResults) -> str | None:
    """How far the run's last checkpoint is from the dense model. None: it is not known."""
    found = list(_beside_dense(comparison, run))
    more = [f"{len(found) - MOST_SCORES} more scores below"] if found[MOST_SCORES:] else []
    words = [f"{score.headline}: {text}" for score, text in found[:MOST_SCORES]]
    return "; ".join(words + more) if words else None


def _beside_dense(comparison: Comparison, run: RunResults) -> Iterator[tuple[ReportedScore, str]]:
    for score in comparison.headlines:
        curve = comparison.curves[run.name, score]
        if not curve.steps or math.isnan(curve.dense):
            continue
        # The curve's score: of the tasks and lengths that this run was asked.
        if paired := at_step(run, curve.score, curve.steps[-1]):
            yield score, describe_difference(paired)
        else:  # single examples are not known, or not the same ones were asked
            points = curve.values[-1] - curve.dense
            yield score, f"{_away(points)} (n = {curve.points[curve.steps[-1]].n:,}, no interval)"


def describe_difference(paired: Paired) -> str:
    """`level with the dense model within ±1.9 points (n = 600)`."""
    points, low, high = paired.difference.value, paired.difference.low, paired.difference.high
    count = f"n = {paired.num_examples:,}"
    if points is None or low is None or high is None:
        return f"{_away(paired.value - paired.other)} ({count}, no interval)"
    interval = f"[{show_change(low)}, {show_change(high)}]"
    if low > 0 or high < 0:
        return f"{_away(points)} {interval} ({count})"
    bound = max(-low, high) or paired.unseen
    if bound <= LEVEL_POINTS:
        return f"level with the dense model within ±{bound:.1f} points ({count})"
    shown = f"{show_change(points)} points {interval}" if low < high else f"±{bound:.0f} points"
    return f"no clear difference from the dense model: {shown} ({count})"


def _away(points: float) -> str:
    if not round(points, 1):
        return "at the dense model's score"
    return f"{abs(points):.1f} points {'below' if points < 0 else 'above'} the dense model"


def write_cards(run_path: Path) -> None:
    """Put the scores of each evaluated model of a run into its card."""
    from bosch.hybrid.export import put_scores  # imports torch, which reports do without

    comparison = compare([run_path])
    (run,) = comparison.runs
    for step in sorted({row["step"] for row in run.rows if row["step"] is not None}):
        folder = model_of(run_path, step)
        if folder.is_dir():
            put_scores(folder, card_lines(comparison, step))


def model_of(run_path: Path, step: int) -> Path:
    """The folder of the model that was evaluated at a step."""
    return run_path / (f"train/step-{step:06d}" if step else "model")


def card_lines(comparison: Comparison, step: int) -> list[str]:
    (run,) = comparison.runs
    rows = []
    for score in comparison.headlines:
        points = comparison.curves[run.name, score].points
        if step in points:
            dense, paired = points.get(None), at_step(run, score, step)
            rows.append(
                (
                    score.title,
                    show_points(points[step].value),
                    MISSING if dense is None else show_points(dense.value),
                    MISSING if paired is None else show_estimate(paired.difference, show_change),
                    f"{points[step].n:,}",
                )
            )
    tokens = {row["tokens"] for row in run.rows if row["step"] == step}
    trained = f"after {show_tokens(max(tokens))} tokens of training" if step else "without training"
    return [
        f"In percent, {trained} (run {markdown(run.name)}). Difference: in points, on the same "
        f"examples, with a {LEVEL:.0%} bootstrap interval; n: number of examples.",
        "",
        *markdown_table(("score", "this model", "dense model", "difference", "n"), rows),
    ]
