"""The report on runs: report.html (self-contained), table.md, pictures, rows. The answers and the
warnings on the page are here too; a terminal shows them as well.

report.html    the answer, pictures, tables; for a browser
table.md       the tables, to paste elsewhere
*.png          the same pictures, for papers: recovery, scores before training, tasks, losses
results.jsonl  every result of every run
recovery.jsonl how far and how fast each run recovers, with intervals
"""

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from bosch.eval.report import tables
from bosch.eval.report.compare import (
    LOSS,
    TRAINING,
    Comparison,
    Recovery,
    by_text,
    is_as_long,
)
from bosch.eval.report.intervals import NEVER, Curve, Estimate, estimate, gap_at
from bosch.eval.report.paired import beside_dense
from bosch.eval.report.pictures import draw_pictures
from bosch.eval.report.runs import RunResults
from bosch.eval.report.verdict import verdict
from bosch.eval.results import DTYPE
from bosch.eval.rows import Row, write_rows
from bosch.eval.suites._reporting import reporting_of
from bosch.masks.picture import mask_lines, mask_title
from bosch.run.errors import UserError
from bosch.run.files import write_atomically
from bosch.run.plain_text import markdown, markdown_table, visible
from bosch.run.stage import flatten

TEMPLATE = "report.html.jinja"  # beside this file, with its style


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Write the report into `out`. Returns the files written."""
    import jinja2
    from markupsafe import Markup

    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{out} is not a folder; name another one for the report.") from error
    all_tables, lines = [*tables.make_tables(comparison).values()], warnings(comparison)
    pictures = draw_pictures(comparison, out)
    text = ["## Warnings", "", *(f"- {markdown(line)}" for line in lines), ""] if lines else []
    for table in all_tables:
        text += [f"## {markdown(table.title)}", "", *markdown_table(table.header, table.rows), ""]
        text += [table.note, ""] if table.note else []
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, "utf-8"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Names of runs and tasks come from files of others: what cannot be printed is shown as an
        # escape, and nothing of them is taken for HTML.
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
    )
    page = environment.get_template(TEMPLATE).render(
        answers=answers(comparison),
        warnings=lines,
        # One file that can be sent: the pictures are in the page.
        pictures={name: b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        tables=all_tables,
        runs=comparison.runs,
        flatten=flatten,
    )
    paths = [out / name for name in ("report.html", "table.md", "results.jsonl", "recovery.jsonl")]
    rows = [{**r, "run": run.name} for run in comparison.runs for r in (*run.rows, *run.variants)]
    write_atomically(paths[0], page)
    write_atomically(paths[1], "\n".join(text))
    write_rows(paths[2], rows)
    write_rows(paths[3], recovery_rows(comparison))
    return [*paths, *pictures.values()]


def recovery_rows(comparison: Comparison) -> list[Row]:
    """A row per run, suite and statistic; for its first and last checkpoint beside the dense model;
    with a baseline also one per setup, score and statistic. "never": not reached."""
    rows: list[Row] = []

    def add(names: Row, statistic: str, found: Estimate, cost: Row | None = None) -> None:
        numbers = {"value": found.value, "low": found.low, "high": found.high}
        written = {key: "never" if number == NEVER else number for key, number in numbers.items()}
        rows.append(names | {"statistic": statistic} | written | (cost or {}))

    for recovery in comparison.recoveries:
        run = recovery.curve.run
        score, is_clear = recovery.curve.score, recovery.has_clear_gap
        # Written also where the gap is not clear, for who counts otherwise; a reader of rows can
        # leave them out.
        names = {"run": run.name, "suite": score.suite, "score": score.name, "clear_gap": is_clear}
        add(names, "gap_share", recovery.gap_share)
        for share, tokens in recovery.tokens_to.items():
            spent = run.spent_until(tokens.value)
            cost: Row = {"flops": spent and spent.flops, "hours": spent and spent.hours}
            if spent and spent.lacks_lessons:
                cost["lacks_lessons"] = True
            add(names, f"tokens_to_{100 * share:.0f}", tokens, cost)
    for of_run, step, paired in beside_dense(comparison):
        score = paired.score
        names = {"run": of_run.name, "step": step, "suite": score.suite, "score": score.name}
        names["n"] = paired.num_examples
        add(names, "points_beside_dense", paired.difference)
        add(names, "share_kept_of_dense", paired.kept)
    for row in comparison.differences:
        names = {"runs": row.setup, "suite": row.score.suite, "score": row.score.name}
        for statistic, points in (("start", row.start), ("end", row.end)):
            if points.num_seeds:
                seeds = {"seeds": points.num_seeds}
                add(names | seeds, f"{statistic}_beside_baseline", points)
    return rows


# -------------------------------------------------------------------------------------- in words


def summarize(comparison: Comparison) -> Iterator[str | Text]:
    """The comparison's only run: in a sentence what came out, then its mask, what it costs and
    saves, and the scores of every checkpoint."""
    (run,) = comparison.runs
    if sentence := verdict(comparison, run):
        yield Text(visible(sentence), "bold")
    if run.mask is not None:
        yield f"mask: {mask_title(run.mask)}; ## full, :: window, share windowed"
        yield from mask_lines(run.mask)
        yield f"KV bytes saved: {tables.kv_saved(run)}"
        if (score := tables.calibration_score(run)) != tables.MISSING:
            yield f"calibration questions answered right (dense model): {score}"
    yield from tables.align(tables.checkpoint_table(comparison, run))
    for recovery in comparison.recoveries:
        yield describe(recovery.curve, recovery)


def answers(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Each run's name and what came out of it: a sentence on how far it is from the dense model,
    its mask and the KV bytes saved, then for each suite how much of the gap was recovered. The best
    by the first suite come first."""
    recovered = {(row.curve.run.name, row.curve.score): row for row in comparison.recoveries}
    found = []
    for run in comparison.runs:
        lines, ends = ["no mask yet"], []
        if run.mask is not None:
            mask = run.mask.mask
            lines = [
                f"{run.method}, {mask.num_windowed} of {mask.num_total} KV groups on a window of "
                f"{mask.window_tokens:,} tokens, sink {mask.sink}; KV bytes saved: "
                f"{tables.kv_saved(run)}"
            ]
        for score in [*comparison.headlines, LOSS]:
            curve, recovery = comparison.curves[run.name, score], recovered.get((run.name, score))
            # Sorted by the first suite's last score, then by the next; runs that were not evaluated
            # come last.
            ends.append(-curve.values[-1] if curve.steps else math.inf)
            if recovery or (curve.steps and score is not LOSS):
                lines.append(describe(curve, recovery))
        if sentence := verdict(comparison, run):
            lines.insert(0, sentence)
        found.append((ends, run.name, lines))
    return [(name, lines) for _, name, lines in sorted(found, key=lambda one: one[0])]


