"""BOSCH: probes of every group, their order over all layers, and guided swaps across layers.

Three stages as in the paper, each with a signal: stage 1 asks what every group is worth, stage 2
ranks the groups of all layers and so gives each layer its share, stage 3 swaps groups, those first
that promise most by the outcomes of each haystack so far. `bosch_paper` is the search as published.

Before stage 1 the masks of rankings (`starts`) are scored like all others, and stage 3 improves on
the best mask so far: so none of them scores higher than the result, however early it ends.
"""
# N groups of the model

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from bosch.config import MaskConfig, above_0
from bosch.masks.mask import Z
from bosch.masks.ranks import ranks_of
from bosch.method import Inputs, MethodTraits, Selection, Table
from bosch.methods._choose import choose_most_local
from bosch.methods._guided import check_rankings, global_table, scores_of
from bosch.methods._settings import METHODS, load_method
from bosch.plugins import list_plugins
from bosch.run.errors import UserError
from bosch.run.progress import say, track
from bosch.search.objective import Means
from bosch.search.settings import SearchSettings

if TYPE_CHECKING:
    from bosch.search.search import Search

traits = MethodTraits(searches=True, keeps_full=True)

LEAST_PATIENCE = 8  # masks, before a search is taken to gain nothing more
# Of log-probability, against the dense model: answers that lose more are not told apart.
LOWEST = -20.0


# About how often a ranking reads the calibration set: razor reads eight texts where the sets of
# small models have twelve, kvzip each text and its repetition, and fisher computes each layer twice
# and its gradients. All but retrieval_head compute all attention weights.
PASSES = {"razor": 0.7, "retrieval_head": 1.0, "kvzip": 3.0, "fisher": 4.0}
OTHER_PASSES = 3.0


@dataclass(frozen=True)
class Settings(SearchSettings):
    # How masks are scored, on the calibration answers: accuracy, probability, logprob,
    # accuracy+probability or accuracy+logprob.
    objective: str = "accuracy+probability"
    optimizer: str = "guided"  # a file of bosch/search/optimizers
    # Rankings to start from, in addition to the probes; one that a model does not allow is left
    # out. (): the probes alone.
    starts: tuple[str, ...] = MaskConfig.starts
    probed: float = 1 / 3  # share of the haystacks that stage 1 reads
    # Stage 3 tries this share of kappa masks per layer.
    effort: float = 1 / 3
    # End with the first mask that answers as well as the dense model. On easy settings that is one
    # of the starts. Not with texts of random tokens.
    until_dense: bool = True
    # End when so large a share of stage 3's masks, in a row, has gained next to nothing (a tenth of
    # a question of 48); 1: try all.
    patience: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        above_0(self, "", "probed", "patience", most=1)
        above_0(self, "", "effort")


def check(settings: Settings) -> None:
    check_rankings(settings, "starts", settings.starts)


def select(inputs: Inputs) -> Selection:
    from bosch.search.finish import announce, finish  # imports torch
    from bosch.search.search import begin_search, count_solving

    settings = inputs.settings
    search = begin_search(inputs)
    groups, guides, starts = search.groups, list[Table](), settings.starts
    swaps = max(2, round(settings.effort * settings.kappa * search.num_layers))
    swaps = count_solving(len(groups), search.num_windowed, swaps)
    is_choice = swaps > 1  # at a ratio of 0 or 1 there is none
    # Of random texts windows predict more than the dense model does, so there its score is no
    # sign that nothing is lost.
    asks_random = any(each.is_random for each in inputs.calibration_of_search.haystacks)
    ends_early = settings.until_dense and not asks_random
    enough = search.anchors.dense.value if ends_early else math.inf
    plan = {"mask": 1}
    if is_choice:
        plan = {"starts": len(starts) + 2} if starts else {}  # 2: what the probes add
        plan |= {"stage 1": len(groups), "stage 3": swaps}
    announce(search, plan)
    with search.until_ended():
        if is_choice:
            # Before the probes: a limit that ends the search early leaves the best of them.
            rankings = score_rankings(search) if starts else []
            if search.best is None or search.best[0] < enough:
                worth = probe_groups(search, settings.probed)
                guides = rank_groups(search, [worth, *rankings])
                if rankings:
                    score_start(search, "probes", search.mask_by(worth))
                    score_start(search, "all together", search.mask_by(guides[0]))
        if starts and "starts" in search.details:
            worths = search.details["starts"].items()
            say("starts: " + ", ".join(f"{name} {each['value']:.4g}" for name, each in worths))
        search.solve(
            "stage 3",
            groups,
            search.num_windowed,
            swaps,
            guides,
            starts=[search.best[1]] if starts and search.best else [],
            enough=enough,
            patience=max(LEAST_PATIENCE, round(settings.patience * swaps)),
        )
    return finish(search)


