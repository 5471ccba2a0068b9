"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper
    accelerate launch recipes/recover.py --ratio 0              # the control: dense, trained

Run the same command again to resume where it stopped. --help-all shows all options. The defaults
in the help are those of the embedded model; of another, where --model or --preset stands beside it.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bosch.config import Config, describe_config
from bosch.eval import eval_stage
from bosch.eval.evaluate import check_calibration
from bosch.eval.report.compare import compare
from bosch.eval.report.page import summarize, write_report
from bosch.eval.report.verdict import model_of
from bosch.hybrid import model_stage
from bosch.methods import _settings as methods
from bosch.plugins import own_folders
from bosch.recipes import compare_runs, presets
from bosch.recipes.command import Command, parse_command
from bosch.run.dist import rank_and_world
from bosch.run.errors import MissingFileError, Refusals, run_main
from bosch.run.folder import REDOING, RUN, RunFolder, measured
from bosch.run.progress import log_to, say, set_up
from bosch.run.stage import Decision, Stage, refuse_blocked, stages_to_redo

GOES_ON = (
    "this command was stopped and goes on; to begin once more, delete the folder of the stage with "
    "which it begins"
)


def main(arguments: Sequence[str]) -> None:
    rank, world = rank_and_world()
    set_up(rank)
    command = parse_command(arguments, __doc__ or "")
    config = command.config
    # These import torch, which takes seconds: what the command line alone shows to be wrong has
    # been refused by now.
    from bosch.recipes.chain import stages_of_run
    from bosch.training.fitting import Fitted, rehearse

    if command.rehearse is not None:  # of the paper's models without fetching anything
        presets.check_lengths(config)
        rehearse(config, command.rehearse)
        return
    run = RunFolder(command.run_path, rank, world, say)
    named_micro_batch = "config.train.micro_batch_sequences" in command.named
    fitted = Fitted(config, world, is_named=named_micro_batch)
    if command.dry_run:  # first, so that the settings are seen also of a run that is refused
        introduce(command, config)

    # All that cannot work is refused here, at once, before anything is written.
    refusals, stages, redo, texts = Refusals(), list[Stage](), list[Stage](), list[str]()
    with refusals:
        presets.check_lengths(config)
    with refusals:
        try:
            model_stage.check(config.model)  # first, since every stage reads it
        except MissingFileError as error:
            needs_text = config.data.source in presets.HUB_TEXTS
            raise presets.explain_offline(error, config.model, needs_text) from error
        stages = stages_of_run(command, run, fitted, lambda: sum(clock()) if clock else 0.0)
        # Stopped and repeated, such a command goes on, and does not begin once more; unless what it
        # has made cannot be used.
        goes_on = run.is_redoing(arguments) and all(
            decision.action != "blocked" for decision in run.plan(stages)
        )
        fresh, start = (None, None) if goes_on else (command.fresh, command.from_)
        redo = stages_to_redo(stages, fresh, start)
        texts = run.check(stages, redo)
    refusals.raise_all()
    if command.dry_run:
        show_plan(command, run, run.plan(stages, fresh, start), texts)
        return

    training = [stage for stage in stages if stage.name == "train"]
    if any(stage in redo or not run.is_complete(stage) for stage in training):
        # It may take minutes, so all is checked before.
        config = replace(config, train=fitted.train)
    promise = command.promise  # of --hours
    record: dict[str, Any] = {"hours": asdict(promise)} if promise else {}
    if folders := own_folders():
        record["plugins"] = folders
    with run, measured(run.path) if promise and rank == 0 else nullcontext() as clock:
        log_to(run.path / "recover.log")
        if rank == 0 and promise is None and not (run.path / RUN).is_file():
            say(*time_of(command))
        introduce(command, config)
        run.agree(stages)
        if rank == 0:
            # Again, now that no other launch can change the folder.
            refuse_blocked(run.plan(stages, fresh, start))
            say(*texts, *([GOES_ON] if goes_on else []))
            run.set_aside(redo, with_products=True)
            # Without what is fitted to this machine: run.json tells runs apart.
            redoing = {REDOING: True} if redo or goes_on else {}
            run.save_config(command.config, arguments, **record, **redoing)
        calibrates = methods.asks_calibration(config, command.settings)
        for stage in stages:
            run.complete(stage)
            if stage.name == "eval/dense" and rank == 0 and calibrates:
                check_calibration(config, run.path)  # the test examples are there now
        if rank == 0:
            written = report(run.path)
            if clock is not None:
                kept = promise.keep(run.path, stages, sum(clock()))
                say(kept.describe_taken())
                record["hours"] = asdict(kept)
            if clock is not None or redo or goes_on:
                run.save_config(command.config, arguments, **record)
            say(*describe_product(run.path, written))


