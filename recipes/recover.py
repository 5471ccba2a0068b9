"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper
    accelerate launch recipes/recover.py --ratio 0              # the control: dense, trained

Run the same command again to resume where it stopped.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from bosch.command_line import Command, as_typed, next_command, parse_command, peek
from bosch.config import Config, describe_config, warn_of_window
from bosch.data import packed
from bosch.eval.judging import check_attention, check_calibration, check_data, judging_of
from bosch.eval.report.compare import compare, has_recovered
from bosch.eval.report.summary import summarize
from bosch.masks.kv_budget import with_kv_budget
from bosch.methods._settings import describe_budget, learning_tokens, learns_from_tokens
from bosch.recipes import (
    calibrate,
    compare_runs,
    evaluate_model,
    materialize_model,
    presets,
    search_mask,
    train_model,
)
from bosch.run import progress
from bosch.run.errors import check_all, run_main
from bosch.run.files import MANIFEST
from bosch.run.folder import RunFolder
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Decision, Stage, plan_run, refuse_blocked, stages_to_redo

Complete = Callable[[Stage], Artifact]


def main(arguments: Sequence[str]) -> None:
    command = parse_command(arguments, presets.choose)
    config, controls = command.config, command.controls
    if controls.kv_budget is not None:
        config, line = with_kv_budget(config, controls.kv_budget, arguments)
        command = replace(command, config=config, chosen_by=(*command.chosen_by, line))
    rank, world = rank_and_world()
    progress.set_up(rank)
    if controls.rehearse is not None:  # of the paper's models without fetching anything
        presets.check_lengths(config)
        train_model.rehearse(config, controls.rehearse)
        return
    run = RunFolder(command.run_path, rank, world, say)
    is_new = not command.run_path.exists()

    @cache
    def make_chain() -> list[Stage]:
        presets.check_model(config.model)
        return build_chain(config, command.run_path, run.complete, controls.zero_shot)

    if controls.dry_run:
        introduce(command)

    @cache
    def inputs() -> list[str]:
        """Refuse texts that cannot be used, of a new run before its folder is made. Lines on
        them."""
        described: list[str] = []
        check_all(
            lambda: described.extend(check_data(judging_of(config), config.model)),
            lambda: calibrate.check(config.model, calibrate.settings_of(config)),
            lambda: presets.check_needles(config) if make_chain() else None,
        )
        return described

    check_all(  # so that all that is refused is said at once
        partial(presets.check_lengths, config),
        make_chain,
        partial(search_mask.check_attention, config),
        lambda: check_attention(judging_of(config)),
        *([] if controls.zero_shot else [partial(train_model.check_machine, config, world)]),
        lambda: packed.check_sources(config, command.run_path, make_chain()),
        *([inputs] if is_new else []),
    )
    from bosch.training.rehearsal import estimate, training_seconds  # torch, which takes seconds

    stages = make_chain()
    redo = stages_to_redo(stages, controls.fresh, controls.from_)
    if controls.dry_run:
        steps = plan_run(command.run_path, stages, controls.fresh, controls.from_)
        for step in steps:
            say(f"{step.stage.name}: {step.action} ({step.reason})")
        refuse_blocked(steps)
        for line in inputs() if evaluates(steps) else ():
            say(line)
        if any(step.action != "reuse" for step in steps):
            schedule = None if controls.zero_shot else train_model.schedule_of(config)
            for line in estimate(config, train_model.make_plan(config, world, "torch"), schedule):
                say(line)
        return
    asked = config  # without what is fitted to this machine: run.json tells runs apart
    is_trained = (command.run_path / "train" / MANIFEST).is_file()
    is_trained = is_trained and not any(stage.name == "train" for stage in redo)
    trains = not controls.zero_shot and not is_trained
    if trains:  # last, since it may take minutes
        names = ("train.micro-batch-sequences", "train.micro_batch_sequences")
        fitting = train_model.fit_memory(config, world, any(peek(arguments, *names).values()))
        if fitting != config:
            config, command = fitting, replace(command, config=fitting)
            stages = build_chain(config, command.run_path, run.complete)
    with run:
        progress.log_to(command.run_path / "recover.log")
        introduce(command)
        if rank == 0:
            decisions = run.plan(stages, controls.fresh, controls.from_)
            refuse_blocked(decisions)
            for line in inputs() if evaluates(decisions) or is_new else ():
                say(line)
            run.set_aside(redo)
            run.save_config(asked, arguments)
            if trains:
                plan = train_model.make_plan(config, world, "torch")
                run.expected["train"] = training_seconds(plan, train_model.schedule_of(config))
        for stage in stages:
            run.complete(stage)
            if stage.name == "eval/dense" and rank == 0:  # the test examples are there now
                check_calibration(config, run.path)
        if rank == 0:
            # Again: no checksum tells whether what only shows results is still intact.
            evaluate_model.publish(run.path)
    if rank == 0:
        say_results(command.run_path)


