"""What masks have in common, compared with random masks of the same ratios: distances, turnover,
whether masks that are close score alike, and the masks of the paper's replacement test.

A mask is treated as the set of its windowed groups (A in the paper): the Jaccard distance of
figures 2, 7 and 8 and the turnover of table 3 compare two such sets. The null model is exact: the
number of groups that random masks share follows a hypergeometric distribution.
"""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.masks.mask import GroupMask, MaskFile, Unit, read_mask, write_mask
from bosch.masks.ranks import ranks_of
from bosch.run.errors import MissingFileError, UserError
from bosch.run.progress import say

MASK = "mask.json"
NUM_DRAWS = 2_000  # of methods, for an interval
LEVEL = 0.95


@dataclass(frozen=True)
class NamedMask:
    """A mask file, and a name that is unique among those of its model and ratio."""

    name: str
    path: Path
    record: MaskFile
    mask: GroupMask  # of the record
    model: str  # of the record
    # The requested one: masks of whole layers seldom meet it exactly, and are compared with masks
    # of the same request.
    ratio: float

    @property
    def full_name(self) -> str:
        return f"{self.name} r{self.ratio:g}"


def read_masks(paths: Sequence[Path]) -> list[NamedMask]:
    """The masks in the order given, each file once. A path may also be that of a run, or of its
    stage `mask`."""
    if not paths:
        raise UserError("No masks were given; pass mask.json files or folders of runs.")
    files: list[Path] = []
    for path in paths:
        places = (path, path / MASK, path / "mask" / MASK)
        if not (found := [file for file in places if file.is_file()]):
            raise MissingFileError(f"{path} is neither a {MASK} nor the folder of a run with one.")
        files.append(found[0])
    masks = []
    for file in dict.fromkeys(files):
        record = read_mask(file)
        ratio = record.mask.ratio if record.ratio_asked is None else record.ratio_asked
        masks.append(NamedMask("", file, record, record.mask, str(record.model), ratio))
    named: dict[Path, str] = {}
    for group in comparable(masks).values():
        # The shortest names that tell all masks of the group apart; their paths do, in the end.
        for form in range(5):
            names = {}
            for mask in group:
                method, seed = mask.record.method, mask.record.seed
                seeded = method if seed is None else f"{method} s{seed}"
                window = f"{seeded} W{mask.mask.window_tokens}"
                run = mask.path.resolve().parent.parent.name
                names[mask.path] = (method, seeded, window, run, str(mask.path))[form]
            if len({*names.values()}) == len(names):
                break
        named |= names
    return [replace(mask, name=named[mask.path]) for mask in masks]


def comparable(masks: Iterable[NamedMask]) -> dict[tuple[str, float], list[NamedMask]]:
    """Masks grouped by model and ratio, ratios rising."""
    groups: dict[tuple[str, float], list[NamedMask]] = {}
    for mask in masks:
        groups.setdefault((mask.model, mask.ratio), []).append(mask)
    return dict(sorted(groups.items(), key=lambda item: item[0][1]))


def find_chains(masks: Sequence[NamedMask]) -> dict[str, list[NamedMask]]:
    """Chains of at least two masks of one method, model, window and sink, by rising ratio. A mask
    without a seed (nothing in it was random) joins the chain of every seed that has no mask of its
    ratio. Of masks that differ in none of these, as by settings of the method, the last is used."""
    kinds: dict[tuple[str, ...], list[NamedMask]] = {}
    for mask in masks:
        made_for = f"W{mask.mask.window_tokens}", f"sink {mask.mask.sink}"
        kind = mask.record.method, mask.model, *made_for
        kinds.setdefault(kind, []).append(mask)
    chains: dict[tuple[str, ...], list[NamedMask]] = {}
    for (method, *others), of_kind in kinds.items():
        # Masks with a seed come last, so that they are used.
        of_kind.sort(key=lambda mask: mask.record.seed is not None)
        seeds = dict.fromkeys(mask.record.seed for mask in of_kind)
        for seed in seeds:
            if seed is None and len(seeds) > 1:
                continue
            members = [mask for mask in of_kind if mask.record.seed in (seed, None)]
            chain = {mask.ratio: mask for mask in members}
            if len(chain) < 2:
                continue
            for other in members:
                if (used := chain[other.ratio]) is not other:
                    same = f"{used.path} has the same method, ratio, window, sink and seed"
                    say(f"{other.path} is left out of the turnover, because {same}")
            name = (method, "" if seed is None else f"s{seed}", *others)
            chains[name] = [chain[ratio] for ratio in sorted(chain)]
    # Only the parts of a name that differ between chains, and always the method, its first.
    told = [part for part in range(5) if part == 0 or len({name[part] for name in chains}) > 1]
    return {
        " ".join(name[part] for part in told if name[part]): chain for name, chain in chains.items()
    }


