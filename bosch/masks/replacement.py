"""The replacement test of C.1: does the mask of a larger ratio get worse if it has to window the
groups that the mask of a smaller ratio had chosen?

The smaller mask's windowed groups that are full in the larger mask become windowed; the same number
of the larger mask's windowed groups, drawn at random, become full. The paper has no control: here
the same groups are also replaced by random ones, which shows the cost of any exchange.
"""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bosch.masks.mask import GroupMask, Unit, write_mask
from bosch.masks.named_masks import NamedMask
from bosch.masks.overlap import check_same_shape

Origin = Literal["smaller", "random"]
ORIGINS: tuple[Origin, ...] = ("smaller", "random")


def replace_groups(
    smaller: GroupMask, larger: GroupMask, origin: Origin, seed: int
) -> tuple[GroupMask, int]:
    """The larger mask with some of its windowed groups replaced, and how many (whole layers if the
    masks choose layers). With the same seed, both origins replace the same groups. Random ones are
    drawn from all full groups of the larger mask, so they may include the smaller mask's.
    """
    check_same_shape(smaller, larger)
    unit: Unit = "layer" if smaller.unit == larger.unit == "layer" else "group"
    columns = range(larger.num_groups if unit == "group" else 1)
    places = list(itertools.product(range(larger.num_layers), columns))
    chosen = {(layer, column) for layer, column in places if not larger.z[layer][column]}
    before = {(layer, column) for layer, column in places if not smaller.z[layer][column]}
    incoming = before - chosen
    generator = random.Random(f"replacement/{seed}")
    removed = generator.sample(sorted(chosen), len(incoming))
    if origin == "random":
        full = [place for place in places if place not in chosen]
        incoming = set(generator.sample(full, len(incoming)))
    windowed = [
        (layer, group)
        for layer, column in (chosen - set(removed)) | incoming
        for group in (range(larger.num_groups) if unit == "layer" else [column])
    ]
    shape = larger.num_layers, larger.num_groups, larger.window_tokens
    return GroupMask.from_windowed(windowed, *shape, unit), len(incoming)


@dataclass(frozen=True)
class Exchanged:
    """The masks for one pair of ratios and one origin, written to files."""

    step: str  # the two ratios
    origin: str  # "as chosen", "smaller" or "random"
    num_replaced: int
    files: Mapping[Path, GroupMask]  # one per seed


def write_masks(
    name: str, smaller: NamedMask, larger: NamedMask, seeds: int, folder: Path
) -> list[Exchanged]:
    """Write the masks for one pair of ratios into a folder of their own. Returns nothing if the
    larger mask windows all that the smaller one does: there is nothing to exchange.
    """
    step = f"{name} {smaller.ratio:g} \N{RIGHTWARDS ARROW} {larger.ratio:g}"
    folder /= f"{name.replace(' ', '-').replace('/', '-')}-{smaller.ratio:g}-{larger.ratio:g}"
    made = [Exchanged(step, "as chosen", 0, {larger.path: larger.mask})]
    for origin in ORIGINS:
        files = {}
        for seed in range(seeds):
            mask, num_replaced = replace_groups(smaller.mask, larger.mask, origin, seed)
            if not num_replaced:
                return []
            settings = {
                "from": larger.record.shown_method,
                "smaller_ratio": smaller.ratio,
                "swapped_in": origin,
                "num_replaced": num_replaced,
            }
            record = replace(
                larger.record,
                mask=mask,
                method="replacement",
                settings=settings,
                seed=seed,
                score_trace=None,
            )
            path = folder / f"{origin}-s{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mask(path, record)
            files[path] = mask
        made.append(Exchanged(step, origin, num_replaced, files))
    return made