def evaluates(decisions: Sequence[Decision]) -> bool:
    return any("eval/" in d.stage.name and d.action != "reuse" for d in decisions)


def build_chain(
    config: Config, run_path: Path, complete: Complete, zero_shot: bool = False
) -> list[Stage]:
    """The stages in their order. Each checkpoint of the training is evaluated by its own stage,
    which training runs through `complete`."""
    calibration = calibrate.build(config)
    tokens = packed.build(config)
    dense = evaluate_model.build(config)
    learns = learns_from_tokens(config.method)
    mask_tokens = learning_tokens(config)
    mask = search_mask.build(config, calibration, tokens if learns else None)
    model = materialize_model.build(config, mask)
    start = evaluate_model.build_step(config, run_path, 0, mask_tokens, model)
    # The search before any evaluation: it refuses at once a calibration set that is of no use.
    untrained = [calibration, *([tokens] if learns else []), mask, dense, model, start]
    if zero_shot:
        return [*only_stages(untrained), compare_runs.build(run_path, [dense, start])]

    def evaluate(step: int, tokens: int, folder: Path) -> bool:
        if step:  # step 0 is evaluated before training
            complete(checkpoints[step])
        return config.train.until == "recovered" and has_recovered(compare([run_path]), step)

    train = train_model.build(config, model, tokens, on_checkpoint=evaluate)
    schedule = train_model.schedule_of(config)
    checkpoints = {
        step: evaluate_model.build_step(config, run_path, step, schedule.tokens_at(step), train)
        for step in schedule.exported_steps
        if step
    }
    evaluations = [dense, start, *checkpoints.values()]
    trained = [*([] if learns else [tokens]), train, *checkpoints.values()]
    report = compare_runs.build(run_path, [train, *evaluations])
    return [*only_stages([*untrained, *trained]), report]


def only_stages(stages: Sequence[Stage | Artifact]) -> list[Stage]:
    """Without the artifacts of other runs, which are complete."""
    return [stage for stage in stages if isinstance(stage, Stage)]


def introduce(command: Command) -> None:
    """Print what this run will do, before work begins."""
    config = command.config
    say(f"run folder {command.run_path}")
    say(describe_budget(config))
    settings = describe_config(config)
    warnings = [*warn_of_window(config), *presets.warn_of_device(config)]
    for line in [*command.chosen_by, *settings, *warnings]:
        say(line)
    if mask_tokens := learning_tokens(config):
        say(
            f"{mask_tokens:,} of the {config.data.tokens:,} tokens are used to learn the mask, the "
            "rest to train"
        )


def say_results(run_path: Path) -> None:
    comparison = compare([run_path])
    for line in summarize(comparison):
        say(line)
    compare_runs.warn(comparison)
    say(f"report in {run_path / 'report' / 'report.html'}; for details:")
    runs = shlex.quote(str(run_path.parent))
    say(f"  {as_typed('tensorboard')} --logdir {runs}")
    say(f"  {next_command('compare', compare_runs)} {runs}/*")


if __name__ == "__main__":
    run_main(main)
