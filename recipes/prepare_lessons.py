"""Stores what the dense model says of every packed token: the stage `lessons` of a distillation.

    python recipes/prepare_lessons.py --model DIR --tokens-from tokens --out lessons
    python recipes/train_model.py --model hybrid --tokens-from tokens --lessons-from lessons \\
        --objective distill --out train

All runs that train on these tokens can share it: the teacher computes once. Run the same command
again to continue where it stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bosch.command_line import run_stage
from bosch.config import TrainConfig
from bosch.data.tokenizer_files import read_tokenizer
from bosch.model import check_length, check_weights, fetch_model
from bosch.recipes import presets
from bosch.run.errors import run_main
from bosch.run.stage import Artifact, Stage
from bosch.training import answers_stage, lessons_stage, train_stage


@dataclass(frozen=True)
class Options:
    model: str  # the teacher: folder or hub id of a dense model (of a hybrid without its windows)
    tokens_from: Path  # folder that `bosch tokens` wrote
    answers_from: Path | None = None  # that `bosch answers` wrote for them
    shares: int = 64  # next tokens stored for each: the likeliest, and a sample of the others
    temperature: float = TrainConfig.temperature  # of the distribution
    precision: Literal["bf16", "fp32"] = "bf16"  # number format of the computation
    document_mask: bool = True  # documents in one sequence do not attend to each other
    out: Path = Path("lessons")  # folder to write


def main(arguments: Sequence[str]) -> None:
    run_stage(Options, arguments, build, usual)


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    config = presets.for_stage(given)
    return {"model": config.model, "precision": config.train.precision}


def build(options: Options, name: str) -> Stage:
    from bosch.data.loader import open_tokens  # torch: seconds

    settings = TrainConfig(
        objective="distill",
        stored_shares=options.shares,
        temperature=options.temperature,
        precision=options.precision,
    )
    train_stage.check(settings, options.document_mask, options.model)
    check_weights(options.model)
    train_stage.check_dense_is_known(settings, fetch_model(options.model))
    tokens = Artifact.load(options.tokens_from)
    packed = open_tokens(tokens.folder, read_tokenizer(options.model).hash)
    check_length("--tokens-from: sequences of", packed.seq_len, options.model)
    return lessons_stage.stage(
        options.model,
        settings,
        options.document_mask,
        tokens,
        num_tokens=packed.train.rows.size,
        name=name,
        answers=answers_stage.read_answers(options.answers_from, tokens)
        if options.answers_from
        else None,
    )


if __name__ == "__main__":
    run_main(main)