def count_passes(settings: Settings, num_layers: int, num_groups: int) -> float:
    """About how often the model reads the calibration set: for the time said beforehand."""
    probes = num_layers * num_groups * settings.probed / 2  # from its layer on, half of them
    shape = num_layers, num_groups
    starts = sum(passes_of_ranking(name, *shape) + 1 for name in settings.starts)  # 1: its mask
    # Stage 3 tried 25 of 60 planned masks on SmolLM2, 36 and 38 of 80 on the embedded model, and
    # most masks end early or share their lower layers with an earlier one.
    return starts + probes + 0.36 * settings.effort * settings.kappa * num_layers


def passes_of_ranking(name: str, num_layers: int, num_groups: int) -> float:
    """With its usual settings, as a start has them."""
    if name in PASSES or name not in list_plugins(METHODS):  # `check` refuses what there is not
        return PASSES.get(name, OTHER_PASSES)
    method = load_method(name)
    if hasattr(method, "count_passes"):
        return float(method.count_passes(method.Settings(), num_layers, num_groups))
    return OTHER_PASSES


def score_rankings(search: "Search") -> list[Table]:
    """Score the masks of the rankings to start from. Returns how global each group is by each."""
    tables = []
    for name in search.inputs.settings.starts:
        say(f"ranking groups by {name}, as a start")
        try:
            scores = scores_of(name, search.inputs)
        except UserError as error:  # on every rank, or on none
            say(f"{name} is left out: {error}")
            continue
        tables.append(global_table(scores))
        if len(tables) == 1:
            search.fallback = tables[0]
        selection = choose_most_local(scores, search.inputs)  # as the method itself would choose
        search.drawn |= selection.drawn
        score_start(search, name, selection.mask.z)
    return tables


def score_start(search: "Search", name: str, z: Z) -> None:
    """Score a mask in full, and record what it is worth."""
    (value,) = search.score([z], part=f"start {name}", num_windowed=search.num_windowed)
    names = ("value", "accuracy", "probability", "log_probability")
    worth = {each: round(getattr(value, each), 4) for each in names}
    search.details.setdefault("starts", {})[name] = worth


def probe_groups(search: "Search", share: float) -> Table:
    """What every group is worth, [layer][group]: how much better keeping it alone in its layer is
    than keeping another. With all other layers full, and means over a share of the haystacks:

        worth(l, g) = log p(only g full in l) - mean over other h of log p(only h full in l)

    One evaluation a group, the same at every ratio. The paper's stage 1 windows layers at the
    ratio, where their best masks lose nothing; with one group left, every layer tells."""
    num_haystacks, dense = len(search.evaluator.questions), search.z  # nothing is windowed yet
    # Evenly spread over the set, in which the haystacks of a task lie together: at a third, numbers
    # 0, 3, 6. 1e-9: the share is rarely a float exactly.
    read = [int(i / share + 1e-9) for i in range(math.ceil(num_haystacks * share - 1e-9))]
    answered = search.anchors.dense.haystacks

    def lost(means: Means, number: int) -> float:
        return max(means.log_probability - answered[number].log_probability, LOWEST)

    layers, groups = range(search.num_layers), range(search.num_groups)
    table: list[tuple[float, ...]] = []
    with track("stage 1", len(layers) * len(groups), "evaluations") as bar:
        # Later probes run more layers, and of the top one only the answers: by the mean of the
        # first half the time left would be told as a fifth of what it is.
        bar.work = lambda done: sum(number // len(groups) + 0.25 for number in range(done))
        for layer in reversed(layers):  # from the top, where a probe costs least
            # The only group of a layer is windowed instead.
            rows = [tuple(int(g == kept and len(groups) > 1) for g in groups) for kept in groups]
            masks = [(*dense[:layer], row, *dense[layer + 1 :]) for row in rows]
            values = search.score(masks, part="stage 1", bar=bar, haystacks=read)
            worth = [fmean(lost(value.haystacks[n], n) for n in read) for value in values]
            if len(groups) == 1:
                table.insert(0, (-worth[0],))
                continue
            rest = [fmean(worth[:kept] + worth[kept + 1 :]) for kept in groups]
            table.insert(0, tuple(round(a - b, 4) for a, b in zip(worth, rest, strict=True)))
    search.details["group_worth"] = table
    return tuple(table)


def rank_groups(search: "Search", guides: Sequence[Table]) -> list[Table]:
    """All groups in one order, by the first guide and the mean of the others in equal parts, before
    the guides themselves. Where a layer's groups lie in it says how many get the window."""
    num_groups = search.num_groups
    first, *others = (ranks_of(np.ravel(guide)) for guide in guides)
    rank_N = (first + ranks_of(np.mean(others, axis=0))) / 2 if others else first
    order: Table = tuple(map(tuple, rank_N.reshape(-1, num_groups).tolist()))
    counts = [row.count(0) for row in search.mask_by(order)]
    search.details["ratios"] = [count / num_groups for count in counts]
    say("stage 2, groups on the window from the bottom layer up: " + " ".join(map(str, counts)))
    return [order, *guides]
