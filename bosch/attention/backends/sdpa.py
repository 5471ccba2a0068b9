"""Attention by torch's `scaled_dot_product_attention` (behind a past on the CPU, and with sinks, by
its kernels, which say their log-sum-exp).

A window over T tokens costs T * (W + C) pairs, not T * T: queries are taken in blocks of C, against
the C + W - 1 keys that a block can see. The blocks of keys are overlapping views, in the batch
dimension, and share one small mask. A T x T mask is never made: with one, this function is several
times slower than full attention. Measurements: `python -m benchmarks attention` and
benchmarks/results/attention-cpu.json.
"""
# B batch, H query heads, G kv heads, T queries, S keys, D head size, C queries a block, L keys a
# block, M blocks

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from bosch.attention.call import ALL, AttentionCall, SinkKeys, repeat_groups
from bosch.attention.merge import attend_with_sink, exact_sink, scores_of

MASK_ELEMENTS = 2**24  # of the mask of a block of queries that follows cached keys
CUDNN_QUERIES = 1024  # without gradients, cuDNN computes multiples of it only
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def unavailable() -> str | None:
    return None


def supports(call: AttentionCall) -> str | None:
    return None


def priority(call: AttentionCall) -> int:
    return 0  # the last one asked: it computes every call


def attend(call: AttentionCall) -> Tensor:
    # Before the call is cut up: the sink's gradients of all pieces add up exactly.
    call = exact_sink(call)
    if call.documents is not None:  # one by one, so that nothing can leak from one to another
        texts, whole = [], replace(call, documents=None)
        for b, ends in enumerate(call.documents.ends):
            parts = []
            for number, (start, end) in enumerate(pairwise(ends)):
                text = slice(start, end)
                part = _cut(whole, text, text, slice(b, b + 1)).without_idle_window()
                if (sink := part.sink) is not None and sink.of_document is not None:
                    own = slice(number * sink.of_document, (number + 1) * sink.of_document)
                    k_BGND, v_BGND = sink.k_BGND[:, :, own], sink.v_BGND[:, :, own]
                    part = replace(part, sink=SinkKeys(k_BGND, v_BGND, sink.seen_BTN[..., own]))
                if part.window_tokens is None and not part.needs_grad:
                    # No longer than its window. (All ranks of a training need the same gradients.)
                    part = replace(part, sink=None)
                parts.append(attend(part))
            texts.append(torch.cat(parts, dim=2))
        return torch.cat(texts)
    if call.window_tokens is None:
        return _full(call)
    # The batch is taken row by row: the blocks of several rows are no view of one tensor, so K and
    # V would be copied (C+W-1)/C times.
    rows = (_banded(_cut(call, rows=slice(b, b + 1))) for b in range(call.q_BHTD.shape[0]))
    if call.needs_grad or torch.compiler.is_compiling():
        out = []
        for pieces in rows:
            flat = [part_MHCD.transpose(0, 1).flatten(1, 2) for part_MHCD in pieces]
            out.append(torch.cat(flat, dim=1))
        return torch.stack(out)
    # Each part goes straight to its place, in memory as (B, T, H, D), the order in which it is read
    # next.
    batch, num_heads, num_queries, head_size = call.q_BHTD.shape
    out_BHTD = call.q_BHTD.new_empty(batch, num_queries, num_heads, head_size).transpose(1, 2)
    for out_HTD, pieces in zip(out_BHTD, rows, strict=True):
        start = 0
        for part_MHCD in pieces:
            size = part_MHCD.shape[0], part_MHCD.shape[2]
            target_HTD = out_HTD[:, start : start + prod(size)]
            target_HTD.unflatten(1, size).copy_(part_MHCD.transpose(0, 1))
            start += prod(size)
    return out_BHTD


