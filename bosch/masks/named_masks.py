"""Mask files by name: which of them can be compared, and which form a chain of rising ratios."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bosch.masks.mask import GroupMask, MaskFile, read_mask

MASK = "mask.json"


@dataclass(frozen=True)
class NamedMask:
    """A mask file, and what tells it from the others of its model and ratio."""

    name: str
    path: Path
    record: MaskFile

    @property
    def mask(self) -> GroupMask:
        return self.record.mask

    @property
    def model(self) -> str:
        return str(self.record.model)

    @property
    def ratio(self) -> float:
        """As asked: whole layers seldom meet it, and are compared with what was asked the same."""
        asked = self.record.ratio_asked
        return self.mask.ratio if asked is None else asked

    @property
    def full_name(self) -> str:
        return f"{self.name} r{self.ratio:g}"

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.full_name,
            "file": str(self.path),
            "model": self.model,
            "method": self.record.method,
            "seed": self.record.seed,
            "ratio_asked": self.record.ratio_asked,
            "ratio": self.mask.ratio,
            "window_tokens": self.mask.window_tokens,
        }


def read_masks(paths: Sequence[Path]) -> list[NamedMask]:
    """The masks in the order given, each file once."""
    if not paths:
        raise ValueError("No masks were named; pass mask.json files, or folders of runs.")
    files = list(dict.fromkeys(find_mask(path) for path in paths))
    masks = [NamedMask("", file, read_mask(file)) for file in files]
    names = {
        mask.path: name for group in comparable(masks).values() for mask, name in tell_apart(group)
    }
    return [replace(mask, name=names[mask.path]) for mask in masks]


def find_mask(path: Path) -> Path:
    """The mask.json that a path means: itself, or that of a run, or of its stage `mask`."""
    for file in (path, path / MASK, path / "mask" / MASK):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{path} is no {MASK}, and no folder of a run that has one.")


def comparable(masks: Iterable[NamedMask]) -> dict[tuple[str, float], list[NamedMask]]:
    """Those of one model and ratio together, ratios rising."""
    groups: dict[tuple[str, float], list[NamedMask]] = {}
    for mask in masks:
        groups.setdefault((mask.model, mask.ratio), []).append(mask)
    return dict(sorted(groups.items(), key=lambda item: item[0][1]))


def tell_apart(masks: Sequence[NamedMask]) -> list[tuple[NamedMask, str]]:
    """Each mask's method; with seed, or window, or both where that is not enough; or the folder of
    its run; or its file.
    """
    ways: list[Callable[[NamedMask], str]] = [
        lambda mask: mask.record.method,
        lambda mask: f"{mask.record.method} s{mask.record.seed}",
        lambda mask: f"{mask.record.method} W{mask.mask.window_tokens}",
        lambda mask: f"{mask.record.method} s{mask.record.seed} W{mask.mask.window_tokens}",
        lambda mask: mask.path.resolve().parents[1].name,
    ]
    for way in ways:
        names = [way(mask) for mask in masks]
        if len(set(names)) == len(names):
            return list(zip(masks, names, strict=True))
    return [(mask, str(mask.path)) for mask in masks]


Kind = tuple[str, str, int]  # what all masks of a chain share beside the seed


def kind_of(mask: NamedMask) -> Kind:
    return mask.record.method, mask.model, mask.mask.window_tokens


def find_chains(masks: Iterable[NamedMask]) -> dict[str, list[NamedMask]]:
    """Masks that differ in their ratio alone, by rising ratio, two of them at least.

    A mask without a seed, because nothing in it was drawn, goes with those of every seed that have
    no mask of its ratio. Of several that differ in nothing, the last is taken.
    """
    alike: dict[Kind, list[NamedMask]] = {}
    for mask in masks:
        alike.setdefault(kind_of(mask), []).append(mask)
    varies = [len({key[part] for key in alike}) > 1 for part in range(3)]
    chains = {}
    for (method, model, window), members in alike.items():
        seeds = {mask.record.seed for mask in members}
        drawn = seeds - {None} or seeds
        for seed in sorted(drawn, key=str):
            mine = [m for m in members if m.record.seed in (seed, None)]
            mine.sort(key=lambda m: m.record.seed is not None)  # a seed's own mask counts
            by_ratio = {m.ratio: m for m in mine}
            if len(by_ratio) > 1:
                name = method + (f" s{seed}" if len(drawn) > 1 else "")
                name += (f" {model}" if varies[1] else "") + (f" W{window}" if varies[2] else "")
                chains[name] = [by_ratio[ratio] for ratio in sorted(by_ratio)]
    return chains


def passed_over(
    masks: Iterable[NamedMask], chains: dict[str, list[NamedMask]]
) -> list[tuple[NamedMask, NamedMask]]:
    """Masks that are in no chain because another of their kind, ratio and seed is, and which: those
    of one method on several calibration sets, say, of which a mask file says nothing.
    """
    taken = {mask.path: mask for chain in chains.values() for mask in chain}
    found = []
    for mask in masks:
        rivals = [
            other
            for other in taken.values()
            if kind_of(other) == kind_of(mask)
            and other.ratio == mask.ratio
            and mask.record.seed in (other.record.seed, None)
        ]
        if rivals and mask.path not in taken:
            found.append((mask, rivals[0]))
    return found


def steps_of(chains: dict[str, list[NamedMask]]) -> list[tuple[str, NamedMask, NamedMask]]:
    """(name of the chain, smaller, larger) of neighboring ratios."""
    return [
        (name, smaller, larger)
        for name, chain in chains.items()
        for smaller, larger in itertools.pairwise(chain)
    ]


Panel = list[list[NamedMask]]  # masks of one model, or of two with masks of the same names


def find_panels(masks: Iterable[NamedMask]) -> list[Panel]:
    """What a heat map each is drawn of: a ratio that several masks of a model share, two models in
    one where their masks have the same names. Of a model without such a ratio, all masks.
    """
    models: dict[str, list[NamedMask]] = {}
    for mask in masks:
        models.setdefault(mask.model, []).append(mask)
    groups = []
    for together in models.values():
        shared = [group for group in comparable(together).values() if len(group) > 1]
        groups += shared or ([together] if len(together) > 1 else [])
    panels: list[Panel] = []
    for group in groups:
        names = [mask.full_name for mask in group]
        half = [p for p in panels if len(p) == 1 and [m.full_name for m in p[0]] == names]
        if half:
            half[0].append(group)
        else:
            panels.append([group])
    return panels
