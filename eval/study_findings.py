"""What the paper found beside what a study found: a sentence each, made from the numbers.

The paper's claims are on its own rivals. Methods that it has not stand in sentences of their own.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from bosch.analysis.overlap import Turnover
from bosch.analysis.replacement import CHOSEN, ORIGINS
from eval.measures import SUITES, Measure
from eval.rows import Row
from eval.study import (
    AFTER,
    AS_PUBLISHED,
    BEFORE,
    DENSE,
    OURS,
    Advantage,
    Study,
    advantage,
    difference,
    leads,
)
from eval.study_tables import (
    STATIC,
    agreements,
    exchange_pairs,
    show_advantage,
    show_mean,
    show_points,
    trained_runs,
    turnovers,
)

HEURISTICS = ("random_layers", "begin_middle_end", "interleave")
FIRST_STAGE, WIDER_STAGE, WHOLE_LAYERS = "bosch_single", "bosch_multi", "bosch_layer"
BEST_STATIC = ("fisher", "razor")
RIVALS = (*HEURISTICS, *STATIC, FIRST_STAGE, WIDER_STAGE, WHOLE_LAYERS)  # of tables 1 and 2
TRAINED_RIVALS = ("fisher", WHOLE_LAYERS, "interleave")  # of figures 3 and 4 and table 6
TURNOVER = {(0.25, 0.5): "26 to 30 %", (0.5, 0.75): "29 to 31 %", (0.75, 0.875): "31 to 44 %"}
Pairs = Sequence[tuple[str, str]]  # a method that the paper has above another


def findings(study: Study, distance_ratios: Sequence[float]) -> Iterator[str]:
    """On each claim of the paper that these numbers can speak to."""
    averages = study.comparison.averages
    if OURS in study.methods:
        yield from same_as_first_stage(study, averages[0])
        for measure in averages:
            yield from above_rivals(study, measure)
        yield from widening_gap(study, averages[0])
    yield from in_order(
        study,
        averages[0],
        (OURS, WHOLE_LAYERS, WIDER_STAGE, FIRST_STAGE),
        "Paper: the first stage alone is far behind BOSCH; with several layers at once it comes "
        "nearer, about to where the search over whole layers is",
        [
            *((OURS, ablation) for ablation in (FIRST_STAGE, WIDER_STAGE, WHOLE_LAYERS)),
            (WIDER_STAGE, FIRST_STAGE),
        ],
    )
    yield from in_order(
        study,
        averages[0],
        STATIC,
        "Paper: of the static methods Fisher and Razor are the strongest, DCAM and APL clearly "
        "worse",
        list(itertools.product(BEST_STATIC, (n for n in STATIC if n not in BEST_STATIC))),
    )
    yield from like_random(study, averages[0])
    yield from (after_training(study, measure) for measure in averages)
    yield from (line for measure in averages for line in what_comes_back(study, measure))
    yield from turnover(study)
    for ratio in distance_ratios:
        if (OURS, ratio) in study.cells:
            yield from how_far(study, ratio)
    own_window = study.comparison.runs[0].window
    yield from beside_others(
        [row for row in study.windows if row["window"] != own_window],
        "window",
        "W {}",
        "Paper: BOSCH stays ahead of Fisher, B-layer and INTR under other windows than those that "
        "masks were chosen for, and larger ones score higher",
    )
    yield from beside_others(
        study.long,
        "length_asked",
        "{:,} tokens",
        "Paper: BOSCH is the best hybrid also on texts longer than the model reads",
    )
    yield from exchanges(study)


# -------------------------------------------------------------------------------- before training


def above_rivals(study: Study, measure: Measure) -> Iterator[str]:
    """Against the paper's rivals, then against the other methods of this project."""
    found = {
        (name, ratio): lead
        for ratio in study.ratios
        for name in study.methods
        if name not in (OURS, AS_PUBLISHED)
        and not is_same(study, name, ratio)
        and (lead := advantage(study, name, ratio, measure, BEFORE))
    }
    theirs = {place: lead for place, lead in found.items() if place[0] in RIVALS}
    others = {place: lead for place, lead in found.items() if place[0] not in RIVALS}
    ratios = list(dict.fromkeys(ratio for _, ratio in theirs))
    first = [
        ratio
        for ratio in ratios
        if all(lead.points >= 0 for (_, at), lead in theirs.items() if at == ratio)
    ]
    if theirs:
        yield (
            f"Paper: before training BOSCH is above every rival at every ratio. Here, on "
            f"{measure.title}, over the seeds that both have, its mean is level with or above that "
            f"of every rival of the paper at {len(first)} of {len(ratios)} ratios; "
            f"{describe_signs(theirs)}"
        )
    if others:
        yield (f"With methods that the paper has not, on {measure.title}: {describe_signs(others)}")


