"""The commands `bosch mask import`, `export` and `show`, or `python -m bosch.masks import`.

    bosch mask import full_attention_heads.tsv --format duo --model DIR --window 256 \\
        --ratio 0.5 --out mask.json
    bosch mask export mask.json --format headwise --out headwise.json
    bosch mask show mask.json --png mask.png
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from bosch.assets import asset_folder
from bosch.command_line import Commands, run_subcommand
from bosch.masks.formats import Request, export_mask, import_mask
from bosch.masks.mask import MaskFile, describe_bytes, describe_ratio, read_mask, write_mask
from bosch.masks.picture import draw_mask, mask_rows, mask_title
from bosch.model import read_model_info
from bosch.run.errors import UserError

Format = Literal["duo", "headwise", "layer_types"]


@dataclass(frozen=True)
class Import:
    """Turn another project's mask into mask.json."""

    file: tyro.conf.Positional[Path]  # the other project's file
    format: Format  # duo: TSV of DuoAttention, PruLong; headwise: rtp-llm; layer_types: HF
    model: Path  # folder of the model that the mask is for, or an embedded model's name
    out: Path = Path("mask.json")
    window: int | None = None  # keys a query sees, its own included; None: what the file says
    ratio: float | None = None  # share of groups on the window, met exactly (duo)
    threshold: float | None = None  # or: groups at or above it keep full attention (duo)
    seed: int = 0  # of the tie-break among groups of equal value (duo)
    debug: bool = False  # show tracebacks


@dataclass(frozen=True)
class Export:
    """Write a mask.json in another project's format."""

    mask: tyro.conf.Positional[Path]
    format: Format  # duo: TSV of DuoAttention, headwise: rtp-llm, layer_types: Hugging Face
    out: Path
    debug: bool = False  # show tracebacks


@dataclass(frozen=True)
class Show:
    """Print a mask and its numbers."""

    mask: tyro.conf.Positional[Path]
    png: Path | None = None  # write the picture to this file too
    context: tuple[int, ...] = (4096, 32768, 131072)  # tokens for which KV bytes are printed
    bytes_per_value: int = 2  # of the KV cache's type
    debug: bool = False  # show tracebacks


def main(arguments: Sequence[str] | None = None) -> None:
    commands: Commands = {
        "show": (Show, run_show),
        "import": (Import, run_import),
        "export": (Export, run_export),
    }
    run_subcommand("python -m bosch.masks", commands, arguments)


def run_import(command: Import) -> None:
    embedded = asset_folder().parent / command.model.name
    is_name = not command.model.is_dir() and Path(embedded.name) == command.model
    model = read_model_info(embedded if is_name and embedded.is_dir() else command.model)
    request = Request(command.window, command.ratio, command.threshold, command.seed)
    record, notes = import_mask(command.file, command.format, model, request)
    write_mask(command.out, record)
    if command.ratio is not None:
        shape = (model.num_layers, model.num_groups)
        print(describe_ratio(command.ratio, *shape, record.mask.unit))
    _report(command.out, notes)
    print(mask_title(record))


def run_export(command: Export) -> None:
    _report(command.out, export_mask(read_mask(command.mask), command.format, command.out))


def run_show(command: Show) -> None:
    shortest = min(command.context, default=1)
    for name, value in (("context", shortest), ("bytes-per-value", command.bytes_per_value)):
        if value < 1:
            raise UserError(f"--{name} is {value}, it must be 1 or more.")
    record = read_mask(command.mask)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{record.model}: {mask_title(record)}")
    for row in mask_rows(record):
        console.print(row)
    for line in numbers(record, command.context, command.bytes_per_value):
        console.print(line)
    if command.png is not None:
        draw_mask(record, command.png)
        console.print(f"wrote {command.png}")


def numbers(record: MaskFile, contexts: tuple[int, ...], bytes_per_value: int) -> list[str]:
    """The lines under the heat map."""
    mask, head_dim = record.mask, record.model.head_dim
    asked = "" if record.ratio_asked is None else f" (asked {record.ratio_asked:g})"
    lines = [
        f"## full {mask.num_full}, :: window {mask.num_windowed} of {mask.num_total} groups; "
        f"ratio {mask.ratio:.6g}{asked}; window {mask.window_tokens} tokens; unit {mask.unit}"
    ]
    for tokens in contexts:
        hybrid = mask.kv_bytes(tokens, head_dim, bytes_per_value)
        dense = mask.dense_kv_bytes(tokens, head_dim, bytes_per_value)
        sizes = f"{describe_bytes(hybrid)} of {describe_bytes(dense)}"
        lines.append(f"KV cache at {tokens:>7} tokens: {sizes} ({hybrid / dense:.1%})")
    return lines


def _report(out: Path, notes: tuple[str, ...]) -> None:
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
