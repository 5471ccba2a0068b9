"""The three stages of the paper.

stage 1  localize_parts: what does windowing each layer cost?
stage 2  assign_ratios: how many groups of each layer get the window?
stage 3  select_groups: which ones?
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bosch.masks.mask import num_windowed
from bosch.method import Table
from bosch.run.progress import say
from bosch.search.objective import Value, rounded
from bosch.search.optimizers._interface import Solution
from bosch.search.ratios import Subproblem, allocate_ratios, cut, plan_subproblems
from bosch.search.search import Search, count_solving
from bosch.search.settings import StageSettings


@dataclass(frozen=True)
class Importance:
    """The result of stage 1."""

    scores: tuple[float, ...]  # the objective with layers i and above localized
    tie_scores: tuple[float, ...]  # log-probabilities, and then the dense model's
    # How global each group is: the harm of windowing it, or 1 for the groups left full.
    guide: Table


def localize_parts(
    search: Search, kappa: int, layers_at_once: int, exact_values: bool = False
) -> Importance:
    """Algorithm 1, from the top layer down, keeping the masks of the layers above: ceil(rho G)
    groups of each layer get the window. The paper takes one layer at a time, its ablation B-multi
    several.
    """
    windowed, dense = groups_a_layer(search), search.anchors.dense
    scores = [0.0] * search.num_layers
    ties = [0.0] * search.num_layers + [_log_probability(dense)]
    harm = [[0.0] * search.num_groups for _ in range(search.num_layers)]
    above = search.score_of(dense)
    for layers in reversed(cut(range(search.num_layers), layers_at_once)):
        variables = search.groups_of(layers)
        solution = search.solve(
            f"stage 1, {describe_layers(layers)}",
            variables,
            windowed * len(layers),
            kappa * len(layers),
            exact_values=exact_values,
        )
        assert solution.value is not None
        score = search.score_of(solution.value)
        for layer in layers:
            scores[layer], ties[layer] = score, _log_probability(solution.value)
        harms = _harm(solution, (above - score) / len(variables))
        for ((layer, group),), harm_done in zip(variables, harms, strict=True):
            harm[layer][group] = harm_done
        above = score
    search.details["stage1_scores"] = scores
    guide = tuple(map(tuple, harm)) if exact_values else search.z
    return Importance(tuple(scores), tuple(ties), guide)


def groups_a_layer(search: Search) -> int:
    """Groups of each layer that stage 1 puts on the window."""
    return num_windowed(search.inputs.ratio, 1, search.num_groups)


def _harm(solution: Solution, share: float) -> list[float]:
    """For each variable, the mean value of masks that keep it full minus the mean value of masks
    that window it, over masks that meet the quota. Where one kind is missing, its share of the
    whole drop.
    """
    problem, table = solution.trials.problem, solution.trials.table.items()
    tried = [(mask, v.value) for mask, v in table if v.exact and problem.meets_quota(mask)]
    harms = []
    for variable in range(problem.num_variables):
        full, windowed = ([v for mask, v in tried if mask[variable] == bit] for bit in (1, 0))
        harms.append(fmean(full) - fmean(windowed) if full and windowed else share)
    return harms


def _log_probability(value: Value) -> float:
    assert value.log_probability is not None
    return rounded(value.log_probability)


def assign_ratios(
    search: Search, settings: StageSettings, importance: Importance
) -> tuple[float, ...]:
    """Algorithm 2; it needs no evaluations."""
    scores, dense = importance.scores, search.score_of(search.anchors.dense)
    if dense <= 0:  # shift log-probabilities to positive scores: only the drops matter
        scores, dense = tuple(round(1 + score - dense, 4) for score in scores), 1.0
    ratio, groups, buckets = search.inputs.ratio, search.num_groups, settings.ratio_buckets
    ratios = allocate_ratios(scores, dense, ratio, groups, buckets, importance.tie_scores)
    search.details["ratios"] = list(ratios)
    say("stage 2, ratios from the bottom layer up: " + " ".join(f"{ratio:g}" for ratio in ratios))
    return ratios


def select_groups(
    search: Search, settings: StageSettings, ratios: Sequence[float], guides: Sequence[Table]
) -> None:
    """Algorithm 3, starting from the dense model: layers of one ratio at a time, larger ratios
    first."""
    search.z = search.dense()
    for part in _plan(search, settings, ratios):
        variables = search.groups_of(part.layers)
        if not part.evaluations:
            bit = int(part.num_windowed == 0)
            search.z = search.mask(variables, (bit,) * len(variables))
            continue
        name = f"stage 3, ratio {part.ratio:g}, {describe_layers(part.layers)}"
        most = settings.kappa * len(part.layers)
        search.solve(name, variables, part.num_windowed, most, guides)


def _plan(search: Search, settings: StageSettings, ratios: Sequence[float]) -> list[Subproblem]:
    groups = search.num_groups
    return plan_subproblems(ratios, groups, settings.kappa, settings.layers_at_once(groups))


def count_evaluations(search: Search, settings: StageSettings) -> dict[str, int]:
    """Most evaluations of each stage."""
    # How many layers get each ratio does not depend on the result of stage 1.
    any_scores = range(search.num_layers)
    ratios = allocate_ratios(
        any_scores,
        search.num_layers,
        search.inputs.ratio,
        search.num_groups,
        settings.ratio_buckets,
    )
    planned = {
        "stage 1": count_localizing(search, settings.kappa, 1),
        "stage 3": sum(part.evaluations for part in _plan(search, settings, ratios)),
    }
    return {stage: count for stage, count in planned.items() if count}


def count_localizing(search: Search, kappa: int, layers_at_once: int) -> int:
    windowed, groups = groups_a_layer(search), search.num_groups
    sizes = [len(part) for part in cut(range(search.num_layers), layers_at_once)]
    return sum(count_solving(n * groups, n * windowed, n * kappa) for n in sizes)


def describe_layers(layers: Sequence[int]) -> str:
    """For example: layer 3, layers 4-6, layers 1 5 7."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    if last - first == len(layers) - 1:
        return f"layers {first}-{last}"
    return "layers " + " ".join(map(str, layers))
