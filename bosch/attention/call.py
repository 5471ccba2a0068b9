"""One call of attention: what a backend is asked to compute, and helpers that backends share."""
# B batch, H query heads, G kv heads, T queries, S keys, D head size, N 1 or H

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

NO_MASK = "it takes no mask, and this batch is padded or has a custom mask"
ALL = slice(None)


@dataclass(frozen=True)
class Documents:
    """Where packed documents end in each row: `ends[b] = (0, end of document 1, ..., T)`."""

    ends: tuple[tuple[int, ...], ...]
    device: torch.device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The ends with all rows joined into one, from 0 on, as the flash kernels take them."""
        num_tokens = self.ends[0][-1]
        # A row's first end, 0, is the last one of the row before it.
        ends = [row * num_tokens + end for row, ends in enumerate(self.ends) for end in ends[1:]]
        return torch.tensor([0, *ends], dtype=torch.int32, device=self.device)

    @cached_property
    def lengths(self) -> list[list[int]]:
        return [[b - a for a, b in pairwise(ends)] for ends in self.ends]

    @cached_property
    def position_BT(self) -> Tensor:
        """The position of each token in its document."""
        # Made on the CPU and copied once: on a GPU each document would be a kernel of its own.
        rows = [torch.cat([torch.arange(length) for length in row]) for row in self.lengths]
        return torch.stack(rows).to(self.device)

    def index_BT(self) -> Tensor:
        """The number of the document each token belongs to."""
        rows = [torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in self.lengths]
        return torch.stack(rows).to(self.device)


@dataclass(frozen=True)
class SinkKeys:
    """What the queries of a call see of a sink (bosch/sink.py): keys and values beside those of the
    window, a constant for each group or the first tokens of each text. Of B rows, or of one for
    all rows."""

    k_BGND: Tensor
    v_BGND: Tensor
    seen_BTN: Tensor  # bool: what each query sees of them, which is only what has left its window
    # Of packed documents, each with first tokens of its own: how many, document after document.
    of_document: int | None = None
    scores_BHTN: Tensor | None = None  # of its keys, if known before a backend cuts a call up

    def of_queries(self, queries: slice, rows: slice = ALL) -> SinkKeys:
        k_BGND, v_BGND, seen_BTN = (
            x if len(x) == 1 else x[rows] for x in (self.k_BGND, self.v_BGND, self.seen_BTN)
        )
        scores = None if self.scores_BHTN is None else self.scores_BHTN[rows, :, queries]
        return SinkKeys(k_BGND, v_BGND, seen_BTN[:, queries], self.of_document, scores)

    def of_groups(self, groups: slice | list[int]) -> SinkKeys:
        return replace(self, k_BGND=self.k_BGND[:, groups], v_BGND=self.v_BGND[:, groups])


@dataclass(frozen=True)
class AttentionCall:
    """Attention of heads that are all full or all windowed.

    Without a mask, the last query is aligned with the last key: query i sees the keys up to column
    `i + S - T`, and with `window_tokens` only the last `window_tokens` of them. A mask (True:
    visible) replaces the causal rule; a window applies on top of it, with the same alignment.
    """

    q_BHTD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    scaling: float
    window_tokens: int | None = None  # including the current token; None: full attention
    mask_BNTS: Tensor | None = None  # bool
    documents: Documents | None = None  # packed documents do not see each other; only where S == T
    dropout: float = 0.0
    sink: SinkKeys | None = None
    # Of a token decoded over the slots of a static cache, a 0-dim tensor: how many of the first
    # keys it sees. The mask says the same, for backends that cannot be told a number.
    num_seen: Tensor | None = None

    @property
    def needs_grad(self) -> bool:
        tensors = [self.q_BHTD, self.k_BGSD, self.v_BGSD]
        if self.sink is not None:
            tensors += [self.sink.k_BGND, self.sink.v_BGND]
        # Not by the tensors alone: in evaluation without gradients, trained weights still want
        # them.
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def is_plain_full(self) -> bool:
        """Full attention without packed documents: torch's own function picks the best kernel for
        it, and the result equals the stock model's bit for bit (on GPUs that torch gives to cuDNN,
        in whole chunks: sdpa.py)."""
        return self.window_tokens is None and self.documents is None and self.sink is None

    def in_one_dtype(self) -> AttentionCall:
        """Under autocast rotary positions leave queries and keys in fp32, while values come from a
        product in half precision; autocast casts the arguments of torch's own attention, and not of
        the kernels that backends call."""
        given = self.q_BHTD, self.k_BGSD, self.v_BGSD
        if len({x.dtype for x in given}) == 1:
            return self
        kind, dtype = self.q_BHTD.device.type, self.q_BHTD.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        q_BHTD, k_BGSD, v_BGSD = (x.to(dtype) for x in given)
        return replace(self, q_BHTD=q_BHTD, k_BGSD=k_BGSD, v_BGSD=v_BGSD)

    def without_idle_window(self) -> AttentionCall:
        """The same call without keys that no query sees, and without a window that hides nothing:
        a decoding step over a rolling cache becomes plain attention over what the cache holds."""
        if (window_tokens := self.window_tokens) is None:
            return self
        num_queries, num_keys = self.q_BHTD.shape[2], self.k_BGSD.shape[2]
        # The first of T queries sees W keys, and each further query one key more.
        reachable = min(num_keys, num_queries + window_tokens - 1)
        # Keys before these have left the window of every query. Of one query, what remains is its
        # window; and a window at least as long as the keys hides none.
        if reachable <= window_tokens or num_queries == 1:
            window_tokens = None  # the cut below is the whole window
        if reachable == num_keys:
            return replace(self, window_tokens=window_tokens)
        mask = None if self.mask_BNTS is None else self.mask_BNTS[..., num_keys - reachable :]
        k_BGSD, v_BGSD = self.k_BGSD[:, :, -reachable:], self.v_BGSD[:, :, -reachable:]
        return replace(
            self, k_BGSD=k_BGSD, v_BGSD=v_BGSD, mask_BNTS=mask, window_tokens=window_tokens
        )


def window_size(window_tokens: int | None) -> tuple[int, int]:
    """(left, right) as flash-attn and torch's varlen_attn count them. (Torch's documentation of the
    latter says (W, 0), but then its kernel shows W+1 keys.)"""
    return (-1, 0) if window_tokens is None else (window_tokens - 1, 0)


def repeat_groups(x_BGSD: Tensor, num_heads: int) -> Tensor:
    """Repeat each KV head for every query head that shares it."""
    return x_BGSD.repeat_interleave(num_heads // x_BGSD.shape[1], dim=1)


class Lengths(NamedTuple):
    """How a variable-length kernel is told the texts of a batch, under flash-attention's names."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def cumulative_lengths(call: AttentionCall) -> Lengths:
    """To such a kernel each packed document is a text of its own, else each row of the batch."""
    (batch, _, num_queries, _), num_keys = call.q_BHTD.shape, call.k_BGSD.shape[2]
    if call.documents is not None:
        # No past, so queries and keys are the same tokens. The longest document sets how much work
        # a kernel plans for each; the row's length would do, and cost more.
        ends_q = ends_k = call.documents.cu_seqlens
        num_queries = num_keys = max(map(max, call.documents.lengths))
    else:
        steps = torch.arange(batch + 1, dtype=torch.int32, device=call.q_BHTD.device)
        ends_q, ends_k = steps * num_queries, steps * num_keys
    return Lengths(ends_q, ends_k, num_queries, num_keys)


