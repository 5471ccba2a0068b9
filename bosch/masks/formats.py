"""Import and export of masks in the file formats of other projects. What our mask.json cannot
express is dropped with a note.

duo          TSV of DuoAttention and PruLong: one line per layer, one number per KV head; groups
             with larger numbers keep full attention. Their windowed heads also see the first
             `sink_size` tokens.
headwise     `headwise_config` of rtp-llm, alone or inside a model's config.json: for each layer a
             list with 0 or 1 per query head; 1 = full attention ("retrieval head"). Its
             `swa_token_num` counts the tokens before the current one, so our window is larger by
             one. It also has sinks, and a text length below which every head has full attention.
             rtp-llm applies it to prefill only and caches every KV head, so it saves no KV memory.
layer_types  a Hugging Face config.json: `layer_types` of full_attention and sliding_attention, and
             `sliding_window`, which includes the current token like ours.
"""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.masks.mask import GroupMask, MaskFile, num_windowed
from bosch.model import ModelInfo
from bosch.model_files import read_json_object
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file
from bosch.run.manifest import provenance, write_atomically

# What rtp-llm takes for a key that its headwise_config leaves out.
HEADWISE_DEFAULTS = {"sink_token_num": 4, "swa_token_num": 8192, "seqlen_threshold": 16384}
LAYER_TYPES = ("sliding_attention", "full_attention")  # indexed by the value of z


@dataclass(frozen=True)
class Request:
    """What the user chose for an import, besides the file."""

    window_tokens: int | None = None  # None: the file's own
    ratio: float | None = None
    seed: int = 0  # breaks ties between equal numbers


@dataclass(frozen=True)
class Imported:
    """A mask read from a foreign file, and what the user should know about it."""

    mask: GroupMask
    settings: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None  # None: nothing was random
    notes: tuple[str, ...] = ()  # one line each: what was dropped or assumed


def import_mask(
    path: Path, format_name: str, model: ModelInfo, request: Request
) -> tuple[MaskFile, tuple[str, ...]]:
    """A foreign file as a MaskFile for `model`, and the notes to print."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise MissingFileError(f"{path} {problem}; pass the file to import.")
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
    """The groups of the smallest numbers get the window, to the exact budget of the ratio."""
    table = read_table(path, model)
    window, notes = _duo_window(path, request)
    if request.ratio is None:
        raise UserError(f"{path} holds real numbers: pass --ratio.")
    budget = num_windowed(request.ratio, model.num_layers, model.num_groups)
    windowed, tie = smallest(table, budget, request.seed)
    if tie:
        notes = (
            *notes,
            f"{tie['num_tied']} groups are tied at the value {tie['value']:g}; the seed "
            f"{request.seed} chose the {tie['num_windowed']} of them that go on the window.",
        )
    mask = GroupMask.from_windowed(windowed, model.num_layers, model.num_groups, window)
    return Imported(mask, {"tie": tie}, request.seed if tie else None, notes)


def read_table(path: Path, model: ModelInfo) -> list[list[float]]:
    """The numbers of a TSV, [layer][group]."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file, so it holds no table ({error}).") from error
    layers = [line.split() for line in lines if line.strip()]
    if len(layers) != model.num_layers:
        raise UserError(
            f"{path} has {len(layers)} lines, but {model} has {model.num_layers} layers."
        )
    table = []
    for layer, row in enumerate(layers):
        if len(row) != model.num_groups:
            raise UserError(
                f"{path}: layer {layer} has {len(row)} values, but {model} has {model.num_groups} "
                "KV heads per layer."
            )
        table.append([_real(text, path, layer) for text in row])
    return table


def smallest(
    table: list[list[float]], count: int, seed: int
) -> tuple[list[tuple[int, int]], dict[str, Any] | None]:
    """The `count` groups with the smallest values, and the tie if the seed had to break one."""
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
        raise UserError(f"{path}: layer {layer} has {text!r}, which is not a finite number.")
    return value


