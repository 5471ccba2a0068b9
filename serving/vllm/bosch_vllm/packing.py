"""How the KV heads of a hybrid are cut into attention modules. Needs no vLLM.

vLLM gives a group of modules a block of memory for some tokens; all its blocks have one size in
bytes. With modules of equal head count ("units") its own grouping wastes only what a group that is
not full leaves empty. "packed" cuts the heads of a kind where a block is full, so that a layer has
about two modules, and names the block that holds each (specs.py).

A packing has for each layer the heads of each module by its name, in the order of the heads.

Each module is an attention call of its own, so GPUs get "packed", where it can run. CPUs get
"units", which was a little faster there (docs/serving.md).
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

Packing = list[dict[str, int]]
LAYOUTS = ("units", "packed")
BLOCKS_FIRST = ("BLHNC", "BLNHC")  # layouts of the cache in which each block is one piece of memory
# What vLLM's FlashAttention 3 takes with a number for each head (its hopper/flash_api): this many
# query heads, and bf16. A window with a static sink has each query head twice (sinks.py).
MOST_HEADS = 64


def choose_layout(asked: str | None, like_gpus: bool, lacking: str | None) -> tuple[str, str]:
    """The layout, and why. `lacking`: why packed cannot run (`why_not_packed`)."""
    layout = asked or ("packed" if like_gpus else "units")
    if layout == "packed" and lacking:
        return "units", lacking
    return layout, "as asked" if asked else f"the default on {'GPUs' if like_gpus else 'CPUs'}"


def why_not_packed(
    num_full: Sequence[int],
    ranks: int,
    named: str | None,
    allowed: Sequence[str] | None,
    has_own_windows: bool = False,
) -> str | None:
    """`named`: the cache's layout, where vLLM or the user has named one; `allowed`: those of the
    attention backend that the user named, None for all."""
    if has_own_windows:
        return "packed needs layers without windows of their own"
    if any(count % ranks for count in num_full):
        return f"packed needs layers whose full groups {ranks} ranks share equally"
    needed = f"packed needs VLLM_KV_CACHE_LAYOUT={' or '.join(BLOCKS_FIRST)}"
    if named and named not in BLOCKS_FIRST:
        return f"{needed}, and it is {named}; left out, it gets the first"
    if allowed is not None and (named or BLOCKS_FIRST[0]) not in allowed:
        return f"{needed}, and the attention backend has {', '.join(allowed)}"
    return None


def number_type(backend: str, like_gpus: bool) -> str:
    """In which type a backend takes the number for each head (sinks.py)."""
    # FlashInfer would go on reading a copy in fp32 of numbers in bf16, made when the model loads.
    return "bfloat16" if like_gpus and backend != "FLASHINFER" else "float32"


def most_groups(per_kv: int) -> int:
    """Groups of `per_kv` query heads that one window with static sinks may have on a GPU."""
    return MOST_HEADS // (2 * per_kv)


def share_out(num_full: Sequence[int], ranks: int) -> list[list[int]]:
    """Full groups of each layer on each rank: parts that differ by one at most, also in total."""
    # Dealt out like cards, on through all layers: where a layer's count leaves a rest, the ranks
    # take turns. Layer by layer, the same ranks would get the rest each time.
    ends = accumulate(num_full, initial=0)
    parts = [
        [(end + rank) // ranks - (begin + rank) // ranks for rank in range(ranks)]
        for begin, end in pairwise(ends)
    ]
    return [list(rank) for rank in zip(*parts, strict=True)]


def order_for_ranks(num_full: int, shares: Sequence[int], num_groups: int) -> list[int]:
    """The groups of a layer, full ones first, so that each rank gets its share in one piece."""
    full, window, order = 0, num_full, list[int]()
    for share in shares:
        rest = num_groups // len(shares) - share
        order += [*range(full, full + share), *range(window, window + rest)]
        full, window = full + share, window + rest
    return order


def greatest_unit(shares: Sequence[Sequence[int]], num_groups: int, most: int | None) -> int:
    """Heads of a module that divide every count, here and on other ranks; at most `most`."""
    unit = math.gcd(num_groups, *(count for share in shares for count in share))
    return next(n for n in range(min(unit, most or unit), 0, -1) if unit % n == 0)


def pack_units(num_full: Sequence[int], num_groups: int, unit: int) -> Packing:
    """Modules of `unit` heads, which divides every count of every layer."""
    return [
        {f"full{i}": unit for i in range(full // unit)}
        | {f"window{i}": unit for i in range((num_groups - full) // unit)}
        for full in num_full
    ]


def pack_blocks(
    num_full: Sequence[int], num_groups: int, kept: int, tokens: int, most: int | None = None
) -> Packing:
    """Modules that cross no block. `kept`: entries that a text of `tokens` keeps for a window;
    `most`: heads that a module of windows may have."""
    num_window = [num_groups - count for count in num_full]
    capacity = heads_in_a_block(sum(num_full), sum(num_window), kept, tokens)
    packing: Packing = [{} for _ in num_full]
    for kind, counts in (("full", num_full), ("window", num_window)):
        filled = 0
        for pieces, count in zip(packing, counts, strict=True):
            end = filled + count
            while filled < end:
                block, used = divmod(filled, capacity)
                size = min(end - filled, capacity - used)
                limit = size if kind == "full" else most or size
                pieces |= _cut(f"{kind}{block}", size, limit)
                filled += size
    for block in sorted({block_of(name) for pieces in packing for name in pieces}):
        _cut_evenly_mixed(packing, block)
    return packing


def _cut(name: str, size: int, most: int) -> dict[str, int]:
    pieces = {name: min(size, most)}
    while (rest := size - sum(pieces.values())) > 0:
        pieces[f"{name}_{rest + most}"] = min(rest, most)  # no other cut has this name
    return pieces


def _cut_evenly_mixed(packing: Packing, block: str) -> None:
    """vLLM takes modules of several sizes for a pattern that repeats, and splits their block up, if
    each size is there equally often. So one is cut until they are not."""
    while True:
        held = [
            (size, layer, name)
            for layer, pieces in enumerate(packing)
            for name, size in pieces.items()
            if block_of(name) == block
        ]
        often = Counter(size for size, _, _ in held)
        if len(often) == 1 or len(set(often.values())) > 1:
            return
        # The largest gives a head away: the memory is the same, and one call more.
        size, layer, name = max(held)
        cut = {name: size - 1, f"{name}_{size}": 1}
        parts = (cut if key == name else {key: n} for key, n in packing[layer].items())
        packing[layer] = {key: n for part in parts for key, n in part.items()}


def block_of(name: str) -> str:
    return name.partition("_")[0]


def heads_in_a_block(num_full: int, num_window: int, kept: int, tokens: int) -> int:
    """The number that makes the fewest blocks, each of which has its own table, where a text takes
    the least memory or at most 5 % more."""
    if not num_full:
        return num_window

    plans = {}  # heads of a block -> blocks, and entries of a text
    for heads in range(1, num_full + 1):
        full, window = math.ceil(num_full / heads), math.ceil(num_window / heads)
        plans[heads] = full + window, (full * tokens + window * min(kept, tokens)) * heads
    # Fewer and larger blocks are fewer tables and calls, but the last of a kind is partly empty.
    good = [heads for heads, (_, held) in plans.items() if held <= 1.05 * plans[1][1]]
    return min(good, key=plans.__getitem__)


def share_of_dense(
    num_full: Sequence[int],
    num_groups: int,
    window: int,
    tokens: int,
    owns: Sequence[int | None] = (),
) -> float:
    """KV entries of one text, as a share of the dense model's: the formula. `owns`: the windows
    that layers have in the dense model too."""
    held = dense = 0
    for count, own in zip(num_full, owns or [None] * len(num_full), strict=True):
        held += count * tokens + (num_groups - count) * min((own or window) - 1, tokens)
        dense += num_groups * (tokens if own is None else min(own - 1, tokens))
    return held / dense


def held_entries(num_full: int, num_window: int, window: int, block: int, tokens: int) -> int:
    """KV entries of the blocks that vLLM holds for one text while it computes the last of its
    tokens: of full groups all, of window groups those in which a token of the window lies. Without
    what a block's last place for heads may leave empty (`heads_in_a_block`)."""
    blocks = math.ceil(tokens / block)
    left = max(0, tokens - window) // block
    return (num_full * blocks + num_window * (blocks - left)) * block
