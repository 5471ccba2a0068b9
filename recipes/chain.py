"""The stages of a whole run, in their order: what each takes, and what it makes for the next."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from bosch.config import Config
from bosch.data import calibration_stage, tokens_stage
from bosch.eval import eval_stage
from bosch.eval.evaluate import plan_of_run
from bosch.eval.own_words import rewording
from bosch.eval.report.compare import compare, has_recovered
from bosch.hybrid import model_stage
from bosch.methods import _settings as methods
from bosch.recipes import presets
from bosch.recipes.command import Command
from bosch.run.errors import Refusals
from bosch.run.files import ENDING, read_sealed_json
from bosch.run.folder import RunFolder
from bosch.run.stage import Stage, locate
from bosch.search import mask_stage
from bosch.training import answers_stage, lessons_stage, train_stage
from bosch.training.fitting import Fitted
from bosch.training.learner import make_learning


def stages_of_run(
    command: Command, run: RunFolder, fitted: Fitted, taken: Callable[[], float] | None = None
) -> list[Stage]:
    """Nothing is done yet. `run`: its folder, in which the training has checkpoints evaluated;
    `fitted`: the training's settings with a micro-batch that fits this machine; `taken`: seconds
    that the run has taken so far, for --hours."""
    config, train = command.config, command.config.train
    learns = methods.load_method(config.method).traits.learns_from_tokens
    # One check for all evaluations, which have the same data.
    check_texts = cache(partial(check_evaluation, config))
    evaluation_of_step = partial(
        eval_stage.stage_of_step, config, run.path, check_texts=check_texts
    )

    calibration = calibration_stage.stage(
        config.model, calibration_stage.settings_of(config), rewording, shared=True
    )
    tokens = tokens_stage.stage_or_reused(config)
    mask = mask_stage.stage(
        config,
        calibration_stage.read_set,
        make_learning,
        calibration=calibration,
        tokens=tokens if learns else None,
        settings=command.settings,
    )
    dense = eval_stage.stage_of_dense(config, check_texts)
    model = model_stage.stage(config.model, mask=mask)
    used = methods.learning_tokens(config)
    untrained = evaluation_of_step(step=0, tokens=used, source=model)

    # Tokens are packed when they are needed first, unless they are another run's. The mask comes
    # before any evaluation: its search refuses at once a calibration set that is of no use.
    packing = [tokens] if isinstance(tokens, Stage) else []
    # A mask of a file that brings its sinks needs no calibration set.
    calibrates = methods.asks_calibration(config, command.settings)
    asked = [calibration] if calibrates else []
    stages = [*asked, *(packing if learns else []), mask, dense, model, untrained]
    if command.zero_shot:
        return stages
    stages += [] if learns else packing

    answers, lessons = None, None
    if config.data.answers:
        answers = answers_stage.stage(
            train.teacher or config.model,
            config.data.answers,
            train,
            config.seed,
            tokens,
            shared=True,
        )
        stages.append(answers)
    if train.objective == "distill" and train.stored_shares:
        lessons = lessons_stage.stage(
            train.teacher or config.model,
            train,
            config.data.document_mask,
            tokens,
            num_tokens=tokens_stage.count(config),
            shared=True,
            answers=answers,
        )
        stages.append(lessons)
    checkpoints: dict[int, Stage] = {}  # by step; filled below, since the training is their input

    def evaluate(step: int, tokens: int, exported: Path) -> bool:
        """What the training does with the model it exports at a step: True ends it."""
        if step:  # step 0 is evaluated before training
            evaluated = checkpoints.get(step)  # none of a step where the time has ended it
            run.complete(evaluated or evaluation_of_step(step, tokens, training))
        return train.until == "recovered" and has_recovered(compare([run.path]), step)

    seconds_left = None
    if command.promise and taken:
        seconds_left = partial(command.promise.seconds_left, taken, locate(run.path, untrained))

    sink = config.sink if config.ratio else "none"  # without windows there is none
    training = train_stage.stage(
        train_stage.settings_of(config),
        model=model,
        tokens=tokens,
        lessons=lessons,
        answers=answers,
        on_checkpoint=evaluate,
        fitted=fitted,
        seconds_left=seconds_left,
        check=partial(train_stage.check, train, config.data.document_mask, config.model, sink=sink),
    )
    schedule = train_stage.schedule_of(config)
    steps = {*schedule.all_evaluated_steps, ended_at(run.path)}
    for step in sorted(filter(None, steps)):
        checkpoints[step] = evaluation_of_step(
            step=step, tokens=schedule.tokens_at(step), source=training
        )
    return [*stages, training, *checkpoints.values()]


def ended_at(run_path: Path) -> int:
    """The last step of a training that its time ends early; 0: none."""
    ending = run_path / "train" / ENDING
    return int(read_sealed_json(ending, "end")["end"]) if ending.is_file() else 0


def check_evaluation(config: Config) -> list[str]:
    """Refuse texts that cannot be had, or built in so few tokens. Lines on which data they are."""
    refusals, lines = Refusals(), list[str]()
    with refusals:
        lines = eval_stage.check(plan_of_run(config), config.model)
    with refusals:
        presets.check_needles(config)
    refusals.raise_all()
    return lines
