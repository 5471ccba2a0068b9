"""Writes the report on runs: report.html (self-contained), table.md, pictures, rows.

report.html    everything, for a browser
table.md       the tables, to paste elsewhere
*.png          recovery over tokens, tasks, losses, masks
results.jsonl  every result of every run
recovery.jsonl how far and how fast each run recovers, with intervals
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bosch.eval.report.compare import Comparison, baseline_differences, recoveries
from bosch.eval.report.pictures import draw_pictures, parts_picture
from bosch.eval.report.statistics import NEVER, Estimate
from bosch.eval.report.summary import warnings
from bosch.eval.report.tables import Table, make_tables, settings_by_section
from bosch.eval.rows import Row, write_rows
from bosch.eval.suites._reporting import reporting_of
from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically
from bosch.run.plain_text import markdown, markdown_table, visible

TEMPLATE = Path(__file__).parents[1] / "data" / "report.html.jinja"
BANDS = "bands: ± one standard error."
CAPTIONS = {
    "recovery": f"Average scores over training tokens, including those of a learned mask; {BANDS}",
    "recovery_flops": f"The same over the FLOPs of the training, a teacher's included; {BANDS}",
    "recovery_hours": f"The same over the hours of the training, without evaluations; {BANDS}",
    "zero_shot": "Average scores before training; bars: ± one standard error over seeds.",
    "losses": "Losses over training tokens.",
    "masks": "Masks: which groups keep full attention. The first layer is at the bottom.",
}


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Write the report into `out`. Returns the files written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{out} is not a folder; name another one for the report.") from error
    tables, lines = make_tables(comparison), warnings(comparison)
    pictures = draw_pictures(comparison, out)
    paths = [out / name for name in ("report.html", "table.md", "results.jsonl", "recovery.jsonl")]
    rows = [{**r, "run": run.name} for run in comparison.runs for r in (*run.rows, *run.variants)]
    write_atomically(paths[0], page(comparison, tables, lines, pictures))
    write_atomically(paths[1], tables_in_markdown(tables.values(), lines))
    write_rows(paths[2], rows)
    write_rows(paths[3], recovery_rows(comparison))
    return [*paths, *pictures]


def block_order(suites: Sequence[str]) -> list[str]:
    """The page from top to bottom: tables by name, pictures by file."""
    recovery = "recovery.png recovery_flops.png recovery_hours.png"
    top = f"runs {recovery} zero_shot.png recovery baseline seeds_before seeds_after variants"
    of_suites = [f"{suite}_{table}" for suite in suites for table in ("scores", "lengths")]
    bottom = "losses.png masks.png certainty effects distances cost"
    parts = [f"{parts_picture(suite)}.png" for suite in suites]
    return [*top.split(), *parts, "drops", *of_suites, *bottom.split()]


def captions(comparison: Comparison) -> dict[str, str]:
    """By the stem of a picture's file."""
    texts = dict(CAPTIONS)
    for suite in comparison.suites:
        reporting = reporting_of(suite)
        has_lengths = any(length for s in comparison.parts(suite) for _, length in s.weights)
        means = ", each the mean over its lengths" if has_lengths else ""
        title = f"{reporting.title} {reporting.parts_title}"
        texts[parts_picture(suite)] = f"{title}{means}; {BANDS}"
    return texts


def page(
    comparison: Comparison,
    tables: Mapping[str, Table],
    warning_lines: Sequence[str],
    pictures: Sequence[Path],
) -> str:
    import jinja2

    texts = captions(comparison)
    blocks: dict[str, dict[str, Table | str]] = {name: {"table": tables[name]} for name in tables}
    for path in pictures:
        png = base64.b64encode(path.read_bytes()).decode()
        blocks[path.name] = {"caption": texts[path.stem], "png": png}
    loader = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    template = loader.from_string(TEMPLATE.read_text("utf-8"))
    names = [run.name for run in comparison.runs]
    return template.render(
        title=names[0] if len(names) == 1 else f"Comparison of {len(names)} runs",
        warnings=warning_lines,
        blocks=[blocks[name] for name in block_order(comparison.suites) if name in blocks],
        runs=[
            {"name": run.name, "path": run.path, "settings": settings_by_section(run.config)}
            for run in comparison.runs
        ],
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
    for recovery in recoveries(comparison):
        names: Row = {"run": recovery.run, "suite": recovery.score.suite}
        for statistic in ("gap_share", "tokens_to_half", "tokens_to_90", "mean_score"):
            rows.append(_row(names, statistic, getattr(recovery, statistic)))
    for difference in baseline_differences(comparison):
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
