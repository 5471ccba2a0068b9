"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper
    accelerate launch recipes/recover.py --ratio 0              # the control: dense, trained

Run the same command again to resume where it stopped.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from bosch.command_line import Command, as_typed, next_command, parse_command
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
from bosch.run.stage import Artifact, Decision, Stage, refuse_blocked, stages_to_redo

Complete = Callable[[Stage], Artifact]
Fit = Callable[[], Config]


@dataclass(frozen=True)
class Plan:
    """What a command will do. Nothing is written yet."""

    config: Config  # with the micro-batch that fits these GPUs
    stages: list[Stage]
    redo: list[Stage]
    steps: list[Decision]
    texts: list[str]  # lines on those of the evaluations
    trains: bool


def main(arguments: Sequence[str]) -> None:
    command = configure(arguments)
    if command.controls.rehearse is not None:  # of the paper's models without fetching anything
        presets.check_lengths(command.config)
        train_model.rehearse(command.config, command.controls.rehearse)
        return
    folder = RunFolder(command.run_path, *rank_and_world(), say)
    if command.controls.dry_run:
        introduce(command, command.config)
        show_plan(command, plan(command, folder))
    else:
        run(command, plan(command, folder), folder)


def configure(arguments: Sequence[str]) -> Command:
    command = parse_command(arguments, presets.choose)
    if (budget := command.controls.kv_budget) is not None:
        config, line = with_kv_budget(command.config, budget, arguments)
        command = replace(command, config=config, chosen_by=(*command.chosen_by, line))
    progress.set_up(rank_and_world()[0])
    return command


def plan(command: Command, folder: RunFolder) -> Plan:
    """The chain and what each stage will do. All that cannot work is refused here, at once, before
    anything is written and before hours are spent."""
    config, controls, world = command.config, command.controls, folder.world
    is_new = not folder.path.exists()
    fit: Fit = cache(partial(train_model.fit_memory, config, world, command.names_micro_batch))

    @cache
    def chain() -> list[Stage]:
        presets.check_model(config.model)
        return build_chain(config, folder.path, folder.complete, controls.zero_shot, fit)

    @cache
    def steps() -> list[Decision]:
        return folder.plan(chain(), controls.fresh, controls.from_)

    @cache
    def texts() -> list[str]:
        if not is_new and (folder.rank != 0 or not evaluates(steps())):
            return []
        described, *_ = check_all(
            lambda: check_data(judging_of(config), config.model),
            lambda: calibrate.check(config.model, calibrate.settings_of(config)),
            lambda: presets.check_needles(config) if chain() else None,
        )
        return described or []

    check_all(
        partial(presets.check_lengths, config),
        chain,
        partial(search_mask.check_attention, config),
        lambda: check_attention(judging_of(config)),
        *([] if controls.zero_shot else [partial(train_model.check_machine, config, world)]),
        lambda: packed.check_sources(config, folder.path, chain()),
        texts,
    )
    redo = stages_to_redo(chain(), controls.fresh, controls.from_)
    is_trained = (folder.path / "train" / MANIFEST).is_file()
    trains = not controls.zero_shot and (not is_trained or any(s.name == "train" for s in redo))
    if trains and not controls.dry_run:
        config = fit()  # last, since it may take minutes
    return Plan(config, chain(), redo, steps(), texts(), trains)


def evaluates(steps: Sequence[Decision]) -> bool:
    return any("eval/" in step.stage.name and step.action != "reuse" for step in steps)


def show_plan(command: Command, planned: Plan) -> None:
    for step in planned.steps:
        say(f"{step.stage.name}: {step.action} ({step.reason})")
    refuse_blocked(planned.steps)
    for line in planned.texts:
        say(line)
    if all(step.action == "reuse" for step in planned.steps):
        return
    from bosch.training.rehearsal import estimate  # torch, which takes seconds

    config, world = planned.config, rank_and_world()[1]
    schedule = None if command.controls.zero_shot else train_model.schedule_of(config)
    for line in estimate(config, train_model.make_plan(config, world, "torch"), schedule):
        say(line)


def run(command: Command, planned: Plan, folder: RunFolder) -> None:
    config, controls, is_first = planned.config, command.controls, folder.rank == 0
    with folder:
        progress.log_to(folder.path / "recover.log")
        introduce(command, config)
        if is_first:
            # Again, now that no other launch can change the folder.
            refuse_blocked(folder.plan(planned.stages, controls.fresh, controls.from_))
            for line in planned.texts:
                say(line)
            folder.set_aside(planned.redo)
            # Without what is fitted to this machine: run.json tells runs apart.
            folder.save_config(command.config, command.arguments)
            if planned.trains:
                from bosch.training.rehearsal import training_seconds

                shape = train_model.make_plan(config, folder.world, "torch")
                seconds = training_seconds(shape, train_model.schedule_of(config))
                folder.expected["train"] = seconds
        for stage in planned.stages:
            folder.complete(stage)
            if stage.name == "eval/dense" and is_first:  # the test examples are there now
                check_calibration(config, folder.path)
        if is_first:
            # Again: no checksum tells whether what only shows results is still intact.
            evaluate_model.publish(folder.path)
    if is_first:
        say_results(folder.path)


def build_chain(
    config: Config,
    run_path: Path,
    complete: Complete,
    zero_shot: bool = False,
    fit: Fit | None = None,
) -> list[Stage]:
    """The stages in their order. Each checkpoint of the training is evaluated by its own stage,
    which training runs through `complete`. `fit`: the settings with a micro-batch that fits."""
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

    train = train_model.build(config, model, tokens, evaluate, fit)
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


def introduce(command: Command, config: Config) -> None:
    """Print what this run will do, before work begins."""
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
