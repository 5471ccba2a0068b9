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

from bosch.run.manifest import write_atomically
from eval.report.compare import Comparison, beside_baseline, recoveries
from eval.report.pictures import draw_pictures
from eval.report.statistics import NEVER, Estimate
from eval.report.tables import Table, make_tables, warnings
from eval.rows import write_rows

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
    return template.render(
        title=_title(comparison),
        warnings=told,
        blocks=[blocks[name] for name in ORDER if name in blocks],
        runs=[
            {"name": run.name, "path": run.path, "settings": _settings(run.config)}
            for run in comparison.runs
        ],
    )


def markdown(tables: Iterable[Table], told: Sequence[str]) -> str:
    parts = []
    if told:
        parts.append("\n".join(["## To know first", "", *(f"- {line}" for line in told)]))
    for table in tables:
        lines = [f"## {table.title}", "", _line(table.header), _line(["---"] * len(table.header))]
        lines += [_line(row) for row in table.rows]
        parts.append("\n".join([*lines, *(["", table.note] if table.note else [])]))
    return "\n\n".join(parts) + "\n"


def recovery_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """How far and how fast: a row a run, suite and statistic; what kinds of runs have over the
    baseline: a row a kind, score and statistic. "never": not reached."""
    rows = []
    for found in recoveries(comparison):
        told: dict[str, Any] = {"run": found.run, "suite": found.measure.suite}
        for name in ("gap_share", "tokens_to_half", "tokens_to_90", "mean_score"):
            rows.append(_row(told, name, getattr(found, name), found.curve.source))
    for beside in beside_baseline(comparison):
        told = {"runs": beside.kind, "suite": beside.measure.suite, "score": beside.measure.name}
        for name in ("start", "end", "mean"):
            points: Estimate | None = getattr(beside, name)
            if points is not None:
                told |= {"seeds": points.num_seeds}
                rows.append(_row(told, f"{name}_beside_baseline", points, beside.source))
    return rows


def _row(told: dict[str, Any], name: str, found: Estimate, source: str) -> dict[str, Any]:
    numbers = {"value": found.value, "low": found.low, "high": found.high}
    shown = {key: "never" if number == NEVER else number for key, number in numbers.items()}
    return told | {"statistic": name} | shown | {"intervals": source}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _title(comparison: Comparison) -> str:
    if len(comparison.runs) == 1:
        return comparison.runs[0].name
    return f"{len(comparison.runs)} runs compared"


def _settings(config: Any) -> list[tuple[str, str]]:
    """Section by section, `field value` one after the other; what belongs to none comes first."""
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    named = {"run": plain, **sections} if plain else sections
    return [
        (section, ", ".join(f"{name} {value}" for name, value in values.items()))
        for section, values in named.items()
    ]