def _full(call: AttentionCall) -> Tensor:
    q_BHTD, mask = call.q_BHTD, call.mask_BNTS
    num_queries, num_keys, device = q_BHTD.shape[2], call.k_BGSD.shape[2], q_BHTD.device
    if num_queries == 1:
        # Query heads that share keys become rows, so that each key is read once: 1.2x as fast on a
        # CPU; on a GPU a mask would make K and V a copy for each query head.
        rows = len(q_BHTD), call.k_BGSD.shape[1], -1, q_BHTD.shape[3]
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(len(mask), *rows[1:3], num_keys)
        return _sdpa(replace(call, q_BHTD=q_BHTD.reshape(rows)), mask).reshape(q_BHTD.shape)
    if mask is not None:
        return _sdpa(call, mask)
    if num_queries == num_keys:
        return _sdpa(call, is_causal=True)
    past = num_keys - num_queries
    if device.type == "cuda":
        if _takes_past_by_cudnn(call, past):
            return _behind_past(call, past, _cudnn_forward)
        return _sdpa(call, causal_lower_right(num_queries, num_keys))
    is_exact = q_BHTD.dtype in (torch.float32, torch.float64)
    if device.type == "cpu" and is_exact and not (call.needs_grad or call.dropout or call.sink):
        return _behind_past(call, past, _cpu_forward)
    # Elsewhere that bias is a T x S mask (8 GB for a chunk of 8k tokens after 1M keys), so blocks
    # of rows get small masks.
    block, parts = max(1, MASK_ELEMENTS // num_keys), []
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        part = _cut(call, slice(start, stop), slice(0, past + stop))
        ones = torch.ones(stop - start, past + stop, dtype=torch.bool, device=device)
        parts.append(_sdpa(part, ones.tril(past + start)))
    return torch.cat(parts, dim=2)


def _behind_past(call: AttentionCall, past: int, forward: Any) -> Tensor:
    """Attention to the past and to the new tokens, each without a mask, merged by their shares of
    the softmax. Takes 0.75 of the time of a mask on a CPU."""
    q, k, v = call.q_BHTD, call.k_BGSD, call.v_BGSD
    (past_BHTD, lse_past_BHT), (new_BHTD, lse_new_BHT) = (
        forward(
            q, k[:, :, keys], v[:, :, keys], bias=None, is_causal=is_causal, scaling=call.scaling
        )
        for keys, is_causal in ((slice(0, past), False), (slice(past, None), True))
    )
    # exp(a) / (exp(a) + exp(b)) is sigmoid(a - b), which overflows for no a and b.
    share_BHT1 = torch.sigmoid(lse_past_BHT - lse_new_BHT)[..., None]
    exact = share_BHT1.dtype  # in bfloat16 the shares would be rounded too
    return torch.lerp(new_BHTD.to(exact), past_BHTD.to(exact), share_BHT1).to(q.dtype)


def _takes_past_by_cudnn(call: AttentionCall, past: int) -> bool:
    """Whether a chunk is computed in two calls of cuDNN, each without a mask. For a mask that is
    aligned at the last key torch has flash-attn 2 only, which is half as fast on Hopper. Both parts
    are whole chunks, whose shapes return, and torch itself would give the past to cuDNN."""
    q_BHTD = call.q_BHTD
    if (
        (call.needs_grad or call.dropout or call.sink is not None)
        or torch.compiler.is_compiling()
        or q_BHTD.shape[2] % CUDNN_QUERIES
        or past % CUDNN_QUERIES
    ):
        return False
    k_BGSD, v_BGSD = call.k_BGSD[:, :, :past], call.v_BGSD[:, :, :past]
    return prefers_cudnn(q_BHTD, k_BGSD, v_BGSD, call.scaling)


def prefers_cudnn(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scaling: float) -> bool:
    """Whether torch gives attention without a mask to cuDNN: by the GPU, the versions, the shapes
    and the switches of this process."""
    grouped = q_BHTD.shape[1] != k_BGSD.shape[1]
    chosen = torch._fused_sdp_choice(q_BHTD, k_BGSD, v_BGSD, scale=scaling, enable_gqa=grouped)
    return int(chosen) == SDPBackend.CUDNN_ATTENTION.value


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` runs where it takes cuDNN, with its log-sum-exp. A causal
    one is aligned at the first key."""
    out, lse, *_ = cudnn_kernel(q, k, v, bias, True, 0.0, is_causal, scale=scaling)
    return out, lse.reshape(q.shape[:3])  # it has one dimension more


cudnn_kernel: Any = torch.ops.aten._scaled_dot_product_cudnn_attention


def _banded(call: AttentionCall) -> Iterator[Tensor]:
    """Windowed attention of one batch row in pieces (M, H, C, D): M blocks of C query rows.

    `without_idle_window` has cut the keys: S <= T + W - 1.
    """
    window_tokens = call.window_tokens
    assert window_tokens is not None
    if call.sink is not None and _merges_sink(call):
        # The scores of its keys for all queries at once: blocks of queries would be a copy.
        call = replace(call, sink=replace(call.sink, scores_BHTN=scores_of(call)))
    num_queries, past = call.q_BHTD.shape[2], call.k_BGSD.shape[2] - call.q_BHTD.shape[2]
    # W is `window_tokens`. Blocks of 32 are the fastest, or within 5 %, for every W (one CPU
    # thread, 64 to 1024). The gradient of the overlapping view is (C+W-1)/C copies of K and V, and
    # so is the view itself on a GPU, where grouped heads are repeated: these take larger.
    is_copied = call.needs_grad or call.q_BHTD.device.type == "cuda"
    block = max(64, window_tokens // 2) if is_copied else 32

    # Rows up to the first that sees W keys, then whole blocks, then the remaining rows. Only rows
    # that see exactly W keys are alike, as blocks must be: the first rows of a text see fewer.
    head = min(num_queries, window_tokens - past) if past < window_tokens - 1 else 0
    # Only blocks that are followed by enough keys for their padding.
    num_blocks = max(num_queries - head - _padding(block, window_tokens), 0) // block
    tail = head + num_blocks * block

    if head:
        yield _full(replace(_cut(call, slice(0, head), slice(0, past + head)), window_tokens=None))
    if num_blocks:
        yield _blocks(call, window_tokens, head, num_blocks, block)
    if tail < num_queries:
        rest = _cut(call, slice(tail, None), slice(past + tail - window_tokens + 1, None))
        # The corner of one band for all lengths of a rest, of which packed documents have many: a
        # band of its own for each would fill the memory, as each is kept.
        most = block + 15  # queries that may be left, by the padding of the last block
        padding = _padding(most, window_tokens)
        band = _band(most, window_tokens, call.q_BHTD.device, padding)
        band = band[: num_queries - tail, : num_queries - tail + window_tokens - 1]
        yield _sdpa(rest, band if rest.mask_BNTS is None else band & rest.mask_BNTS)


def _blocks(
    call: AttentionCall, window_tokens: int, head: int, num_blocks: int, block: int
) -> Tensor:
    """Rows `head` to `head + num_blocks * block`. Each of them sees W keys.

    With W = 3 and blocks of C = 2 queries, and without padding, of what each query sees (#) block m
    is the part of C x (C + W - 1) that begins C rows and C columns behind that of block m - 1:

        keys     0 1 2 3 4 5 6 7
               +---------+
        query 2| # # # . | . . . .        The columns of neighbors overlap by W - 1, so the blocks
              3| . # # # | . . . .        of keys are a view with a step of C tokens (`unfold`).
               +---+-----+---+            A mask's parts lie along the diagonal: in memory the next
        query 4. . | # # # . | . .        block is C rows and C columns further, which is a stride
              5. . | . # # # | . .        too (`as_strided`). Nothing is copied. And inside each
                   +---+-----+---+        block the same keys are visible, so one mask of this size
        query 6. . . . | # # # . |        (`_band`) serves them all.
              7. . . . | . # # # |
    """
    past, padding = call.k_BGSD.shape[2] - call.q_BHTD.shape[2], _padding(block, window_tokens)
    reach = block + window_tokens - 1 + padding
    first_key = past + head - window_tokens + 1
    queries, blocks = slice(head, head + num_blocks * block), (num_blocks, block)
    # The blocks take the place of the batch, which is of one row here: to the kernel they are M
    # texts of C queries and L keys.
    q_MHCD = call.q_BHTD[0, :, queries].unflatten(1, blocks).transpose(0, 1)
    keys = slice(first_key, first_key + (num_blocks - 1) * block + reach)
    both = call.k_BGSD, call.v_BGSD
    k_MGLD, v_MGLD = (x[0, :, keys].unfold(1, reach, block).permute(1, 0, 3, 2) for x in both)
    mask = _band(block, window_tokens, call.q_BHTD.device, padding)
    # (M, N, C, L): its parts along the diagonal. Row c and column l of block m are in the mask at
    # row     head + m * C + c            so the step from block to block is C rows and C columns,
    # column  first_key + m * C + l       and those inside a block are the mask's own.
    if call.mask_BNTS is not None:
        mask_NTS = call.mask_BNTS[0]
        by_head, by_row, by_column = mask_NTS.stride()
        offset = mask_NTS.storage_offset() + head * by_row + first_key * by_column
        shape = (num_blocks, mask_NTS.shape[0], block, reach)
        strides = (block * (by_row + by_column), by_head, by_row, by_column)
        mask = mask & mask_NTS.as_strided(shape, strides, offset)
    sink = call.sink
    if sink is not None:
        sink = sink.of_queries(queries)
        sink = replace(sink, seen_BTN=sink.seen_BTN[0].unflatten(0, blocks))
        if sink.scores_BHTN is not None:
            s_HMCN = sink.scores_BHTN[0].unflatten(1, blocks)
            sink = replace(sink, scores_BHTN=s_HMCN.transpose(0, 1))
    return _sdpa(replace(call, q_BHTD=q_MHCD, k_BGSD=k_MGLD, v_BGSD=v_MGLD, sink=sink), mask)


def _padding(block: int, window_tokens: int) -> int:
    """Keys that no query of a block sees, so that its rows of scores are a multiple of 16 long.
    (One CPU thread, AVX512, D=64, W=256: 287 keys a block take 1.19 times as long as 288.)"""
    return -(block + window_tokens - 1) % 16


def _band(num_queries: int, window_tokens: int, device: torch.device, padding: int = 0) -> Tensor:
    """(C, C + W - 1 + padding): query i sees keys i to i + W - 1."""
    if torch.compiler.is_compiling():  # a compiled graph stores its constants itself
        return _make_band(num_queries, window_tokens, device, padding)
    with torch.inference_mode(False):  # one made in evaluation is used in training too
        return _cached_band(num_queries, window_tokens, device, padding)


def _make_band(num_queries: int, window_tokens: int, device: torch.device, padding: int) -> Tensor:
    shape = (num_queries, num_queries + window_tokens - 1 + padding)
    ones = torch.ones(shape, dtype=torch.bool, device=device)
    return ones.triu().tril(window_tokens - 1)


# Of each window and device two for training and two for reading: selective checkpointing fails if
# one is made in the backward only.
_cached_band = lru_cache(maxsize=64)(_make_band)


def _cut(
    call: AttentionCall, queries: slice = ALL, keys: slice = ALL, rows: slice = ALL
) -> AttentionCall:
    """The part of a call for these queries, keys and rows of the batch: views."""
    mask, sink = call.mask_BNTS, call.sink
    if mask is not None:
        mask = mask[rows if len(mask) > 1 else ALL, :, queries, keys]
    q_BHTD = call.q_BHTD[rows, :, queries]
    k_BGSD, v_BGSD = call.k_BGSD[rows, :, keys], call.v_BGSD[rows, :, keys]
    sink = None if sink is None else sink.of_queries(queries, rows)
    return replace(call, q_BHTD=q_BHTD, k_BGSD=k_BGSD, v_BGSD=v_BGSD, mask_BNTS=mask, sink=sink)


def avoids_cudnn(call: AttentionCall, is_causal: bool) -> bool:
    """Whether torch must not give this to cuDNN, which it prefers on Hopper and Blackwell.

    cuDNN plans anew for each shape it has not seen (tens of milliseconds), so it is for shapes that
    return: a training's, and whole chunks of prompts, not a step of decoding. It was also wrong: a
    single query with fewer than 8 KV heads on a B200 (pytorch#193893), and gradients of NaN with a
    mask (pytorch#196678).
    """
    if call.q_BHTD.device.type != "cuda":
        return False
    if call.needs_grad:
        return not is_causal  # masked, or a single query with its past
    return call.q_BHTD.shape[2] % CUDNN_QUERIES != 0


@contextmanager
def without_cudnn() -> Iterator[None]:
    if torch.compiler.is_compiling():
        # Tracing stops at the switches below. This becomes a part of the graph.
        with sdpa_kernel(OTHERS):
            yield
        return
    # The switch of the process, since a call has none; sdpa_kernel would set the others too.
    is_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(is_enabled)


def _sdpa(
    call: AttentionCall, mask: Tensor | CausalBias | None = None, is_causal: bool = False
) -> Tensor:
    """torch's function, or where there is a sink, one of its kernels. `mask`: what the queries see
    of the keys, instead of the call's own."""
    on_cpu = call.q_BHTD.device.type == "cpu"
    if call.mask_BNTS is not None and not on_cpu:
        assert mask is not None
        if call.needs_grad or (call.sink is not None and mask.shape[-2] > 1):
            # A query that sees nothing (padding) would have gradients of NaN (torch 2.11, H200),
            # and no log-sum-exp for a sink.
            mask = mask | ~mask.any(-1, keepdim=True)
    if call.sink is not None:
        if _merges_sink(call):
            return (_cpu_with_sink if on_cpu else _cuda_with_sink)(call, mask, is_causal)
        call, is_causal = _sink_as_key(call, mask, is_causal), False
        mask = call.mask_BNTS
    q, k, v = call.q_BHTD, call.k_BGSD, call.v_BGSD
    grouped = q.shape[1] != k.shape[1]
    by_flash = isinstance(mask, CausalBias) and q.dtype in (torch.float16, torch.bfloat16)
    if grouped and mask is not None and not by_flash and not on_cpu:
        # Except on the CPU, grouped heads with a mask would use the slow math kernel.
        k, v, grouped = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1]), False
    with without_cudnn() if avoids_cudnn(call, is_causal) else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, mask, call.dropout, is_causal, scale=call.scaling, enable_gqa=grouped
        )


def _merges_sink(call: AttentionCall) -> bool:
    """Whether a kernel computes it that says its log-sum-exp."""
    q_BHTD = call.q_BHTD
    if call.dropout or q_BHTD.device.type not in ("cpu", "cuda"):
        return False
    on_cpu = q_BHTD.device.type == "cpu"
    return on_cpu or has_efficient_kernel(q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[3])


@torch.compiler.assume_constant_result
def has_efficient_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """No float64, no odd head sizes, no bf16 on old GPUs. Asked once for each kind of call. (Of a
    function with lru_cache, a compiled model would not take the answer for a constant.)"""
    kind = (device, dtype, head_size)
    if kind not in _efficient_kernels:
        x = torch.empty(1, 1, 1, head_size, dtype=dtype, device=device)
        params = cuda.SDPAParams(x, x, x, None, 0.0, False, False)
        _efficient_kernels[kind] = cuda.can_use_efficient_attention(params)
    return _efficient_kernels[kind]


_efficient_kernels: dict[tuple[torch.device, torch.dtype, int], bool] = {}


def _cpu_with_sink(call: AttentionCall, mask: Tensor | None, is_causal: bool) -> Tensor:
    bias = None
    if mask is not None:  # 0 where the mask is True, else -inf
        bias = torch.zeros_like(mask, dtype=call.q_BHTD.dtype)
        bias = bias.masked_fill(~mask, -torch.inf)
    return attend_with_sink(
        call,
        partial(_cpu_forward, bias=bias, is_causal=is_causal, scaling=call.scaling),
        partial(_cpu_backward, bias=bias, is_causal=is_causal, scaling=call.scaling),
    )


# What `scaled_dot_product_attention` runs on a CPU, with its log-sum-exp.
def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scaling
    )
    return out, lse


def _cpu_backward(
    *tensors: Tensor, bias: Tensor | None, is_causal: bool, scaling: float
) -> Iterable[Tensor]:
    dtype = tensors[0].dtype
    if bias is not None:
        # With a mask torch's kernel is slow in half precision: blocks of a window of 128 take it
        # 2.2 to 3 times as long in bf16 as in fp32 (a CPU with AMX, two threads and one).
        tensors = tuple(x.to(torch.promote_types(dtype, torch.float32)) for x in tensors)
        bias = bias.to(tensors[0].dtype)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, is_causal, attn_mask=bias, scale=scaling
    )
    return (grad.to(dtype) for grad in grads)


def _cuda_with_sink(
    call: AttentionCall, mask: Tensor | CausalBias | None, is_causal: bool
) -> Tensor:
    """By the kernel that torch calls memory-efficient."""
    q_BHTD, bias_BHTS = call.q_BHTD, None
    (batch, num_heads, num_queries, _), num_keys = q_BHTD.shape, call.k_BGSD.shape[2]
    if isinstance(mask, CausalBias):
        mask = _lower_right(call)
    if mask is not None:
        # The kernel reads a bias of all heads whose rows each begin at a multiple of 16 numbers, so
        # rows get room behind their end. The heads share one in memory (`expand`).
        shape = (*mask.shape[:-1], num_keys + -num_keys % 16)
        bias = q_BHTD.new_full(shape, -torch.inf)[..., :num_keys].masked_fill_(mask, 0)
        bias_BHTS = bias.expand(batch, num_heads, num_queries, num_keys)
    # It has no grouped heads.
    k_BHSD, v_BHSD = (
        x if x.shape[1] == num_heads else repeat_groups(x, num_heads)
        for x in (call.k_BGSD, call.v_BGSD)
    )
    return attend_with_sink(
        replace(call, k_BGSD=k_BHSD, v_BGSD=v_BHSD),
        partial(_cuda_forward, bias=bias_BHTS, is_causal=is_causal, scaling=call.scaling),
        partial(_cuda_backward, bias=bias_BHTS, is_causal=is_causal, scaling=call.scaling),
    )


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = efficient_kernel(q, k, v, bias, True, 0.0, is_causal, scale=scaling)
    return out, lse[..., : q.shape[2]]  # for a multiple of 32 queries


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out_BHTD: Tensor, lse_BHT: Tensor,
    *, bias: Tensor | None, is_causal: bool, scaling: float,
) -> Any:  # fmt: skip
    # What the kernel takes for granted of its own output: its order in memory, and a log-sum-exp
    # for a multiple of 32 queries, which is infinite for those that do not exist.
    out = out_BHTD.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse_BHT, (0, -lse_BHT.shape[-1] % 32), value=torch.inf).contiguous()
    seed, offset = torch.zeros(2, dtype=torch.long, device=q.device)  # of a dropout
    wanted = [True, True, True, False]  # not the gradient of the bias
    grads = efficient_backward_kernel(
        grad, q, k, v, bias, out, lse, seed, offset, 0.0, wanted, is_causal, scale=scaling
    )
    return grads[:3]


efficient_kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_backward_kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def _sink_as_key(
    call: AttentionCall, mask: Tensor | CausalBias | None, is_causal: bool
) -> AttentionCall:
    """The sink as further keys, where no kernel says its log-sum-exp: a copy."""
    assert call.sink is not None
    (batch, _, num_queries, _), num_keys = call.q_BHTD.shape, call.k_BGSD.shape[2]
    if is_causal or isinstance(mask, CausalBias):
        mask = _lower_right(call)
    elif mask is None:
        mask = call.q_BHTD.new_ones(num_queries, num_keys, dtype=torch.bool)
    keys, values = (
        torch.cat([x_BGND.expand(batch, -1, -1, -1).to(x_BGSD.dtype), x_BGSD], 2)
        for x_BGND, x_BGSD in ((call.sink.k_BGND, call.k_BGSD), (call.sink.v_BGND, call.v_BGSD))
    )
    mask = mask.expand(batch, mask.shape[1] if mask.dim() == 4 else 1, num_queries, num_keys)
    seen = call.sink.seen_BTN[:, None].expand(*mask.shape[:3], -1)
    visible = torch.cat([seen, mask], -1)
    return replace(call, k_BGSD=keys, v_BGSD=values, mask_BNTS=visible, sink=None)


def _lower_right(call: AttentionCall) -> Tensor:
    """(T, S): the causal mask whose last query sees the last key."""
    num_queries, num_keys = call.q_BHTD.shape[2], call.k_BGSD.shape[2]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=call.q_BHTD.device)
    return ones.tril(num_keys - num_queries)
