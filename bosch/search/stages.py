"""The three stages of the paper, in its order.

stage 1  localize_parts (algorithm 1): what does windowing each layer cost?
stage 2  give_ratios (algorithm 2): how many groups of each layer get the window?
stage 3  choose_groups (algorithm 3): which ones?

Stages 1 and 3 ask for masks (Search.solve); stage 2 only counts. Under them are their rules without
a search: allocate_ratios of stage 2, plan_subproblems of stage 3."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from statistics import fmean

from bosch.config import MaskConfig
from bosch.masks.mask import check_ratio, num_windowed
from bosch.method import Table
from bosch.run.errors import UserError
from bosch.run.progress import say
from bosch.search.objective import rounded
from bosch.search.optimizers._interface import Trials, assign
from bosch.search.search import Search, count_solving
from bosch.search.settings import StageSettings


@dataclass(frozen=True)
class Subproblem:
    """Which `num_windowed` of the groups of some layers get the window."""

    layers: tuple[int, ...]  # ascending
    ratio: float
    num_windowed: int  # in all these layers: single ones may deviate from the ratio
    evaluations: int  # 0 (nothing to choose), the number of candidates, or kappa x layers


def localize_parts(
    search: Search, kappa: int, layers_at_once: int, exact_values: bool = False
) -> tuple[list[float], Table]:
    """Algorithm 1, from the top layer down, keeping the masks of the layers above: of the groups of
    each layer a share rho, rounded up, gets the window. The paper takes one layer at a time, its
    ablation B-multi several, of whose groups together it takes that share.
    `details["stage1_scores"][i]` becomes the score with layers i and above localized.

    Returns the log-probabilities of the same masks, with the dense model's at the end, which decide
    between equal scores in stage 2; and how global each group is, by which stage 3 starts: the harm
    of windowing it, or 1 for the groups left full."""
    # From the top, so that `scores[i]` falls as i does: what layer i costs is the drop from
    # scores[i + 1], with all layers above already on their best masks. Their mistakes count too,
    # which a layer probed alone would not show.
    dense = search.anchors.dense
    ratio, num_groups = search.inputs.ratio, search.num_groups
    scores = [0.0] * search.num_layers
    ties = [0.0] * search.num_layers + [rounded(dense.log_probability or 0.0)]
    harm = [[0.0] * search.num_groups for _ in range(search.num_layers)]
    above = search.score_of(dense)
    for layers in reversed(cut_into(range(search.num_layers), layers_at_once)):
        variables = search.groups_of(layers)
        solution = search.solve(
            f"stage 1, {describe_layers(layers)}",
            variables,
            quota=num_windowed(ratio, len(layers), num_groups),
            max_evaluations=kappa * len(layers),
            exact_values=exact_values,
        )
        value = solution.value
        assert value is not None
        score = search.score_of(value)
        for layer in layers:  # layers that are taken together share their score
            scores[layer], ties[layer] = score, rounded(value.log_probability or 0.0)
        harms = _harm(solution, share_of_drop=(above - score) / len(variables))
        for ((layer, group),), harm_done in zip(variables, harms, strict=True):
            harm[layer][group] = harm_done
        above = score
    search.details["stage1_scores"] = scores
    # Harm is a mean over masks, so it needs exact values; where evaluations may end early, all that
    # is known is which groups stage 1 left full, and z itself says that.
    return ties, tuple(map(tuple, harm)) if exact_values else search.z


def _harm(trials: Trials, share_of_drop: float) -> list[float]:
    """For each variable, the mean value of masks that keep it full minus the mean value of masks
    that window it, over masks that meet the quota. Where one kind is missing, its share of the
    whole drop."""
    tried = [
        (assignment, value.value)
        for assignment, value in trials.table.items()
        if value.exact and assignment.count(0) == trials.problem.quota
    ]
    harms = []
    for variable in range(len(trials.problem.variables)):
        full, windowed = ([v for mask, v in tried if mask[variable] == bit] for bit in (1, 0))
        harms.append(fmean(full) - fmean(windowed) if full and windowed else share_of_drop)
    return harms


def give_ratios(search: Search, settings: StageSettings, ties: Sequence[float]) -> list[float]:
    """Algorithm 2, which needs no evaluations: the ratio of each layer, from what stage 1 found.
    ties: the log-probabilities of stage 1."""
    ratios = allocate_ratios(
        stage1_scores=search.details["stage1_scores"],
        dense_score=search.score_of(search.anchors.dense),
        rho=search.inputs.ratio,
        num_groups=search.num_groups,
        buckets=settings.ratio_buckets,
        tie_scores=ties,
    )
    search.details["ratios"] = list(ratios)
    say("stage 2, ratios from the bottom layer up: " + " ".join(f"{ratio:g}" for ratio in ratios))
    return list(ratios)


def choose_groups(
    search: Search, settings: StageSettings, ratios: Sequence[float], guide: Table
) -> None:
    """Algorithm 3: layers of one ratio at a time, larger ratios first. guide: how global each group
    is."""
    # From the dense model again. The masks of stage 1 were of equal ratios, and of use only to tell
    # what a layer costs; what they say of single groups comes back as the guide.
    search.z = ((1,) * search.num_groups,) * search.num_layers
    most_layers = settings.layers_at_once(search.num_groups)
    for part in plan_subproblems(ratios, search.num_groups, settings.kappa, most_layers):
        variables = search.groups_of(part.layers)
        if not part.evaluations:  # all of them on the window, or none
            bit = int(part.num_windowed == 0)
            search.z = assign(search.z, variables, (bit,) * len(variables))
            continue
        search.solve(
            f"stage 3, ratio {part.ratio:g}, {describe_layers(part.layers)}",
            variables,
            quota=part.num_windowed,
            max_evaluations=settings.kappa * len(part.layers),
            guides=[guide],
        )


def count_evaluations(search: Search, settings: StageSettings) -> dict[str, int]:
    """Most evaluations of each stage."""
    # How many layers get each ratio does not depend on the result of stage 1, so any scores will
    # do: these are as if every layer cost the same.
    ratios = allocate_ratios(
        stage1_scores=range(search.num_layers),
        dense_score=search.num_layers,
        rho=search.inputs.ratio,
        num_groups=search.num_groups,
        buckets=settings.ratio_buckets,
    )
    most_layers = settings.layers_at_once(search.num_groups)
    plan = plan_subproblems(ratios, search.num_groups, settings.kappa, most_layers)
    planned = {
        "stage 1": count_localizing(search, settings.kappa, layers_at_once=1),
        "stage 3": sum(part.evaluations for part in plan),
    }
    return {stage: count for stage, count in planned.items() if count}


def count_localizing(search: Search, kappa: int, layers_at_once: int) -> int:
    """Most evaluations of stage 1."""
    groups, ratio = search.num_groups, search.inputs.ratio
    sizes = map(len, cut_into(range(search.num_layers), layers_at_once))
    return sum(count_solving(n * groups, num_windowed(ratio, n, groups), n * kappa) for n in sizes)


def describe_layers(layers: Sequence[int]) -> str:
    """For example: layer 3, layers 4-6, layers 1 5 7."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    if last - first == len(layers) - 1:
        return f"layers {first}-{last}"
    return "layers " + " ".join(map(str, layers))


