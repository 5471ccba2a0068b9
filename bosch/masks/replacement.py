"""The replacement test of C.1: does the larger ratio's mask get worse when it takes back what the
smaller ratio's mask had chosen?

As many of its windowed groups as the smaller mask has beside it, drawn at random, become full, and
those of the smaller mask go on the window instead. The paper lacks a control: here the same groups
are also replaced by random ones, which says how much any exchange costs.
"""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bosch.masks.mask import GroupMask, Unit, write_mask
from bosch.masks.named_masks import NamedMask
from bosch.masks.overlap import check_same_shape

Origin = Literal["smaller", "random"]
ORIGINS: tuple[Origin, ...] = ("smaller", "random")


def replace_groups(
    smaller: GroupMask, larger: GroupMask, origin: Origin, seed: int
) -> tuple[GroupMask, int]:
    """The larger mask with some of its windowed groups replaced, and how many: whole layers if the
    masks choose layers. With one seed, both origins replace the same groups. Random ones are drawn
    from all that the larger mask leaves full, so they may be among the smaller mask's too.
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
    """The masks of one step of ratios and one origin, written to files."""

    step: str
    origin: str  # "as chosen", "smaller" or "random"
    num_replaced: int
    files: Mapping[Path, GroupMask]  # one a seed


def write_masks(
    name: str, smaller: NamedMask, larger: NamedMask, seeds: int, folder: Path
) -> list[Exchanged]:
    """The masks of one step of a chain as mask files, in a folder of their own. Where the larger
    ratio gives nothing up there is nothing to exchange.
    """
    step = f"{name} {smaller.ratio:g} \N{RIGHTWARDS ARROW} {larger.ratio:g}"
    own = f"{name.replace(' ', '-').replace('/', '-')}-{smaller.ratio:g}-{larger.ratio:g}"
    made = [Exchanged(step, "as chosen", 0, {larger.path: larger.mask})]
    for origin in ORIGINS:
        files = {}
        for seed in range(seeds):
            mask, num_replaced = replace_groups(smaller.mask, larger.mask, origin, seed)
            if not num_replaced:
                return []
            settings = {
                "from": larger.record.method,
                "smaller_ratio": smaller.ratio,
                "swapped_in": origin,
                "num_replaced": num_replaced,
            }
            about: dict[str, Any] = {"method": "replacement", "settings": settings, "seed": seed}
            record = replace(larger.record, mask=mask, score_trace=None, **about)
            path = folder / own / f"{origin}-s{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mask(path, record)
            files[path] = mask
        made.append(Exchanged(step, origin, num_replaced, files))
    return made