def compare(first: GroupMask, second: GroupMask) -> dict[str, float]:
    """The number of windowed groups that two masks share, Jaccard's distance 1 - |A and B| / |A or
    B| (0 for two masks that window nothing), and what to expect of random masks."""
    shapes = [(mask.num_layers, mask.num_groups) for mask in (first, second)]
    if shapes[0] != shapes[1]:
        text = " and ".join(f"{layers} layers x {groups} groups" for layers, groups in shapes)
        raise UserError(f"The masks have {text}; only masks of one model can be compared.")
    num_first, num_second = first.num_windowed, second.num_windowed

    def distance(shared: int) -> float:
        either = num_first + num_second - shared
        return 1 - shared / either if either else 0.0

    rows = zip(first.z, second.z, strict=True)
    shared = sum(pair == (0, 0) for row in rows for pair in zip(*row, strict=True))
    chances = overlap_chances(first, second).items()
    return {
        "shared": shared,
        "distance": distance(shared),
        "expected_shared": num_first * num_second / first.num_total,
        "expected_distance": math.fsum(chance * distance(count) for count, chance in chances),
    }


def overlap_chances(first: GroupMask, second: GroupMask) -> dict[int, float]:
    """Probability of each number of shared windowed groups if the second mask is drawn at random:
    groups, or layers if both masks choose whole layers."""
    size = first.num_groups if first.unit == second.unit == "layer" else 1
    total, marked = first.num_total // size, first.num_windowed // size
    drawn = second.num_windowed // size
    # Hypergeometric: of `total` groups, `marked` are windowed in the first mask, and `drawn` are
    # drawn for the second. Integers until the division, so that no factorial overflows.
    return {
        k * size: comb(marked, k) * comb(total - marked, drawn - k) / comb(total, drawn)
        for k in range(min(marked, drawn) + 1)
    }


def turnover(smaller: GroupMask, larger: GroupMask) -> dict[str, float | None]:
    """T of table 3, the share of the smaller mask's windowed groups that are full in the larger
    one; T~, which is T divided by its maximum (None: that is 0); and both of random masks."""
    both, total = compare(smaller, larger), smaller.num_windowed
    most = min(total, larger.num_full) / total
    raw, chance = ((total - both[name]) / total for name in ("shared", "expected_shared"))
    normalized, expected = (share / most if most else None for share in (raw, chance))
    return {"raw": raw, "normalized": normalized, "chance": chance, "normalized_chance": expected}


@dataclass(frozen=True)
class ScoredMask:
    """A mask, the method that chose it, and what the model scores with it."""

    method: str
    mask: GroupMask
    score: float


