"""What the static methods share: statistics of attention probabilities, layer by layer, without a
T x T matrix.

Rows of the attention matrix are made in chunks, used and dropped: memory grows with T, not with its
square. Scores are computed in float32, or in the model's own format if that is finer, and summed in
float64.
"""
# L layers, H query heads, G kv heads, R query heads a group, T tokens, C rows of a chunk, S keys,
# D head size, N rows asked for

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bosch.calibration import Haystack
from bosch.hybrid.capture import capturing
from bosch.method import Inputs
from bosch.methods._examples import measure_haystacks

LEAST_ROWS = 16  # of a chunk, however long the text is

# A statistic of one layer, (H,) or (H, ...): of q_HTD, k_GTD and the scale of their products.
LayerStatistic = Callable[[Tensor, Tensor, float], Tensor]


def per_layer(inputs: Inputs, ids_T: Tensor, statistic: LayerStatistic) -> Tensor:
    """A statistic of every layer of the dense model on one text, (L, H, ...), on the CPU."""
    found: dict[int, Tensor] = {}

    def collect(layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scaling: float) -> None:
        found[layer] = statistic(q_HTD, k_GTD, scaling).cpu()

    model = inputs.model
    with torch.no_grad(), capturing(model):
        ids_BT = ids_T[None].to(model.device)
        model.base_model(ids_BT, use_cache=False, bosch_collect=collect)
    return torch.stack([found[layer] for layer in range(inputs.num_layers)])


def mean_over_rows(inputs: Inputs, name: str, noted_as: str, sums: LayerStatistic) -> Tensor:
    """(L, H): a method's sums over the rows of each calibration text, by the rows of all texts."""

    def measure(haystack: Haystack) -> dict[str, Any]:
        return {noted_as: per_layer(inputs, haystack.ids_T, sums).tolist()}

    num_rows = sum(len(haystack.ids_T) for haystack in inputs.calibration.haystacks)
    return add_up(measure_haystacks(inputs, name, measure), noted_as) / num_rows


@dataclass(frozen=True)
class Rows:
    """Queries `start` to `stop` against keys 0 to `stop`."""

    start: int
    stop: int
    weights_HCS: Tensor  # attention probabilities, 0 where a key comes after its query

    def queries_C1(self) -> Tensor:
        return torch.arange(self.start, self.stop, device=self.weights_HCS.device)[:, None]

    def inside(self, window_tokens: int) -> tuple[int, Tensor]:
        """The first key that a window of these rows reaches, and from there on which keys lie in
        each row's window (C, S - first). Keys after their query count as inside: they weigh 0."""
        first = max(0, self.start - window_tokens + 1)
        keys_S = torch.arange(first, self.stop, device=self.weights_HCS.device)
        return first, keys_S > self.queries_C1() - window_tokens


def attention_rows(
    q_HTD: Tensor, k_GTD: Tensor, scaling: float, chunk_elements: int
) -> Iterator[Rows]:
    """All rows of a layer's causal attention, a chunk at a time."""
    for start, stop in chunks(q_HTD, chunk_elements):
        scores_HCS = row_scores(q_HTD[:, start:stop], k_GTD[:, :stop], scaling)
        queries_C = torch.arange(start, stop, device=q_HTD.device)
        future_CC = queries_C > queries_C[:, None]
        scores_HCS[..., start:].masked_fill_(future_CC, float("-inf"))
        yield Rows(start, stop, scores_HCS.softmax(-1))


def chunks(q_HTD: Tensor, chunk_elements: int, band: int | None = None) -> list[tuple[int, int]]:
    """Rows from and to, so that the scores of a chunk are no more than asked: against all keys, or,
    where a row looks at a band of keys only, against those of its rows' bands."""
    num_heads, num_rows, _ = q_HTD.shape
    size = chunk_elements // (num_heads * max(1, num_rows))
    if band is not None:  # C rows reach C + band keys: no more rows than twice the band is worth
        size = min(band, chunk_elements // (num_heads * 2 * band))
    size = max(LEAST_ROWS, size)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def row_scores(q_HCD: Tensor, k_GSD: Tensor, scaling: float) -> Tensor:
    """(H, C, S): scaled products of queries and keys, before any mask."""
    return grouped_products(q_HCD, k_GSD).mul_(scaling)


def grouped_products(x_HCD: Tensor, y_GSD: Tensor) -> Tensor:
    """(H, C, S): products of each query head's rows with the keys, or values, of its group."""
    exact = torch.promote_types(x_HCD.dtype, torch.float32)
    x_GRCD = x_HCD.to(exact).unflatten(0, (y_GSD.shape[0], -1))
    products_GRCS = x_GRCD.flatten(1, 2) @ y_GSD.to(exact).transpose(1, 2)
    return products_GRCS.unflatten(1, x_GRCD.shape[1:3]).flatten(0, 1)


def single_rows(q_HTD: Tensor, k_GTD: Tensor, scaling: float, positions: list[int]) -> Tensor:
    """(H, N, S): scores of some queries alone, -inf for keys that come after them."""
    last = max(positions) + 1
    positions_N = torch.tensor(positions, device=q_HTD.device)
    scores_HNS = row_scores(q_HTD[:, positions_N], k_GTD[:, :last], scaling)
    future_NS = torch.arange(last, device=q_HTD.device) > positions_N[:, None]
    return scores_HNS.masked_fill_(future_NS, float("-inf"))


def exact_sum(values_HCS: Tensor) -> Tensor:
    """(H,): sums over all but the first dimension, in float64."""
    return values_HCS.sum(-1).sum(-1, dtype=torch.float64)


def add_up(results: list[dict[str, list[list[float]]]], name: str) -> Tensor:
    """(L, H): the sum of one statistic over examples, in their order."""
    return torch.tensor([result[name] for result in results], dtype=torch.float64).sum(0)
