"""An existing mask: a mask.json, or a file of DuoAttention, PruLong, rtp-llm or Hugging Face.

Real numbers (the TSV files of DuoAttention and PruLong) are cut at the ratio's exact budget. A file
of zeros and ones must have the requested ratio. The window is always the requested one, so a mask
can be tried with windows other than its own.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from bosch.masks.formats import Request, import_mask
from bosch.masks.mask import read_mask
from bosch.method import Inputs, MethodTraits, Selection
from bosch.model_files import read_json_object
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file

traits = MethodTraits(reads_calibration=False)


@dataclass(frozen=True)
class Settings:
    """The file."""

    path: Path | None = None  # mask.json, full_attention_heads.tsv, headwise_config, config.json


def check(settings: Settings) -> None:
    if settings.path is None:
        raise UserError("--method from_file needs --path: a mask.json or another mask file.")
    if not settings.path.is_file():
        raise MissingFileError(f"--path {settings.path} does not exist; name a mask file.")
    if kind_of(settings.path) == "mask":
        read_mask(settings.path)


def select(inputs: Inputs) -> Selection:
    check(inputs.settings)
    path: Path = inputs.settings.path
    kind, window = kind_of(path), inputs.window_tokens
    notes: tuple[str, ...] = ()
    if kind == "mask":
        record = read_mask(path, inputs.model_info)
        if (made_for := record.mask.window_tokens) != window:
            notes = (f"{path} was made for a window of {made_for} tokens; using it with {window}",)
        details, drawn = {"made_by": record.shown_method}, False
    else:
        ratio = inputs.ratio if kind == "duo" else None
        request = Request(window, ratio, inputs.seed)
        record, notes = import_mask(path, kind, inputs.model_info, request)
        details, drawn = dict(record.settings), record.seed is not None
    mask = record.mask
    # Zeros and ones leave nothing to choose, and there is always a requested ratio.
    advice = f"pass --ratio {json.dumps(record.ratio_asked or mask.ratio)}"
    mask.refuse_another_ratio(inputs.ratio, str(path), advice)
    mask = replace(mask, window_tokens=window)
    details["path_xxh3"] = hash_file(path)
    return Selection(mask, details=details, drawn=drawn, notes=notes)


def kind_of(path: Path) -> str:
    """The format of a file, recognized by its content."""
    if path.suffix == ".tsv":
        return "duo"
    try:
        content = read_json_object(path)
    except UserError as error:
        if path.suffix == ".json":
            raise
        raise UserError(f"{path} is neither a .tsv file of numbers nor a JSON file.") from error
    if "z" in content:
        return "mask"
    if "headwise_config" in content:  # its config.json may list layer_types as well
        return "headwise"
    return "layer_types" if "layer_types" in content else "headwise"
