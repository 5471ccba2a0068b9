"""docs/study.md: the paper's tables and figures in miniature, from the runs of recipes/study.py.

Whatever the numbers show is printed. Sentences on what the paper found stand beside what was found
here, and are made from the numbers too.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bosch.manifest import provenance, write_atomically
from eval.measures import SUITES, Measure
from eval.pictures import draw_recovery, draw_zero_shot
from eval.report import markdown
from eval.report_tables import unlike_examples
from eval.rows import Row
from eval.study import AFTER, BEFORE, OURS, Study, advantage
from eval.study_tables import (
    STATIC,
    advantage_table,
    agreements,
    cost_table,
    distances_table,
    long_table,
    recovery_table,
    replacement_table,
    show_advantage,
    turnover_table,
    windows_table,
    zero_shot_table,
)

FIGURE_2 = (0.5, 0.75)  # ratios
FIRST_STAGE = "bosch_single"


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
        *(distances_table(study, ratio) for ratio in FIGURE_2 if ratio in study.ratios),
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
    counts = {
        suite: sum(map(len, cells.values()))
        for run in runs
        for (step, suite), cells in run.samples.items()
        if step == 0
    }
    judged = f"all models were judged on the same {sum(counts.values())} test examples"
    if unlike := unlike_examples(study.comparison):
        judged = f"not all models were judged on the same test examples ({'; '.join(unlike)})"
    return "\n".join(
        [
            "# Study on the embedded model",
            "",
            f"Made by `{study.command}` at commit {told.get('commit', '?')}; do not edit by hand.",
            f"{len(runs)} runs of `recipes/recover.py`, seeds {', '.join(map(str, seeds))} (of the "
            "calibration set, the tokens and the method), packed in `benchmarks/study`. "
            f"Model {runs[0].model}, window {runs[0].window}; {judged}. "
            "Settings are those of the preset `tiny`, which are not "
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


def draw(study: Study, folder: Path) -> Iterator[str]:
    """Pictures, and the lines that show them."""
    trained = [
        run
        for run in study.comparison.runs
        if run.method in study.trained and run.ratio == study.trained_ratio and run.training
    ]
    for name, told, runs, make in (
        ("recovery", "Figure 3", trained, draw_recovery),
        ("zero_shot", "Tables 1 and 2 as a picture", study.comparison.runs, draw_zero_shot),
    ):
        shown = [run for run in runs if run.ratio]
        figure = make(replace(study.comparison, runs=shown)) if shown else None
        if figure is not None:
            figure.savefig(folder / f"{name}.png", format="png", metadata={"Software": None})
            yield f"![{told}]({folder.name}/{name}.png)"


def findings(study: Study) -> Iterator[str]:
    """One sentence on each claim of the paper that these numbers can speak to."""
    if OURS in study.methods:
        yield from first_stage_alone(study)
        yield from (best_of_all(study, measure) for measure in study.comparison.averages)
        yield from (after_training(study, measure) for measure in study.comparison.averages)
    if study.turnover:
        own = [row for row in study.turnover if row["method"].split()[0] == OURS]
        shares = [row["normalized"] for row in own if row["normalized"] is not None]
        if shares:
            ends = dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares)))
            yield (
                "Paper: masks of one ratio are not contained in those of the next, turnover is 26 "
                f"to 44 % of the most possible. Here {OURS}'s is {' to '.join(ends)} of it."
            )
    yield from (how_far(study, ratio) for ratio in FIGURE_2 if (OURS, ratio) in study.cells)
    yield from beside_others(
        study.windows,
        "window",
        "W",
        "Paper: under windows that masks were not chosen for BOSCH stays ahead of the others",
    )
    yield from beside_others(
        study.long,
        "length_asked",
        "tokens",
        "Paper: on texts longer than the model was trained on BOSCH is the best hybrid",
    )
    yield from exchanges(study.replacement)


def first_stage_alone(study: Study) -> Iterator[str]:
    """How often ours ended with the mask that its first stage found."""
    same, total = 0, 0
    for ratio in study.ratios:
        told = agreements(study, OURS, FIRST_STAGE, ratio)
        same += sum(agreement.distance == 0 for agreement in told)
        total += len(told)
    if total:
        yield (
            f"Paper: all three stages of BOSCH are needed, the first alone is clearly worse. Here, "
            f"in {same} of {total} runs, {OURS} ended with the mask of its first stage "
            f"({FIRST_STAGE}'s): it keeps the best mask that it has scored on its calibration set "
            "(`keep_best`, ours), and no later stage found a better one. The paper takes that of "
            "stage 3; [search.md](search.md) tells where it ended."
        )


def best_of_all(study: Study, measure: Measure) -> str:
    first, wins, losses, open_, total, compared = [], [], [], 0, 0, 0
    for ratio in study.ratios:
        rivals = [name for name in study.methods if study.curves(name, ratio, measure)]
        if OURS not in rivals or len(rivals) < 2:
            continue
        compared += 1
        rivals.remove(OURS)
        told = {name: advantage(study, name, ratio, measure, BEFORE) for name in rivals}
        if all(found.points >= 0 for found in told.values() if found):
            first.append(ratio)
        for rival, found in told.items():
            total += 1
            if found is None or found.sign == 0:
                open_ += 1
            elif found.sign > 0:
                wins.append(rival)
            else:
                losses.append(f"{rival} at {ratio:g}")
    line = (
        f"Paper: before training BOSCH is above every rival at every ratio. Here, on "
        f"{measure.title}, over the seeds that both have, it is level with or above every rival at "
        f"{len(first)} of {compared} ratios; of {total} comparisons with other methods {len(wins)} "
        f"are clearly for it, {len(losses)} clearly against it, {open_} open (those over one seed "
        "among them)."
    )
    return line + (f" Against: {', '.join(sorted(losses))}." if losses else "")


def how_far(study: Study, ratio: float) -> str:
    """Figure 2: the static method that is nearest to ours, and the farthest."""
    found = {name: agreements(study, OURS, name, ratio) for name in STATIC}
    means = {
        name: statistics.fmean(one.distance for one in told) for name, told in found.items() if told
    }
    line = (
        "Paper: BOSCH's masks are far from those of all static methods, Fisher's and Razor's are "
        f"the nearest. Here, at ratio {ratio:g}"
    )
    if not means:
        return f"{line}: no static method was run."
    near, far = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    others = f", {far} the farthest, at {means[far]:.2f}" if far != near else ", the only one run"
    return (
        f"{line}: {near} is the nearest, at a Jaccard distance of {means[near]:.2f}{others}; "
        f"random masks are at {found[near][0].expected_distance:.2f}."
    )


def beside_others(rows: Sequence[Row], across: str, unit: str, claim: str) -> Iterator[str]:
    """Where ours has the best score of the hybrids, and which are the best elsewhere."""
    for suite in dict.fromkeys(row["suite"] for row in rows):
        places: dict[int, dict[str, float]] = {}
        for row in rows:
            if row["suite"] == suite and row["method"] != "dense":
                places.setdefault(row[across], {})[row["method"]] = row["value"]
        told = []
        for place, scores in sorted(places.items()):
            if OURS in scores and len(scores) > 1:
                best = max(scores, key=scores.__getitem__)
                what = f"{unit} {place}" if unit == "W" else f"{place:,} {unit}"
                leads = scores[OURS] == scores[best]
                beside = "" if leads else f" after {best}'s {scores[best]:.1f}"
                told.append(f"{scores[OURS]:.1f} at {what}{beside or ', the best'}")
        if told:
            yield f"{claim}. Here, on {SUITES[suite]} average, {OURS} has {'; '.join(told)}."


def exchanges(rows: Sequence[Row]) -> Iterator[str]:
    """Table 5: what it costs ours to take groups of a smaller ratio back."""
    steps: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["step"].split()[0] == OURS and "probability" in row["means"]:
            steps.setdefault(row["step"], {})[row["origin"]] = row["means"]["probability"]
    told = [
        f"{step.removeprefix(OURS).strip()} {found['as chosen']:.3f}, {found['smaller']:.3f}, "
        f"{found['random']:.3f}"
        for step, found in steps.items()
        if found.keys() >= {"as chosen", "smaller", "random"}
    ]
    if told:
        yield (
            "Paper: masks lose where groups that a smaller ratio had chosen are put back. Here "
            f"{OURS}'s answer probability as chosen, with those, with random ones: "
            f"{'; '.join(told)}."
        )


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
