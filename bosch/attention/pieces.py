"""Attention of ranks that share each sequence of a training (context parallelism).

A sequence of T tokens is cut into 2N pieces for the N ranks of a group, and rank r has pieces r and
2N - 1 - r, so that all ranks have as much causal work:

    N = 2    | piece 0 | piece 1 | piece 2 | piece 3 |
    rank         0         1         1         0

Only attention looks at other tokens. For it the ranks exchange keys and values: of full groups all,
and of groups with a window the last W - 1 of each piece, which the next one sees, with the first
tokens of documents where a sink keeps them. A piece is then computed by ordinary calls, whose
queries stand behind past keys.
"""
# B rows, H query heads, G kv heads, T tokens of a sequence, L of a rank, S keys of a call, C keys
# that a rank sends, D head size, N ranks, E 2: keys and values

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bosch.attention.call import AttentionCall, Documents
from bosch.attention.dispatch import attend
from bosch.attention.sink_keys import keys_of_sink, learns
from bosch.masks.window import own_window
from bosch.sink import NO_SINK

# torch 2.13 gives them these names, and warns of the old ones.
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Span = tuple[int, int]  # of tokens of a sequence: the first, and the one behind the last


@dataclass(frozen=True)
class Stretch:
    """Tokens of a piece that one call computes: the rest of a document that began before the piece,
    or all documents that begin in it."""

    begin: int  # in the sequence
    end: int
    place: int  # of its first token, among those of this rank
    document: Span  # of its first document
    documents: Documents | None  # all of them, if there are several

    def of(self, x_HLD: Tensor) -> Tensor:
        return x_HLD[..., self.place : self.place + self.end - self.begin, :]


