"""docs/study.md: the paper's tables and figures in miniature, from the runs of recipes/study.py.

Whatever the numbers show is printed. Sentences on what the paper found stand beside what was found
here, and are made from the numbers too.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bosch.manifest import provenance, write_atomically
from eval.measures import Measure
from eval.pictures import draw_recovery, draw_zero_shot
from eval.report import markdown
from eval.study import AFTER, BEFORE, OURS, Study, advantage
from eval.study_tables import (
    advantage_table,
    cost_table,
    long_table,
    recovery_table,
    replacement_table,
    show_advantage,
    turnover_table,
    windows_table,
    zero_shot_table,
)


def write_study_page(study: Study, page: Path) -> None:
    """The page, its pictures in a folder beside it."""
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [header(study), "## What the paper says, and what was found here\n"]
    parts += [f"- {line}" for line in findings(study)]
    averages = study.comparison.averages
    tables = [make(study, m) for m in averages for make in (zero_shot_table, advantage_table)]
    parts += ["", *draw(study, pictures), ""]
    tables += [
        recovery_table(study),
        windows_table(study),
        long_table(study),
        turnover_table(study),
        replacement_table(study),
        cost_table(study),
    ]
    parts.append(markdown([table for table in tables if table.rows], []))
    if study.left:
        parts += ["", "## Not run yet", "", *(f"- {line}" for line in study.left)]
    write_atomically(page, "\n".join(parts).rstrip() + "\n")


def header(study: Study) -> str:
    runs = study.comparison.runs
    seeds = sorted({run.seed or 0 for run in runs})
    told = provenance()
    examples = sum(len(cell) for place in runs[0].samples.values() for cell in place.values())
    return "\n".join(
        [
            "# Study on the embedded model",
            "",
            f"Made by `{study.command}` at commit {told.get('commit', '?')}; do not edit by hand.",
            f"{len(runs)} runs of `recipes/recover.py`, seeds {', '.join(map(str, seeds))} (of the "
            "calibration set, the tokens and the method), packed in `benchmarks/study`. "
            f"Model {runs[0].model}, window {runs[0].window}; all models were judged on the same "
            f"{examples} test examples. Settings are those of the preset `tiny`, which are not "
            "the paper's: nothing here says how large a difference is on a model of its size.",
            "",
            "± is one standard error over seeds. Intervals hold the middle 95 % of 2,000 "
            "replicates in which seeds and test examples are drawn anew, the same examples for "
            "both sides.",
            "",
        ]
    )


def draw(study: Study, folder: Path) -> Iterator[str]:
    """Pictures, and the lines that show them."""
    trained = [
        run
        for run in study.comparison.runs
        if run.method in study.trained and run.ratio == study.trained_ratio and run.training
    ]
    for name, told, runs, make in (
        ("recovery", "Figure 3", trained, draw_recovery),
        ("zero_shot", "Tables 1 and 2 as curves", study.comparison.runs, draw_zero_shot),
    ):
        shown = [run for run in runs if run.ratio]
        figure = make(replace(study.comparison, runs=shown)) if shown else None
        if figure is not None:
            figure.savefig(folder / f"{name}.png", format="png", metadata={"Software": None})
            yield f"![{told}]({folder.name}/{name}.png)"


def findings(study: Study) -> Iterator[str]:
    """One sentence on each claim of the paper that these numbers can speak to."""
    if OURS in study.methods:
        yield from (best_of_all(study, measure) for measure in study.comparison.averages)
        yield from (after_training(study, measure) for measure in study.comparison.averages)
    if study.turnover:
        own = [row for row in study.turnover if row["method"].startswith(OURS)]
        shares = [row["raw"] for row in own if row["method"].split()[0] == OURS]
        if shares:
            yield (
                "Paper: masks of one ratio are not contained in those of the next, turnover is 26 "
                f"to 44 %. Here {OURS}'s is {min(shares):.0%} to {max(shares):.0%}."
            )


def best_of_all(study: Study, measure: Measure) -> str:
    first, wins, losses, open_, total = [], [], [], 0, 0
    for ratio in study.ratios:
        means = {
            method: statistics.fmean(float(c.values[0]) for c in curves.values())
            for method in study.methods
            if (curves := study.curves(method, ratio, measure))
        }
        if OURS not in means:
            continue
        if max(means, key=lambda name: means[name]) == OURS:
            first.append(ratio)
        for rival in means.keys() - {OURS}:
            found = advantage(study, rival, ratio, measure, BEFORE)
            total += 1
            if found is None or found.sign == 0:
                open_ += 1
            elif found.sign > 0:
                wins.append(rival)
            else:
                losses.append(f"{rival} at {ratio:g}")
    told = f"{len(first)} of {len(study.ratios)} ratios" if first else "no ratio"
    line = (
        f"Paper: before training BOSCH is above every rival at every ratio. Here, on "
        f"{measure.title}, it has the best mean at {told}; of {total} comparisons with other "
        f"methods {len(wins)} are clearly for it, {len(losses)} clearly against it, {open_} open."
    )
    return line + (f" Against: {', '.join(sorted(losses))}." if losses else "")


def after_training(study: Study, measure: Measure) -> str:
    told = []
    for rival in study.trained:
        if rival == OURS:
            continue
        found = advantage(study, rival, study.trained_ratio, measure, AFTER)
        if found is not None:
            told.append(f"{show_advantage(found)} over {rival}")
    return (
        f"Paper: after training BOSCH stays ahead. Here, at ratio {study.trained_ratio:g} on "
        f"{measure.title}: {'; '.join(told) or 'not trained yet'}."
    )
