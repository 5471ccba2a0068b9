"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper
    accelerate launch recipes/recover.py --ratio 0              # the control: dense, trained

Run the same command again to resume where it stopped. --help-all shows all options.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bosch.config import Config, describe_config
from bosch.data import calibration_stage, tokens_stage
from bosch.eval import eval_stage
from bosch.eval.evaluate import check_attention, check_calibration, check_data, plan_of_run
from bosch.eval.report.compare import compare, has_recovered
from bosch.eval.report.page import summarize, write_report
from bosch.hybrid import model_stage
from bosch.methods import _settings as methods
from bosch.recipes import compare_runs, presets
from bosch.recipes.command import Command, parse_command
from bosch.run.dist import rank_and_world
from bosch.run.errors import Refusals, run_main
from bosch.run.files import MANIFEST
from bosch.run.folder import RUN, RunFolder
from bosch.run.progress import log_to, say, set_up
from bosch.run.stage import Stage, locate, refuse_blocked, stages_to_redo
from bosch.search import mask_stage
from bosch.training import lessons_stage, train_stage

if TYPE_CHECKING:
    from bosch.training.fitting import Fitted


def main(arguments: Sequence[str]) -> None:
    rank, world = rank_and_world()
    set_up(rank)
    command = parse_command(arguments, __doc__ or "")
    config, is_first = command.config, rank == 0
    # These import torch, which takes seconds: what the command line alone shows to be wrong has
    # been refused by now.
    from bosch.recipes.duration import describe_room, describe_time
    from bosch.training.fitting import Fitted, rehearse

    if command.rehearse is not None:  # of the paper's models without fetching anything
        presets.check_lengths(config)
        rehearse(config, command.rehearse)
        return
    run = RunFolder(command.run_path, rank, world, say)
    fitted = Fitted(config, world, is_named="config.train.micro_batch_sequences" in command.named)

    if command.dry_run:
        introduce(command, config)
        stages, texts = check(command, run, fitted)
        say(*describe_time(command.preset, config, command.zero_shot))
        plan = run.plan(stages, command.fresh, command.from_)
        say(*(f"{step.stage.name}: {step.action} ({step.reason})" for step in plan))
        refuse_blocked(plan)
        say(*texts)
        if any(step.action != "reuse" for step in plan):
            say(*describe_room(config, world, command.zero_shot))
        return

    stages, texts = check(command, run, fitted)
    redo = stages_to_redo(stages, command.fresh, command.from_)
    is_trained = (run.path / "train" / MANIFEST).is_file()
    trains_again = any(stage.name == "train" for stage in redo)
    if not command.zero_shot and (trains_again or not is_trained):
        # It may take minutes, so all is checked before.
        config = replace(config, train=fitted.train)
    with run:
        log_to(run.path / "recover.log")
        if is_first and not (run.path / RUN).is_file():
            say(*describe_time(command.preset, command.config, command.zero_shot))
        introduce(command, config)
        if is_first:
            # Again, now that no other launch can change the folder.
            refuse_blocked(run.plan(stages, command.fresh, command.from_))
            say(*texts)
            run.set_aside(redo)
            # Without what is fitted to this machine: run.json tells runs apart.
            run.save_config(command.config, arguments)
        for stage in stages:
            run.complete(stage)
            if stage.name == "eval/dense" and is_first:  # the test examples are there now
                check_calibration(config, run.path)
        if is_first:
            report(run.path)


