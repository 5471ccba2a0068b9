"""Writes the report on runs: report.html (one file, nothing outside it), table.md, pictures, rows.

report.html    everything, to be read in a browser
table.md       the tables, to be pasted
*.png          recovery over tokens, tasks, categories, losses, masks
results.jsonl  every evaluation row of every run
recovery.jsonl how far and how fast, with intervals
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bosch.eval.report.compare import Comparison, beside_baseline, recoveries
from bosch.eval.report.pictures import draw_pictures
from bosch.eval.report.statistics import NEVER, Estimate
from bosch.eval.report.summary import warnings
from bosch.eval.report.tables import Table, make_tables, markdown_lines, settings_by_section
from bosch.eval.rows import write_rows
from bosch.run.manifest import write_atomically

TEMPLATE = Path(__file__).parents[1] / "data" / "report.html.jinja"
# The page from top to bottom: tables by their names, pictures by their files.
ORDER = (
    "runs recovery.png zero_shot.png recovery baseline seeds_before seeds_after variants "
    "niah_tasks.png longbench_categories.png falls niah_scores niah_lengths longbench_scores "
    "losses.png masks.png distances cost"
).split()
CAPTIONS = {
    "recovery": "Averages over tokens, those of the mask among them; bands: one standard error.",
    "zero_shot": "Scores before training; bars: one standard error over seeds.",
    "niah_tasks": "NIAH tasks, each the mean over its lengths; bands: one standard error.",
    "longbench_categories": "LongBench categories; bands: one standard error.",
    "losses": "Losses.",
    "masks": "Masks, the first layer at the bottom.",
}


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Write the report into `out`; the files written."""
    out.mkdir(parents=True, exist_ok=True)
    tables, told = make_tables(comparison), warnings(comparison)
    pictures = draw_pictures(comparison, out)
    paths = [out / name for name in ("report.html", "table.md", "results.jsonl", "recovery.jsonl")]
    rows = [{**r, "run": run.name} for run in comparison.runs for r in (*run.rows, *run.variants)]
    write_atomically(paths[0], page(comparison, tables, told, pictures))
    write_atomically(paths[1], markdown(tables.values(), told))
    write_rows(paths[2], rows)
    write_rows(paths[3], recovery_rows(comparison))
    return [*paths, *pictures]


def page(
    comparison: Comparison,
    tables: Mapping[str, Table],
    told: Sequence[str],
    pictures: Sequence[Path],
) -> str:
    import jinja2

    blocks: dict[str, dict[str, Any]] = {name: {"table": tables[name]} for name in tables}
    for path in pictures:
        png = base64.b64encode(path.read_bytes()).decode()
        blocks[path.name] = {"caption": CAPTIONS[path.stem], "png": png}
    loader = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = loader.from_string(TEMPLATE.read_text("utf-8"))
    names = [run.name for run in comparison.runs]
    return template.render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs compared",
        warnings=told,
        blocks=[blocks[name] for name in ORDER if name in blocks],
        runs=[
            {"name": run.name, "path": run.path, "settings": settings_by_section(run.config)}
            for run in comparison.runs
        ],
    )


def markdown(tables: Iterable[Table], told: Sequence[str]) -> str:
    parts = []
    if told:
        parts.append("\n".join(["## To know first", "", *(f"- {line}" for line in told)]))
    for table in tables:
        lines = [f"## {table.title}", "", *markdown_lines(table.header, table.rows)]
        parts.append("\n".join([*lines, *(["", table.note] if table.note else [])]))
    return "\n\n".join(parts) + "\n"


def recovery_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """How far and how fast: a row a run, suite and statistic; what kinds of runs have over the
    baseline: a row a kind, score and statistic. "never": not reached."""
    rows = []
    for found in recoveries(comparison):
        told: dict[str, Any] = {"run": found.run, "suite": found.measure.suite}
        for name in ("gap_share", "tokens_to_half", "tokens_to_90", "mean_score"):
            rows.append(_row(told, name, getattr(found, name)))
    for beside in beside_baseline(comparison):
        told = {"runs": beside.kind, "suite": beside.measure.suite, "score": beside.measure.name}
        for name in ("start", "end", "mean"):
            points: Estimate | None = getattr(beside, name)
            if points is not None:
                told |= {"seeds": points.num_seeds}
                rows.append(_row(told, f"{name}_beside_baseline", points))
    return rows


def _row(told: dict[str, Any], name: str, found: Estimate) -> dict[str, Any]:
    numbers = {"value": found.value, "low": found.low, "high": found.high}
    shown = {key: "never" if number == NEVER else number for key, number in numbers.items()}
    return told | {"statistic": name} | shown
