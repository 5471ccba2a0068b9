"""Writes the hybrid model of a mask as an ordinary Hugging Face folder, and the way back.

    python recipes/materialize_model.py --model DIR --mask mask.json --out hybrid
    python recipes/materialize_model.py --model hybrid --out dense-again --reverse
    python recipes/materialize_model.py --model train/step-000500 --out for-the-hub --standalone

Run the same command again and it goes on where it stopped. In recover.py it is the stage `model`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from bosch.command_line import parse
from bosch.config import Config
from bosch.masks.mask import read_mask
from bosch.model import describe_model, describe_source, fetch_model, read_model_info
from bosch.run import progress
from bosch.run.errors import UserError, exit_on_user_error
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder, home_of
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage

VERSION = 1  # raised when the same model and mask give other files
MASK_FILE = "mask.json"


@dataclass(frozen=True)
class Options:
    """Turn a model and a mask into a hybrid model, or a hybrid back into the model it was made
    from."""

    model: str  # folder of a model, or a hub id
    out: Path  # folder to write
    mask: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """mask.json; None: the model is a hybrid already"""
    standalone: tyro.conf.FlagCreatePairsOff[bool] = False
    """with the code that loads it where this package is not installed"""
    reverse: tyro.conf.FlagCreatePairsOff[bool] = False  # from the hybrid back to the dense model
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error

    def __post_init__(self) -> None:
        if self.reverse and (self.mask or self.standalone):
            raise UserError(
                "--reverse takes neither --mask nor --standalone: the hybrid knows its mask, and "
                "the dense model needs no code."
            )


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments)
    progress.set_up()
    stage = choose_stage(options)
    out = options.out.absolute()
    with RunFolder(out.parent, say=say, home=home_of(out)) as run:
        run.complete(stage)
    say(f"model in {options.out}")


def choose_stage(options: Options) -> Stage:
    """What the options ask for, refused here if it cannot be done."""
    source = fetch_model(options.model)
    settings: dict[str, Any] = {"model": describe_model(source), "standalone": options.standalone}
    run: Callable[[Path], None]
    if options.mask is not None:
        read_mask(options.mask, read_model_info(source))  # before anything is written
        settings["mask"] = hash_file(options.mask)
        run = partial(write_hybrid, source, options.mask, standalone=options.standalone)
    else:
        settings["reverse"] = options.reverse
        run = partial(write_again, source, reverse=options.reverse, standalone=options.standalone)
    return Stage(options.out.absolute().name, run=run, settings=settings, version=VERSION)


def build(config: Config, mask: Stage) -> Stage:
    """The stage `model` of recover.py."""
    told = describe_source(config.model)

    def run(out: Path, mask: Artifact) -> None:
        from bosch.method import WEIGHTS  # loads torch and transformers: seconds

        trained = mask.folder / WEIGHTS  # there if the mask is for weights that came with it
        source = trained if trained.is_dir() else fetch_model(config.model)
        write_hybrid(source, mask.folder / MASK_FILE, out)

    return Stage("model", run=run, settings={"model": told}, inputs={"mask": mask}, version=VERSION)


def write_hybrid(source: Path, mask: Path, out: Path, standalone: bool = False) -> None:
    from bosch.hybrid.materialize import materialize  # loads torch and transformers: seconds

    materialize(source, read_mask(mask, read_model_info(source)), out, standalone)


def write_again(source: Path, out: Path, reverse: bool, standalone: bool) -> None:
    """From a hybrid: the dense model, or the hybrid with card and code."""
    from bosch.hybrid.materialize import export_hybrid, unmaterialize

    if reverse:
        unmaterialize(source, out)
    else:
        export_hybrid(source, out, standalone)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
