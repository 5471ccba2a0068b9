"""The stage `lessons`: what the dense model says of every packed token, stored once for all runs
that train on these tokens (training/teacher.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from bosch.config import TrainConfig
from bosch.data.tokenizer_files import read_tokenizer
from bosch.model import describe_source, fetch_config, fetch_model
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import STARTED, read_sealed_json
from bosch.run.fingerprint import plain
from bosch.run.stage import Artifact, Stage
from bosch.training.train_stage import TEACHER, Settings

VERSION = 1  # raised when the same settings give other lessons


def stage(
    teacher: str,
    settings: TrainConfig,
    document_mask: bool,
    tokens: Stage | Artifact,
    num_tokens: int,
    name: str = "lessons",
    shared: bool = False,
    answers: Stage | Artifact | None = None,
) -> Stage:
    """`num_tokens`: how many there are. What is said of them may be more than a disk holds.
    `answers`: of training/answers_stage.py, in place of some of the tokens."""
    from bosch.training.teacher import lesson_type  # torch: seconds

    # What decides a lesson. Kernels and shards do not: they change its last digits alone.
    facts: dict[str, Any] = {
        "teacher": describe_source(teacher),
        "vocabulary": vocabulary_of(teacher),
        "shares": settings.stored_shares,
        "temperature": settings.temperature,
        "precision": settings.precision,
        "document_mask": document_mask,
    }

    def run(out: Path, tokens: Artifact, answers: Artifact | None = None) -> None:
        from bosch.data.loader import open_tokens  # torch: seconds
        from bosch.training.teacher import write_lessons

        folder = fetch_model(teacher, TEACHER)
        answered = answers.folder if answers else None
        packed = open_tokens(tokens.folder, read_tokenizer(folder).hash, answered)
        write_lessons(out, folder, packed, settings, document_mask)

    shares, vocabulary, num_bytes = settings.stored_shares or 0, facts["vocabulary"], 0
    if shares < vocabulary:  # else train_stage.check refuses them
        num_bytes = num_tokens * lesson_type(shares, vocabulary).itemsize
    return Stage(
        name,
        run=run,
        settings=facts,
        version=VERSION,
        inputs={"tokens": tokens} | ({"answers": answers} if answers else {}),
        ranks="all",
        shared=shared,
        num_bytes=num_bytes,
    )


def with_lessons(
    settings: Settings,
    model: Artifact,
    tokens: Artifact,
    lessons: Artifact,
    answers: Artifact | None = None,
) -> Settings:
    """The settings of a training by these lessons, which say themselves how many shares they have.
    UserError if they are of other tokens or another teacher, or not as the settings ask."""
    train, folder = settings.train, lessons.folder
    try:
        facts = read_sealed_json(folder / STARTED, "settings", "inputs")
        found = facts["settings"] | facts["inputs"]
        learning = replace(train, stored_shares=found["shares"])
    except (MissingFileError, KeyError) as error:
        raise UserError(f"{folder} holds no lessons; `bosch lessons` makes them.") from error
    if train.objective != "distill":
        raise UserError("--lessons-from is what a teacher says; pass --objective distill.")
    asked: dict[str, object] = {
        "temperature": train.temperature,
        "shares": train.stored_shares,
        "document_mask": settings.document_mask,
        "tokens": tokens.fingerprint,
        "vocabulary": vocabulary_of(str(model.folder)),
    }
    if train.teacher and plain(describe_source(train.teacher)) != found["teacher"]:
        raise UserError(f"The lessons of {folder} are not of train.teacher {train.teacher}.")
    for what, value in asked.items():
        if value is not None and (there := found.get(what)) != value:
            raise UserError(f"The lessons of {folder} are for {what} {there}, not {value}.")
    if found.get("answers") != (answers.fingerprint if answers else None):
        problem = "were made with answers" if "answers" in found else "were made without answers"
        remedy = "name the same ones by --answers-from here as there, or none in both"
        raise UserError(f"The lessons of {folder} {problem}: {remedy}.")
    return replace(settings, train=learning)


def vocabulary_of(model: str) -> int:
    from bosch.training.model_start import read_config  # torch: seconds

    return int(read_config(fetch_config(model)).vocab_size)
