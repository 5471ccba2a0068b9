"""The report on runs: report.html (self-contained), table.md, pictures, rows. The answers and the
warnings on the page are here too; a terminal shows them as well.

report.html    the answer, charts that answer to the pointer, tables; for a browser
table.md       the tables, to paste elsewhere
*.png          the same charts, for papers: recovery, scores before training, tasks, losses
results.jsonl  every result of every run
recovery.jsonl how far and how fast each run recovers, with intervals
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from bosch.eval.report import pictures, tables
from bosch.eval.report.compare import LOSS, Comparison, Recovery, end_together
from bosch.eval.report.intervals import NEVER, Curve, Estimate, estimate, gain_to, gap_at
from bosch.eval.report.runs import RunResults
from bosch.eval.rows import Row, write_rows
from bosch.eval.suites._reporting import reporting_of
from bosch.masks.picture import mask_lines, mask_title
from bosch.run.errors import UserError
from bosch.run.files import write_atomically
from bosch.run.plain_text import markdown, markdown_table, visible

TEMPLATE = "report.html.jinja"  # beside this file, with its style and its script


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Write the report into `out`. Returns the files written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{out} is not a folder; name another one for the report.") from error
    all_tables, lines = [*tables.make_tables(comparison).values()], warnings(comparison)
    charts = pictures.make_charts(comparison)
    paths = [out / name for name in ("report.html", "table.md", "results.jsonl", "recovery.jsonl")]
    rows = [{**r, "run": run.name} for run in comparison.runs for r in (*run.rows, *run.variants)]
    write_atomically(paths[0], page(comparison, charts, all_tables, lines))
    write_atomically(paths[1], tables_in_markdown(all_tables, lines))
    write_rows(paths[2], rows)
    write_rows(paths[3], recovery_rows(comparison))
    return [*paths, *pictures.draw_pictures(charts, out)]


def page(
    comparison: Comparison,
    charts: Sequence[pictures.Chart],
    all_tables: Sequence[tables.Table],
    warning_lines: Sequence[str],
) -> str:
    import jinja2
    from markupsafe import Markup

    styles = pictures.choose_styles(charts)
    drawn = []
    for chart in charts:
        panels = [(panel, pictures.place_panel(panel, styles)) for panel in chart.panels]
        labels = dict.fromkeys(line.label for panel in chart.panels for line in panel.lines)
        drawn.append((chart.title, panels, [(label, styles[label]) for label in labels]))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, "utf-8"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
    )
    return environment.get_template(TEMPLATE).render(
        answers=answers(comparison),
        warnings=warning_lines,
        charts=drawn,
        tables=all_tables,
        runs=comparison.runs,
        settings_by_section=tables.settings_by_section,
        axes=pictures.AXES,
    )


def tables_in_markdown(all_tables: Sequence[tables.Table], warning_lines: Sequence[str]) -> str:
    parts = []
    if warning_lines:
        parts.append("\n".join(["## Warnings", "", *(f"- {markdown(w)}" for w in warning_lines)]))
    for table in all_tables:
        lines = [f"## {markdown(table.title)}", "", *markdown_table(table.header, table.rows)]
        parts.append("\n".join([*lines, *(["", table.note] if table.note else [])]))
    return "\n\n".join(parts) + "\n"


def recovery_rows(comparison: Comparison) -> list[Row]:
    """A row per run, suite and statistic; with a baseline also one per setup, score and statistic.
    "never": not reached."""
    rows = []
    for recovery in comparison.recoveries:
        names: Row = {"run": recovery.curve.run.name, "suite": recovery.curve.score.suite}
        for statistic in ("gap_share", "mean_score"):
            rows.append(_row(names, statistic, getattr(recovery, statistic)))
        run = recovery.curve.run
        for share, tokens in recovery.tokens_to.items():
            flops = {"flops": run.spent_until("flops", tokens.value)}
            rows.append(_row(names, f"tokens_to_{100 * share:.0f}", tokens) | flops)
    for difference in comparison.differences:
        score = difference.score
        names = {"runs": difference.setup, "suite": score.suite, "score": score.name}
        for statistic in ("start", "end", "mean"):
            points: Estimate | None = getattr(difference, statistic)
            if points is not None:
                names |= {"seeds": points.num_seeds}
                rows.append(_row(names, f"{statistic}_beside_baseline", points))
    return rows


def _row(names: Row, statistic: str, estimate: Estimate) -> Row:
    numbers = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    written = {key: "never" if number == NEVER else number for key, number in numbers.items()}
    return names | {"statistic": statistic} | written


# -------------------------------------------------------------------------------------- in words


def summarize(comparison: Comparison) -> Iterator[str | Text]:
    """The comparison's only run: its mask, what it costs and saves, and the scores of every
    checkpoint."""
    (run,) = comparison.runs
    if run.mask is not None:
        yield f"mask: {mask_title(run.mask)}; ## full, :: window, share windowed"
        yield from mask_lines(run.mask)
        yield f"KV bytes saved: {tables.kv_saved(run)}"
        if (score := tables.calibration_score(run)) != tables.MISSING:
            yield f"calibration questions answered right (dense model): {score}"
    yield from tables.align(tables.checkpoint_table(comparison, run))
    yield from map(describe_recovery, comparison.recoveries)


def answers(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Each run's name and what came out of it: its mask and the KV bytes saved, then for each suite
    the gap to the dense model and how much of it was recovered. The best by the first suite come
    first."""
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
        for score in [*comparison.averages, LOSS]:
            curve = comparison.curve(run, score)
            ends.append(-curve.values[-1] if curve.steps else math.inf)
            if row := recovered.get((run.name, score)):
                lines.append(describe_recovery(row))
            elif curve.steps and not curve.is_loss:
                lines.append(describe_start(curve))
        found.append((ends, run.name, lines))
    return [(name, lines) for _, name, lines in sorted(found, key=lambda one: one[0])]


