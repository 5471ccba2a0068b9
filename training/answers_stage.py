"""The stage `answers`: questions on the training text that the dense model answers, in place of the
text of some training sequences (training/answers.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bosch.config import TrainConfig
from bosch.data.tokenizer_files import read_tokenizer
from bosch.model import describe_source, fetch_model, hash_text_files
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import STARTED, read_sealed_json
from bosch.run.stage import Artifact, Stage, follow_reference
from bosch.training.train_stage import TEACHER

VERSION = 2  # raised when the same settings give other answers


def stage(
    model: str,
    share: float,
    settings: TrainConfig,
    seed: int,
    tokens: Stage | Artifact,
    name: str = "answers",
    shared: bool = False,
) -> Stage:
    """`model`: the dense one. `share`: of the training sequences."""
    facts: dict[str, Any] = {
        "model": describe_source(model),
        "share": share,
        "precision": settings.precision,
        "seed": seed,
    }

    def run(out: Path, tokens: Artifact) -> Callable[[], None]:
        from bosch.data.loader import open_tokens  # torch: seconds
        from bosch.training.answers import write_answers, write_summary

        folder = fetch_model(model, TEACHER)
        packed = open_tokens(tokens.folder, read_tokenizer(folder).hash)
        write_answers(out, folder, packed, settings, share, seed)
        return lambda: write_summary(out, folder, packed, share)

    return Stage(
        name,
        run=run,
        settings=facts,
        version=VERSION,
        inputs={"tokens": tokens},
        ranks="all",
        shared=shared,
        model_files=hash_text_files(model),  # the chat template is one of them
    )


def read_answers(folder: Path, tokens: Artifact) -> Artifact:
    """A complete folder of answers, or a run's reference to one. They must be on these tokens."""
    folder = follow_reference(folder)
    try:
        found = read_sealed_json(folder / STARTED, "settings", "inputs")["inputs"]["tokens"]
    except (MissingFileError, KeyError) as error:
        raise UserError(f"{folder} holds no answers; `bosch answers` makes them.") from error
    if found != tokens.fingerprint:
        raise UserError(f"The answers of {folder} are on other tokens than {tokens.folder}.")
    return Artifact.load(folder)
