"""Stores what the dense model says of every packed token: the stage `lessons` of a distillation.

    python recipes/prepare_lessons.py --model DIR --tokens-from tokens --out lessons
    python recipes/train_model.py --model hybrid --tokens-from tokens --lessons-from lessons \\
        --objective distill --out train

All runs that train on these tokens can share it: the teacher computes once. Run the same command
again to continue where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bosch.command_line import run_stage
from bosch.config import TrainConfig
from bosch.data.tokenizer_files import read_tokenizer
from bosch.model import check_length, check_weights, describe_source, fetch_config, fetch_model
from bosch.recipes import presets
from bosch.recipes.train_model import TEACHER, check_settings
from bosch.run.errors import run_main
from bosch.run.files import MANIFEST
from bosch.run.stage import Artifact, Stage

NAME = "lessons"


@dataclass(frozen=True)
class Options:
    model: str  # the teacher: folder or hub id of a dense model (of a hybrid without its windows)
    tokens_from: Path  # folder that prepare_tokens.py wrote
    shares: int = 64  # next tokens stored for each: the likeliest, and a sample of the others
    temperature: float = TrainConfig.temperature  # of the distribution
    precision: Literal["bf16", "fp32"] = "bf16"  # number format of the computation
    document_mask: bool = True  # documents in one sequence do not attend to each other
    out: Path = Path("lessons")  # folder to write


def main(arguments: Sequence[str]) -> None:
    config = presets.for_stage(arguments)
    usual = {"model": config.model, "precision": config.train.precision}
    run_stage(Options, arguments, check_and_build, usual)


def check_and_build(options: Options, name: str) -> Stage:
    from bosch.data.loader import open_tokens

    settings = TrainConfig(
        objective="distill",
        stored_shares=options.shares,
        temperature=options.temperature,
        precision=options.precision,
    )
    check_settings(settings, options.document_mask, options.model)
    check_weights(options.model)
    tokens = Artifact.load(options.tokens_from)
    packed = open_tokens(tokens.folder, read_tokenizer(options.model).hash)
    check_length("--tokens-from: sequences of", packed.seq_len, options.model)
    check_room(options.model, settings, packed.train.rows.size, options.out)
    return build(options.model, settings, options.document_mask, tokens, name)


def build(
    teacher: str,
    settings: TrainConfig,
    document_mask: bool,
    tokens: Stage | Artifact,
    name: str = NAME,
    shared: bool = False,
) -> Stage:
    facts = {
        "teacher": describe_source(teacher),
        "vocabulary": vocabulary_of(teacher),
        "shares": settings.stored_shares,
        "temperature": settings.temperature,
        "precision": settings.precision,
        "document_mask": document_mask,
    }

    def run(out: Path, tokens: Artifact) -> None:
        from bosch.data.loader import open_tokens
        from bosch.training.teacher import write_lessons

        folder = fetch_model(teacher, TEACHER)
        packed = open_tokens(tokens.folder, read_tokenizer(folder).hash)
        write_lessons(out, folder, packed, settings, document_mask)

    inputs = {"tokens": tokens}
    return Stage(name, run, facts, inputs, ranks="all", shared=shared)


def check_room(
    model: str, settings: TrainConfig, tokens: int, folder: Path, afresh: bool = False
) -> None:
    """Refuse a disk that cannot hold what is not there yet. `afresh`: what is there is set aside,
    and still takes its room."""
    from bosch.training import teacher

    count, vocabulary = settings.stored_shares, vocabulary_of(model)
    # check_settings refuses more than the vocabulary.
    if count and count < vocabulary and (afresh or not (folder / MANIFEST).is_file()):
        done = 0 if afresh else sum(file.stat().st_size for file in folder.glob("*.npy"))
        size = teacher.lesson_type(count, vocabulary).itemsize
        teacher.check_room(folder, tokens * size - done)


def vocabulary_of(model: str) -> int:
    from bosch.training.model_start import read_config

    return int(read_config(fetch_config(model)).vocab_size)


if __name__ == "__main__":
    run_main(main)