class Pieces:
    """What a rank has of the sequences of a micro-batch.

    Not a dataclass: of those fully_shard makes another one for each block, as it casts what a block
    is given, and what is computed once would be computed in each layer.
    """

    def __init__(
        self,
        group: Any,  # torch's process group of the N ranks
        rank: int,  # in it
        size: int,  # N
        ends: tuple[tuple[int, ...], ...],  # of the documents in each whole sequence, from 0 on
        device: torch.device,
    ) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.ends, self.device = ends, device

    @property
    def num_tokens(self) -> int:
        return self.ends[0][-1]

    @property
    def piece_tokens(self) -> int:
        return self.num_tokens // (2 * self.size)

    def spans(self, rank: int) -> tuple[Span, Span]:
        """The two pieces of a rank."""
        first, second = (n * self.piece_tokens for n in (rank, 2 * self.size - 1 - rank))
        return (first, first + self.piece_tokens), (second, second + self.piece_tokens)

    def place_of(self, token: int) -> int:
        """Among those of this rank."""
        (first, stop), (second, _) = self.spans(self.rank)
        return token - first if token < stop else token - second + self.piece_tokens

    def cut(self, x_BT: Tensor) -> Tensor:
        """The columns of this rank, of a tensor that has all."""
        return torch.cat([x_BT[:, begin:end] for begin, end in self.spans(self.rank)], 1)

    # In a compiled block an exchange ends the graph anyway, and documents are others each time.
    @torch.compiler.disable
    def attend(
        self,
        module: Any,
        q_BHLD: Tensor,
        k_BGLD: Tensor,
        v_BGLD: Tensor,
        make_call: Callable[..., AttentionCall],
        backend: str | None,
    ) -> Tensor:
        """The attention of a layer for this rank's tokens: (B, L, H, D). `make_call` adds what all
        calls of the layer have in common."""
        config, num_groups = module.config, k_BGLD.shape[1]
        num_full, window_tokens = num_groups, own_window(config, module.layer_idx)
        if window_tokens is not None:
            num_full = 0
        elif (hybrid := getattr(config, "bosch", None)) is not None:
            num_full, window_tokens = hybrid["num_full"][module.layer_idx], hybrid["window"]
        repeats, parts = q_BHLD.shape[1] // num_groups, []
        for begin, end, window in ((0, num_full, None), (num_full, num_groups, window_tokens)):
            if begin < end:
                q_BHLD_here = q_BHLD[:, begin * repeats : end * repeats]
                both_EBGLD = torch.stack([k_BGLD[:, begin:end], v_BGLD[:, begin:end]])
                calls = self._calls(module, q_BHLD_here, both_EBGLD, window, make_call)
                rows = [torch.cat([attend(call, backend) for call in row], 2) for row in calls]
                parts.append(torch.cat(rows))
        return torch.cat(parts, 1).transpose(1, 2).contiguous()

    def _calls(
        self,
        module: Any,
        q_BHLD: Tensor,
        own_EBGLD: Tensor,
        window_tokens: int | None,
        make_call: Callable[..., AttentionCall],
    ) -> list[list[AttentionCall]]:
        """Of groups that are all full or all windowed: those of each row."""
        reach, sink = self.num_tokens, NO_SINK  # how many keys before its own a query sees
        if window_tokens is not None:
            reach = window_tokens - 1
            # By the whole sequence, of which another rank may have what this one's sink hides.
            if window_tokens < self.num_tokens or learns(module):
                sink = getattr(module, "window_sink", NO_SINK)
        own_EBGLD, received = self._exchange(own_EBGLD, reach, sink.num_tokens)

        def make(row: int, stretch: Stretch) -> AttentionCall:
            start, stop = stretch.document
            past = received.keys(row, max(start, stretch.begin - reach), stretch.begin)
            k_BGSD, v_BGSD = torch.cat([*past, stretch.of(own_EBGLD[:, row])], 2)[:, None]
            call = make_call(
                stretch.of(q_BHLD[row])[None],
                k_BGSD,
                v_BGSD,
                window_tokens=window_tokens,
                documents=stretch.documents,
            )
            if sink.kind == "none":
                return call
            first = None
            if sink.num_tokens and start < stretch.begin:
                found = received.keys(row, start, min(start + sink.num_tokens, stop))
                k_first, v_first = torch.cat(found, 2)[:, None]
                first = k_first, v_first
            num_past = stretch.begin - start
            return replace(call, sink=keys_of_sink(module, call, reach + 1, num_past, first))

        return [
            [make(row, stretch) for stretch in stretches]
            for row, stretches in enumerate(self.stretches)
        ]

    @cached_property
    def stretches(self) -> list[list[Stretch]]:
        """Of this rank's pieces, in each row."""
        found = []
        for ends in self.ends:
            of_row = list[Stretch]()
            found.append(of_row)
            for begin, end in self.spans(self.rank):
                borders = [begin, end]
                number = bisect_right(ends, begin)  # the end of the document there
                if ends[number - 1] < begin and ends[number] < end:
                    borders.insert(1, ends[number])
                for first, last in pairwise(borders):
                    number, documents = bisect_right(ends, first), None
                    if inside := ends[number : bisect_left(ends, last)]:
                        within = tuple(each - first for each in (first, *inside, last))
                        documents = Documents((within,), self.device)
                    document = ends[number - 1], ends[number]
                    place = self.place_of(first)
                    of_row.append(Stretch(first, last, place, document, documents))
        return found

    def _exchange(self, own_EBGLD: Tensor, reach: int, num_first: int) -> tuple[Tensor, "Received"]:
        """This rank's keys and values, and those that it gets: of each piece the last ones, which
        later queries reach, and of each document that goes on in another piece the first ones."""
        spans = [self._spans_to_send(rank, reach, num_first) for rank in range(self.size)]
        counts = [sum(end - begin for begin, end in each) for each in spans]
        if not (most := max(counts)):
            return own_EBGLD, Received([], own_EBGLD)
        places = ((self.place_of(begin), end - begin) for begin, end in spans[self.rank])
        sent = [own_EBGLD[..., place : place + size, :] for place, size in places]
        shape = list(own_EBGLD.shape)
        shape[3] = most - counts[self.rank]  # all ranks send as many
        sent_EBGCD = torch.cat([*sent, own_EBGLD.new_zeros(shape)], 3)
        own_EBGLD, all_NEBGCD = _Exchange.apply(own_EBGLD, sent_EBGCD, self.group)
        contents = []
        for rank, of_rank in enumerate(spans):
            column = 0
            for begin, end in of_rank:
                contents.append((rank, column, (begin, end)))
                column += end - begin
        return own_EBGLD, Received(contents, all_NEBGCD)

    def _spans_to_send(self, rank: int, reach: int, num_first: int) -> list[Span]:
        found = [(max(begin, end - reach), end) for begin, end in self.spans(rank)]
        for ends, border in product(self.ends, range(0, self.num_tokens, self.piece_tokens)):
            number = bisect_right(ends, border)
            start, stop = ends[number - 1], ends[number]
            if start < border:  # the document goes on behind the border
                stop = min(stop, start + num_first)
                found += [(max(start, a), min(stop, b)) for a, b in self.spans(rank)]
        return sorted({(begin, end) for begin, end in found if begin < end})


@dataclass(frozen=True)
class Received:
    """Keys and values of all ranks."""

    contents: list[tuple[int, int, Span]]  # of a rank, from a column of what it sent on: which
    all_NEBGCD: Tensor

    def keys(self, row: int, begin: int, end: int) -> list[Tensor]:
        """(E, G, S, D), in parts: the keys and values of these tokens."""
        found = []
        while begin < end:
            rank, column, (first, last) = next(
                each for each in self.contents if each[2][0] <= begin < each[2][1]
            )
            last, column = min(last, end), column + begin - first
            found.append(self.all_NEBGCD[rank, :, row, :, column : column + last - begin])
            begin = last
        return found


class _Exchange(torch.autograd.Function):
    """What all ranks of a group send, beside the own keys and values unchanged: since every rank
    sees some of its own, the backward, in which all must take part, is run on every one."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sent: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.shape = group, sent.shape
        received = sent.new_empty(dist.get_world_size(group), *sent.shape)
        # Flat: gloo takes tensors that are joined along the first dimension only.
        gather(received.view(-1), sent.reshape(-1), group=group)
        return own.view_as(own), received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # The sum over the ranks is rounded once: bfloat16 would lose small summands.
        grad_own, grad_received = grads
        exact = grad_received.to(torch.promote_types(grad_received.dtype, torch.float32))
        total = exact.new_empty(ctx.shape)
        reduce_scatter(total.view(-1), exact.reshape(-1), group=ctx.group)
        return grad_own, total.to(grad_received.dtype), None
