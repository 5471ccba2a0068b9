"""The three stages of BOSCH, and what its variants put in their place or behind them.

stage 1  localize_parts, probe_layers: what does each layer cost?
stage 2  assign_ratios: how many groups of each layer go on the window?
stage 3  select_groups: which ones?
after    polish: does a swap across layers help?
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bosch.methods._interface import Table
from bosch.run.progress import say
from bosch.search.optimizers._interface import WITH_PENALTY, Found, mend
from bosch.search.ratios import allocate_ratios
from bosch.search.search import Search, Variable, plan_solving
from bosch.search.settings import StageSettings
from bosch.search.subproblems import cut, plan_subproblems


@dataclass(frozen=True)
class Importance:
    """What stage 1 found."""

    scores: tuple[float, ...]  # once layers i and above are localized; in the objective
    dense: float
    tie_scores: tuple[float, ...] | None = None  # the same in log-probability, the dense one last
    # How global it found each group: the harm done by windowing it, or 1 for those left full.
    guide: Table | None = None

    @property
    def guides(self) -> list[Table]:
        return [] if self.guide is None else [self.guide]


# ---------------------------------------------------------------------------------------- stage 1


def measure_importance(search: Search, settings: StageSettings) -> Importance:
    """Stage 1, in the way that the settings ask for."""
    if settings.importance == "whole_layer":
        return probe_layers(search)
    wants_harm = settings.optimizer not in WITH_PENALTY
    return localize_parts(search, settings.kappa, 1, exact_values=wants_harm)


def localize_parts(
    search: Search, kappa: int, layers_at_once: int, exact_values: bool = False
) -> Importance:
    """Algorithm 1, from the top layer down, what was found above kept: ceil(rho G) groups of each
    layer go on the window. The paper takes one layer at a time, its ablation -multi several.
    """
    windowed = groups_a_layer(search)
    scores = [0.0] * search.num_layers
    ties = [0.0] * search.num_layers + [_tie(search.anchors.dense.log_probability)]
    harm = [[0.0] * search.num_groups for _ in range(search.num_layers)]
    above = search.score_of(search.anchors.dense)
    for layers in reversed(cut(range(search.num_layers), layers_at_once)):
        variables = search.groups_of(layers)
        found = search.solve(
            f"stage 1, {describe_layers(layers)}",
            variables,
            windowed * len(layers),
            kappa * len(layers),
            exact_values=exact_values,
        )
        assert found.value is not None
        for layer in layers:
            scores[layer] = search.score_of(found.value)
            ties[layer] = _tie(found.value.log_probability)
        share = (above - scores[layers[0]]) / len(variables)
        for ((layer, group),), harm_done in zip(variables, _harm(found, share), strict=True):
            harm[layer][group] = harm_done
        above = scores[layers[0]]
    search.details["stage1_scores"] = scores
    return Importance(
        tuple(scores),
        search.score_of(search.anchors.dense),
        tuple(ties),
        tuple(map(tuple, harm)) if exact_values else search.z,
    )


def localize_to_budget(search: Search, kappa: int, layers_at_once: int) -> None:
    """Stage 1 as a method of its own. It puts ceil(rho G) groups of each layer on the window; those
    beyond the budget are taken off again, first those that did the most harm there.
    """
    windowed = groups_a_layer(search) * search.num_layers
    found = localize_parts(search, kappa, layers_at_once, exact_values=windowed != search.budget)
    if windowed != search.budget:
        groups = search.all_groups()
        assert found.guide is not None
        order = most_local_first(found.guide, groups)
        bits = mend(search.bits(groups, search.z), search.budget, order)
        search.z = search.mask(groups, bits)
        search.evaluate(search.z, None, "to the budget")


def groups_a_layer(search: Search) -> int:
    """Of each layer that stage 1 puts on the window."""
    return math.ceil(search.context.ratio * search.num_groups - 1e-9)


def probe_layers(search: Search) -> Importance:
    """Each layer wholly on the window with all others full, by the answers' mean log-probability:
    one evaluation a layer.

    A layer with a single group that counts costs nothing in stage 1 as published, whose best masks
    avoid that group, and then everything at a ratio of 1.
    """
    layers, dense = search.whole_layers(), _tie(search.anchors.dense.log_probability)
    found = []
    with search.objective.tracking("stage 1, whole layers", len(layers)):
        for layer in range(len(layers)):
            bits = tuple(int(other != layer) for other in range(len(layers)))
            value = search.evaluate(search.mask(layers, bits), None, "stage 1, whole layers")
            found.append(_tie(value.log_probability))
    search.details["whole_layer_log_probabilities"] = found
    # As if each layer's drop were added on top of those above it, from a dense score of 1.
    scores = [1.0]
    for left in reversed(found):
        scores.append(round(scores[-1] - (dense - left), 4))
    return Importance(tuple(scores[:0:-1]), 1.0)


def _harm(found: Found, share: float) -> list[float]:
    """For each variable the mean value of the masks that meet the quota and keep it full, less that
    of those that put it on the window; its share of the whole drop where there are not both.
    """
    trials = found.trials
    rows = [
        (bits, value.value)
        for bits, value in trials.table.items()
        if value.exact and trials.problem.meets_quota(bits)
    ]
    harms = []
    for variable in range(trials.problem.num_variables):
        kept, lost = ([v for bits, v in rows if bits[variable] == bit] for bit in (1, 0))
        both = kept and lost
        harms.append(fmean(kept) - fmean(lost) if both else share)
    return harms


def _tie(log_probability: float | None) -> float:
    assert log_probability is not None
    return round(log_probability, 4)


# ---------------------------------------------------------------------------------------- stage 2


def assign_ratios(search: Search, settings: StageSettings, found: Importance) -> tuple[float, ...]:
    """Algorithm 2, without an evaluation."""
    scores, dense = found.scores, found.dense
    if dense <= 0:  # log-probabilities, where stage 2 takes shares; it goes by the drops alone
        scores, dense = tuple(round(1 + score - dense, 4) for score in scores), 1.0
    ratios = allocate_ratios(
        scores,
        dense,
        search.context.ratio,
        search.num_groups,
        settings.ratio_buckets,
        found.tie_scores,
    )
    search.details["ratios"] = list(ratios)
    say("stage 2, ratios from the bottom layer up: " + " ".join(f"{ratio:g}" for ratio in ratios))
    return ratios


# ---------------------------------------------------------------------------------------- stage 3


def select_groups(
    search: Search,
    settings: StageSettings,
    ratios: Sequence[float],
    guides: Sequence[Table] = (),
) -> None:
    """Algorithm 3, from the dense model on: layers of one ratio at a time, larger ratios first.

    Each guide says how global it finds each group. Optimizers that keep the quota start from what
    the guides choose, the first of them also says which groups go where a mask must be mended.
    """
    search.z = search.dense()
    plan = plan_subproblems(
        ratios,
        search.num_groups,
        settings.kappa,
        settings.layers_at_once(search.num_groups),
    )
    for part in plan:
        variables = search.groups_of(part.layers)
        if part.method == "none":
            bit = int(part.num_windowed == 0)
            search.z = search.mask(variables, (bit,) * len(variables))
            continue
        budget = settings.kappa * len(part.layers)
        name = f"stage 3, ratio {part.ratio:g}, {describe_layers(part.layers)}"
        solve_guided(search, name, variables, part.num_windowed, budget, guides)


def solve_guided(
    search: Search,
    name: str,
    variables: Sequence[Variable],
    quota: int,
    max_evaluations: int,
    guides: Sequence[Table],
) -> None:
    orders = [most_local_first(guide, variables) for guide in guides]
    starts = [mend((1,) * len(variables), quota, order) for order in orders]
    if search.settings.optimizer in WITH_PENALTY:
        starts = []
    search.solve(name, variables, quota, max_evaluations, starts, orders[0] if orders else ())


def most_local_first(guide: Table, variables: Sequence[Variable]) -> list[int]:
    """The variables by how global a guide finds their groups; among equals the first."""
    score = [sum(guide[layer][group] for layer, group in places) for places in variables]
    return sorted(range(len(variables)), key=lambda variable: score[variable])


# ------------------------------------------------------------------------------------------ after


def polish(search: Search, max_evaluations: int) -> None:
    """Swaps over all groups, across layers, from the present mask on; the budget stays met."""
    if max_evaluations < 2:
        return
    variables = search.all_groups()
    start = search.bits(variables, search.z)
    search.solve("polish", variables, search.budget, max_evaluations, [start], optimizer="swap")


# ----------------------------------------------------------------------------------- what it costs


def plan_evaluations(
    search: Search, settings: StageSettings, num_rankings: int = 0
) -> dict[str, int]:
    """Evaluations of each stage, at most. A static ranking counts as one."""
    planned = {
        "stage 1": plan_stage1(search, settings),
        "stage 3": plan_stage3(search, settings),
        "polish": plan_polish(search, settings, num_rankings),
    }
    return {stage: count for stage, count in planned.items() if count}


def plan_stage1(search: Search, settings: StageSettings) -> int:
    if settings.importance == "whole_layer":
        return search.num_layers
    return plan_localizing(search, settings.kappa, 1)


def plan_localizing(search: Search, kappa: int, layers_at_once: int) -> int:
    windowed, groups = groups_a_layer(search), search.num_groups
    sizes = [len(part) for part in cut(range(search.num_layers), layers_at_once)]
    return sum(plan_solving(n * groups, n * windowed, n * kappa) for n in sizes)


def plan_stage3(search: Search, settings: StageSettings) -> int:
    """How many layers get which ratio does not depend on what stage 1 finds."""
    num_layers, num_groups = search.num_layers, search.num_groups
    ratio, buckets = search.context.ratio, settings.ratio_buckets
    ratios = allocate_ratios(range(num_layers), num_layers, ratio, num_groups, buckets)
    most = settings.layers_at_once(num_groups)
    plan = plan_subproblems(ratios, num_groups, settings.kappa, most)
    return sum(part.evaluations for part in plan)


def plan_polish(search: Search, settings: StageSettings, num_rankings: int = 0) -> int:
    if settings.polish is not None:
        return settings.polish * search.num_layers
    spent = plan_stage1(search, settings) + num_rankings
    return max(plan_localizing(search, settings.kappa, 1) - spent, settings.kappa)


def describe_layers(layers: Sequence[int]) -> str:
    """layer 3, layers 4-6, layers 1 5 7."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    if last - first == len(layers) - 1:
        return f"layers {first}-{last}"
    return "layers " + " ".join(map(str, layers))