def chain(command: Command, run: RunFolder, fitted: "Fitted") -> list[Stage]:
    """The stages in their order. Each says what it takes; nothing is done yet."""
    from bosch.eval.own_words import rewording  # these import torch
    from bosch.training.learner import make_learning

    config, train = command.config, command.config.train
    learns = methods.traits_of(config.method).learns_from_tokens
    calibration = calibration_stage.stage(
        config.model, calibration_stage.settings_of(config), rewording, shared=True
    )
    tokens = tokens_stage.stage_or_reused(config)
    dense = eval_stage.stage_of_dense(config)
    mask = mask_stage.stage(
        config,
        calibration_stage.read_set,
        make_learning,
        calibration=calibration,
        tokens=tokens if learns else None,
    )
    model = model_stage.stage(config.model, mask=mask)
    used = methods.learning_tokens(config)
    start = eval_stage.stage_of_step(config, run.path, step=0, tokens=used, source=model)
    # Tokens are packed when they are needed first, unless they are another run's.
    packing = [tokens] if isinstance(tokens, Stage) else []
    before_mask, before_training = (packing, []) if learns else ([], packing)
    # The search before any evaluation: it refuses at once a calibration set that is of no use.
    untrained = [calibration, *before_mask, mask, dense, model, start]
    if command.zero_shot:
        return untrained

    lessons = None
    if train.objective == "distill" and train.stored_shares:
        lessons = lessons_stage.stage(
            train.teacher or config.model, train, config.data.document_mask, tokens, shared=True
        )
    checkpoints: dict[int, Stage] = {}  # by step; filled below, since the training is their input

    def evaluate(step: int, tokens: int, exported: Path) -> bool:
        """What the training does with the model it exports at a step: True ends it."""
        if step:  # step 0 is evaluated before training
            run.complete(checkpoints[step])
        return train.until == "recovered" and has_recovered(compare([run.path]), step)

    training = train_stage.stage(
        train_stage.settings_of(config),
        model=model,
        tokens=tokens,
        lessons=lessons,
        on_checkpoint=evaluate,
        fitted=fitted,
    )
    schedule = train_stage.schedule_of(config)
    for step in filter(None, schedule.exported_steps):
        done = schedule.tokens_at(step)
        checkpoints[step] = eval_stage.stage_of_step(config, run.path, step, done, training)
    teaching = [lessons] if lessons else []
    return [*untrained, *before_training, *teaching, training, *checkpoints.values()]


def check(command: Command, run: RunFolder, fitted: "Fitted") -> tuple[list[Stage], list[str]]:
    """The chain, and lines on the texts of the evaluations. All that cannot work is refused here,
    at once, before anything is written and before hours are spent."""
    config, refusals = command.config, Refusals()
    stages, texts = list[Stage](), list[str]()
    reads_texts = not run.path.exists()  # else only if an evaluation is not complete
    with refusals:
        presets.check_lengths(config)
    with refusals:
        model_stage.check(config.model)
        stages = chain(command, run, fitted)
    with refusals:
        mask_stage.check(config)
    with refusals:
        check_attention(plan_of_run(config))
    with refusals:
        if not command.zero_shot:
            sink = config.sink if config.ratio else "none"  # without windows there is none
            train_stage.check(config.train, config.data.document_mask, config.model, sink)
    named = {stage.name: stage for stage in stages}
    with refusals:
        if "tokens" in named:  # else they are another run's, or not needed
            tokens_stage.check(config, run.path, named["tokens"])
    with refusals:
        redo = stages_to_redo(stages, command.fresh, command.from_) if stages else []
        if "lessons" in named:
            lessons_stage.check(
                config.train.teacher or config.model,
                config.train,
                num_tokens=tokens_stage.count(config),
                folder=locate(run.path, named["lessons"]),
                afresh=named["lessons"] in redo,
            )
    with refusals:
        if stages and not reads_texts and run.rank == 0:
            plan = run.plan(stages, command.fresh, command.from_)
            reads_texts = any("eval/" in s.stage.name and s.action != "reuse" for s in plan)
    if reads_texts:
        with refusals:
            texts = check_data(plan_of_run(config), config.model)
        with refusals:
            calibration_stage.check(config.model, calibration_stage.settings_of(config))
        with refusals:
            if stages:
                presets.check_needles(config)
    refusals.raise_all()
    return stages, texts


def introduce(command: Command, config: Config) -> None:
    """Print what this run will do, before work begins."""
    say(f"run folder {command.run_path}", *methods.describe_choice(config), *command.chosen_by)
    say(*describe_config(config), *methods.describe_settings(config), *presets.warnings(config))
    if used := methods.learning_tokens(config):
        of = f"{used:,} of the {config.data.tokens:,} tokens"
        say(f"{of} are used to learn the mask, the rest to train")


def report(run_path: Path) -> None:
    """Write the report, each time: what only shows results has no checksum. And print it."""
    eval_stage.publish(run_path)
    comparison = compare([run_path])
    written = write_report(comparison, run_path / "report")
    say(*summarize(comparison))
    compare_runs.warn(comparison)
    say(f"report in {written[0]}; for details:")
    programs, runs = Path(sys.executable).parent, shlex.quote(str(run_path.parent))
    say(f"  {programs / 'tensorboard'} --logdir {runs}")
    say(f"  {programs / 'bosch'} compare {runs}/*")


if __name__ == "__main__":
    run_main(main)
