"""Names for mask files, which of them can be compared, and which form a chain of rising ratios."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bosch.masks.mask import GroupMask, MaskFile, read_mask
from bosch.run.errors import MissingFileError, UserError
from bosch.run.progress import say

MASK = "mask.json"


@dataclass(frozen=True)
class NamedMask:
    """A mask file, and a name that is unique among those of its model and ratio."""

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
        """The requested ratio: masks of whole layers seldom meet it exactly, and are compared with
        masks of the same request."""
        requested = self.record.ratio_asked
        return self.mask.ratio if requested is None else requested

    @property
    def full_name(self) -> str:
        return f"{self.name} r{self.ratio:g}"


def read_masks(paths: Sequence[Path]) -> list[NamedMask]:
    """The masks in the order given, each file once."""
    if not paths:
        raise UserError("No masks were given; pass mask.json files or folders of runs.")
    files = list(dict.fromkeys(find_mask(path) for path in paths))
    masks = [NamedMask("", file, read_mask(file)) for file in files]
    groups = comparable(masks)
    return [replace(mask, name=name_among(groups[mask.model, mask.ratio], mask)) for mask in masks]


def find_mask(path: Path) -> Path:
    """The mask.json of a path: the file itself, or that of a run or of its stage `mask`."""
    for file in (path, path / MASK, path / "mask" / MASK):
        if file.is_file():
            return file
    raise MissingFileError(f"{path} is neither a {MASK} nor the folder of a run that has one.")


def comparable(masks: Iterable[NamedMask]) -> dict[tuple[str, float], list[NamedMask]]:
    """Masks grouped by model and ratio, ratios rising."""
    groups: dict[tuple[str, float], list[NamedMask]] = {}
    for mask in masks:
        groups.setdefault((mask.model, mask.ratio), []).append(mask)
    return dict(sorted(groups.items(), key=lambda item: item[0][1]))


def name_among(masks: Sequence[NamedMask], mask: NamedMask) -> str:
    """The shortest unique name: the method, with the seed, with the window, the folder of the run,
    or the file.
    """
    candidates = zip(*map(possible_names, masks), strict=True)
    unique = next(names for names in candidates if len(set(names)) == len(names))
    return unique[masks.index(mask)]


def possible_names(mask: NamedMask) -> tuple[str, ...]:
    method, seed = mask.record.shown_method, mask.record.seed
    seeded = method if seed is None else f"{method} s{seed}"
    folder = mask.path.resolve().parent.parent.name
    return method, seeded, f"{seeded} W{mask.mask.window_tokens}", folder, str(mask.path)


def find_chains(masks: Iterable[NamedMask]) -> dict[str, list[NamedMask]]:
    """Chains of at least two masks that differ only in their ratio, by rising ratio.

    A mask without a seed (nothing in it was random) joins the chain of every seed that has no mask
    of its ratio. Of masks that differ in nothing that a mask file records, such as those of two
    calibration sets, the last one is used.
    """
    kinds: dict[tuple[str, str, int], list[NamedMask]] = {}
    for mask in masks:
        kind = (mask.record.shown_method, mask.model, mask.mask.window_tokens)
        kinds.setdefault(kind, []).append(mask)
    chains: dict[tuple[str, ...], list[NamedMask]] = {}
    for (method, model, window), members in kinds.items():
        seeds = {mask.record.seed for mask in members}
        for seed in sorted(seeds - {None} or seeds, key=lambda seed: seed or 0):
            by_ratio: dict[float, list[NamedMask]] = {}
            # Masks with the seed come last, so that they are used.
            for mask in sorted(members, key=lambda mask: mask.record.seed is not None):
                if mask.record.seed in (seed, None):
                    by_ratio.setdefault(mask.ratio, []).append(mask)
            if len(by_ratio) > 1:
                name = (method, "" if seed is None else f"s{seed}", model, f"W{window}")
                chains[name] = [_last(by_ratio[ratio]) for ratio in sorted(by_ratio)]
    # Only the parts of a name that differ between chains, and always the method.
    differs = [True, *(len(set(part)) > 1 for part in list(zip(*chains, strict=True))[1:])]
    return {
        " ".join(
            part for part, is_used in zip(name, differs, strict=True) if part and is_used
        ): chain
        for name, chain in chains.items()
    }


def _last(equal: Sequence[NamedMask]) -> NamedMask:
    *others, last = equal
    for other in others:
        say(
            f"{other.path} is left out of the turnover: {last.path} has the same method, ratio and "
            "seed; analyze one calibration set at a time"
        )
    return last