def is_same(study: Study, rival: str, ratio: float) -> bool:
    """Whether a rival found our masks, under every seed that both have."""
    found = agreements(study, OURS, rival, ratio)
    return bool(found) and all(one.distance == 0 for one in found)


def describe_signs(told: Mapping[tuple[str, float], Advantage], unit: str = "{:g}") -> str:
    """How many comparisons are clearly for ours, against it, or open; and which are against, by
    rival and ratio (or another place of that unit)."""
    signs = [lead.sign for lead in told.values()]
    against = [f"{name} at {unit.format(at)}" for (name, at), lead in told.items() if lead.sign < 0]
    line = (
        f"of {len(told)} comparisons {signs.count(1)} are clearly for it, {len(against)} clearly "
        f"against it, {signs.count(0)} open"
    )
    if any(lead.num_seeds < 2 for lead in told.values()):
        line += " (those over one seed among them)"
    return line + (f". Against: {', '.join(against)}." if against else ".")


def widening_gap(study: Study, measure: Measure) -> Iterator[str]:
    told = []
    for ratio in study.ratios:
        means = means_of(study, RIVALS, ratio, measure)
        means.pop(FIRST_STAGE, None)  # the same mask, more often than not
        ours = means_of(study, [OURS], ratio, measure).get(OURS)
        if means and ours is not None:
            ahead = ours - statistics.median(means.values())
            told.append(f"{ahead:.1f} at {ratio:g}")
    if told:
        yield (
            "Paper: the gap to the competitors tends to widen with the ratio. Here, on "
            f"{measure.title}, {OURS} is above the median of the paper's rivals but {FIRST_STAGE} "
            f"by {'; '.join(told)}."
        )


def same_as_first_stage(study: Study, measure: Measure) -> Iterator[str]:
    """How often ours ended with the mask of its first stage; and what stage 3 ended with."""
    told = [
        agreement.distance
        for ratio in study.ratios
        for agreement in agreements(study, OURS, FIRST_STAGE, ratio)
    ]
    if not told:
        return
    line = (
        f"To know beforehand: {OURS} keeps the best mask that it has scored on its calibration "
        f"set (`keep_best`, ours); in {told.count(0)} of {len(told)} runs that is the mask of its "
        f"first stage, {FIRST_STAGE}'s, which is left out where rivals are counted. The paper "
        "takes the mask of stage 3"
    )
    means = {r: means_of(study, [AS_PUBLISHED], r, measure).get(AS_PUBLISHED) for r in study.ratios}
    last = [f"{mean:.1f} at {ratio:g}" for ratio, mean in means.items() if mean is not None]
    yield line + (f", which here has on {measure.title} {', '.join(last)}." if last else ".")


def in_order(
    study: Study, measure: Measure, names: Sequence[str], claim: str, pairs: Pairs
) -> Iterator[str]:
    """The means of some methods at each ratio, the best first, and how many pairs stand so."""
    told, stand, compared = [], 0, 0
    for ratio in study.ratios:
        means = means_of(study, names, ratio, measure)
        ordered = sorted(means, key=means.__getitem__, reverse=True)
        both = [(a, b) for a, b in pairs if a in means and b in means]
        stand += sum(means[a] > means[b] for a, b in both)
        compared += len(both)
        if both:
            scores = ", ".join(f"{name} {means[name]:.1f}" for name in ordered)
            told.append(f"at {ratio:g} {scores}")
    if told:
        yield (
            f"{claim}. Here {stand} of the {compared} pairs that this orders stand so on "
            f"{measure.title}: {'; '.join(told)}."
        )