def export_duo(record: MaskFile) -> tuple[str, tuple[str, ...]]:
    window = record.mask.window_tokens
    note = (
        "the table does not contain the window: DuoAttention reads it from a config.json next to "
        f"the table; write recent_size {window} and sink_size 0 there."
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
        raise UserError(f"{path} has no headwise_config: it lists no layer.")
    unknown = sorted(config.keys() - layers - HEADWISE_DEFAULTS.keys())
    if unknown:
        raise UserError(
            f"{path}: {unknown[0]!r} is not a layer of {model} (0 to {model.num_layers - 1}) and "
            f"not one of {', '.join(HEADWISE_DEFAULTS)}."
        )
    settings = {name: config.get(name, default) for name, default in HEADWISE_DEFAULTS.items()}
    for name, value in settings.items():
        if type(value) is not int or value < 0:
            raise UserError(f"{path}: {name} is {value!r}; it must be a whole number, 0 or more.")

    notes = []
    if settings["sink_token_num"]:
        notes.append(_sinks_dropped(settings["sink_token_num"]))
    if settings["seqlen_threshold"]:
        notes.append(
            f"dropped: seqlen_threshold {settings['seqlen_threshold']}, below which every head has "
            "full attention; our window applies at every length."
        )
    if missing := sorted(map(int, layers - config.keys())):
        notes.append(
            f"layers missing from the file keep full attention: {', '.join(map(str, missing))}."
        )
    bits = [
        _headwise_groups(path, layer, config.get(str(layer), [1] * model.num_query_heads), model)
        for layer in range(model.num_layers)
    ]
    window, window_notes = _choose_window(
        path, "the file's swa_token_num + 1", settings["swa_token_num"] + 1, request
    )
    mask = GroupMask.from_rows(bits, window)
    _check_fixed_ratio(path, mask, request)
    return Imported(mask, settings, notes=(*notes, *window_notes))


def _headwise_groups(path: Path, layer: int, heads: object, model: ModelInfo) -> list[int]:
    """One layer's groups from its query heads; those of one group must be equal."""
    if not isinstance(heads, list) or len(heads) != model.num_query_heads:
        raise UserError(
            f"{path}: layer {layer} must list the {model.num_query_heads} query heads of {model}."
        )
    if any(type(bit) is not int or bit not in (0, 1) for bit in heads):
        raise UserError(f"{path}: layer {layer} is {heads}; each query head must be 0 or 1.")
    size = model.query_heads_per_group
    groups = [heads[start : start + size] for start in range(0, len(heads), size)]
    for group, bits in enumerate(groups):
        if len(set(bits)) > 1:
            raise UserError(
                f"{path}: the query heads of layer {layer}, group {group} are {bits}; they share a "
                "KV head, so a group mask needs the same value for all of them."
            )
    return [bits[0] for bits in groups]


def export_headwise(record: MaskFile) -> tuple[str, tuple[str, ...]]:
    mask, size = record.mask, record.model.query_heads_per_group
    left = mask.window_tokens - 1
    config: dict[str, object] = {"sink_token_num": 0, "swa_token_num": left, "seqlen_threshold": 0}
    for layer, row in enumerate(mask.z):
        config[str(layer)] = [bit for bit in row for _ in range(size)]
    note = (
        f"swa_token_num is {left}: rtp-llm does not count the current token; sink_token_num and "
        "seqlen_threshold are 0: no sinks, and the window applies at every length."
    )
    return json.dumps({"headwise_config": config}, indent=1) + "\n", (note,)


# --- Hugging Face: layer_types ---


def import_layer_types(path: Path, model: ModelInfo, request: Request) -> Imported:
    config = read_json_object(path)
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != model.num_layers:
        raise UserError(
            f"{path}: layer_types is {types!r}; it must list the {model.num_layers} layers of "
            f"{model}."
        )
    for layer, name in enumerate(types):
        if name not in LAYER_TYPES:
            raise UserError(
                f"{path}: layer {layer} is {name!r}; a mask can hold {' and '.join(LAYER_TYPES)}."
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
                f"Layer {layer} mixes full and windowed groups ({row}), but layer_types has one "
                "type per layer; use --format headwise or duo."
            )
    config = {
        "layer_types": [LAYER_TYPES[row[0]] for row in mask.z],
        "sliding_window": mask.window_tokens,
        "use_sliding_window": True,  # without it, Qwen2 and Qwen3 ignore sliding_window
    }
    note = "these are fields of config.json: merge them into the one of the model."
    return json.dumps(config, indent=1) + "\n", (note,)


# --- shared by the formats ---


def _choose_window(
    path: Path, name: str, in_file: object, request: Request
) -> tuple[int, tuple[str, ...]]:
    """The requested window, or the file's (its place is described by `name`); and the notes."""
    requested = request.window_tokens
    if in_file is None:
        if requested is None:
            raise UserError(f"{path} does not contain the window; pass --window.")
        return requested, ()
    if type(in_file) is not int or in_file < 1:
        raise UserError(f"{path}: {name} is {in_file!r}; it must be a whole number, 1 or more.")
    if requested is None:
        return in_file, (f"the window is {in_file} tokens, from {name}.",)
    if requested == in_file:
        return requested, ()
    return requested, (f"{name} is {in_file}, but --window {requested} is used.",)


def _check_fixed_ratio(path: Path, mask: GroupMask, request: Request) -> None:
    """A file of zeros and ones has one ratio: refuse another one."""
    if request.ratio is not None:
        mask.refuse_another_ratio(request.ratio, str(path), "leave --ratio out")


def _sinks_dropped(num_sinks: int) -> str:
    return (
        f"dropped: the windowed heads in the file also see the first {num_sinks} tokens; our "
        "window has no sinks."
    )


Importer = Callable[[Path, ModelInfo, Request], Imported]
Exporter = Callable[[MaskFile], tuple[str, tuple[str, ...]]]  # the text, and notes to print
FORMATS: dict[str, tuple[Importer, Exporter]] = {
    "duo": (import_duo, export_duo),
    "headwise": (import_headwise, export_headwise),
    "layer_types": (import_layer_types, export_layer_types),
}
