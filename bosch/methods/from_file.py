"""An existing mask: a mask.json, a ready mask by its name, or a table of DuoAttention or PruLong.

A table (its file ends in .tsv) is cut at exactly the ratio. A mask.json must have the
requested ratio. The window is always the requested one, so a mask can be tried with windows other
than its own; so is the sink, where one is requested: by itself a mask has its own."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bosch.config import Config
from bosch.masks.formats import import_mask, sink_beside
from bosch.masks.mask import MaskFile, find_constants, read_mask
from bosch.masks.ready import find_mask
from bosch.method import Inputs, MethodTraits, Selection
from bosch.model import fetch_config, read_model_info
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file
from bosch.sink import Sink

traits = MethodTraits(reads_calibration=False)


@dataclass(frozen=True)
class Settings:
    # A mask.json, full_attention_heads.tsv, or the name of a ready mask (smollm2-135m@0.75).
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.path is not None:  # the file at once: its content decides
            object.__setattr__(
                self, "path", find_mask(Path(self.path))
            )  # from Python it may be text


def check(settings: Settings) -> None:
    if settings.path is None:
        raise UserError(
            "--method from_file needs --path (in `bosch recover` --mask.options path=FILE): a "
            "mask.json or a .tsv of DuoAttention, or the name of a ready mask."
        )
    if not settings.path.exists():
        named = f"--path {settings.path} (in `bosch recover` --mask.options path={settings.path})"
        raise MissingFileError(f"{named} does not exist; name a mask file.")
    # A table says nothing without a model and a ratio. Of a folder this names the file in it.
    if settings.path.suffix != ".tsv" or settings.path.is_dir():
        read_mask(settings.path)


def own_sink(settings: Settings, window_tokens: int) -> Sink:
    check(settings)
    path: Any = settings.path
    return sink_beside(path, window_tokens) if path.suffix == ".tsv" else read_mask(path).mask.sink


def has_constants(settings: Settings) -> bool:
    """Whether static sinks come with the mask. If not, the calibration set gives them."""
    check(settings)
    path: Any = settings.path
    if path.suffix == ".tsv" or read_mask(path).mask.sink.kind != "static":
        return False
    return find_constants(path).is_file()


def check_choice(settings: Settings, config: Config) -> None:
    """Refuse, before work begins, a mask of another model or ratio."""
    check(settings)
    path: Any = settings.path
    if path.suffix != ".tsv":  # a table is made to fit
        record = read_mask(path, read_model_info(fetch_config(config.model)))
        refuse_another_ratio(path, record, config.ratio)


def refuse_another_ratio(path: Path, record: MaskFile, ratio: float) -> None:
    # A mask.json leaves nothing to choose, and there is always a requested ratio.
    advice = f"pass --ratio {json.dumps(record.ratio_asked or record.mask.ratio)}"
    record.mask.refuse_another_ratio(ratio, str(path), advice)


def select(inputs: Inputs) -> Selection:
    check(inputs.settings)
    path: Path = inputs.settings.path
    notes: list[str] = []
    if path.suffix == ".tsv":
        record, found = import_mask(
            path, inputs.model_info, inputs.ratio, inputs.window_tokens, inputs.seed
        )
        notes += found
        details, drawn = dict(record.settings), record.seed is not None
    else:
        record = read_mask(path, inputs.model_info)
        if (made_for := record.mask.window_tokens) != inputs.window_tokens:
            notes.append(
                f"{path} was made for a window of {made_for} tokens; using it with "
                f"{inputs.window_tokens}"
            )
        details, drawn = {"made_by": record.method}, False
    if (own := record.mask.sink) != inputs.sink:
        notes.append(f"{path} has the sink {own}; using it with {inputs.sink}, as asked")
        record = replace(record, mask=replace(record.mask, sink=inputs.sink))
    elif has_constants(inputs.settings):
        from bosch.hybrid.sinks import read_constants  # imports torch

        record = read_constants(path, record)
    elif own.kind == "static":
        notes.append(f"beside {path} are no sinks: measured on the calibration set")
    refuse_another_ratio(path, record, inputs.ratio)
    details["path_xxh3"] = hash_file(path)
    mask = replace(record.mask, window_tokens=inputs.window_tokens)
    return Selection(mask, details=details, drawn=drawn, notes=tuple(notes))
