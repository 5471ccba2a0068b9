"""Writes the hybrid of a model and a mask as an ordinary Hugging Face folder, or reverses that.

    python recipes/materialize_model.py --model DIR --mask mask.json --out hybrid
    python recipes/materialize_model.py --model hybrid --out dense-again --reverse
    python recipes/materialize_model.py --model train/step-000500 --out for-the-hub
    python recipes/materialize_model.py --model hybrid --out for-any-engine --layer-types

Run the same command again and it continues where it stopped. In recover.py it is the stage `model`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bosch import model as models
from bosch.command_line import run_stage
from bosch.config import Config
from bosch.masks.mask import SINKS, read_mask
from bosch.run.errors import UserError, run_main
from bosch.run.fingerprint import hash_file
from bosch.run.stage import Artifact, Stage

VERSION = 1  # raise it when the same model and mask give other files


@dataclass(frozen=True)
class Options:
    model: str  # folder of a model, or a hub id
    out: Path  # folder to write
    mask: Annotated[Path | None, "FILE"] = None  # a mask.json; None: the model is a hybrid already
    reverse: bool = False  # restore the dense model from the hybrid
    # Of a hybrid of whole layers: write the plain model with its family's own layer_types, which
    # any engine serves.
    layer_types: bool = False

    def __post_init__(self) -> None:
        if self.reverse and self.mask:
            raise UserError("--reverse takes no --mask: the hybrid contains its mask.")
        if self.layer_types and (self.reverse or self.mask):
            raise UserError("--layer-types takes a hybrid, without --mask and --reverse.")


def main(arguments: Sequence[str]) -> None:
    run_stage(Options, arguments, check_and_build)


def check_and_build(options: Options, name: str) -> Stage:
    from bosch.hybrid import materialize

    source = models.fetch_model(options.model)
    settings: dict[str, Any] = {"model": models.describe_model(source)}
    run: Callable[[Path], None]
    if options.mask is not None:
        # All before anything is written.
        mask = read_mask(options.mask, models.read_model_info(source)).mask
        materialize.refuse_unless_plain(source, materialize.read_config(source))
        if mask.num_windowed:
            models.check_window_fits(mask.window_tokens, options.model)
        settings["mask"] = hash_file(options.mask)
        if mask.sink == "static" and (sinks := options.mask.with_name(SINKS)).is_file():
            settings["sinks"] = hash_file(sinks)
        run = partial(write_hybrid, source, options.mask)
    else:
        materialize.read_hybrid(source)
        settings["reverse"] = options.reverse
        export = materialize.unmaterialize if options.reverse else materialize.export_hybrid
        if options.layer_types:
            settings["layer_types"], export = True, materialize.as_layer_types
        run = partial(export, source)
    models.check_weights(str(source))
    files = models.hash_text_files(str(source))
    return Stage(name, run=run, settings=settings, version=VERSION, model_files=files)


def build(config: Config, mask: Stage) -> Stage:
    def run(out: Path, mask: Artifact) -> None:
        from bosch.method import WEIGHTS  # imports torch, which takes seconds

        trained = mask.folder / WEIGHTS  # there if the method trained the model with its mask
        source = trained if trained.is_dir() else models.fetch_model(config.model)
        write_hybrid(source, mask.folder / "mask.json", out)

    settings, inputs = {"model": models.describe_source(config.model)}, {"mask": mask}
    files = models.hash_text_files(config.model)
    return Stage("model", run, settings, inputs, version=VERSION, model_files=files)


def write_hybrid(source: Path, mask: Path, out: Path) -> None:
    from bosch.hybrid.materialize import materialize  # imports torch: seconds
    from bosch.hybrid.sink_files import read_sinks

    record = read_mask(mask, models.read_model_info(source))
    sinks = read_sinks(mask.parent, record) if record.mask.sink == "static" else None
    materialize(source, record, out, sinks)


if __name__ == "__main__":
    run_main(main)
