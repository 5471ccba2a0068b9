"""Shared by the static methods: statistics of attention probabilities, layer by layer, without a
T x T matrix.

Rows of the attention matrix are computed in chunks and then dropped, so memory grows with T, not
with its square. Scores are computed in float32, or in the model's format if that is more precise,
and summed in float64."""
# L layers, H query heads, G kv heads, R query heads a group, T tokens, C rows of a chunk, S keys,
# D head size, N selected rows

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bosch.calibration import Haystack
from bosch.method import Inputs
from bosch.methods._examples import Result, measure_haystacks

LEAST_ROWS = 16  # per chunk, however long the haystack is

# A statistic of one layer, (H,) or (H, ...), of q_HTD, k_GTD and the scale of their products.
LayerStatistic = Callable[[Tensor, Tensor, float], Tensor]


def per_layer(inputs: Inputs, ids_T: Tensor, statistic: LayerStatistic) -> Tensor:
    """A statistic of every layer of the dense model on one haystack, (L, H, ...), on the CPU."""
    statistics: dict[int, Tensor] = {}

    def observe(
        layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scaling: float, out: Tensor
    ) -> Tensor:
        statistics[layer] = statistic(q_BHTD[0], k_BGTD[0], scaling).cpu()
        return out

    model = inputs.model
    with torch.no_grad():
        ids_BT = ids_T[None].to(model.device)
        model.base_model(ids_BT, use_cache=False, bosch_observe=observe)
    return torch.stack([statistics[layer] for layer in range(inputs.num_layers)])


def mean_over_rows(inputs: Inputs, name: str, noted_as: str, sums: LayerStatistic) -> Tensor:
    """(L, H): a method's sums over the rows of each haystack, divided by the rows of all."""

    def measure(haystack: Haystack) -> Result:
        return {noted_as: per_layer(inputs, haystack.ids_T, sums).tolist()}

    num_rows = sum(len(haystack.ids_T) for haystack in inputs.calibration.haystacks)
    return add_up(measure_haystacks(inputs, name, measure), noted_as) / num_rows


@dataclass(frozen=True)
class AttentionRows:
    """Rows `start` to `stop` of an attention matrix, over keys 0 to `stop`."""

    start: int
    stop: int
    queries_C1: Tensor  # their numbers, as a column beside which keys are a row
    weights_HCS: Tensor  # attention probabilities, 0 where a key comes after its query

    def inside(self, window_tokens: int) -> tuple[int, Tensor]:
        """The first key inside any window of these rows, and which keys from there on lie in each
        row's window (C, S - first). Keys after their query count as inside: their weight is 0."""
        first = max(0, self.start - window_tokens + 1)
        keys_S = torch.arange(first, self.stop, device=self.weights_HCS.device)
        return first, keys_S > self.queries_C1 - window_tokens

    def past(self, window_tokens: int, num_keys: int) -> Tensor:
        """(C, N): which of the first keys have left each row's window."""
        keys_N = torch.arange(num_keys, device=self.weights_HCS.device)
        return keys_N <= self.queries_C1 - window_tokens


def attention_rows(
    q_HTD: Tensor, k_GTD: Tensor, scaling: float, chunk_elements: int
) -> Iterator[AttentionRows]:
    """All rows of a layer's causal attention, a chunk at a time."""
    for start, stop in chunks(q_HTD, chunk_elements):
        scores_HCS = row_scores(q_HTD[:, start:stop], k_GTD[:, :stop], scaling)
        queries_C1 = torch.arange(start, stop, device=q_HTD.device)[:, None]
        # Keys up to `start` come before all of these rows; only the last C can be in the future.
        #     rows of a chunk (start 3, stop 6), keys 0 to 5; x: masked
        #     3   . . . . x x
        #     4   . . . . . x
        #     5   . . . . . .
        future_CC = queries_C1 < queries_C1.T
        scores_HCS[..., start:].masked_fill_(future_CC, float("-inf"))
        yield AttentionRows(start, stop, queries_C1, scores_HCS.softmax(-1))


def chunks(q_HTD: Tensor, chunk_elements: int, band: int | None = None) -> list[tuple[int, int]]:
    """Row ranges whose scores fit in `chunk_elements`: against all keys or, if `band` is given,
    against a band of that many keys per row."""
    num_heads, num_rows, _ = q_HTD.shape
    size = chunk_elements // (num_heads * max(1, num_rows))  # as if every row saw all keys
    if band is not None:  # C rows need C + band keys, so at most `band` rows
        size = min(band, chunk_elements // (num_heads * 2 * band))
    size = max(LEAST_ROWS, size)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def row_scores(x_HCD: Tensor, y_GSD: Tensor, scaling: float = 1.0) -> Tensor:
    """(H, C, S): scaled products of each query head's rows with the keys or values of its group,
    before any mask."""
    # The heads of a group share its keys: they become more rows of one product, so that no keys are
    # copied for each head.
    exact = torch.promote_types(x_HCD.dtype, torch.float32)
    x_GRCD = x_HCD.to(exact).unflatten(0, (y_GSD.shape[0], -1))
    products_GRCS = x_GRCD.flatten(1, 2) @ y_GSD.to(exact).transpose(1, 2)
    return products_GRCS.unflatten(1, x_GRCD.shape[1:3]).flatten(0, 1).mul_(scaling)


def single_rows(q_HTD: Tensor, k_GTD: Tensor, scaling: float, positions: list[int]) -> Tensor:
    """(H, N, S): scores of selected queries, -inf for later keys."""
    last = max(positions) + 1
    positions_N = torch.tensor(positions, device=q_HTD.device)
    scores_HNS = row_scores(q_HTD[:, positions_N], k_GTD[:, :last], scaling)
    future_NS = torch.arange(last, device=q_HTD.device) > positions_N[:, None]
    return scores_HNS.masked_fill_(future_NS, float("-inf"))


def exact_sum(values_HCS: Tensor) -> Tensor:
    """(H): the sum over keys in the format of the scores, and over the many rows in float64."""
    return values_HCS.sum(-1).sum(-1, dtype=torch.float64)


def add_up(results: list[dict[str, list[list[float]]]], name: str) -> Tensor:
    """(L, H): the sum of one statistic over examples, in their order, so that neither ranks nor a
    kill change its last digit."""
    return torch.tensor([result[name] for result in results], dtype=torch.float64).sum(0)
