"""What `bosch` has in place of the paper's stages 1 and 2: a probe of every group, and one order of
all groups of the model."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from bosch.method import Table
from bosch.run.progress import say, track
from bosch.search.optimizers._surrogate import Array
from bosch.search.search import Search

LOWEST = -20.0  # log-probability: below it, worse answers are not told apart


def probe_groups(search: Search, share: float) -> Table:
    """What every group is worth: the answers' mean log-probability in a share of the haystacks when
    the group is kept alone in its layer, against keeping another one, all other layers full.

    One evaluation a group, the same at every ratio. The paper's stage 1 windows layers at the
    ratio, where their best masks lose nothing; with one group left, every layer tells."""
    num_haystacks, dense = len(search.objective.questions), search.dense()
    read = [int(i / share + 1e-9) for i in range(math.ceil(num_haystacks * share - 1e-9))]
    layers, groups = range(search.num_layers), range(search.num_groups)
    table: list[tuple[float, ...]] = []
    with track("stage 1", len(layers) * len(groups), "evaluations") as bar:
        for layer in reversed(layers):  # from the top, where a probe costs least
            # The only group of a layer is windowed instead.
            rows = [tuple(int(g == kept and len(groups) > 1) for g in groups) for kept in groups]
            masks = [(*dense[:layer], row, *dense[layer + 1 :]) for row in rows]
            values = search.evaluate(masks, None, "stage 1", [False] * len(masks), bar, read)
            logs = [[value.haystacks[n].log_probability for n in read] for value in values]
            worth = [fmean(max(log, LOWEST) for log in row) for row in logs]
            if len(groups) == 1:
                table.insert(0, (-worth[0],))
                continue
            rest = [fmean(worth[:kept] + worth[kept + 1 :]) for kept in groups]
            table.insert(0, tuple(round(a - b, 4) for a, b in zip(worth, rest, strict=True)))
    search.details["group_worth"] = table
    return tuple(table)


def rank_groups(search: Search, guides: Sequence[Table]) -> list[Table]:
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


def mean_rank(scores_SN: Sequence[Array]) -> Array:
    """The mean rank of each entry over several scores."""
    order_SN = np.argsort(scores_SN, axis=1, kind="stable")
    mean_N: Array = np.argsort(order_SN, axis=1).mean(0)
    return mean_N
