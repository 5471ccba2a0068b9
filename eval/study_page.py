"""docs/study.md: the paper's tables and figures in miniature, from the runs of recipes/study.py.

Whatever the numbers show is printed.
"""

from pathlib import Path

from bosch.manifest import provenance, write_atomically
from eval.measures import SUITES
from eval.report import markdown
from eval.report_tables import unlike_examples
from eval.study import Study
from eval.study_findings import findings
from eval.study_pictures import draw_far_apart, draw_study
from eval.study_tables import (
    advantage_table,
    cost_table,
    detail_table,
    distances_table,
    exchange_table,
    leads_table,
    long_table,
    recovery_table,
    turnover_table,
    windows_table,
    zero_shot_table,
)

FIGURE_2 = [0.5, 0.75]  # ratios


def write_study_page(study: Study, page: Path) -> None:
    """The page, its pictures in a folder beside it."""
    parts = [header(study), "## What the paper says, and what was found here\n"]
    folder = page.with_suffix("")  # after the header, whose commit has these pictures unchanged
    pictures = draw_study(study, folder) | draw_far_apart(study, FIGURE_2, folder)
    parts += [f"- {line}" for line in findings(study, FIGURE_2)]
    averages = study.comparison.averages
    tables = [make(study, m) for m in averages for make in (zero_shot_table, advantage_table)]
    parts += ["", *(f"![{told}]({folder.name}/{name})" for name, told in pictures.items()), ""]
    tables += [
        *(distances_table(study, ratio) for ratio in FIGURE_2 if ratio in study.ratios),
        recovery_table(study),
        *(detail_table(study, measure.suite) for measure in averages),
        windows_table(study),
        leads_table(study.windows, "window", "W {}", "Other windows"),
        long_table(study),
        leads_table(study.long, "length_asked", "{:,} tokens", "Long texts"),
        turnover_table(study),
        exchange_table(study),
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
    commits = ", ".join(f"{commit} {count}" for commit, count in study.commits.items())
    counts = {
        suite: {
            cell: len(values)
            for run in runs
            for (step, of_suite), samples in run.samples.items()
            if step == 0 and of_suite == suite
            for cell, values in samples.items()
        }
        for suite in SUITES
    }
    lengths = sorted({row["length"] for run in runs for row in run.rows if row["length"]})
    judged = (
        f"all were judged on the same {sum(counts['niah'].values())} examples of NIAH, in "
        f"{' and '.join(f'{n:,}' for n in lengths)} tokens, and "
        f"{sum(counts['longbench'].values())} of the toy world's counterpart of LongBench, which "
        f"is called LongBench here, at most {max(counts['niah'].values(), default=0)} of a task "
        "and length"
    )
    if unlike := unlike_examples(study.comparison):
        judged = f"not all were judged on the same test examples ({'; '.join(unlike)})"
    return "\n".join(
        [
            "# Study on the embedded model",
            "",
            f"Made by `{study.command}` at commit {told.get('commit', '?')} from what `make study` "
            "leaves; do not edit by hand.",
            f"{len(runs)} runs of `recipes/recover.py`, seeds {', '.join(map(str, seeds))} (of the "
            "calibration set, the tokens and the method), packed in `benchmarks/study` with their "
            f"settings{f'; by commit: {commits}' if commits else ''}. "
            f"Model {runs[0].model}, window {runs[0].window}; {judged}. "
            "All other settings are those of the preset `tiny`, which are not "
            "the paper's: nothing here says how large a difference is on a model of its size.",
            "",
            "± is one standard error over seeds where nothing else is said. Intervals hold the "
            "middle 95 % of 2,000 replicates in which seeds and test examples are drawn anew, the "
            "same examples for both sides. With few seeds they are too narrow: three seeds drawn "
            "anew never leave the range of the three, which holds the true mean in about three "
            "cases of four; and of many comparisons some look clear by chance.",
            "",
        ]
    )