# ------------------------------------------------------------------ the rules of stages 2 and 3
#
# Stage 2 is algorithm 2 in whole numbers, so that the ratio is met exactly and the loop ends. Line
# 6 is read with the opposite sign: as printed, the most harmful layer would count as the easiest.
# The paper clips and scales the drops to weights but only uses their order, so they are sorted.


def allocate_ratios(
    stage1_scores: Sequence[float],
    dense_score: float,
    rho: float,
    num_groups: int,
    buckets: Sequence[float] = MaskConfig.ratio_buckets,
    tie_scores: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Each layer's share of groups on the window; together exactly the groups that `rho` demands.

    `stage1_scores[i]` is the score with layers i and above localized; layer 0 is at the bottom.
    `tie_scores`, another score in the same order with the dense model's last, decide between equal
    drops; if those are equal too, the lower layer counts as harder. A harder layer never gets a
    larger share."""
    num_layers = len(stage1_scores)
    counts = _bucket_counts(buckets, num_groups)
    total = num_windowed(rho, num_layers, num_groups)
    least, most = counts[0] * num_layers, counts[-1] * num_layers
    if not least <= total <= most:
        raise UserError(
            f"A ratio of {rho:g} puts {total} of {num_layers * num_groups} groups on the window, "
            f"but buckets from {counts[0]} to {counts[-1]} groups per layer allow {least} to "
            f"{most}; choose other buckets."
        )
    hard = hardest_first(stage1_scores, dense_score, tie_scores)
    # The hardest layers go into the first bucket.
    parts = enumerate(cut(hard, num_parts=len(counts)))
    bucket_of = {layer: bucket for bucket, part in parts for layer in part}
    # Lines 14 to 33: layers move between neighboring buckets until the total is met. A step is
    # taken unless it overshoots. What remains when no step fits is less than any step, and goes to
    # a single layer: the easiest that can give up more, or the hardest that can get some back.
    missing = total - sum(counts[bucket] for bucket in bucket_of.values())
    step, last, layers = (1, len(counts) - 1, hard[::-1]) if missing > 0 else (-1, 0, hard)
    moved = True
    while missing and moved:
        moved = False
        for layer in layers:
            if (bucket := bucket_of[layer]) == last:
                continue
            change = counts[bucket + step] - counts[bucket]
            if abs(change) <= abs(missing):
                bucket_of[layer] += step
                missing -= change
                moved = True
    windowed = {layer: counts[bucket] for layer, bucket in bucket_of.items()}
    if missing:
        windowed[next(layer for layer in layers if bucket_of[layer] != last)] += missing
    return tuple(windowed[layer] / num_groups for layer in range(num_layers))


def hardest_first(
    stage1_scores: Sequence[float], dense_score: float, tie_scores: Sequence[float] | None = None
) -> list[int]:
    """Layers sorted by the cost of localizing them, highest first."""
    num_layers = len(stage1_scores)
    drops = _layer_drops([*stage1_scores, dense_score])
    ties = _layer_drops(tie_scores or [0.0] * (num_layers + 1))
    return sorted(range(num_layers), key=lambda layer: (-drops[layer], -ties[layer], layer))


def _layer_drops(scores: Sequence[float]) -> list[Fraction]:
    """The score before each layer is localized minus the score after; the dense model's is last."""
    exact = []
    for score in scores:
        # Shares of examples become exact fractions, so that equal drops are equal: in floats 0.3 -
        # 0.2 is not 0.2 - 0.1. Other numbers stay as they are.
        share = Fraction(score).limit_denominator(10_000)
        exact.append(share if float(share) == score else Fraction(score))
    return [before - after for after, before in pairwise(exact)]


def _bucket_counts(buckets: Sequence[float], num_groups: int) -> list[int]:
    """Windowed groups per layer in each bucket: the nearest whole number, and no number twice. With
    two groups a layer 0, 1 and 2 of them are left of the usual five buckets, with three 0 to 3."""
    for bucket in buckets:
        check_ratio(bucket)
    if list(buckets) != sorted(set(buckets)):
        raise UserError(f"buckets must be in increasing order, but are {tuple(buckets)}.")
    return sorted({round(bucket * num_groups) for bucket in buckets})


def plan_subproblems(
    ratios: Sequence[float], num_groups: int, kappa: int, max_layers: int
) -> list[Subproblem]:
    """The subproblems in the order in which stage 3 solves them: larger ratios first, and within a
    ratio from the bottom up.

    Layers of one ratio are split by depth into parts of at most `max_layers`: the layers below a
    part are then not run again for each candidate. Each part gets `kappa` evaluations per layer; if
    it has no more candidates than that, all are tried."""
    plan = []
    for ratio in sorted(set(ratios), reverse=True):
        same = [layer for layer, share in enumerate(ratios) if share == ratio]
        for layers in cut_into(same, max_layers):
            windowed = num_windowed(ratio, len(layers), num_groups)
            candidates = math.comb(len(layers) * num_groups, windowed)
            evaluations = min(candidates, kappa * len(layers)) if candidates > 1 else 0
            plan.append(Subproblem(layers, ratio, windowed, evaluations))
    return plan


def cut_into(layers: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """As few parts as possible, of at most so many layers each."""
    num_parts = -(-len(layers) // most)  # rounded up
    return cut(layers, num_parts)


def cut(layers: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """Split into parts whose sizes differ by at most one, larger first (as numpy.array_split)."""
    size, larger = divmod(len(layers), num_parts)
    bounds = [part * size + min(part, larger) for part in range(num_parts + 1)]
    return [tuple(layers[a:b]) for a, b in pairwise(bounds)]
