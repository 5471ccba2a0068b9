"""Import and export of masks in the format of DuoAttention, which PruLong has too: a TSV with one
line per layer and one number per KV head. Groups with larger numbers keep full attention. The
config.json beside it has the window, `recent_size`, and `sink_size`: S of the sink `tokens=S`.
"""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bosch.masks.mask import GroupMask, MaskFile, num_windowed
from bosch.model import ModelInfo
from bosch.model_files import read_json_object
from bosch.run.checkout import provenance
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_atomically
from bosch.run.fingerprint import hash_file
from bosch.sink import NO_SINK, Sink

METHOD = "import-duo"  # of an imported mask
LEAST = {"sink_size": 0, "recent_size": 1}  # in tokens


def import_mask(
    path: Path,
    model: ModelInfo,
    ratio: float,
    window_tokens: int | None = None,
    seed: int = 0,
    own_windows: tuple[int, ...] = (),
) -> tuple[MaskFile, tuple[str, ...]]:
    """A table as a MaskFile for `model`, which may have `own_windows`, and the notes to print. The
    groups of the smallest numbers get the window, which is the file's own if none is given; `seed`
    breaks ties."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise MissingFileError(f"{path} {problem}; pass the file to import.")
    try:
        table = np.loadtxt(path.read_text("utf-8").splitlines(), ndmin=2)
    except ValueError as error:  # also a UnicodeDecodeError
        raise UserError(f"{path} holds no table of numbers ({error}).") from error
    num_layers, num_groups = model.num_layers, model.num_groups
    if table.shape != (num_layers, num_groups):
        size = f"{table.shape[0]} lines of {table.shape[1]} numbers"
        raise UserError(f"{path} has {size}, but {model} is {num_layers} x {num_groups} groups.")
    for layer, row in enumerate(table.tolist()):
        if not all(map(math.isfinite, row)):
            raise UserError(f"{path}: layer {layer} is {row}; each value must be finite.")
    # The table says only which groups are full. DuoAttention keeps the window in a file beside it.
    sizes = read_sizes(path.parent / "config.json")
    notes = []
    recent = sizes.get("recent_size")
    if (window := recent if window_tokens is None else window_tokens) is None:
        raise UserError(f"{path} does not contain the window; pass --window.")
    source = "the recent_size in config.json beside the table"
    if window_tokens is None:
        notes.append(f"the window is {window} tokens, from {source}.")
    elif recent not in (None, window):
        notes.append(f"{source} is {recent}, but --window {window} is used.")
    windowed, tie = smallest(table.tolist(), num_windowed(ratio, num_layers, num_groups), seed)
    if tie:
        notes.append(
            f"{tie['num_tied']} groups are tied at the value {tie['value']:g}; the seed {seed} "
            f"chose the {tie['num_windowed']} of them that go on the window."
        )
    mask = GroupMask.from_windowed(windowed, num_layers, num_groups, window)
    mask = replace(mask, sink=sink_beside(path, window), own_windows=own_windows)
    if (asked := sizes.get("sink_size", 0)) > window:
        notes.append(f"sink_size is {asked}; the window of {window} keeps {window} of them.")
    # Where it is from goes into the mask's file, by checksum: a table in a folder of downloads soon
    # has another content.
    made = {"source": path.name, "source_xxh3": hash_file(path), "notes": notes, **provenance()}
    settings, seed_used = {"tie": tie, **sizes}, seed if tie else None
    record = MaskFile(mask, model, METHOD, ratio, settings, seed_used, provenance=made)
    return record, tuple(notes)


def read_sizes(path: Path) -> dict[str, int]:
    """`sink_size` and `recent_size` of a config.json, where it has them."""
    config = read_json_object(path) if path.is_file() else {}
    sizes = {name: config[name] for name in LEAST if config.get(name) is not None}
    for name, size in sizes.items():
        if type(size) is not int or size < LEAST[name]:
            raise UserError(f"{path}: {name} is {size!r}; it must be a whole number of tokens.")
    return sizes


def sink_beside(path: Path, window_tokens: int) -> Sink:
    """That of the config.json beside a table; at most the window."""
    count = min(read_sizes(path.parent / "config.json").get("sink_size", 0), window_tokens)
    return Sink("tokens", count) if count else NO_SINK


def smallest(
    table: list[list[float]], count: int, seed: int, least_full: int = 0
) -> tuple[list[tuple[int, int]], dict[str, Any] | None]:
    """The `count` groups with the smallest values, and the tie if the seed had to break one. The
    `least_full` groups of each layer with the largest values are never among them."""
    # Shuffled before they are sorted, so that ties fall by the seed alone: where many values are
    # equal, the first layers would get all windows.
    groups = [(layer, group) for layer, row in enumerate(table) for group in range(len(row))]
    random.Random(seed).shuffle(groups)
    # The sort is stable: equal values stay shuffled.
    ranked = sorted(groups, key=lambda place: table[place[0]][place[1]])
    if least_full:
        kept: list[tuple[int, int]] = []
        for layer, _ in enumerate(table):
            own = [place for place in ranked if place[0] == layer]
            kept += own[len(own) - least_full :]
        ranked = [place for place in ranked if place not in kept]
    values = [table[layer][group] for layer, group in ranked]
    if not 0 < count < len(ranked) or values[count - 1] != values[count]:
        return ranked[:count], None
    border = values[count]
    tied, windowed = values.count(border), values[:count].count(border)
    return ranked[:count], {"value": border, "num_tied": tied, "num_windowed": windowed}


def export_mask(record: MaskFile, path: Path) -> str:
    """Write the table, and beside it the config.json that DuoAttention reads, unless there is one.
    Returns a note to print."""
    write_atomically(path, "".join("\t".join(row) + "\n" for row in record.mask.row_texts()))
    first, window = record.mask.sink.num_tokens, record.mask.window_tokens
    beside = path.with_name("config.json")
    lost = ""
    if record.mask.sink.kind == "static":
        lost = " The mask's static sinks are lost: DuoAttention has none that are constant."
    if beside.exists():
        needs = f"DuoAttention needs recent_size {window} and sink_size {first} in it."
        return f"{beside} was there and is left as it is; {needs}{lost}"
    sizes = {"sink_size": first, "recent_size": window}
    write_atomically(beside, json.dumps(sizes, indent=1) + "\n")
    has = "the window" if lost else "the window and the sinks"
    return f"{beside} has {has}, which the table does not contain.{lost}"