def describe_recovery(recovery: Recovery) -> str:
    curve = recovery.curve
    title = curve.score.suite_title
    if math.isnan(curve.dense):
        return f"{title}: the dense model was not evaluated"
    if recovery.gap_share.value is None:
        verdict = "no gap to recover, since step 0 is not below the dense model"
    elif recovery.has_clear_gap:
        share = tables.show_estimate(recovery.gap_share, tables.show_share)
        verdict = f"recovered {share} of the gap to the dense model"
    else:
        verdict = "no significant gap to the dense model"
    end = tables.show_tokens(curve.tokens[-1])
    if curve.is_loss:
        gaps = " to ".join(f"{curve.dense - curve.values[place]:+.3f}" for place in (0, -1))
        return f"{title}: {verdict} ({-curve.dense:.3f}), from {gaps} after {end} tokens"
    gaps = " to ".join(_gap_at(curve, place) for place in (0, -1))
    return f"{title}: {verdict} ({curve.dense:.1f}), from {gaps} points after {end} tokens"


def describe_start(curve: Curve) -> str:
    """Of a run that was not evaluated before and after training."""
    title = reporting_of(curve.score.suite).title
    when = (
        f"after {tables.show_tokens(curve.tokens[-1])} tokens"
        if curve.steps[-1]
        else "before training"
    )
    if math.isnan(curve.dense):
        return f"{title}: {curve.values[-1]:.1f} {when}; the dense model was not evaluated"
    return f"{title}: {_gap_at(curve, -1)} points from the dense model ({curve.dense:.1f}) {when}"


def _gap_at(curve: Curve, place: int) -> str:
    return tables.show_estimate(estimate([curve], gap_at(place)), tables.show_change)


