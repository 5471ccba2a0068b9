"""Trains the hybrid on packed tokens, to recover its quality: the stage `train`.

    python recipes/train_model.py --model hybrid --tokens-from tokens --out train
    accelerate launch recipes/train_model.py --model hybrid --tokens-from tokens --out train
    accelerate launch --use_fsdp --num_processes 2 recipes/train_model.py ...      # 2 CPU processes

--model may also be a dense model, as a control. Run the same command again to resume from the last
checkpoint. Ctrl-C, SIGTERM or a file named STOP in the folder end the training after the current
step, with everything saved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import run_stage
from bosch.config import FLAT
from bosch.model import check_weights, fetch_model
from bosch.recipes import presets
from bosch.run.errors import UserError, run_main
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage
from bosch.training import answers_stage, lessons_stage, train_stage
from bosch.training.train_stage import Settings


@dataclass(frozen=True)
class Options:
    model: str  # folder or hub id of a hybrid or dense model
    tokens_from: Path  # folder that `bosch tokens` wrote
    out: Path  # folder to write
    settings: Annotated[Settings, FLAT]
    # Folder that `bosch answers` wrote for these tokens, to stand in place of some of them.
    answers_from: Path | None = None
    # Folder that `bosch lessons` wrote for these tokens; None: ask the teacher at every step.
    lessons_from: Path | None = None


def main(arguments: Sequence[str]) -> None:
    options = run_stage(Options, arguments, build, usual)
    exports = sorted(options.out.glob("step-*"))
    say(f"trained model in {exports[-1] if exports else options.out}")


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    # Lessons say themselves how many shares they have.
    return {"settings": Settings(replace(presets.for_stage(given).train, stored_shares=None))}


def build(options: Options, name: str) -> Stage:
    model, tokens = Artifact.load(fetch_model(options.model)), Artifact.load(options.tokens_from)
    check_weights(options.model)
    settings, lessons, answers = options.settings, None, None
    if (until := settings.train.until) != "budget":
        raise UserError(f"--until {until} takes evaluations: train with `bosch recover`.")
    train_stage.check(settings.train, settings.document_mask, options.model)
    if options.answers_from is not None:
        answers = answers_stage.read_answers(options.answers_from, tokens)
    if options.lessons_from is not None:
        lessons = Artifact.load(options.lessons_from)
        settings = lessons_stage.with_lessons(settings, model, tokens, lessons, answers)
    if settings.train.on_policy or options.lessons_from is None:
        train_stage.check_dense_is_known(settings.train, model.folder)
    if options.lessons_from is None and settings.train.stored_shares:
        raise UserError("train.stored_shares needs --lessons-from; `bosch lessons` makes them.")
    train_stage.check_tokens(settings, options.model, tokens)
    return train_stage.stage(settings, model, tokens, lessons, name, answers=answers)


if __name__ == "__main__":
    run_main(main)
