"""Stage 2 of BOSCH: from the cost of localizing each layer to its share of windowed groups.

Algorithm 2 of the paper in whole numbers, so that the budget is met exactly and the loop ends. Line
6 is read with the opposite sign: as printed, the most harmful layer would count as the easiest. The
paper clips and scales the drops to weights but only uses their order, so the drops are sorted here.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from bosch.config import MaskConfig
from bosch.masks.mask import check_ratio, num_windowed
from bosch.run.errors import UserError


def allocate_ratios(
    stage1_scores: Sequence[float],
    dense_score: float,
    rho: float,
    num_groups: int,
    buckets: Sequence[float] = MaskConfig.ratio_buckets,
    tie_scores: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Each layer's share of groups on the window; together exactly the budget of `rho`.

    `stage1_scores[i]` is the score with layers i and above localized; layer 0 is at the bottom.
    `tie_scores`, another score in the same order with the dense model's last, decide between equal
    drops; if those are equal too, the lower layer counts as harder. A harder layer never gets a
    larger share.
    """
    scores, dense_score = [float(score) for score in stage1_scores], float(dense_score)
    ties = None if tie_scores is None else [float(score) for score in tie_scores]
    _check_scores(scores, dense_score, ties)
    check_ratio(rho)
    num_layers = len(scores)
    counts = _bucket_counts([float(bucket) for bucket in buckets], num_groups)
    budget = num_windowed(rho, num_layers, num_groups)
    if not counts[0] * num_layers <= budget <= counts[-1] * num_layers:
        raise UserError(
            f"A ratio of {rho:g} puts {budget} of {num_layers * num_groups} groups on the window, "
            f"but buckets from {counts[0]} to {counts[-1]} groups per layer allow "
            f"{counts[0] * num_layers} to {counts[-1] * num_layers}; choose other buckets."
        )
    hard = hardest_first(scores, dense_score, ties)
    windowed = _reconcile(_split(hard, len(counts)), hard, counts, budget)
    assert sum(windowed.values()) == budget
    return tuple(windowed[layer] / num_groups for layer in range(num_layers))


def hardest_first(
    stage1_scores: Sequence[float], dense_score: float, tie_scores: Sequence[float] | None = None
) -> list[int]:
    """Layers sorted by the cost of localizing them, highest first: the order that stage 2 uses."""
    drops = layer_drops([*stage1_scores, dense_score])
    ties = layer_drops(tie_scores) if tie_scores is not None else [Fraction(0)] * len(drops)
    return sorted(range(len(drops)), key=lambda layer: (-drops[layer], -ties[layer], layer))


def layer_drops(scores: Sequence[float]) -> list[Fraction]:
    """The cost of each layer: the score before it is localized minus the score after. The last of
    `scores` is the dense model's.
    """
    exact = []
    for score in scores:
        # Shares of examples become exact fractions, so that equal drops are equal: in floats 0.3 -
        # 0.2 is not 0.2 - 0.1. Other numbers stay as they are.
        share = Fraction(score).limit_denominator(10_000)
        exact.append(share if float(share) == score else Fraction(score))
    return [before - after for after, before in pairwise(exact)]


def _bucket_counts(buckets: Sequence[float], num_groups: int) -> list[int]:
    """Windowed groups per layer in each bucket. Buckets that are not a whole number of groups are
    dropped: with two groups per layer, 0, 0.5 and 1 of the usual five remain.
    """
    if num_groups < 1:
        raise UserError(f"num_groups is {num_groups}, it must be at least 1.")
    for bucket in buckets:
        check_ratio(bucket)
    if list(buckets) != sorted(set(buckets)):
        raise UserError(f"buckets must be in increasing order, but are {tuple(buckets)}.")
    sizes = [bucket * num_groups for bucket in buckets]
    counts = [round(size) for size in sizes if abs(size - round(size)) < 1e-9]
    if not counts:
        raise UserError(
            f"None of the buckets {tuple(buckets)} is a whole number of {num_groups} groups."
        )
    return counts


def _split(hard: list[int], num_buckets: int) -> dict[int, int]:
    """The bucket of each layer, the hardest layers in the first. Like numpy.array_split, the first
    parts are one larger if they cannot be equal.
    """
    size, larger = divmod(len(hard), num_buckets)
    places = [bucket for bucket in range(num_buckets) for _ in range(size + (bucket < larger))]
    return dict(zip(hard, places, strict=True))


def _reconcile(
    bucket_of: dict[int, int], hard: list[int], counts: list[int], budget: int
) -> dict[int, int]:
    """Move layers between neighboring buckets until the budget is met: lines 14 to 33.

    A step is taken unless it overshoots. What remains when no step fits is less than any step, and
    goes to a single layer: the easiest that can give up more, or the hardest that can get some
    back. Layers keep their order, so a harder one never has the larger share.
    """
    missing = budget - sum(counts[bucket] for bucket in bucket_of.values())
    direction = 1 if missing > 0 else -1
    layers = hard[::-1] if missing > 0 else hard
    last = len(counts) - 1 if missing > 0 else 0
    moved = True
    while missing and moved:
        moved = False
        for layer in layers:
            bucket = bucket_of[layer]
            if bucket == last:
                continue
            step = counts[bucket + direction] - counts[bucket]
            if abs(step) <= abs(missing):
                bucket_of[layer] = bucket + direction
                missing -= step
                moved = True
    windowed = {layer: counts[bucket] for layer, bucket in bucket_of.items()}
    if missing:
        windowed[next(layer for layer in layers if bucket_of[layer] != last)] += missing
    return windowed


def _check_scores(scores: list[float], dense_score: float, ties: list[float] | None) -> None:
    if not scores:
        raise UserError("stage1_scores is empty; it needs one score per layer.")
    for score in (*scores, dense_score, *(ties or ())):
        if not math.isfinite(score):
            raise UserError(f"A score is {score}; scores must be finite numbers.")
    if dense_score <= 0:
        raise UserError(
            f"The dense model's score is {dense_score:g}, so masks cannot lower it: the "
            "calibration examples are too hard for the model. Use shorter or easier ones."
        )
    if ties is not None and len(ties) != len(scores) + 1:
        raise UserError(
            f"tie_scores has {len(ties)} values for {len(scores)} layers; it needs one per layer "
            "and then the dense model's."
        )
