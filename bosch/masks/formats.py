"""Masks in the file formats of other projects, both ways. What a format says and ours does not is
dropped with a note.

duo          TSV of DuoAttention and PruLong: a line a layer, a real a KV head; larger = keeps full
             attention. Their streaming heads also see the first `sink_size` tokens.
headwise     `headwise_config` of rtp-llm, alone or inside a model's config.json: a list of 0 and 1
             for each layer, an entry a query head; 1 = full attention ("retrieval head"). Its
             `swa_token_num` is a `window_left`, the tokens before the own one: our window is one
             more. It also has sinks, and a length under which all heads of a text see everything.
layer_types  a Hugging Face config.json: `layer_types` of full_attention and sliding_attention, and
             `sliding_window`, which counts as ours does.
"""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.masks.mask import GroupMask, MaskFile, describe_ratio, num_windowed
from bosch.model import ModelInfo, read_json_object
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file
from bosch.run.manifest import provenance, write_atomically

# What rtp-llm takes for a key that its headwise_config leaves out.
HEADWISE_DEFAULTS = {"sink_token_num": 4, "swa_token_num": 8192, "seqlen_threshold": 16384}
LAYER_TYPES = ("sliding_attention", "full_attention")  # at its value of z


@dataclass(frozen=True)
class Request:
    """What the user said about an import beside the file."""

    window_tokens: int | None = None  # None: the file's own
    ratio: float | None = None
    threshold: float | None = None  # only for reals
    seed: int = 0  # of the tie-break among equal reals


@dataclass(frozen=True)
class Imported:
    """A mask read from a foreign file, and what the user should know about it."""

    mask: GroupMask
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None  # None: nothing had to be drawn
    notes: tuple[str, ...] = ()  # one line each: what was dropped or taken


def import_mask(
    path: Path, format_name: str, model: ModelInfo, request: Request
) -> tuple[MaskFile, tuple[str, ...]]:
    """A foreign file as a MaskFile for `model`, and the notes to print."""
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise MissingFileError(f"{path} {wrong}; the first argument is the file to import.")
    imported = FORMATS[format_name][0](path, model, request)
    record = MaskFile(
        mask=imported.mask,
        model=model,
        method=f"import-{format_name}",
        ratio_asked=request.ratio,
        settings=imported.settings,
        seed=imported.seed,
        provenance={
            "source": path.name,
            "source_xxh3": hash_file(path),
            "notes": list(imported.notes),
            **provenance(),
        },
    )
    return record, imported.notes


def export_mask(record: MaskFile, format_name: str, path: Path) -> tuple[str, ...]:
    """Write a mask in a foreign format; returns the notes to print."""
    text, notes = FORMATS[format_name][1](record)
    write_atomically(path, text)
    return notes


# --- DuoAttention and PruLong: a table of reals ---


def import_duo(path: Path, model: ModelInfo, request: Request) -> Imported:
    """By threshold (a group at or above it keeps full attention), or to a ratio's exact budget."""
    table = read_table(path, model)
    window, notes = _duo_window(path, request)
    if (request.ratio is None) == (request.threshold is None):
        raise UserError(f"{path} holds reals: say --ratio or --threshold, one of the two.")
    if request.threshold is not None:
        if not math.isfinite(request.threshold):
            raise UserError(f"threshold is {request.threshold}, it must be a finite number.")
        rows = [[value >= request.threshold for value in row] for row in table]
        mask = GroupMask.from_rows(rows, window)
        return Imported(mask, {"threshold": request.threshold}, notes=notes)
    assert request.ratio is not None
    budget = num_windowed(request.ratio, model.num_layers, model.num_groups)
    windowed, tie = smallest(table, budget, request.seed)
    if tie:
        notes = (
            *notes,
            f"{tie['num_tied']} groups share the value {tie['value']:g} at the border; seed "
            f"{request.seed} chose the {tie['num_windowed']} of them that go on the window.",
        )
    mask = GroupMask.from_windowed(windowed, model.num_layers, model.num_groups, window)
    return Imported(mask, {"tie": tie}, request.seed if tie else None, notes)


def read_table(path: Path, model: ModelInfo) -> list[list[float]]:
    """The reals of a TSV, [layer][group]."""
    lines = path.read_text("utf-8").splitlines()
    rows = [line.split() for line in lines if line.strip()]
    if len(rows) != model.num_layers:
        raise UserError(f"{path} has {len(rows)} lines, but {model} has {model.num_layers} layers.")
    table = []
    for layer, row in enumerate(rows):
        if len(row) != model.num_groups:
            raise UserError(
                f"{path}: layer {layer} has {len(row)} values, but {model} has {model.num_groups} "
                "KV heads a layer."
            )
        table.append([_real(text, path, layer) for text in row])
    return table


