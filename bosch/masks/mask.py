"""`GroupMask`, the choice of KV groups that keep full attention, and its file `mask.json`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from bosch.masks.window import WINDOW_CONVENTION, check_window, spare_tokens
from bosch.model import ModelInfo
from bosch.model_files import read_json_object
from bosch.run.errors import UserError
from bosch.run.files import write_atomically
from bosch.sink import CONSTANTS_FILE, NO_SINK, Sink

Unit = Literal["group", "layer"]
UNITS = get_args(Unit)
# A mask: z[layer][group], 1 is full attention and 0 the sliding window. A search scores, compares
# and stores masks of this type, and the attention function takes them as they are.
Z = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GroupMask:
    """Which KV-head groups keep full attention (z in the paper), with its window and sink."""

    z: Z
    window_tokens: int  # window size in tokens, including the current token
    unit: Unit = "group"  # what was chosen; "layer": all groups of a layer are equal
    sink: Sink = NO_SINK  # of its windows
    own_windows: tuple[int, ...] = ()  # of layers of the model that are none of `z`, in tokens

    def __post_init__(self) -> None:
        check_window(self.window_tokens, self.sink.num_tokens)
        if self.unit not in UNITS:
            raise UserError(f"unit is {self.unit!r}; it must be one of {', '.join(UNITS)}.")
        if not self.z or not self.z[0]:
            raise UserError("A mask needs at least one layer with one group.")
        for layer, row in enumerate(self.z):
            if len(row) != (first := len(self.z[0])):
                raise UserError(f"Layer {layer} has {len(row)} groups, but layer 0 has {first}.")
            # Not True, not numpy's integers: masks are compared, hashed and written as they are.
            if any(type(bit) is not int or bit not in (0, 1) for bit in row):
                raise UserError(f"Layer {layer} is {row}; each group must be 1 (full) or 0.")
            if self.unit == "layer" and len(set(row)) > 1:
                raise UserError(f"unit is 'layer', but the groups of layer {layer} differ: {row}.")

    @classmethod
    def from_rows(
        cls, rows: Iterable[Iterable[Any]], window_tokens: int, unit: Unit = "group"
    ) -> "GroupMask":
        """One row per layer: lists, arrays, tensors, booleans or strings ("0110")."""
        return cls(tuple(tuple(map(_bit, row)) for row in rows), window_tokens, unit)

    @classmethod
    def from_windowed(
        cls,
        windowed: Iterable[tuple[int, int]],
        num_layers: int,
        num_groups: int,
        window_tokens: int,
    ) -> "GroupMask":
        """Full attention except for the (layer, group) pairs in `windowed`."""
        chosen = set(windowed)
        places = [[(layer, group) for group in range(num_groups)] for layer in range(num_layers)]
        if outside := chosen.difference(*places):
            raise UserError(f"{outside} is outside {num_layers} layers x {num_groups} groups.")
        rows = [[place not in chosen for place in row] for row in places]
        return cls.from_rows(rows, window_tokens)

    @property
    def num_layers(self) -> int:
        return len(self.z)

    @property
    def num_groups(self) -> int:  # of one layer
        return len(self.z[0])

    @property
    def num_total(self) -> int:
        return self.num_layers * self.num_groups

    @property
    def num_full(self) -> int:
        return sum(map(sum, self.z))

    @property
    def num_windowed(self) -> int:
        return self.num_total - self.num_full

    @property
    def ratio(self) -> float:
        """Actual share of groups on the sliding window; the requested one may differ."""
        return self.num_windowed / self.num_total

    @property
    def layer_ratios(self) -> tuple[float, ...]:
        return tuple(row.count(0) / self.num_groups for row in self.z)

    def refuse_another_ratio(self, ratio: float, where: str, advice: str) -> None:
        """Unless exactly as many groups (or layers) are windowed as this ratio stands for.
        `where`: what holds this mask."""
        size = self.num_groups if self.unit == "layer" else 1
        if self.num_windowed != num_windowed(ratio, self.num_total // size, 1) * size:
            requested = describe_ratio(ratio, self.num_layers, self.num_groups, self.unit)
            count = f"{self.num_windowed} of {self.num_total} groups on the window"
            raise UserError(f"{where} has {count}, but {requested}; {advice}.")

    def kv_bytes(self, context_tokens: int, head_dim: int, bytes_per_value: int = 2) -> int:
        """Bytes of the entries in use for one text, without spare room. A windowed group keeps W-1,
        because the next token adds its own before it attends (the static cache keeps W), and those
        of its sink."""
        in_window = min(context_tokens, self.window_tokens - 1) + self.sink.num_tokens
        entries = self.num_full * context_tokens + self.num_windowed * in_window
        entries += self.num_groups * sum(min(context_tokens, own - 1) for own in self.own_windows)
        return entries * 2 * head_dim * bytes_per_value  # 2: keys and values

    def allocated_bytes(self, context_tokens: int, head_dim: int, bytes_per_value: int = 2) -> int:
        """What our dynamic cache allocates at most for one text, and does allocate when it has read
        a text at once and the first new token: entries in use, and room for further tokens."""
        # The first tokens of a sink lie in tensors of their own, without room: they never grow.
        in_window = min(context_tokens, self.window_tokens - 1)
        entries = self.num_full * (context_tokens + spare_tokens(context_tokens))
        entries += self.num_windowed * (in_window + spare_tokens(in_window) + self.sink.num_tokens)
        held = [min(context_tokens, own - 1) for own in self.own_windows]
        entries += self.num_groups * sum(count + spare_tokens(count) for count in held)
        return entries * 2 * head_dim * bytes_per_value

    def dense_kv_bytes(self, context_tokens: int, head_dim: int, bytes_per_value: int = 2) -> int:
        held = [min(context_tokens, own - 1) for own in self.own_windows]
        entries = self.num_total * context_tokens + self.num_groups * sum(held)
        return entries * 2 * head_dim * bytes_per_value

    def row_texts(self) -> list[str]:
        """One string of 0 and 1 per layer."""
        return ["".join(map(str, row)) for row in self.z]


def num_windowed(ratio: float, num_layers: int, num_groups: int) -> int:
    """The budget M: the number of groups that a ratio puts on the window. Always met exactly."""
    check_ratio(ratio)
    # 0.07 * 10 * 10 is 7.000000000000001: without the margin, 8 groups of 100.
    return math.ceil(ratio * num_layers * num_groups - 1e-9)


def spread_mask(ratio: float, num_layers: int, num_groups: int) -> list[list[int]]:
    """z with the exact budget of a ratio, spread evenly over the layers; full groups come first."""
    budget = num_windowed(ratio, num_layers, num_groups)
    # Counted from the first layer on and rounded down: the counts of two layers differ by one at
    # most, and all of them add up to the budget.
    ends = [budget * layer // num_layers for layer in range(num_layers + 1)]
    windowed = [end - begin for begin, end in pairwise(ends)]
    return [[1] * (num_groups - count) + [0] * count for count in windowed]


def describe_ratio(ratio: float, num_layers: int, num_groups: int, unit: Unit = "group") -> str:
    """What a ratio means for a model: `--ratio 0.33 means 22 of 64 groups, 0.34375`."""
    total = num_layers * num_groups if unit == "group" else num_layers
    count = num_windowed(ratio, total, 1)
    text = f"--ratio {ratio:g} means {count} of {total} {unit}s"
    return text if math.isclose(count / total, ratio) else f"{text}, {count / total:.6g}"


def describe_bytes(count: float) -> str:
    """A number of bytes for people, in powers of 1,000."""
    count = float(f"{count:.3g}")  # first, so that 999,999 is 1 MB and not 1,000 kB
    if count < 1000:
        return f"{count:.0f} bytes"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def check_ratio(ratio: float) -> None:
    if not 0 <= ratio <= 1:  # false for nan too
        raise UserError(f"ratio is {ratio}; it is the share of groups on the window, from 0 to 1.")


@dataclass(frozen=True)
class MaskFile:
    """A mask and its origin: the content of mask.json."""

    mask: GroupMask
    model: ModelInfo
    method: str  # file name in bosch/methods, or import-<format>
    ratio_asked: float | None = None  # requested ratio; None: an import may have none
    settings: Mapping[str, Any] = field(default_factory=dict)  # the method's
    seed: int | None = None  # None: nothing was random
    score_trace: Mapping[str, object] | None = None  # summary of a search
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mask, model = self.mask, self.model
        if (mask.num_layers, mask.num_groups) != (model.num_layers, model.num_groups):
            size = f"{mask.num_layers} layers x {mask.num_groups} groups"
            raise UserError(f"The mask has {size}, but its model is {model.describe()}.")
        if self.ratio_asked is not None:
            mask.refuse_another_ratio(self.ratio_asked, "z", "z or ratio_asked is wrong")

    def origin(self) -> dict[str, object]:
        """All fields except z and the window, as JSON."""
        more = {"unit": self.mask.unit, "ratio": self.mask.ratio, "model": asdict(self.model)}
        return {name: getattr(self, name) for name in ORIGIN} | more


ORIGIN = ("method", "ratio_asked", "settings", "seed", "score_trace", "provenance")
CONVENTIONS = {
    "schema_version": 1,
    "mask_convention": "1: full causal attention, 0: sliding window",
    "window_convention": WINDOW_CONVENTION,
}
MODEL_FIELDS = {name: get_args(kind) or (kind,) for name, kind in get_type_hints(ModelInfo).items()}
# The fields of mask.json in their order, with their types in JSON.
FIELDS: dict[str, tuple[type, ...]] = {
    **{name: (type(value),) for name, value in CONVENTIONS.items()},
    "window_tokens": (int,),
    "unit": (str,),
    "model": (dict,),
    "ratio_asked": (float, int, NoneType),
    "ratio": (float, int),
    "z": (list,),
    "method": (str,),
    "settings": (dict,),
    "seed": (int, NoneType),
    "score_trace": (dict, NoneType),
    "provenance": (dict,),
    "sink": (dict,),  # left out where there is none
    "own_windows": (list,),  # left out where there are none
    **{f"model.{name}": kinds for name, kinds in MODEL_FIELDS.items()},
}


def write_mask(path: Path, record: MaskFile) -> None:
    content = CONVENTIONS | record.origin()
    content |= {"window_tokens": record.mask.window_tokens, "z": record.mask.row_texts()}
    if record.mask.sink.kind != "none":  # so that masks without are as before there were any
        content["sink"] = record.mask.sink.to_json()
    if record.mask.own_windows:
        content["own_windows"] = list(record.mask.own_windows)
    # Always in one order, so that the same mask has the same bytes. And no NaN, which JSON has not.
    in_order = {name: content[name] for name in FIELDS if name in content}
    write_atomically(path, json.dumps(in_order, indent=1, allow_nan=False) + "\n")


def read_mask(path: Path, model: ModelInfo | None = None) -> MaskFile:
    """Read and check mask.json. With `model`, a mask made for another model is refused. Every
    UserError names the file and the field."""
    if path.is_dir():  # of a mask, or of a run
        inside = [path / name for name in ("mask.json", "mask/mask.json")]
        found = [file for file in inside if file.is_file()]
        meant = f"pass {found[0]}" if found else "it holds no mask.json; pass the file of a mask"
        raise UserError(f"{path} is a folder; {meant}.")
    content = read_json_object(path)
    try:
        record = _parse(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if model is None or model.is_same_model(record.model):
        return record
    models = f"{record.model.describe()}, not for {model.describe()}"
    raise UserError(f"{path}: the mask was made for {models}; pass its own model, or a new mask.")


def constants_file(mask: Path) -> Path:
    """Where the constants of a mask's static sink are written: sinks.safetensors beside a
    mask.json, A.sinks.safetensors beside an A.json, so that one folder can hold several masks."""
    if mask.name == "mask.json":
        return mask.with_name(CONSTANTS_FILE)
    return mask.with_name(f"{mask.name.removesuffix('.json')}.{CONSTANTS_FILE}")


def find_constants(mask: Path) -> Path:
    """Where they are read. Earlier versions wrote sinks.safetensors beside a mask of any name."""
    own, of_any = constants_file(mask), mask.with_name(CONSTANTS_FILE)
    return of_any if of_any.is_file() and not own.is_file() else own


def _parse(content: dict[str, Any]) -> MaskFile:
    # These first: files of another version have other fields.
    for name, known in CONVENTIONS.items():
        if (value := content.get(name, known)) != known:
            problem = f"{name} is {value!r}, but this code reads {known!r}"
            raise UserError(f"{problem}; use the version that wrote it, or search the mask anew.")
    content.setdefault("sink", {"kind": "none"})
    content.setdefault("own_windows", [])
    # The model's own fields are checked with the others, under names as `model.id`.
    model = content.get("model")
    inside = model.items() if isinstance(model, dict) else ()
    found = content | {f"model.{name}": value for name, value in inside}
    for name in [*FIELDS, *found]:
        if name not in found:
            raise UserError(f"{name} is missing.")
        if name not in FIELDS:
            raise UserError(f"a mask.json has no such field as {name}.")
        if type(found[name]) not in FIELDS[name]:
            kinds = ["null" if kind is NoneType else kind.__name__ for kind in FIELDS[name]]
            must = f"it must be {' or '.join(kinds)}"
            raise UserError(f"{name} is {found[name]!r}; {must}.")
    for layer, row in enumerate(content["z"]):
        if type(row) is not str or set(row) - {"0", "1"}:
            raise UserError(f"z, layer {layer}, is {row!r}; it must be a string of 0 and 1.")
    z = tuple(tuple(map(int, row)) for row in content["z"])
    sink = Sink.from_json(content["sink"])
    for own in content["own_windows"]:
        check_window(own)
    own_windows = tuple(content["own_windows"])
    mask = GroupMask(z, content["window_tokens"], content["unit"], sink, own_windows)
    if not math.isclose(content["ratio"], mask.ratio, abs_tol=1e-9):  # nan is not close
        raise UserError(f"ratio is {content['ratio']}, but z has that of {mask.ratio:.6g}.")
    for name in ("settings", "provenance"):  # they go into config.json
        try:
            json.dumps(content[name], allow_nan=False)
        except ValueError:
            raise UserError(f"{name} holds NaN or Infinity.") from None
    return MaskFile(
        mask,
        ModelInfo(**content["model"]),
        method=content["method"],
        ratio_asked=content["ratio_asked"],
        settings=content["settings"],
        seed=content["seed"],
        score_trace=content["score_trace"],
        provenance=content["provenance"],
    )


def _bit(value: Any) -> Any:
    """0 or 1 from a number, a boolean, a one-element tensor or a character. GroupMask refuses what
    is none of these."""
    return next((bit for bit in (0, 1) if value in (bit, str(bit))), value)