# -------------------------------------------------------------------------------------- warnings


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before the numbers: missing parts, runs that are not comparable, and
    checkpoints below step 0."""
    lines = [f"{run.name}: {problem}" for run in comparison.runs for problem in run.problems]
    runs_lacking: dict[str, list[str]] = {}
    for run in comparison.runs:
        for part in missing_parts(comparison, run):
            runs_lacking.setdefault(part, []).append(run.name)
    lines += [f"{list_runs(names)}: {part}" for part, names in runs_lacking.items()]
    lines += different_examples(comparison)
    ends: list[tuple[Curve, list[str]]] = []  # of a training, and the runs that end there
    for curve in (recovery.curve for recovery in comparison.recoveries):
        alike = (names for end, names in ends if end_together(curve, end))
        if (names := next(alike, None)) is None:
            ends.append((curve, [curve.run.name]))
        elif curve.run.name not in names:
            names.append(curve.run.name)
    if len(ends) > 1:
        listed = [
            f"{tables.show_tokens(curve.tokens[-1])} in {list_runs(names)}" for curve, names in ends
        ]
        lines.append(f"runs were trained on different numbers of tokens: {'; '.join(listed)}")
    if comparison.baseline and len(comparison.runs) > 1 and not comparison.differences:
        lines.append(
            f"{comparison.baseline.title}: no run is compared to it: none is like it in model, "
            "ratio, window and seed, or step 0 was not evaluated"
        )
    return lines + drops(comparison)


def list_runs(names: Sequence[str], most: int = 4) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more runs"


def missing_parts(comparison: Comparison, run: RunResults) -> list[str]:
    if run.mask is None:
        return ["no mask yet"]
    if not (run.rows or run.variants):
        return ["not evaluated yet"]
    curves = [comparison.curve(run, score) for score in comparison.scores]
    parts = []
    if not any(row["step"] is None for row in run.rows):
        parts.append("the dense model was not evaluated, so the gap to it is unknown")
    if not any(curve.starts_at_zero for curve in curves):
        parts.append("step 0 was not evaluated")
    elif not any(curve.is_trained for curve in curves):
        parts.append("evaluated only before training")
    for curve in curves:
        is_average = curve.score.kind == "average"
        if run.ratio and is_average and curve.is_trained and curve.dense <= curve.values[0]:
            title = curve.score.title
            parts.append(f"{title}: no gap to recover, step 0 is not below the dense model")
    return parts


def different_examples(comparison: Comparison) -> list[str]:
    """Averages that some runs were evaluated for on other examples than the rest."""
    lines = []
    for score in comparison.averages:
        test_sets: dict[str, list[str]] = {}
        for run in comparison.runs:
            with_length = {r["length"] for r in run.rows if r["suite"] == score.suite}
            lengths = ", ".join(map(str, sorted(with_length - {0, None})))
            for n in sorted({point.n for point in comparison.curve(run, score).points.values()}):
                test_set = f"{n} of {lengths} tokens" if lengths else str(n)
                test_sets.setdefault(test_set, []).append(run.name)
        if len(test_sets) > 1:
            listed = "; ".join(f"{name} in {list_runs(runs)}" for name, runs in test_sets.items())
            lines.append(f"{score.title}: runs were evaluated on different examples: {listed}")
    return lines


def drops(comparison: Comparison) -> list[str]:
    """Checkpoints below step 0, averages first. Those that may be noise are only counted."""
    lines, num_others = [], 0
    scores = sorted(comparison.scores, key=lambda score: score.kind)
    for curve in (curve for score in scores for curve in comparison.curves_of(score)):
        lost: dict[int, Estimate] = {}
        for place, step in enumerate(curve.steps):
            if curve.starts_at_zero and curve.values[place] < curve.values[0] - 1e-9:
                points = estimate([curve], gain_to(place))
                lost |= {step: points} if points.excludes_zero else {}
                num_others += not points.excludes_zero
        if lost:
            worst = tables.show_estimate(
                min(lost.values(), key=lambda e: e.value or 0), tables.show_change
            )
            lines.append(
                f"{curve.run.name}: {curve.score.full_title} is below step 0 at steps "
                f"{', '.join(map(str, lost))}: at worst {worst} points"
            )
    if num_others:
        others = "more scores" if lines else "scores"
        lines.append(
            f"{num_others} {others} of checkpoints are below step 0, but not significantly"
        )
    return lines
