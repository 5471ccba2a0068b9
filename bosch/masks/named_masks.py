"""Mask files by name: which of them can be compared, and which form a chain of rising ratios."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bosch.masks.mask import GroupMask, MaskFile, read_mask
from bosch.run.errors import MissingFileError, UserError
from bosch.run.progress import say

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


def read_masks(paths: Sequence[Path]) -> list[NamedMask]:
    """The masks in the order given, each file once."""
    if not paths:
        raise UserError("No masks were named; pass mask.json files, or folders of runs.")
    files = list(dict.fromkeys(find_mask(path) for path in paths))
    masks = [NamedMask("", file, read_mask(file)) for file in files]
    groups = comparable(masks)
    return [replace(mask, name=name_among(groups[mask.model, mask.ratio], mask)) for mask in masks]


def find_mask(path: Path) -> Path:
    """The mask.json that a path means: itself, or that of a run, or of its stage `mask`."""
    for file in (path, path / MASK, path / "mask" / MASK):
        if file.is_file():
            return file
    raise MissingFileError(f"{path} is no {MASK}, and no folder of a run that has one.")


def comparable(masks: Iterable[NamedMask]) -> dict[tuple[str, float], list[NamedMask]]:
    """Those of one model and ratio together, ratios rising."""
    groups: dict[tuple[str, float], list[NamedMask]] = {}
    for mask in masks:
        groups.setdefault((mask.model, mask.ratio), []).append(mask)
    return dict(sorted(groups.items(), key=lambda item: item[0][1]))


def name_among(masks: Sequence[NamedMask], mask: NamedMask) -> str:
    """The mask's method; with seed and window where that is not enough; or the folder of its run;
    or its file.
    """
    candidates = zip(*map(possible_names, masks), strict=True)
    unique = next(names for names in candidates if len(set(names)) == len(names))
    return unique[masks.index(mask)]


def possible_names(mask: NamedMask) -> tuple[str, ...]:
    method, seed = mask.record.method, mask.record.seed
    seeded = method if seed is None else f"{method} s{seed}"
    folder = mask.path.resolve().parents[1].name
    return method, seeded, f"{seeded} W{mask.mask.window_tokens}", folder, str(mask.path)


def find_chains(masks: Iterable[NamedMask]) -> dict[str, list[NamedMask]]:
    """Masks that differ in their ratio alone, by rising ratio, two of them at least.

    A mask without a seed, because nothing in it was drawn, goes with those of every seed that have
    no mask of its ratio. Of several that differ in nothing that a mask file tells, as those of two
    calibration sets, the last is taken.
    """
    kinds: dict[tuple[str, str, int], list[NamedMask]] = {}
    for mask in masks:
        kind = (mask.record.method, mask.model, mask.mask.window_tokens)
        kinds.setdefault(kind, []).append(mask)
    chains: dict[tuple[str, ...], list[NamedMask]] = {}
    for (method, model, window), members in kinds.items():
        seeds = {mask.record.seed for mask in members}
        for seed in sorted(seeds - {None} or seeds, key=str):
            by_ratio: dict[float, list[NamedMask]] = {}
            # A seed's own masks come last, so that they count.
            for mask in sorted(members, key=lambda mask: mask.record.seed is not None):
                if mask.record.seed in (seed, None):
                    by_ratio.setdefault(mask.ratio, []).append(mask)
            if len(by_ratio) > 1:
                name = (method, "" if seed is None else f"s{seed}", model, f"W{window}")
                chains[name] = [_last(by_ratio[ratio]) for ratio in sorted(by_ratio)]
    told = [True, *(len(set(part)) > 1 for part in list(zip(*chains, strict=True))[1:])]
    return {
        " ".join(part for part, is_told in zip(name, told, strict=True) if part and is_told): chain
        for name, chain in chains.items()
    }


def _last(alike: Sequence[NamedMask]) -> NamedMask:
    *others, taken = alike
    for other in others:
        say(
            f"{other.path} has no part in turnover: {taken.path} is of the same method, ratio and "
            "seed; analyze calibration sets one at a time"
        )
    return taken
