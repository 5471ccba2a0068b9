"""The stage `model`: the hybrid of a model and a mask, written by bosch/hybrid/materialize.py; and
its forms as a command of its own, which also goes back."""

from pathlib import Path
from typing import Any, Literal

from bosch.masks.mask import find_constants, read_mask
from bosch.masks.ready import find_mask
from bosch.model import (
    check_weights,
    check_window_fits,
    describe_model,
    describe_source,
    fetch_config,
    fetch_model,
    hash_text_files,
    read_model_info,
)
from bosch.run.fingerprint import hash_file
from bosch.run.stage import Artifact, Stage

VERSION = 1  # raise it when the same model and mask give other files


def check(model: str) -> None:
    """Refuse, before hours are spent on it, a model that cannot become a hybrid."""
    from bosch.hybrid.materialize import read_plain  # torch: seconds

    read_plain(fetch_config(model))
    check_weights(model)


def stage(model: str, mask: Stage) -> Stage:
    """`mask`: the stage that chooses the mask, or trains the model with it."""

    def run(out: Path, mask: Artifact) -> None:
        from bosch.method import WEIGHTS  # imports torch, which takes seconds

        trained = mask.folder / WEIGHTS  # there if the method trained the model with its mask
        source = trained if trained.is_dir() else fetch_model(model)
        write_hybrid(source, mask.folder / "mask.json", out)

    return Stage(
        "model",
        run=run,
        settings={"model": describe_source(model)},
        inputs={"mask": mask},
        version=VERSION,
        model_files=hash_text_files(model),
    )


def stage_of_file(name: str, model: str, mask: Path) -> Stage:
    """The hybrid of a mask.json or a ready mask. UserError if it is not the model's, or cannot be
    written."""
    from bosch.hybrid.materialize import read_plain

    mask = find_mask(mask)
    folder = fetch_model(model)
    found = read_mask(mask, read_model_info(folder)).mask
    read_plain(folder)
    if found.num_windowed:
        check_window_fits(found.window_tokens, model)
    check_weights(str(folder))
    # The constants beside a mask are a part of it, but not of its file.
    settings = {"model": describe_model(folder), "mask": hash_file(mask)}
    constants = find_constants(mask)
    if found.sink.kind == "static" and constants.is_file():
        settings["sinks"] = hash_file(constants)

    def run(out: Path) -> None:
        write_hybrid(folder, mask, out)

    files = hash_text_files(str(folder))
    return Stage(name, run=run, settings=settings, version=VERSION, model_files=files)


def stage_of_hybrid(
    name: str,
    model: str,
    form: Literal["export", "reverse", "layer_types"],
    dense: str | None = None,
) -> Stage:
    """A hybrid written again: for the hub, as the dense model it was made of (`reverse`), or with
    its family's own layer types. UserError if the model is no hybrid, or cannot be read. `dense`:
    of an export, the model whose queries and keys the groups on full attention get back."""
    from bosch.hybrid import materialize

    folder = fetch_model(model)
    materialize.read_hybrid(folder)
    check_weights(str(folder))
    settings: dict[str, Any] = {
        "model": describe_model(folder),
        "reverse": form == "reverse",
    }
    if form == "layer_types":
        settings["layer_types"] = True  # only then: earlier versions had no such form
    if dense is not None:
        settings["dense"] = describe_source(dense)

    def run(out: Path) -> None:
        if form == "reverse":
            materialize.unmaterialize(folder, out)
        elif form == "layer_types":
            materialize.as_layer_types(folder, out)
        else:
            materialize.export_hybrid(folder, out, fetch_model(dense) if dense else None)

    files = hash_text_files(str(folder))
    return Stage(name, run=run, settings=settings, version=VERSION, model_files=files)


def write_hybrid(source: Path, mask: Path, out: Path) -> None:
    from bosch.hybrid.materialize import materialize  # imports torch: seconds
    from bosch.hybrid.sinks import read_constants

    record = read_mask(mask, read_model_info(source))
    materialize(source, read_constants(mask, record), out)