def like_random(study: Study, measure: Measure) -> Iterator[str]:
    """Whether fixed patterns of layers are in the range of random ones."""
    told, inside, compared = [], 0, 0
    for ratio in study.ratios:
        drawn = [
            float(curve.values[BEFORE])
            for curve in study.curves(HEURISTICS[0], ratio, measure).values()
        ]
        means = means_of(study, HEURISTICS[1:], ratio, measure)
        if drawn and means:
            low, high = min(drawn), max(drawn)
            inside += sum(low <= mean <= high for mean in means.values())
            compared += len(means)
            scores = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
            told.append(f"at {ratio:g} {low:.1f} to {high:.1f}, {scores}")
    if told:
        yield (
            "Paper: INTR and BME often fall in the range of RAND. Here they do in "
            f"{inside} of {compared} cases on {measure.title} (first {HEURISTICS[0]} over its "
            f"seeds): {'; '.join(told)}."
        )


def means_of(
    study: Study, names: Sequence[str], ratio: float, measure: Measure
) -> dict[str, float]:
    """Of the methods that have been run at this ratio, over their seeds, before training."""
    found = {name: study.curves(name, ratio, measure).values() for name in names}
    return {
        name: statistics.fmean(float(curve.values[BEFORE]) for curve in curves)
        for name, curves in found.items()
        if curves
    }


# --------------------------------------------------------------------------------- after training


def after_training(study: Study, measure: Measure) -> str:
    theirs = [name for name in study.trained if name in TRAINED_RIVALS]
    others = [name for name in study.trained if name not in (*TRAINED_RIVALS, OURS)]
    line = (
        "Paper: after training BOSCH is ahead of Fisher, Fisher of B-layer, B-layer of INTR. "
        f"Here, at ratio {study.trained_ratio:g} on {measure.title}: "
        f"{describe_lead(study, theirs, measure) or 'not trained yet'}."
    )
    more = describe_lead(study, others, measure)
    return line + (f" Beside methods that the paper has not: {more}." if more else "")


def what_comes_back(study: Study, measure: Measure) -> Iterator[str]:
    """From step 0 to the end, beside the dense model before and after the same training."""
    told, above = [], 0
    for name, runs in trained_runs(study).items():
        curves = [curve for run in runs if (curve := study.comparison.curve(run.name, measure))]
        trained = [curve for curve in curves if curve.is_trained]
        if trained:
            first, last = (
                statistics.fmean(float(curve.values[place]) for curve in trained)
                for place in (BEFORE, AFTER)
            )
            told.append(f"{name} {first:.1f} to {last:.1f}")
            above += last > first
    if told:
        yield (
            "Paper: training nearly closes the gap on NIAH and narrows it on LongBench by methods "
            f"that choose heads, less by those that choose layers. Here, on {measure.title}, "
            f"{above} of {len(told)} end above where they began: {', '.join(told)}."
        )


def describe_lead(study: Study, rivals: Sequence[str], measure: Measure) -> str:
    found = {name: advantage(study, name, study.trained_ratio, measure, AFTER) for name in rivals}
    return "; ".join(f"{show_advantage(lead)} over {name}" for name, lead in found.items() if lead)


# --------------------------------------------------------------------------------------- masks


def turnover(study: Study) -> Iterator[str]:
    told = []
    for pair, found in turnovers(study, OURS).items():
        mean, chance = (mean_share(found, name) for name in ("normalized", "normalized_chance"))
        if mean is not None and chance is not None:
            step = "{:g} to {:g}".format(*pair)
            said = f" (paper {TURNOVER[pair]})" if pair in TURNOVER else ""
            told.append(f"from {step} {mean:.0%}{said}, at random {chance:.0%}")
    if told:
        yield (
            "Paper: masks of one ratio are not contained in those of the next; of the turnover "
            f"that is possible there is 26 to 44 %. Here {OURS} has, over its seeds, "
            f"{'; '.join(told)}."
        )


def mean_share(found: Sequence[Turnover], name: str) -> float | None:
    shares = [share for one in found if (share := getattr(one, name)) is not None]
    return statistics.fmean(shares) if shares else None