def smallest(
    table: list[list[float]], count: int, seed: int
) -> tuple[list[tuple[int, int]], dict[str, Any] | None]:
    """The `count` groups with the smallest values, and the tie if the last of them was drawn."""
    groups = [(layer, group) for layer, row in enumerate(table) for group in range(len(row))]
    random.Random(seed).shuffle(groups)
    # The sort is stable, so equal values stay shuffled.
    ranked = sorted(groups, key=lambda place: table[place[0]][place[1]])
    values = [table[layer][group] for layer, group in ranked]
    if not 0 < count < len(ranked) or values[count - 1] != values[count]:
        return ranked[:count], None
    border = values[count]
    tied, windowed = values.count(border), values[:count].count(border)
    return ranked[:count], {"value": border, "num_tied": tied, "num_windowed": windowed}


def _duo_window(path: Path, request: Request) -> tuple[int, tuple[str, ...]]:
    """Window and notes, from the config.json that DuoAttention writes beside its table."""
    beside = path.parent / "config.json"
    config = read_json_object(beside) if beside.is_file() else {}
    sinks = config.get("sink_size")
    dropped = (_sinks_dropped(sinks),) if sinks else ()
    name = "the recent_size in config.json beside the table"
    window, notes = _choose_window(path, name, config.get("recent_size"), request)
    return window, (*dropped, *notes)


