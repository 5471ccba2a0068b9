"""Compare masks: their distances, and what the masks of two ratios share.

    python recipes/analyze_masks.py runs/*/mask/mask.json --out analysis

Prints a table for each analysis, beside the figures of random masks. All numbers are in
analysis.json; distances.png shows the distances. Where the masks are those of evaluated runs, it
also says whether masks that are close score alike before training. `--replacement 3` writes the
masks of the paper's table 5: `bosch recover --method from_file --mask.options
path=FILE --ratio R` scores one.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from bosch.command_line import parse
from bosch.config import POSITIONAL
from bosch.eval.report.runs import is_run, read_run
from bosch.masks import analysis
from bosch.masks.analysis import NamedMask, ScoredMask, compare
from bosch.masks.picture import draw_distances
from bosch.run.checkout import provenance
from bosch.run.errors import UserError, run_main
from bosch.run.files import write_atomically
from bosch.run.progress import say, set_up, show_rows, show_table

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    masks: Annotated[tuple[Path, ...], POSITIONAL]  # mask.json files or run folders
    out: Path = Path("analysis")  # folder for numbers and pictures
    replacement: int = 0  # masks to write for each pair of ratios, for the test of the paper's C.1


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments)
    set_up()
    masks = analysis.read_masks(options.masks)
    options.out.mkdir(parents=True, exist_ok=True)
    chains = analysis.find_chains(masks)
    # Of each method, masks at adjacent ratios.
    steps = [(name, *two) for name, chain in chains.items() for two in itertools.pairwise(chain)]
    results: dict[str, Any] = {
        "masks": [{"name": m.full_name, "model": m.model, "file": str(m.path)} for m in masks],
        "pairs": compare_pairs(masks, options.out),
        "turnover": measure_turnover(steps),
        "correlation": correlate_scores(masks),
    }
    if options.replacement:
        results["replacement"] = write_table_5(steps, options)
    text = json.dumps(results | {"provenance": provenance()}, indent=1, allow_nan=False)
    write_atomically(options.out / "analysis.json", text + "\n")
    say(f"numbers and pictures in {options.out}")


def compare_pairs(masks: Sequence[NamedMask], out: Path) -> Rows:
    """Jaccard distances of all pairs of a model."""
    rows = [
        {"model": first.model, "first": first.full_name, "second": second.full_name}
        | compare(first.mask, second.mask)
        for first, second in itertools.combinations(masks, 2)
        if first.model == second.model
    ]
    panels, lines = {}, []
    for (model, ratio), group in analysis.comparable(masks).items():
        if pairs := [compare(a.mask, b.mask) for a, b in itertools.combinations(group, 2)]:
            panels[f"{model}, ratio {ratio:g}"] = group
            distances, chances = ([p[k] for p in pairs] for k in ("distance", "expected_distance"))
            values = (mean(distances), min(distances), max(distances), mean(chances))
            figures = [f"{value:.3f}" for value in values]
            lines.append((f"{model}, ratio {ratio:g}", len(pairs), *figures))
    if panels:
        header = ("", "pairs", "mean", "least", "most", "random masks")
        show_table("Jaccard distance of windowed groups", header, lines)
        draw_distances(panels, out / "distances.png")
    else:
        say("no two masks share a model and ratio: no table of distances")
    return rows


def measure_turnover(steps: Sequence[tuple[str, NamedMask, NamedMask]]) -> Rows:
    rows: Rows = [
        {"method": name, "smaller_ratio": smaller.ratio, "larger_ratio": larger.ratio}
        | analysis.turnover(smaller.mask, larger.mask)
        for name, smaller, larger in steps
        if smaller.mask.num_windowed  # else nothing can be given up
    ]
    columns = {
        "": "method",
        "from": "smaller_ratio",
        "to": "larger_ratio",
        "T": "raw:.1%",
        "random masks' T": "chance:.1%",
        "T~": "normalized:.1%",
        "random masks' T~": "normalized_chance:.1%",
    }
    if rows:
        show_rows("Share of windowed groups that a larger ratio leaves full", rows, columns)
    else:
        say("no method has masks at two ratios: no turnover")
    return rows


def correlate_scores(masks: Sequence[NamedMask]) -> Rows:
    """Of each suite, for the masks of a model and ratio whose runs were evaluated at step 0."""
    rows: Rows = []
    for (model, ratio, of_windows), group in windows_alike(masks).items():
        scored: dict[str, list[ScoredMask]] = {}
        for mask in group:
            folder = mask.path.parent.parent
            if mask.path.parent.name != "mask" or not is_run(folder):
                continue  # a mask file outside of a run has no scores
            run = read_run(folder)
            for row in run.rows:
                # Not the average of each length, which some suites have too.
                if (row["step"], row["task"]) == (0, "average") and not row["length"]:
                    one = ScoredMask(run.method, mask.mask, row["value"])
                    scored.setdefault(row["suite"], []).append(one)
        for suite, members in scored.items():
            if len({one.method for one in members}) > 2:  # two methods are one pair
                which = {"model": model, "ratio": ratio, "windows": of_windows, "suite": suite}
                rows.append(which | analysis.correlate_scores(members))
    columns = {name: name for name in ("model", "ratio", "windows", "suite", "methods", "pairs")}
    columns |= {name: f"{name}:.2f" for name in ("spearman", "low", "high")}
    if rows:
        show_rows("Correlation of distance and difference in score", rows, columns)
    return rows


def windows_alike(masks: Sequence[NamedMask]) -> dict[tuple[str, float, str], list[NamedMask]]:
    """Masks of one model and ratio with one window and sink: else a difference in scores is not of
    the groups alone."""
    found: dict[tuple[str, float, str], list[NamedMask]] = {}
    for (model, ratio), group in analysis.comparable(masks).items():
        for mask in group:
            of_windows = f"{mask.mask.window_tokens}, sink {mask.mask.sink}"
            found.setdefault((model, ratio, of_windows), []).append(mask)
    return found


def write_table_5(steps: Sequence[tuple[str, NamedMask, NamedMask]], options: Options) -> Rows:
    """Masks of adjacent ratios, in which groups that only the smaller one windows are replaced."""
    rows: Rows = []
    for name, smaller, larger in steps:
        folder = options.out / "replacement" / re.sub("[ /]", "-", name)
        written = analysis.write_replacements(smaller, larger, options.replacement, folder)
        rows += [{"method": name} | row for row in written]
    if not rows:
        problem = "needs two ratios of a method, the larger leaving full what the other windows"
        raise UserError(f"--replacement {problem}.")
    columns = ("method", "smaller_ratio", "larger_ratio", "replaced", "file")
    show_rows("Masks of the replacement test", rows, {column: column for column in columns})
    return rows


if __name__ == "__main__":
    run_main(main)