def how_far(study: Study, ratio: float) -> Iterator[str]:
    """Figure 2: the static methods by their distance from ours, then by that from each other."""
    found = {name: agreements(study, OURS, name, ratio) for name in STATIC}
    distances = {name: [one.distance for one in told] for name, told in found.items() if told}
    if not distances:
        return
    ordered = sorted(distances, key=lambda name: statistics.fmean(distances[name]))
    told = ", ".join(f"{name} {show_mean(distances[name], 2)}" for name in ordered)
    chance = next(iter(found[ordered[0]])).expected_distance
    yield (
        "Paper: BOSCH's masks are far from those of all static methods, Fisher's and Razor's are "
        f"the nearest. Here, by Jaccard distance at ratio {ratio:g}: {told}; random masks are at "
        f"{chance:.2f}."
    )
    pairs = {
        f"{a} and {b}": statistics.fmean(one.distance for one in both)
        for a, b in itertools.combinations(STATIC, 2)
        if (both := agreements(study, a, b, ratio))
    }
    if len(pairs) > 1:
        tight = sorted(pairs, key=pairs.__getitem__)
        shown = dict.fromkeys([tight[0], "razor and fisher", "dcam and apl"])
        told = ", ".join(f"{pair} at {pairs[pair]:.2f}" for pair in shown if pair in pairs)
        yield (
            "Paper: Fisher and Razor are a tighter pair than other static methods, DCAM and APL "
            f"are close to each other. Here, at ratio {ratio:g}, the tightest pair first: {told}."
        )


def exchanges(study: Study) -> Iterator[str]:
    """Table 5: what it costs ours to take groups of a smaller ratio back."""
    measure = study.comparison.averages[0]
    told = []
    for (smaller, larger), of_pair in exchange_pairs(study).items():
        chosen, *others = (of_pair[origin][measure.suite] for origin in (CHOSEN, *ORIGINS))
        if chosen and all(others):
            above = " and ".join(show_advantage(difference(chosen, points)) for points in others)
            told.append(f"from {smaller:g} to {larger:g} {show_points(chosen)}, {above}")
    if told:
        yield (
            "Paper: masks lose 4 to 22 points of NIAH where groups that a smaller ratio had on the "
            f"window are put there again. Here, on {measure.title}, masks as chosen, what they are "
            f"above those, and above as many random groups: {'; '.join(told)}."
        )


# --------------------------------------------------------------------- other windows and lengths


def beside_others(rows: Sequence[Row], across: str, unit: str, claim: str) -> Iterator[str]:
    """Ours beside the best of the paper's rivals, then beside the best of the other methods."""
    found = leads(rows, across)
    for suite in dict.fromkeys(row["suite"] for row in rows):
        scores: dict[int, dict[str, list[float]]] = {}
        for row in rows:
            if row["suite"] == suite and row["method"] != DENSE:
                of_place = scores.setdefault(row[across], {})
                of_place.setdefault(row["method"], []).append(row["value"])
        told = []
        for of_paper in (True, False):
            signs = {
                (rival, place): lead
                for (of_suite, rival, place), lead in found.items()
                if of_suite == suite and (rival in TRAINED_RIVALS) == of_paper
            }
            best = describe_best(scores, unit, of_paper)
            told.append(f"{best}; {describe_signs(signs, unit)}" if best else "")
        theirs, others = told
        if theirs:
            line = f"{claim}. Here, on {SUITES[suite]} average: {theirs}"
            yield line + (f" Beside methods that the paper has not: {others}" if others else "")


def describe_best(scores: dict[int, dict[str, list[float]]], unit: str, of_paper: bool) -> str:
    """At each window or length ours, and the best of the others that the paper has, or has not."""
    told = []
    for place, values in sorted(scores.items()):
        others = [n for n in values if n != OURS and (n in TRAINED_RIVALS) == of_paper]
        if OURS in values and others:
            best = max(others, key=lambda name: statistics.fmean(values[name]))
            both = ", ".join(f"{name} {show_mean(values[name])}" for name in (OURS, best))
            told.append(f"{both} at {unit.format(place)}")
    return "; ".join(told)
