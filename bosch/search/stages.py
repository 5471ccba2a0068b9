"""The three stages of BOSCH, and what its variants put in their place or behind them.

stage 1  localize_parts, probe_layers: what does each layer cost?
stage 2  assign_ratios: how many groups of each layer go on the window?
stage 3  select_groups: which ones?
after    polish: does a swap across layers help?
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bosch.masks.mask import num_windowed
from bosch.method import Table
from bosch.run.progress import say
from bosch.search.objective import Value, rounded
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
    ties = [0.0] * search.num_layers + [_log_probability(search.anchors.dense)]
    harm = [[0.0] * search.num_groups for _ in range(search.num_layers)]
    above = dense = search.score_of(search.anchors.dense)
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
            ties[layer] = _log_probability(found.value)
        share = (above - scores[layers[0]]) / len(variables)
        for ((layer, group),), harm_done in zip(variables, _harm(found, share), strict=True):
            harm[layer][group] = harm_done
        above = scores[layers[0]]
    search.details["stage1_scores"] = scores
    guide = tuple(map(tuple, harm)) if exact_values else search.z
    return Importance(tuple(scores), dense, tuple(ties), guide)


def groups_a_layer(search: Search) -> int:
    """Of each layer that stage 1 puts on the window."""
    return num_windowed(search.inputs.ratio, 1, search.num_groups)


def probe_layers(search: Search) -> Importance:
    """Each layer wholly on the window with all others full, by the answers' mean log-probability:
    one evaluation a layer.

    A layer with a single group that counts costs nothing in stage 1 as published, whose best masks
    avoid that group, and then everything at a ratio of 1.
    """
    layers, dense = search.whole_layers(), _log_probability(search.anchors.dense)
    found = []
    with search.objective.tracking("stage 1, whole layers", len(layers)):
        for layer in range(len(layers)):
            bits = tuple(int(other != layer) for other in range(len(layers)))
            value = search.evaluate(search.mask(layers, bits), None, "stage 1, whole layers")
            found.append(_log_probability(value))
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
    problem, table = found.trials.problem, found.trials.table.items()
    rows = [(bits, v.value) for bits, v in table if v.exact and problem.meets_quota(bits)]
    harms = []
    for variable in range(problem.num_variables):
        kept, lost = ([v for bits, v in rows if bits[variable] == bit] for bit in (1, 0))
        harms.append(fmean(kept) - fmean(lost) if kept and lost else share)
    return harms


def _log_probability(value: Value) -> float:
    assert value.log_probability is not None
    return rounded(value.log_probability)


# ---------------------------------------------------------------------------------------- stage 2


def assign_ratios(search: Search, settings: StageSettings, found: Importance) -> tuple[float, ...]:
    """Algorithm 2, without an evaluation."""
    scores, dense = found.scores, found.dense
    if dense <= 0:  # log-probabilities, where stage 2 takes shares; it goes by the drops alone
        scores, dense = tuple(round(1 + score - dense, 4) for score in scores), 1.0
    ratio, groups, buckets = search.inputs.ratio, search.num_groups, settings.ratio_buckets
    ratios = allocate_ratios(scores, dense, ratio, groups, buckets, found.tie_scores)
    search.details["ratios"] = list(ratios)
    say("stage 2, ratios from the bottom layer up: " + " ".join(f"{ratio:g}" for ratio in ratios))
    return ratios


# ---------------------------------------------------------------------------------------- stage 3


def select_groups(
    search: Search, settings: StageSettings, ratios: Sequence[float], guides: Sequence[Table] = ()
) -> None:
    """Algorithm 3, from the dense model on: layers of one ratio at a time, larger ratios first.

    Each guide says how global it finds each group. Optimizers that keep the quota start from what
    the guides choose, the first of them also says which groups go where a mask must be mended.
    """
    search.z = search.dense()
    plan = plan_subproblems(
        ratios, search.num_groups, settings.kappa, settings.layers_at_once(search.num_groups)
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
    # How many layers get which ratio does not depend on what stage 1 finds.
    num_layers, num_groups, ratio = search.num_layers, search.num_groups, search.inputs.ratio
    ratios = allocate_ratios(
        range(num_layers), num_layers, ratio, num_groups, settings.ratio_buckets
    )
    most = settings.layers_at_once(num_groups)
    parts = plan_subproblems(ratios, num_groups, settings.kappa, most)
    planned = {
        "stage 1": plan_stage1(search, settings),
        "stage 3": sum(part.evaluations for part in parts),
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
