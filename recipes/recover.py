"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper
    accelerate launch recipes/recover.py --ratio 0              # the control: dense, trained

Run the same command again and it goes on where it stopped.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bosch.command_line import Command, as_near, as_typed, parse_command
from bosch.config import Config, describe_config, warn_of_window
from bosch.data import packed
from bosch.eval.judging import check_calibration, check_data, judging_of
from bosch.eval.report.compare import compare
from bosch.eval.report.summary import summarize
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
from bosch.run.errors import exit_on_user_error
from bosch.run.folder import RunFolder
from bosch.run.plan import plan_run, refuse_blocked, stages_to_redo
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage

Complete = Callable[[Stage], Artifact]


def main(arguments: Sequence[str]) -> None:
    command = parse_command(arguments, tuple(presets.PRESETS), presets.choose)
    config, controls = command.config, command.controls
    rank, world = rank_and_world()
    progress.set_up(rank)
    run = RunFolder(command.run_path, rank, world, say)
    stages = build_chain(config, command.run_path, run.complete, controls.zero_shot)
    redo = stages_to_redo(stages, controls.fresh, controls.start)

    if controls.dry_run:
        introduce(command)
        for step in plan_run(command.run_path, stages, controls.fresh, controls.start):
            say(f"{step.stage.name}: {step.action} ({step.reason})")
        return
    presets.check_lengths(config)
    presets.check_model(config.model)
    if not controls.zero_shot:
        train_model.check_machine(config, world)
    with run:
        progress.log_to(command.run_path / "recover.log")
        introduce(command)
        if rank == 0:
            decisions = run.plan(stages, controls.fresh, controls.start)
            refuse_blocked(decisions)
            if any("eval/" in one.stage.name and one.action != "reuse" for one in decisions):
                check_data(judging_of(config), config.model)
            run.set_aside(redo)
            run.save_config(config, arguments)
        for stage in stages:
            run.complete(stage)
            if stage.name == "eval/dense" and rank == 0:  # the test examples are there now
                check_calibration(config, run.path)
    if rank == 0:
        say_results(command.run_path)


def build_chain(
    config: Config, run_path: Path, complete: Complete, zero_shot: bool = False
) -> list[Stage]:
    """The stages in their order. Training hands each checkpoint to its evaluation, a stage of its
    own, which `complete` completes."""
    calibration = calibrate.build(config)
    tokens = packed.build(config)
    dense = evaluate_model.build(config)
    learns = learns_from_tokens(config.method)
    spent = learning_tokens(config)
    mask = search_mask.build(config, calibration, tokens if learns else None)
    model = materialize_model.build(config, mask)
    start = evaluate_model.build_step(config, run_path, 0, spent, model)
    chosen = [calibration, dense, *([tokens] if learns else []), mask, model, start]
    if zero_shot:
        return [*own(chosen), compare_runs.build(run_path, [dense, start])]

    def evaluate(step: int, tokens: int, folder: Path) -> None:
        if step:  # step 0 was judged before training
            complete(checkpoints[step])

    train = train_model.build(config, model, tokens, on_checkpoint=evaluate)
    schedule = train_model.schedule_of(config)
    checkpoints = {
        step: evaluate_model.build_step(config, run_path, step, schedule.tokens_at(step), train)
        for step in schedule.evaluated_steps
        if step
    }
    judged = [dense, start, *checkpoints.values()]
    trained = [*([] if learns else [tokens]), train, *checkpoints.values()]
    return [*own([*chosen, *trained]), compare_runs.build(run_path, [train, *judged])]


def own(stages: Sequence[Stage | Artifact]) -> list[Stage]:
    """Without artifacts of other runs: there is nothing to be made."""
    return [stage for stage in stages if isinstance(stage, Stage)]


def introduce(command: Command) -> None:
    """Say what this run is, before work begins."""
    config = command.config
    say(f"run folder {command.run_path}")
    say(describe_budget(config))
    settings = describe_config(config)
    for line in [*command.chosen_by, *settings, *warn_of_window(config)]:
        say(line)
    if spent := learning_tokens(config):
        say(
            f"{spent:,} of the {config.data.tokens:,} tokens are for learning the mask, training "
            "gets the rest"
        )


def say_results(run_path: Path) -> None:
    comparison = compare([run_path])
    for line in summarize(comparison):
        say(line)
    compare_runs.warn(comparison)
    say(f"report in {run_path / 'report' / 'report.html'}; to look further:")
    runs = shlex.quote(str(run_path.parent))
    say(f"  {as_typed('tensorboard')} --logdir {runs}")
    recipe = as_near(Path(compare_runs.__file__))
    say(f"  {as_typed('python')} {recipe} {runs}/*")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
