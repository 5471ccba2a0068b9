"""The commands `bosch mask import`, `export`, `show` and `publish`, or `python -m bosch.masks ...`.

bosch mask import full_attention_heads.tsv --model DIR --window 256 --ratio 0.5 --out mask.json
bosch mask export mask.json --out full_attention_heads.tsv
bosch mask show mask.json --png mask.png --memory memory.png
bosch mask publish runs/NAME smollm2-135m@0.75
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from bosch.command_line import Commands, run_subcommand
from bosch.config import POSITIONAL, TokenCount
from bosch.masks.formats import export_mask, import_mask
from bosch.masks.mask import describe_bytes, describe_ratio, read_mask, write_mask
from bosch.masks.picture import draw_mask, draw_memory, mask_lines, mask_title
from bosch.masks.ready import FOLDER, find_mask, publish
from bosch.model import fetch_config, read_model_info, read_own_windows
from bosch.run.errors import UserError, run_main
from bosch.run.plain_text import visible


@dataclass(frozen=True)
class Import:
    """Convert a mask of DuoAttention or PruLong to mask.json."""

    file: Annotated[Path, POSITIONAL]  # a TSV: one line per layer, one number per KV head
    model: str  # the model that the mask is for: a Hugging Face folder or hub id
    ratio: float  # share of groups on the sliding window, met exactly
    out: Path = Path("mask.json")  # file to write
    # In tokens, including the current one; None: that beside the file.
    window: TokenCount | None = None
    seed: int = 0  # breaks ties between groups of equal value


@dataclass(frozen=True)
class Export:
    """Write a mask.json in the format of DuoAttention and PruLong."""

    mask: Annotated[Path, POSITIONAL]  # a mask.json, or the name of a ready mask
    out: Path  # the TSV to write


@dataclass(frozen=True)
class Show:
    """Print a mask, its ratio, and the size of its KV cache."""

    mask: Annotated[Path, POSITIONAL]  # a mask.json, or the name of a ready mask
    png: Path | None = None  # also write the picture to this file
    memory: Path | None = None  # also write a picture of the KV cache by text length to this file
    # Tokens to print the cache of, in bfloat16.
    context: tuple[TokenCount, ...] = (4096, 32768, 131072)


@dataclass(frozen=True)
class Publish:
    """Make a ready mask of a run: its mask, its sinks, and its scores as evidence."""

    run: Annotated[Path, POSITIONAL]  # the folder of a run
    name: Annotated[str, POSITIONAL]  # of the ready mask: MODEL@RATIO
    to: Path = FOLDER  # folder of ready masks


def main(arguments: Sequence[str]) -> None:
    commands: Commands = {
        "show": run_show,
        "import": run_import,
        "export": run_export,
        "publish": run_publish,
    }
    run_subcommand("python -m bosch.masks", commands, arguments)


def run_import(command: Import) -> None:
    folder = fetch_config(command.model)
    model, own = read_model_info(folder), read_own_windows(folder)
    more = command.window, command.seed, own
    record, notes = import_mask(command.file, model, command.ratio, *more)
    command.out.parent.mkdir(parents=True, exist_ok=True)
    write_mask(command.out, record)
    print(describe_ratio(command.ratio, model.num_layers, model.num_groups))
    for line in (*(f"note: {note}" for note in notes), f"wrote {command.out}", mask_title(record)):
        print(visible(line))


def run_export(command: Export) -> None:
    record = read_mask(find_mask(command.mask))
    command.out.parent.mkdir(parents=True, exist_ok=True)
    print(visible(f"note: {export_mask(record, command.out)}"))
    print(visible(f"wrote {command.out}"))


def run_publish(command: Publish) -> None:
    folder = publish(command.run, command.name, command.to)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    files = ", ".join(f"{name} {describe_bytes(size)}" for name, size in sizes.items())
    print(visible(f"wrote {folder}: {files}"))


def run_show(command: Show) -> None:
    if (shortest := min(command.context, default=1)) < 1:
        raise UserError(f"--context is {shortest}; it must be 1 or more.")
    record = read_mask(find_mask(command.mask))
    mask, head_dim = record.mask, record.model.head_dim
    # As it is, without rich's guesses: names of models may look like its markup.
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
        allocated = describe_bytes(mask.allocated_bytes(tokens, head_dim))
        more = f"in use; our cache allocates up to {allocated}"
        console.print(f"KV cache at {tokens:>7} tokens: {sizes} {more}")
    if command.png is not None:
        command.png.parent.mkdir(parents=True, exist_ok=True)
        draw_mask(record, command.png)
        console.print(visible(f"wrote {command.png}"))
    if command.memory is not None:
        command.memory.parent.mkdir(parents=True, exist_ok=True)
        draw_memory(record, command.memory)
        console.print(visible(f"wrote {command.memory}"))


if __name__ == "__main__":
    run_main(main)