def _real(text: str, path: Path, layer: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{path}: layer {layer} holds {text!r}, which is not a finite number.")
    return value


def export_duo(record: MaskFile) -> tuple[str, tuple[str, ...]]:
    window = record.mask.window_tokens
    note = (
        "the table says no window: DuoAttention reads it from a config.json beside the table, with "
        f"recent_size {window} and sink_size 0."
    )
    return "".join("\t".join(row) + "\n" for row in record.mask.row_texts()), (note,)


# --- rtp-llm: headwise_config ---


def import_headwise(path: Path, model: ModelInfo, request: Request) -> Imported:
    content = read_json_object(path)
    config = content.get("headwise_config", content)
    if not isinstance(config, dict):
        raise UserError(f"{path}: headwise_config must be an object, not {config!r}.")
    layers = {str(layer) for layer in range(model.num_layers)}
    if not layers & config.keys():
        raise UserError(f"{path} holds no headwise_config: there is no layer in it.")
    unknown = sorted(config.keys() - layers - HEADWISE_DEFAULTS.keys())
    if unknown:
        raise UserError(
            f"{path}: {unknown[0]!r} is neither a layer of {model} (0 to {model.num_layers - 1}) "
            f"nor one of {', '.join(HEADWISE_DEFAULTS)}."
        )
    settings = {name: config.get(name, default) for name, default in HEADWISE_DEFAULTS.items()}
    for name, value in settings.items():
        if type(value) is not int or value < 0:
            raise UserError(f"{path}: {name} is {value!r}, it must be a whole number from 0 on.")

    notes = []
    if settings["sink_token_num"]:
        notes.append(_sinks_dropped(settings["sink_token_num"]))
    if settings["seqlen_threshold"]:
        notes.append(
            "dropped: there, all heads see the whole of a text under "
            f"{settings['seqlen_threshold']} tokens; our window always holds."
        )
    if missing := sorted(map(int, layers - config.keys())):
        notes.append(
            f"layers that the file leaves out keep full attention: {', '.join(map(str, missing))}."
        )
    rows = [
        _headwise_row(path, layer, config.get(str(layer), [1] * model.num_query_heads), model)
        for layer in range(model.num_layers)
    ]
    window, window_notes = _choose_window(
        path, "the file's swa_token_num + 1", settings["swa_token_num"] + 1, request
    )
    mask = GroupMask.from_rows(rows, window)
    _check_fixed_ratio(path, mask, request)
    return Imported(mask, settings, notes=(*notes, *window_notes))


def _headwise_row(path: Path, layer: int, heads: Any, model: ModelInfo) -> list[int]:
    """One layer's query heads as groups, which must agree within."""
    if not isinstance(heads, list) or len(heads) != model.num_query_heads:
        raise UserError(
            f"{path}: layer {layer} must list the {model.num_query_heads} query heads of {model}."
        )
    if any(type(bit) is not int or bit not in (0, 1) for bit in heads):
        raise UserError(f"{path}: layer {layer} is {heads}; each query head is 0 or 1.")
    size = model.query_heads_per_group
    groups = [heads[start : start + size] for start in range(0, len(heads), size)]
    for group, bits in enumerate(groups):
        if len(set(bits)) > 1:
            raise UserError(
                f"{path}: the query heads of layer {layer}, group {group} are {bits}; they share "
                "one KV head, so a group mask needs them alike."
            )
    return [bits[0] for bits in groups]


def export_headwise(record: MaskFile) -> tuple[str, tuple[str, ...]]:
    mask, size = record.mask, record.model.query_heads_per_group
    left = mask.window_tokens - 1
    config: dict[str, Any] = {"sink_token_num": 0, "swa_token_num": left, "seqlen_threshold": 0}
    for layer, row in enumerate(mask.z):
        config[str(layer)] = [bit for bit in row for _ in range(size)]
    note = (
        f"swa_token_num is {left}: rtp-llm counts the tokens before the own one; "
        "sink_token_num and seqlen_threshold are 0: no sinks, and the window holds at every length."
    )
    return json.dumps({"headwise_config": config}, indent=1) + "\n", (note,)


# --- Hugging Face: layer_types ---


def import_layer_types(path: Path, model: ModelInfo, request: Request) -> Imported:
    config = read_json_object(path)
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != model.num_layers:
        raise UserError(
            f"{path}: layer_types must list the {model.num_layers} layers of {model}, but it is "
            f"{types!r}."
        )
    for layer, name in enumerate(types):
        if name not in LAYER_TYPES:
            raise UserError(
                f"{path}: layer {layer} is {name!r}; a mask knows {' and '.join(LAYER_TYPES)}."
            )
    window, notes = _choose_window(
        path, "the file's sliding_window", config.get("sliding_window"), request
    )
    mask = GroupMask.from_rows(
        [[LAYER_TYPES.index(name)] * model.num_groups for name in types], window, "layer"
    )
    _check_fixed_ratio(path, mask, request)
    return Imported(mask, notes=notes)


def export_layer_types(record: MaskFile) -> tuple[str, tuple[str, ...]]:
    mask = record.mask
    for layer, row in enumerate(mask.row_texts()):
        if len(set(row)) > 1:
            raise UserError(
                f"Layer {layer} mixes full and windowed groups ({row}), and layer_types has one "
                "kind a layer: export with --format headwise or duo."
            )
    config = {
        "layer_types": [LAYER_TYPES[row[0]] for row in mask.z],
        "sliding_window": mask.window_tokens,
        "use_sliding_window": True,  # without it, Qwen2 and Qwen3 forget sliding_window
    }
    note = "these are fields of config.json: merge them into the model's."
    return json.dumps(config, indent=1) + "\n", (note,)


# --- shared by the formats ---


def _choose_window(
    path: Path, name: str, own: Any, request: Request
) -> tuple[int, tuple[str, ...]]:
    """The window asked for, else the file's own, described by `name`; and what to note of it."""
    asked = request.window_tokens
    if own is None:
        if asked is None:
            raise UserError(f"{path} says no window: pass --window.")
        return asked, ()
    if type(own) is not int or own < 1:
        raise UserError(f"{path}: {name} is {own!r}, it must be a whole number from 1 on.")
    if asked is None:
        return own, (f"the window is {own} tokens, {name}.",)
    return asked, () if asked == own else (f"{name} is {own}; the mask takes --window {asked}.",)


def _check_fixed_ratio(path: Path, mask: GroupMask, request: Request) -> None:
    """Zeros and ones leave nothing to choose."""
    if request.threshold is not None:
        raise UserError(f"{path} holds zeros and ones, not reals: leave --threshold out.")
    if request.ratio is not None and not mask.meets(request.ratio):
        asked = describe_ratio(request.ratio, mask.num_layers, mask.num_groups, mask.unit)
        raise UserError(
            f"{path} has {mask.num_windowed} of {mask.num_total} groups on the window, but {asked}"
            "; leave --ratio out."
        )


def _sinks_dropped(num_sinks: int) -> str:
    return (
        f"dropped: the windowed heads there also see the first {num_sinks} tokens; our window has "
        "no sinks."
    )


Importer = Callable[[Path, ModelInfo, Request], Imported]
Exporter = Callable[[MaskFile], tuple[str, tuple[str, ...]]]  # the text, and notes to print
FORMATS: dict[str, tuple[Importer, Exporter]] = {
    "duo": (import_duo, export_duo),
    "headwise": (import_headwise, export_headwise),
    "layer_types": (import_layer_types, export_layer_types),
}