def correlate_scores(scored: Sequence[ScoredMask]) -> dict[str, float | None]:
    """Do masks that are close score alike (section 4.2 of the paper)? Spearman's correlation, over
    pairs of masks of one model and ratio, of their distance and the difference of their scores.

    The paper compares methods, so two masks of one method are no pair. Pairs have masks in common
    and are not independent: the interval is over methods, drawn anew with replacement. None: too
    few pairs, or all of them have the same distance or the same difference."""
    methods = sorted({one.method for one in scored})
    pairs = [
        (methods.index(a.method), methods.index(b.method), a, b)
        for a, b in itertools.combinations(scored, 2)
        if a.method != b.method
    ]
    first, second = (np.array([pair[side] for pair in pairs], int) for side in (0, 1))
    distances = np.array([compare(a.mask, b.mask)["distance"] for *_, a, b in pairs])
    differences = np.array([abs(a.score - b.score) for *_, a, b in pairs])
    found = spearman(distances, differences)
    # The bootstrap draws methods, not pairs: two pairs with one method in common are no independent
    # observations. A method drawn n times counts n times in each of its pairs.
    generator, drawn = np.random.default_rng(0), []
    for _ in range(NUM_DRAWS if found is not None else 0):
        counts = generator.multinomial(len(methods), np.full(len(methods), 1 / len(methods)))
        times = counts[first] * counts[second]
        drawn.append(spearman(distances.repeat(times), differences.repeat(times)))
    # Draws of a single method have no pair. Where these are too many, what is left is no interval.
    known = [one for one in drawn if one is not None]
    low, high = None, None
    if known and len(known) >= LEVEL * NUM_DRAWS:
        low, high = map(float, np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    sizes: dict[str, float | None] = {"methods": len(methods), "pairs": len(pairs)}
    return sizes | {"spearman": found, "low": low, "high": high}


def spearman(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """None where one of them does not vary."""
    ranks = []
    for values in (first, second):
        if len(np.unique(values)) < 2:
            return None
        ranks.append(ranks_of(values))
    table: NDArray[np.float64] = np.asarray(np.corrcoef(ranks))
    return float(table[0, 1])


def write_replacements(
    smaller: NamedMask, larger: NamedMask, seeds: int, folder: Path
) -> list[dict[str, Any]]:
    """Write A' of the paper for each seed: the larger ratio's mask A, made to window the groups
    that only the smaller ratio's mask windows. Table 5 asks whether it scores worse than A, so its
    windows have A's sink. Each pair has a folder of its own."""
    folder, rows = folder / f"{smaller.ratio:g}-{larger.ratio:g}", []
    for seed in range(seeds):
        mask, count = replace_groups(smaller.mask, larger.mask, seed)
        if not count:
            break  # the larger mask windows all that the smaller one does
        facts = {"smaller_ratio": smaller.ratio, "larger_ratio": larger.ratio, "replaced": count}
        settings = {"from": larger.record.method, **facts}
        record = replace(larger.record, mask=mask, method="replacement", settings=settings)
        path = folder / f"s{seed}.json"
        folder.mkdir(parents=True, exist_ok=True)
        if mask.sink.kind == "static":
            from bosch.hybrid.sinks import read_constants, write_constants  # imports torch

            complete = read_constants(larger.path, larger.record)
            write_constants(path, complete.mask.sink)
        write_mask(path, replace(record, seed=seed, score_trace=None))
        rows.append(facts | {"seed": seed, "file": str(path)})
    return rows


def replace_groups(smaller: GroupMask, larger: GroupMask, seed: int) -> tuple[GroupMask, int]:
    """The larger mask, with the groups that only the smaller one windows in place of as many of its
    own, drawn at random; and how many. If both masks choose whole layers, layers are replaced. The
    sink and the model's own windows are the larger's."""
    unit: Unit = "layer" if smaller.unit == larger.unit == "layer" else "group"
    width = larger.num_groups if unit == "layer" else 1  # groups that are chosen together
    chosen, before = (
        {(l, g) for l, row in enumerate(mask.z) for g in range(0, len(row), width) if not row[g]}
        for mask in (larger, smaller)
    )
    incoming = before - chosen
    # Sorted, since the order of a set is not the same in every process, and a seed is to be.
    removed = random.Random(f"replacement/{seed}").sample(sorted(chosen), len(incoming))
    windowed = (chosen - set(removed)) | incoming
    groups, layers = range(larger.num_groups), range(larger.num_layers)
    rows = [[int((l, g - g % width) not in windowed) for g in groups] for l in layers]
    mask = GroupMask.from_rows(rows, larger.window_tokens, unit)
    return replace(mask, sink=larger.sink, own_windows=larger.own_windows), len(incoming)