def describe(curve: Curve, recovery: Recovery | None) -> str:
    """How far a score is from the dense model's. No recovery: only one checkpoint is known."""

    def gap(place: int) -> str:
        if curve.score is LOSS:
            return f"{curve.dense - curve.values[place]:+.3f}"
        return tables.show_estimate(estimate([curve], gap_at(place)), tables.show_change)

    title = curve.score.headline
    dense = f"({-curve.dense:.3f})" if curve.score is LOSS else f"({curve.dense:.1f})"
    tokens = tables.show_tokens(curve.tokens[-1])
    when = f"after {tokens} tokens" if curve.steps[-1] else "before training"
    if math.isnan(curve.dense):
        return f"{title}: {curve.values[-1]:.1f} {when}; the dense model was not evaluated"
    if recovery is None:
        return f"{title}: {gap(-1)} points from the dense model {dense} {when}"
    unit = "" if curve.score is LOSS else " points"
    ends = f"from {gap(0)} to {gap(-1)}{unit} {when}"
    if recovery.has_clear_gap and recovery.gap_share.low is None:
        # A share of the gap that no interval carries is not shown.
        return f"{title}: {ends}, beside the dense model {dense}"
    share, needed = tables.show_gap_share(recovery), recovery.num_needed
    if needed is None or not recovery.has_clear_gap:
        outcome = f"before training {share}"
        if recovery.has_clear_gap:
            outcome = f"recovered {share} of the gap"
        return f"{title}: {outcome} to the dense model {dense}, {ends}"
    # The option counts examples of each task, the interval all of them.
    what, option = "examples", f" (--eval.samples {math.ceil(needed / len(curve.score.weights))})"
    if curve.score is LOSS:
        what, option = "held-out sequences", f" (--data.held-out-sequences {needed})"
    few = f"{recovery.num_examples:,} {what} are too few to tell how much of the gap to the dense"
    end = f"about {needed:,} would do{option}"
    return f"{title}: {few} model {dense} was recovered, {ends}; {end}"


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before the numbers: missing parts, runs that are not comparable."""
    lines = [f"{run.name}: {problem}" for run in comparison.runs for problem in run.problems]
    for run in comparison.runs:
        if run.ending:
            steps = f"step {run.ending.get('end')} of {run.ending.get('of')}"
            lines.append(f"{run.name}: training ended early, at {steps}, so that --hours held")
    lacking: dict[str, list[str]] = {}
    for run in comparison.runs:
        for part in missing_parts(comparison, run):
            lacking.setdefault(part, []).append(run.name)
    lines += [f"{list_runs(names)}: {part}" for part, names in lacking.items()]
    lines += different_examples(comparison)
    lines += different_dtypes(comparison)
    ends: dict[float, list[str]] = {}  # tokens at the end of a training -> runs
    of_runs: dict[str, float] = {}
    for curve in (recovery.curve for recovery in comparison.recoveries):
        of_runs[curve.run.name] = max(curve.tokens[-1], of_runs.get(curve.run.name, 0))
    for name, last in of_runs.items():
        # Within a hundredth: a learned mask takes whole steps of the budget, so sums differ
        # slightly.
        end = next((tokens for tokens in ends if is_as_long(tokens, last)), last)
        ends.setdefault(end, []).append(name)
    if len(ends) > 1:
        listed = [f"{tables.show_tokens(end)} in {list_runs(names)}" for end, names in ends.items()]
        lines.append(f"runs were trained on different numbers of tokens: {'; '.join(listed)}")
    for names, runs in comparison.baseline.apart.items():
        when = " after training" if all(name.startswith(TRAINING) for name in names) else ""
        problem = f"no such run has the same {', '.join(names)}"
        lines.append(
            f"{list_runs(runs)}: not compared with {comparison.baseline.title}{when}: {problem}"
        )
    return lines


def list_runs(names: Sequence[str], most: int = 4) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more runs" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def missing_parts(comparison: Comparison, run: RunResults) -> list[str]:
    if run.mask is None:
        return ["no mask yet"]
    if not (run.rows or run.variants):
        return ["not evaluated yet"]
    last = max((row["step"] for row in run.rows if row["step"]), default=0)
    found: dict[str, list[str]] = {}
    for suite in comparison.suites:
        scores = [score for score in comparison.scores if score.suite == suite]
        curves = [comparison.curves[run.name, score] for score in scores if score.kind != "variant"]
        known = {step for curve in curves for step in curve.points}
        problems = []
        if None not in known:
            problems.append("the dense model was not evaluated, so the gap to it is unknown")
        if 0 not in known:
            problems.append("step 0 was not evaluated")
        elif not (trained := known - {None, 0}):
            problems.append("evaluated only before training")
        elif (end := max(filter(None, trained))) < last:
            problems.append(f"evaluated only until step {end:,}")
        for problem in problems if known else ["not evaluated"]:
            found.setdefault(problem, []).append(reporting_of(suite).title)
    # What all suites lack is said once, without their names.
    in_all = len(comparison.suites)
    return [
        problem if len(titles) == in_all else f"{', '.join(titles)}: {problem}"
        for problem, titles in found.items()
    ]


def different_dtypes(comparison: Comparison) -> list[str]:
    """Near ties between tokens fall otherwise in another number format, by points."""
    lines = []
    for suite in comparison.suites:
        found: dict[str, list[str]] = {}
        for run in comparison.runs:
            for row in run.rows:
                if row["suite"] == suite and DTYPE in row:
                    model = run.name if row["step"] is not None else f"{run.name}'s dense model"
                    found.setdefault(row[DTYPE], []).append(model)
        if len(found) > 1:
            listed = "; ".join(f"{dtype} by {list_runs(names)}" for dtype, names in found.items())
            lines.append(f"{suite}: answers are in different number formats: {listed}")
    return lines


def different_examples(comparison: Comparison) -> list[str]:
    """Averages that some runs were evaluated for on other examples than the rest."""
    lines = []
    for score in comparison.scores_of("average"):
        test_sets: dict[str, list[str]] = {}
        for run in comparison.runs:
            with_length = {row["length"] for row in run.rows if row["suite"] == score.suite}
            lengths = ", ".join(map(str, sorted(with_length - {0, None})))
            points = comparison.curves[run.name, score].points.values()
            for n in sorted({point.n for point in points}):
                test_set = f"{n} of {lengths} tokens" if lengths else str(n)
                test_sets.setdefault(test_set, []).append(run.name)
        texts = by_text(comparison.curves_of(score))
        if len(texts) > 1:
            named = (list_runs([curve.run.name for curve in members]) for members in texts)
            lines.append(
                f"{score.title}: runs were asked other texts, and the baseline is compared with "
                f"those alone that have its own: {'; others in '.join(named)}"
            )
        if len(test_sets) > 1:
            listed = "; ".join(f"{name} in {list_runs(runs)}" for name, runs in test_sets.items())
            lines.append(
                f"{score.title}: runs were evaluated on different examples, and the baseline is "
                f"compared with those alone that have its own: {listed}"
            )
    return lines
