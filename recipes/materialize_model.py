"""Writes the hybrid of a model and a mask as an ordinary Hugging Face folder, or reverses that.

    python recipes/materialize_model.py --model DIR --mask mask.json --out hybrid
    python recipes/materialize_model.py --model hybrid --out dense-again --reverse
    python recipes/materialize_model.py --model train/step-000500 --out for-the-hub
    python recipes/materialize_model.py --model hybrid --out without-our-code --layer-types
    python recipes/materialize_model.py --model train/step-000500 --out restored \\
        --queries-and-keys-of DENSE

Run the same command again and it continues where it stopped. In `bosch recover` it is the stage
`model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bosch.command_line import run_stage
from bosch.hybrid import model_stage
from bosch.run.errors import UserError, run_main
from bosch.run.stage import Stage


@dataclass(frozen=True)
class Options:
    model: str  # folder of a model, or a hub id
    out: Path  # folder to write
    # A mask.json, or the name of a ready mask; None: the model is a hybrid already.
    mask: Annotated[Path | None, "FILE"] = None
    reverse: bool = False  # restore the dense model from the hybrid
    # Of a hybrid of whole layers: write the plain model with its family's own layer_types. Other
    # engines serve it, if they heed them: docs/serving.md names some that do not.
    layer_types: bool = False
    # Of a trained hybrid: give its groups on full attention the queries and keys of this model, the
    # dense one that it was made of, back.
    queries_and_keys_of: str | None = None

    def __post_init__(self) -> None:
        if self.reverse and self.mask:
            raise UserError("--reverse takes no --mask: the hybrid contains its mask.")
        if self.layer_types and (self.reverse or self.mask):
            raise UserError("--layer-types takes a hybrid, without --mask and --reverse.")
        if self.queries_and_keys_of and (self.reverse or self.mask or self.layer_types):
            raise UserError("--queries-and-keys-of takes a hybrid, and no other form of it.")


def main(arguments: Sequence[str]) -> None:
    run_stage(Options, arguments, build)


def build(options: Options, name: str) -> Stage:
    if options.mask is not None:
        return model_stage.stage_of_file(name, options.model, options.mask)
    if options.layer_types:
        return model_stage.stage_of_hybrid(name, options.model, "layer_types")
    return model_stage.stage_of_hybrid(
        name,
        options.model,
        "reverse" if options.reverse else "export",
        dense=options.queries_and_keys_of,
    )


if __name__ == "__main__":
    run_main(main)
