"""BOSCH: probes of every group, their order over all layers, and guided swaps across layers.

Three stages as in the paper, each with a signal: stage 1 asks what every group is worth, stage 2
ranks the groups of all layers and so gives each layer its share, stage 3 swaps groups, those first
that promise most by the outcomes of each haystack so far. `bosch_paper` is the search as published.
"""
# N groups of the model, S scores

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bosch.config import above_0
from bosch.method import Inputs, MethodTraits, Selection, Table
from bosch.methods._guided import GuidedSettings, check_guides, rankings_of
from bosch.run.progress import say, track

if TYPE_CHECKING:
    from bosch.search.search import Search

traits = MethodTraits(searches=True)
check = check_guides

LEAST_PATIENCE = 8  # masks, before a search is taken to gain nothing more
LOWEST = -20.0  # log-probability: below it, worse answers are not told apart


@dataclass(frozen=True)
class Settings(GuidedSettings):
    optimizer: str = "guided"  # a file of bosch/search/optimizers
    rankings: tuple[str, ...] = ()  # ranking methods to start from, in addition to the probes
    probed: float = 1 / 3  # share of the haystacks that stage 1 reads
    # Stage 3 tries this share of kappa masks per layer.
    effort: float = 1 / 3
    # End with the first mask that answers as well as the dense model. On easy settings that is the
    # one that the probes choose.
    until_dense: bool = True
    # End when so large a share of stage 3's masks, in a row, has gained next to nothing (a tenth of
    # a question of 48); 1: try all.
    patience: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        above_0(self, "", "probed", "patience", most=1)
        above_0(self, "", "effort")


def select(inputs: Inputs) -> Selection:
    from bosch.search.finish import announce, finish  # imports torch
    from bosch.search.search import count_solving, open_search

    settings = inputs.settings
    with open_search(inputs) as search:
        groups, guides = search.groups, []
        swaps = max(2, round(settings.effort * settings.kappa * search.num_layers))
        swaps = count_solving(len(groups), search.num_windowed, swaps)
        is_choice = swaps > 1  # at a ratio of 0 or 1 there is none
        announce(search, {"stage 1": len(groups), "stage 3": swaps} if is_choice else {"mask": 1})
        with search.until_ended():
            if is_choice:
                worth = probe_groups(search, settings.probed)
                guides = rank_groups(search, [worth, *rankings_of(inputs)])
            enough = search.anchors.dense.value if settings.until_dense else math.inf
            search.solve(
                "stage 3",
                groups,
                search.num_windowed,
                swaps,
                guides,
                enough=enough,
                patience=max(LEAST_PATIENCE, round(settings.patience * swaps)),
            )
        return finish(search)


def count_passes(settings: Settings, num_layers: int, num_groups: int) -> float:
    """About how often the model reads the calibration set: for the time said beforehand."""
    probes = num_layers * num_groups * settings.probed / 2  # from its layer on, half of them
    # Stage 3 tried 25 of 60 planned masks on SmolLM2, 36 and 38 of 80 on the embedded model, and
    # most masks end early or share their lower layers with an earlier one.
    return probes + 0.36 * settings.effort * settings.kappa * num_layers


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
            logs = [[value.haystacks[n].log_probability for n in read] for value in values]
            worth = [fmean(max(log, LOWEST) for log in row) for row in logs]
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
    first, *others = (mean_rank([np.ravel(guide)]) for guide in guides)
    rank_N = mean_rank([first, mean_rank(others)] if others else [first])
    windowed = np.argsort(rank_N, kind="stable")[: search.num_windowed]
    counts = np.bincount(windowed // num_groups, minlength=search.num_layers).tolist()
    search.details["ratios"] = [count / num_groups for count in counts]
    say("stage 2, groups on the window from the bottom layer up: " + " ".join(map(str, counts)))
    return [tuple(map(tuple, rank_N.reshape(-1, num_groups).tolist())), *guides]


def mean_rank(scores_SN: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The mean rank of each entry over several scores."""
    order_SN = np.argsort(scores_SN, axis=1, kind="stable")
    mean_N: NDArray[Any] = np.argsort(order_SN, axis=1).mean(0)
    return mean_N