def introduce(command: Command, config: Config) -> None:
    """Print what this run will do, before work begins."""
    say(f"run folder {command.run_path}")
    say(*methods.describe_choice(config, command.settings), *command.chosen_by)
    if command.show_settings:
        say(*describe_config(config), *methods.describe_settings(config.method, command.settings))
    else:
        say(*command.describe_changes())
    say(*presets.warnings(config))
    if used := methods.learning_tokens(config):
        of = f"{used:,} of the {config.data.tokens:,} tokens"
        say(f"{of} are used to learn the mask, the rest to train")


def show_plan(
    command: Command, run: RunFolder, plan: Sequence[Decision], texts: Sequence[str]
) -> None:
    """What each stage would do and why, how long it takes, and what it would write."""
    from bosch.recipes.duration import describe_room  # imports torch: seconds

    if command.promise is None:
        say(*time_of(command))
    say(*(f"{step.stage.name}: {step.action} ({step.reason})" for step in plan))
    refuse_blocked(plan)
    say(*texts)
    if any(step.action != "reuse" for step in plan):
        say(*describe_room(command.config, run.world, command.zero_shot))


def time_of(command: Command) -> list[str]:
    """Lines on how long the run takes here."""
    from bosch.recipes.duration import describe_time  # imports torch: seconds

    repeats = command.config_ is not None
    return describe_time(command.preset, command.config, command.zero_shot, repeats)


def report(run_path: Path) -> Path:
    """Write the report, each time: what only shows results has no checksum. And print it. Returns
    its page."""
    eval_stage.publish(run_path)
    comparison = compare([run_path])
    written = write_report(comparison, run_path / "report")
    say(*summarize(comparison))
    compare_runs.warn(comparison)
    return written[0]


def describe_product(run_path: Path, page: Path) -> list[str]:
    """What there is now and what to do with it: the last lines of a run."""
    from bosch.hybrid.export import why_not_served  # imports torch
    from bosch.hybrid.materialize import read_hybrid

    steps = [int(path.name.removeprefix("step-")) for path in (run_path / "eval").glob("step-*/")]
    # A training that ends early leaves stages of evaluations without a model.
    step = max(step for step in steps if model_of(run_path, step).is_dir())
    folder = model_of(run_path, step)
    model, runs = shlex.quote(str(folder)), shlex.quote(str(run_path.parent))
    # Of a family of the user's own, say.
    own = f" --plugins {shlex.join(folders)}" if (folders := own_folders()) else ""
    if reason := why_not_served(read_hybrid(folder)):
        served = f"  vLLM does not serve it: {reason}"
    else:
        served = f"  serve (docs/serving.md): {program('bosch')} serve --model {model}"
    return [
        f"compare runs: {program('bosch')} compare {runs}/*",
        f"curves: {program('tensorboard')} --logdir {runs}",
        f"the hybrid is in {folder}",
        f'  generate: {program("bosch")} generate --model {model}{own} --prompt "Once upon a time"',
        served,
        f"report in {page}",
    ]


def program(name: str) -> str:
    """As it is typed here: its name, or its path where the shell would find none or another."""
    path = Path(sys.executable).parent / name
    found = shutil.which(name)
    return name if found and Path(found) == path else shlex.quote(str(path))


if __name__ == "__main__":
    run_main(main)
