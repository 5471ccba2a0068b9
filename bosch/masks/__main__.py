"""The commands `bosch mask import`, `export` and `show`, or `python -m bosch.masks import`.

bosch mask import full_attention_heads.tsv --model DIR --window 256 --ratio 0.5 --out mask.json
bosch mask export mask.json --out full_attention_heads.tsv
bosch mask show mask.json --png mask.png
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from bosch.command_line import Commands, run_subcommand
from bosch.config import POSITIONAL
from bosch.masks.formats import export_mask, import_mask
from bosch.masks.mask import describe_bytes, describe_ratio, read_mask, write_mask
from bosch.masks.picture import draw_mask, mask_lines, mask_title
from bosch.model import fetch_config, read_model_info
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.plain_text import visible

Format = Literal["duo"]


@dataclass(frozen=True)
class Import:
    """Convert a mask of DuoAttention to mask.json."""

    file: Annotated[Path, POSITIONAL]  # a TSV: one line per layer, one number per KV head
    model: str  # the model that the mask is for: a Hugging Face folder or hub id
    ratio: float  # share of groups on the sliding window, met exactly
    out: Path = Path("mask.json")  # file to write
    window: int | None = None  # in tokens, including the current one; None: that beside the file
    seed: int = 0  # breaks ties between groups of equal value
    format: Format = "duo"  # of DuoAttention and PruLong


@dataclass(frozen=True)
class Export:
    """Write a mask.json in DuoAttention's format."""

    mask: Annotated[Path, POSITIONAL]  # a mask.json
    out: Path  # the TSV to write
    format: Format = "duo"  # of DuoAttention and PruLong


@dataclass(frozen=True)
class Show:
    """Print a mask, its ratio, and the size of its KV cache."""

    mask: Annotated[Path, POSITIONAL]  # a mask.json
    png: Path | None = None  # also write the picture to this file
    context: tuple[int, ...] = (4096, 32768, 131072)  # tokens to print the cache of, in bfloat16


def main(arguments: Sequence[str]) -> None:
    commands: Commands = {"show": run_show, "import": run_import, "export": run_export}
    run_subcommand("python -m bosch.masks", commands, arguments)


def run_import(command: Import) -> None:
    check_output("--out", command.out)
    model = read_model_info(fetch_config(command.model))
    record, notes = import_mask(command.file, model, command.ratio, command.window, command.seed)
    write_mask(command.out, record)
    print(describe_ratio(command.ratio, model.num_layers, model.num_groups))
    report(command.out, *notes)
    print(mask_title(record))


def run_export(command: Export) -> None:
    check_output("--out", command.out)
    report(command.out, export_mask(read_mask(command.mask), command.out))


def run_show(command: Show) -> None:
    if (shortest := min(command.context, default=1)) < 1:
        raise UserError(f"--context is {shortest}; it must be 1 or more.")
    if command.png is not None:
        check_output("--png", command.png)
    record = read_mask(command.mask)
    mask, head_dim = record.mask, record.model.head_dim
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(visible(f"{record.model}: {mask_title(record)}"))
    for row in mask_lines(record):
        console.print(row)
    requested = "" if record.ratio_asked is None else f" (requested {record.ratio_asked:g})"
    console.print(
        f"## full {mask.num_full}, :: window {mask.num_windowed} of {mask.num_total} groups; "
        f"ratio {mask.ratio:.6g}{requested}; window {mask.window_tokens} tokens; "
        f"sink {mask.sink}; unit {mask.unit}"
    )
    for tokens in command.context:
        hybrid, dense = (count(tokens, head_dim) for count in (mask.kv_bytes, mask.dense_kv_bytes))
        sizes = f"{describe_bytes(hybrid)} of {describe_bytes(dense)} ({hybrid / dense:.1%})"
        console.print(f"KV cache at {tokens:>7} tokens: {sizes}")
    if command.png is not None:
        draw_mask(record, command.png)
        console.print(visible(f"wrote {command.png}"))


def check_output(option: str, path: Path) -> None:
    """Refuse a file that cannot be written because of its folder."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name the file to write.")
    if not path.parent.is_dir():
        raise MissingFileError(f"{option} {path}: the folder {path.parent} does not exist.")


def report(out: Path, *notes: str) -> None:
    for line in [*(f"note: {note}" for note in notes), f"wrote {out}"]:
        print(visible(line))


if __name__ == "__main__":
    run_main(main)
