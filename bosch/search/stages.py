"""The three stages of BOSCH, and the stages that its variants replace or add.

stage 1  localize_parts, probe_layers: what does windowing each layer cost?
stage 2  assign_ratios: how many groups of each layer get the window?
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
from bosch.search.optimizers._interface import WITH_PENALTY, Solution, repair
from bosch.search.ratios import allocate_ratios
from bosch.search.search import Search, Variable, count_solving
from bosch.search.settings import StageSettings
from bosch.search.subproblems import cut, plan_subproblems

LOWEST = -20.0  # log-probability: below it, worse answers are not told apart


@dataclass(frozen=True)
class Importance:
    """The result of stage 1."""

    scores: tuple[float, ...]  # the objective with layers i and above localized
    dense: float
    tie_scores: tuple[float, ...] | None = None  # log-probabilities, and then the dense model's
    # How global each group is: the harm of windowing it, or 1 for the groups left full.
    guide: Table | None = None

    @property
    def guides(self) -> list[Table]:
        return [] if self.guide is None else [self.guide]


# ---------------------------------------------------------------------------------------- stage 1


def measure_importance(search: Search, settings: StageSettings) -> Importance:
    """Stage 1, as chosen by `settings.importance`."""
    if settings.importance == "whole_layer":
        return probe_layers(search)
    wants_harm = settings.optimizer not in WITH_PENALTY
    return localize_parts(search, settings.kappa, 1, exact_values=wants_harm)


def localize_parts(
    search: Search, kappa: int, layers_at_once: int, exact_values: bool = False
) -> Importance:
    """Algorithm 1, from the top layer down, keeping the masks of the layers above: ceil(rho G)
    groups of each layer get the window. The paper takes one layer at a time, its ablation B-multi
    several.
    """
    windowed = groups_a_layer(search)
    scores = [0.0] * search.num_layers
    ties = [0.0] * search.num_layers + [_log_probability(search.anchors.dense)]
    harm = [[0.0] * search.num_groups for _ in range(search.num_layers)]
    above = dense = search.score_of(search.anchors.dense)
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
        for layer in layers:
            scores[layer] = search.score_of(solution.value)
            ties[layer] = _log_probability(solution.value)
        share = (above - scores[layers[0]]) / len(variables)
        for ((layer, group),), harm_done in zip(variables, _harm(solution, share), strict=True):
            harm[layer][group] = harm_done
        above = scores[layers[0]]
    search.details["stage1_scores"] = scores
    guide = tuple(map(tuple, harm)) if exact_values else search.z
    return Importance(tuple(scores), dense, tuple(ties), guide)


def groups_a_layer(search: Search) -> int:
    """Groups of each layer that stage 1 puts on the window."""
    return num_windowed(search.inputs.ratio, 1, search.num_groups)


def probe_layers(search: Search) -> Importance:
    """Window one whole layer at a time, all others full, and measure the answers' mean
    log-probability: one evaluation per layer.

    In stage 1 as published, a layer with a single important group costs nothing, because its best
    masks avoid that group; at a ratio of 1 it then costs everything.
    """
    layers, dense = search.whole_layers(), _log_probability(search.anchors.dense)
    probes = []
    with search.objective.tracking("stage 1, whole layers", len(layers)):
        for layer in range(len(layers)):
            assignment = tuple(int(other != layer) for other in range(len(layers)))
            value = search.evaluate(search.mask(layers, assignment), None, "stage 1, whole layers")
            probes.append(_log_probability(value))
    search.details["whole_layer_log_probabilities"] = probes
    # Scores as in stage 1: the drops accumulate from the top layer down, from a dense score of 1.
    scores = [1.0]
    for probe in reversed(probes):
        scores.append(round(scores[-1] - (dense - probe), 4))
    return Importance(tuple(scores[:0:-1]), 1.0)


def probe_groups(search: Search, share: float) -> Table:
    """How global each group is: keep it alone in its layer, with all other layers full, against
    keeping another one of the layer alone, by the answers' mean log-probability in a share of the
    texts.

    One evaluation per group, the same at every ratio. At the ratio, a layer's best masks lose
    nothing; with one group left, every layer and group shows what it is worth.
    """
    num_texts = len(search.objective.questions)
    texts = range(0, num_texts, max(1, round(1 / share)))
    layers, groups = range(search.num_layers), range(search.num_groups)
    table = []
    with search.objective.tracking("stage 1", len(layers) * len(groups)):
        for layer in reversed(layers):
            row = [[int(group == kept and len(groups) > 1) for group in groups] for kept in groups]
            dense = search.dense()
            masks = [(*dense[:layer], tuple(bits), *dense[layer + 1 :]) for bits in row]
            values = search.evaluate_all(masks, None, "stage 1", [False] * len(masks), texts)
            kept = [
                fmean(max(m.log_probability, LOWEST) for t, m in v.texts.items() if t in texts)
                for v in values
            ]
            rest = [fmean(kept[:i] + kept[i + 1 :] or [0.0]) for i in groups]
            table.append(tuple(round(a - b, 4) for a, b in zip(kept, rest, strict=True)))
    if len(groups) == 1:  # windowed alone instead of kept alone
        table = [tuple(-value for value in row) for row in table]
    harms = tuple(reversed(table))
    search.details["group_harms"] = harms
    return harms


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


# ---------------------------------------------------------------------------------------- stage 2


def assign_ratios(
    search: Search, settings: StageSettings, importance: Importance
) -> tuple[float, ...]:
    """Algorithm 2; it needs no evaluations."""
    scores, dense = importance.scores, importance.dense
    if dense <= 0:  # shift log-probabilities to positive scores: only the drops matter
        scores, dense = tuple(round(1 + score - dense, 4) for score in scores), 1.0
    ratio, groups, buckets = search.inputs.ratio, search.num_groups, settings.ratio_buckets
    ratios = allocate_ratios(scores, dense, ratio, groups, buckets, importance.tie_scores)
    search.details["ratios"] = list(ratios)
    say("stage 2, ratios from the bottom layer up: " + " ".join(f"{ratio:g}" for ratio in ratios))
    return ratios


def rank_groups(search: Search, guides: Sequence[Table]) -> list[Table]:
    """All groups in one order, by the first guide and the mean of the others in equal parts, before
    the guides themselves. Where a layer's groups lie in it says how many get the window.
    """
    variables = search.all_groups()
    order = [rank_mean([guide_scores(guide, variables)]) for guide in guides]
    mean = rank_mean([order[0], rank_mean(order[1:])] if guides[1:] else order)
    both = tuple(
        tuple(mean[start : start + search.num_groups])
        for start in range(0, len(mean), search.num_groups)
    )
    windowed = set(most_local_first(both, variables)[: search.budget])
    counts = [0] * search.num_layers
    for variable in windowed:
        counts[variables[variable][0][0]] += 1
    search.details["ratios"] = [count / search.num_groups for count in counts]
    say("stage 2, groups on the window from the bottom layer up: " + " ".join(map(str, counts)))
    return [both, *guides]


def rank_mean(scores: Sequence[Sequence[float]]) -> list[float]:
    """The mean rank of each entry."""
    ranked = []
    for row in scores:
        order = sorted(range(len(row)), key=row.__getitem__)
        ranks = dict(zip(order, range(len(row)), strict=True))
        ranked.append([float(ranks[entry]) for entry in range(len(row))])
    return [fmean(column) for column in zip(*ranked, strict=True)]


# ---------------------------------------------------------------------------------------- stage 3


def select_groups(
    search: Search, settings: StageSettings, ratios: Sequence[float], guides: Sequence[Table] = ()
) -> None:
    """Algorithm 3, starting from the dense model: layers of one ratio at a time, larger ratios
    first.

    A guide is a table of how global each group is. Optimizers that keep the quota start from the
    masks that the guides choose; the first guide also decides how masks are repaired.
    """
    search.z = search.dense()
    parts = plan_subproblems(
        ratios, search.num_groups, settings.kappa, settings.layers_at_once(search.num_groups)
    )
    for part in parts:
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
    starts = [repair((1,) * len(variables), quota, order) for order in orders]
    if search.settings.optimizer in WITH_PENALTY:
        starts = []
    order = orders[0] if orders else ()
    prior = guide_scores(guides[0], variables) if guides else ()
    search.solve(name, variables, quota, max_evaluations, starts, order, prior)


def most_local_first(guide: Table, variables: Sequence[Variable]) -> list[int]:
    """The variables, sorted by how global a guide finds their groups; ties keep their order."""
    scores = guide_scores(guide, variables)
    return sorted(range(len(variables)), key=lambda variable: scores[variable])


def guide_scores(guide: Table, variables: Sequence[Variable]) -> list[float]:
    return [sum(guide[layer][group] for layer, group in places) for places in variables]


# ------------------------------------------------------------------------------------------ after


def polish(search: Search, max_evaluations: int) -> None:
    """Swaps over all groups, across layers, starting from the current mask."""
    if max_evaluations < 2:
        return
    variables = search.all_groups()
    start = search.assignment_in(search.z, variables)
    search.solve("polish", variables, search.budget, max_evaluations, [start], optimizer="swap")


# ---------------------------------------------------------------------------- number of evaluations


def count_evaluations(
    search: Search, settings: StageSettings, num_rankings: int = 0
) -> dict[str, int]:
    """Most evaluations of each stage. A static ranking counts as one."""
    # How many layers get each ratio does not depend on the result of stage 1.
    num_layers, num_groups, ratio = search.num_layers, search.num_groups, search.inputs.ratio
    ratios = allocate_ratios(
        range(num_layers), num_layers, ratio, num_groups, settings.ratio_buckets
    )
    most = settings.layers_at_once(num_groups)
    parts = plan_subproblems(ratios, num_groups, settings.kappa, most)
    planned = {
        "stage 1": count_stage1(search, settings),
        "stage 3": sum(part.evaluations for part in parts),
        "polish": count_polish(search, settings, num_rankings),
    }
    return {stage: count for stage, count in planned.items() if count}


def count_stage1(search: Search, settings: StageSettings) -> int:
    if settings.importance == "whole_layer":
        return search.num_layers
    return count_localizing(search, settings.kappa, 1)


def count_localizing(search: Search, kappa: int, layers_at_once: int) -> int:
    windowed, groups = groups_a_layer(search), search.num_groups
    sizes = [len(part) for part in cut(range(search.num_layers), layers_at_once)]
    return sum(count_solving(n * groups, n * windowed, n * kappa) for n in sizes)


def count_polish(search: Search, settings: StageSettings, num_rankings: int = 0) -> int:
    if settings.polish is not None:
        return settings.polish * search.num_layers
    spent = count_stage1(search, settings) + num_rankings
    return max(count_localizing(search, settings.kappa, 1) - spent, settings.kappa)


def describe_layers(layers: Sequence[int]) -> str:
    """For example: layer 3, layers 4-6, layers 1 5 7."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    if last - first == len(layers) - 1:
        return f"layers {first}-{last}"
    return "layers " + " ".join(map(str, layers))
