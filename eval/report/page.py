"""Writes the report on runs: report.html (self-contained), table.md, pictures, rows.

report.html    the answer, charts that answer to the pointer, tables; for a browser
table.md       the tables, to paste elsewhere
*.png          the same charts: recovery over tokens, scores before training, tasks; for papers
results.jsonl  every result of every run
recovery.jsonl how far and how fast each run recovers, with intervals
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bosch.eval.report.compare import Comparison
from bosch.eval.report.intervals import NEVER, Estimate
from bosch.eval.report.pictures import (
    AXES,
    Chart,
    choose_styles,
    draw_pictures,
    make_charts,
    place_panel,
)
from bosch.eval.report.summary import answers, warnings
from bosch.eval.report.tables import Table, make_tables, settings_by_section
from bosch.eval.rows import Row, write_rows
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
    tables, lines = make_tables(comparison).values(), warnings(comparison)
    charts = make_charts(comparison)
    pictures = draw_pictures(charts, out)
    paths = [out / name for name in ("report.html", "table.md", "results.jsonl", "recovery.jsonl")]
    rows = [{**r, "run": run.name} for run in comparison.runs for r in (*run.rows, *run.variants)]
    write_atomically(paths[0], page(comparison, charts, tables, lines))
    write_atomically(paths[1], tables_in_markdown(tables, lines))
    write_rows(paths[2], rows)
    write_rows(paths[3], recovery_rows(comparison))
    return [*paths, *pictures]


def page(
    comparison: Comparison,
    charts: Sequence[Chart],
    tables: Iterable[Table],
    warning_lines: Sequence[str],
) -> str:
    import jinja2
    from markupsafe import Markup

    styles = choose_styles(charts)
    drawn = []
    for chart in charts:
        panels = [(panel, place_panel(panel, styles)) for panel in chart.panels]
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
        tables=tables,
        runs=comparison.runs,
        settings_by_section=settings_by_section,
        axes=AXES,
    )


def tables_in_markdown(tables: Iterable[Table], warning_lines: Sequence[str]) -> str:
    parts = []
    if warning_lines:
        parts.append(
            "\n".join(["## Warnings", "", *(f"- {markdown(line)}" for line in warning_lines)])
        )
    for table in tables:
        lines = [f"## {markdown(table.title)}", "", *markdown_table(table.header, table.rows)]
        parts.append("\n".join([*lines, *(["", table.note] if table.note else [])]))
    return "\n\n".join(parts) + "\n"


def recovery_rows(comparison: Comparison) -> list[Row]:
    """A row per run, suite and statistic; with a baseline also one per setup, score and statistic.
    "never": not reached."""
    rows = []
    for recovery in comparison.recoveries:
        names: Row = {"run": recovery.curve.run.name, "suite": recovery.curve.score.suite}
        for statistic in ("gap_share", "tokens_to_half", "tokens_to_90", "mean_score"):
            rows.append(_row(names, statistic, getattr(recovery, statistic)))
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
