"""The tables of docs/consa.md, from the rows that recipes/benchmarks/learned_masks.py keeps."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bosch.analysis.depth import longest_blocks, nesting
from bosch.manifest import write_atomically
from bosch.mask import GroupMask

Row = Mapping[str, Any]
MARK = "<!-- What follows is made by recipes/benchmark.py learned_masks; do not edit it. -->"
TITLE = "# Learned masks beside searched ones"
STATES = ("zero-shot", "trained")


def write_page(path: Path, rows: Sequence[Row], variants: Sequence[str]) -> None:
    """Whoever reads the tables writes above the mark; that stays."""
    above = TITLE + "\n"
    if path.is_file() and MARK in path.read_text("utf-8"):
        above = path.read_text("utf-8").split(MARK)[0].rstrip() + "\n"
    lines = [above, MARK, "", *describe_rows(rows, variants)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines).rstrip() + "\n")


def describe_rows(rows: Sequence[Row], variants: Sequence[str]) -> list[str]:
    if not rows:
        return ["Nothing has been measured on this model yet."]
    first = rows[0]
    lines = [
        f"Model {first['model']}, window {first['window']}. NIAH at "
        f"{' and '.join(map(str, first['lengths']))} tokens, {first['niah']['n']} examples; toy "
        f"LongBench, {first['longbench']['n']} rows; validation loss on held-out tokens. Budget: "
        f"{first['budget_tokens']:,} tokens, of which learning takes what the table says and "
        "training the rest. Mean over seeds ± standard error, with one seed that of the examples.",
        "",
    ]
    for ratio in sorted({row["ratio"] for row in rows}):
        mine = [row for row in rows if row["ratio"] == ratio]
        lines += [f"## Ratio {ratio:g}", "", *describe_scores(mine, variants), ""]
        lines += [*describe_depth(mine, variants), ""]
    return [*lines, *describe_nesting(rows, variants)]


def describe_scores(rows: Sequence[Row], variants: Sequence[str]) -> list[str]:
    lines = [
        "| mask | state | seeds | tokens: mask | training | NIAH | LongBench | loss |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for variant in variants:
        for state in STATES:
            mine = [row for row in rows if (row["variant"], row["state"]) == (variant, state)]
            if not mine:
                lines.append(f"| {variant} | {state} | not run | | | | | |")
                continue
            cells = [
                ", ".join(str(row["seed"]) for row in sorted(mine, key=lambda row: row["seed"])),
                f"{mean(row['learning_tokens'] for row in mine):,.0f}",
                f"{mean(row['training_tokens'] for row in mine):,.0f}",
                show([row["niah"] for row in mine]),
                show([row["longbench"] for row in mine]),
                f"{mean(row['validation_loss'] for row in mine):.3f}",
            ]
            lines.append(f"| {variant} | {state} | {' | '.join(cells)} |")
    return lines


def show(figures: Sequence[Mapping[str, float]]) -> str:
    """Mean ± its standard error."""
    values = [figure["value"] for figure in figures]
    error = figures[0]["stderr"] or 0.0
    if len(values) > 1:
        error = stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.1f} ± {error:.1f}"


def describe_depth(rows: Sequence[Row], variants: Sequence[str]) -> list[str]:
    """One mask of each variant, that of the first seed there is."""
    lines = [
        "| mask | seed | full groups by layer, first to last | longest block fuller than the mask |"
        " in random masks |",
        "|---|---:|---|---:|---:|",
    ]
    for variant in variants:
        for row in [row for row in masks_of(rows) if row["variant"] == variant][:1]:
            mask = mask_of(row)
            (block,) = [b for b in longest_blocks(mask) if b.kind == "fuller than the mask"]
            full = " ".join(str(sum(layer)) for layer in mask.z)
            lines.append(
                f"| {variant} | {row['seed']} | {full} | {block.num_layers} layers | "
                f"{block.expected:.1f} |"
            )
    return lines


def describe_nesting(rows: Sequence[Row], variants: Sequence[str]) -> list[str]:
    """Masks of one seed by rising ratio: whether what is on the window stays there."""
    lines = [
        "## Nesting",
        "",
        "| mask | seed | ratios | windowed groups that stay so | in random masks | nested |",
        "|---|---:|---|---:|---:|---|",
    ]
    found = False
    for variant in variants:
        mine = [row for row in masks_of(rows) if row["variant"] == variant]
        for seed in sorted({row["seed"] for row in mine}):
            chain = sorted((r for r in mine if r["seed"] == seed), key=lambda row: row["ratio"])
            if len(chain) < 2:
                continue
            found, told = True, nesting([mask_of(row) for row in chain])
            kept, chance = (
                ", ".join(f"{100 * share:.0f} %" for share in shares)
                for shares in (told.kept, told.kept_by_chance)
            )
            ratios = " → ".join(f"{row['ratio']:g}" for row in chain)
            lines.append(
                f"| {variant} | {seed} | {ratios} | {kept} | {chance} | "
                f"{'yes' if told.is_nested else 'no'} |"
            )
    return lines if found else []


def masks_of(rows: Sequence[Row]) -> list[Row]:
    """A row for each mask, by seed: both states have the same one."""
    masks = {(row["variant"], row["ratio"], row["seed"]): row for row in rows}
    return sorted(masks.values(), key=lambda row: int(row["seed"]))


def mask_of(row: Row) -> GroupMask:
    return GroupMask.from_rows(row["z"], row["window"], row["unit"])
