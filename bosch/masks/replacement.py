"""The replacement test of C.1: does the larger ratio's mask get worse when it takes back what the
smaller ratio's mask had chosen?

As many of its windowed groups as the smaller mask has beside it, drawn at random, become full, and
those of the smaller mask go on the window instead. The paper lacks a control: here the same groups
are also replaced by random ones, which says how much any exchange costs.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bosch.masks.mask import GroupMask, MaskFile, Unit, write_mask
from bosch.masks.named_masks import NamedMask
from bosch.masks.overlap import check_same_shape, windowed_groups

Origin = Literal["smaller", "random"]
ORIGINS: tuple[Origin, ...] = ("smaller", "random")
CHOSEN = "as chosen"

Step = tuple[str, NamedMask, NamedMask]  # name of the chain, smaller and larger ratio


@dataclass(frozen=True)
class Replacement:
    """A mask of the larger ratio with some of its windowed groups replaced."""

    mask: GroupMask
    num_replaced: int  # groups; whole layers, if the masks choose layers


def replace_groups(smaller: GroupMask, larger: GroupMask, origin: Origin, seed: int) -> Replacement:
    """With one seed, both origins replace the same groups. Random ones are drawn from all that the
    larger mask leaves full, so they may be among the smaller mask's too.
    """
    check_same_shape(smaller, larger)
    unit: Unit = "layer" if smaller.unit == larger.unit == "layer" else "group"
    chosen, before = _windowed(larger, unit), _windowed(smaller, unit)
    incoming = before - chosen
    generator = random.Random(f"replacement/{seed}")
    removed = generator.sample(sorted(chosen), len(incoming))
    if origin == "random":
        full = sorted(_all(larger, unit) - chosen)
        incoming = frozenset(generator.sample(full, len(incoming)))
    size = larger.num_groups
    windowed = [
        (layer, group)
        for layer, column in (chosen - set(removed)) | incoming
        for group in (range(size) if unit == "layer" else [column])
    ]
    mask = GroupMask.from_windowed(windowed, larger.num_layers, size, larger.window_tokens, unit)
    return Replacement(mask, len(incoming))


def turns_over(smaller: GroupMask, larger: GroupMask) -> bool:
    """Whether the smaller mask windows anything that the larger leaves full."""
    return not windowed_groups(smaller) <= windowed_groups(larger)


# What is exchanged is (layer, group), or (layer, 0) for masks over whole layers.


def _windowed(mask: GroupMask, unit: Unit) -> frozenset[tuple[int, int]]:
    return frozenset(place for place in _all(mask, unit) if not mask.z[place[0]][place[1]])


def _all(mask: GroupMask, unit: Unit) -> frozenset[tuple[int, int]]:
    columns = range(mask.num_groups if unit == "group" else 1)
    return frozenset((layer, group) for layer in range(mask.num_layers) for group in columns)


@dataclass(frozen=True)
class Exchanged:
    """One mask of the test, written to a file."""

    step: str
    origin: str  # "as chosen", "smaller" or "random"
    seed: int | None
    num_replaced: int
    path: Path
    mask: GroupMask


def write_masks(steps: Sequence[Step], seeds: int, folder: Path) -> list[Exchanged]:
    """The masks of every step and seed as mask files, in a folder a step. Where the larger ratio
    gives nothing up there is nothing to exchange.
    """
    made = []
    for name, smaller, larger in steps:
        if not turns_over(smaller.mask, larger.mask):
            continue
        step = f"{name} {smaller.ratio:g} \N{RIGHTWARDS ARROW} {larger.ratio:g}"
        place = (
            folder
            / f"{name.replace(' ', '-').replace('/', '-')}-{smaller.ratio:g}-{larger.ratio:g}"
        )
        place.mkdir(parents=True, exist_ok=True)
        made.append(Exchanged(step, CHOSEN, None, 0, larger.path, larger.mask))
        for origin, seed in itertools.product(ORIGINS, range(seeds)):
            found = replace_groups(smaller.mask, larger.mask, origin, seed)
            path = place / f"{origin}-s{seed}.json"
            write_mask(path, _record(smaller, larger, found, origin, seed))
            made.append(Exchanged(step, origin, seed, found.num_replaced, path, found.mask))
    return made


def _record(
    smaller: NamedMask, larger: NamedMask, found: Replacement, origin: Origin, seed: int
) -> MaskFile:
    settings = {
        "from": larger.record.method,
        "smaller_ratio": smaller.ratio,
        "swapped_in": origin,
        "num_replaced": found.num_replaced,
    }
    return replace(
        larger.record,
        mask=found.mask,
        method="replacement",
        settings=settings,
        seed=seed,
        score_trace=None,
    )


def summarize(
    exchanged: Sequence[Exchanged], scores: Mapping[GroupMask, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """A row a step and origin, as table 5: every measure that there is, and its mean over seeds."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in exchanged:
        row = rows.setdefault(
            (one.step, one.origin),
            {
                "step": one.step,
                "origin": one.origin,
                "num_replaced": one.num_replaced,
                "files": [],
                "scores": {},
            },
        )
        row["files"].append(str(one.path))
        for measure, value in scores.get(one.mask, {}).items():
            row["scores"].setdefault(measure, []).append(value)
    for row in rows.values():
        row["means"] = {name: sum(told) / len(told) for name, told in row["scores"].items()}
    return list(rows.values())