def flat_tokens(x_BHTD: Tensor) -> Tensor:
    """(B, H, T, D) -> (B*T, H, D), the layout of variable-length kernels."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def in_rows(out_NHD: Tensor, lse: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a variable-length kernel, as (B, H, T, D) and (B, H, T)."""
    lse_HN = lse if lse.shape[-1] == len(out_NHD) else lse.T  # some give (N, H)
    out_BHTD = out_NHD.unflatten(0, (batch, -1)).transpose(1, 2)
    return out_BHTD, lse_HN.unflatten(1, (batch, -1)).transpose(0, 1)


def no_flash_device() -> str | None:
    """Why no flash-attention kernel can run on this machine."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
    return None


def flash_refusal(call: AttentionCall) -> str | None:
    """Why no flash-attention kernel can compute this call."""
    q_BHTD, sink = call.q_BHTD, call.sink
    if q_BHTD.device.type != "cuda":
        return "it runs on CUDA devices only"
    if q_BHTD.dtype not in (torch.float16, torch.bfloat16):
        return "it computes in float16 and bfloat16 only"
    if call.mask_BNTS is not None:
        return NO_MASK
    if sink is not None and sink.of_document is not None:
        return "it has no first tokens of packed documents"
    if q_BHTD.shape[-1] > 256 or q_BHTD.shape[-1] % 8:
        return "its head size is a multiple of 8 up to 256"
    return None
