"""The three stages of the paper.

stage 1  localize_parts: what does windowing each layer cost?
stage 2  choose_groups: how many groups of each layer get the window?
stage 3  choose_groups: which ones?
"""

from collections.abc import Sequence
from statistics import fmean

from bosch.masks.mask import num_windowed
from bosch.method import Table
from bosch.run.progress import say
from bosch.search.objective import rounded
from bosch.search.optimizers._interface import Solution
from bosch.search.ratios import Subproblem, allocate_ratios, cut, plan_subproblems
from bosch.search.search import Search, count_solving
from bosch.search.settings import StageSettings


def localize_parts(
    search: Search, kappa: int, layers_at_once: int, exact_values: bool = False
) -> tuple[list[float], Table]:
    """Algorithm 1, from the top layer down, keeping the masks of the layers above: ceil(rho G)
    groups of each layer get the window. The paper takes one layer at a time, its ablation B-multi
    several. The scores, with layers i and above localized, go into the search's record.

    Returns the log-probabilities, with the dense model's at the end, for equal scores; and how
    global each group is: the harm of windowing it, or 1 for the groups left full.
    """
    windowed, dense = groups_a_layer(search), search.anchors.dense
    scores = [0.0] * search.num_layers
    ties = [0.0] * search.num_layers + [rounded(dense.log_probability or 0.0)]
    harm = [[0.0] * search.num_groups for _ in range(search.num_layers)]
    above = search.score_of(dense)
    for layers in reversed(parts(search, layers_at_once)):
        variables = search.groups_of(layers)
        name = f"stage 1, {describe_layers(layers)}"
        quota, most = windowed * len(layers), kappa * len(layers)
        solution = search.solve(name, variables, quota, most, exact_values=exact_values)
        value = solution.value
        assert value is not None
        score = search.score_of(value)
        for layer in layers:
            scores[layer], ties[layer] = score, rounded(value.log_probability or 0.0)
        harms = _harm(solution, (above - score) / len(variables))
        for ((layer, group),), harm_done in zip(variables, harms, strict=True):
            harm[layer][group] = harm_done
        above = score
    search.details["stage1_scores"] = scores
    return ties, tuple(map(tuple, harm)) if exact_values else search.z


def groups_a_layer(search: Search) -> int:
    """Groups of each layer that stage 1 puts on the window."""
    return num_windowed(search.inputs.ratio, 1, search.num_groups)


def parts(search: Search, layers_at_once: int) -> list[tuple[int, ...]]:
    """The layers that stage 1 takes together."""
    return cut(range(search.num_layers), -(-search.num_layers // layers_at_once))


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


def choose_groups(
    search: Search, settings: StageSettings, ties: Sequence[float], guide: Table
) -> None:
    """Algorithm 2, which needs no evaluations, and algorithm 3: starting from the dense model,
    layers of one ratio at a time, larger ratios first."""
    dense, ratio = search.score_of(search.anchors.dense), search.inputs.ratio
    scores, buckets = search.details["stage1_scores"], settings.ratio_buckets
    ratios = allocate_ratios(scores, dense, ratio, search.num_groups, buckets, ties)
    search.details["ratios"] = list(ratios)
    say("stage 2, ratios from the bottom layer up: " + " ".join(f"{ratio:g}" for ratio in ratios))
    search.z = search.dense()
    for part in _plan(search, settings, ratios):
        variables = search.groups_of(part.layers)
        if not part.evaluations:
            bit = int(part.num_windowed == 0)
            search.z = search.mask(variables, (bit,) * len(variables))
            continue
        name = f"stage 3, ratio {part.ratio:g}, {describe_layers(part.layers)}"
        most = settings.kappa * len(part.layers)
        search.solve(name, variables, part.num_windowed, most, [guide])


def _plan(search: Search, settings: StageSettings, ratios: Sequence[float]) -> list[Subproblem]:
    groups = search.num_groups
    return plan_subproblems(ratios, groups, settings.kappa, settings.layers_at_once(groups))


def count_evaluations(search: Search, settings: StageSettings) -> dict[str, int]:
    """Most evaluations of each stage."""
    # How many layers get each ratio does not depend on the result of stage 1.
    layers, groups = search.num_layers, search.num_groups
    ratios = allocate_ratios(
        range(layers), layers, search.inputs.ratio, groups, settings.ratio_buckets
    )
    planned = {
        "stage 1": count_localizing(search, settings.kappa, 1),
        "stage 3": sum(part.evaluations for part in _plan(search, settings, ratios)),
    }
    return {stage: count for stage, count in planned.items() if count}


def count_localizing(search: Search, kappa: int, layers_at_once: int) -> int:
    windowed, groups = groups_a_layer(search), search.num_groups
    sizes = map(len, parts(search, layers_at_once))
    return sum(count_solving(n * groups, n * windowed, n * kappa) for n in sizes)


def describe_layers(layers: Sequence[int]) -> str:
    """For example: layer 3, layers 4-6, layers 1 5 7."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    if last - first == len(layers) - 1:
        return f"layers {first}-{last}"
    return "layers " + " ".join(map(str, layers))
