"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper

Run the same command again and it goes on where it stopped.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bosch import progress
from bosch.command_line import Command, parse_command
from bosch.config import Config, describe_config
from bosch.errors import exit_on_user_error
from bosch.mask import describe_ratio
from bosch.plan import plan_run, refuse_blocked, stages_to_redo
from bosch.plugins import suggest
from bosch.progress import say
from bosch.ranks import rank_and_world
from bosch.run_folder import RunFolder
from bosch.stage import Stage
from recipes import calibrate, materialize_model, prepare_tokens, presets, search_mask


@dataclass(frozen=True)
class Link:
    """One stage of the chain, and the earlier ones it reads."""

    name: str
    needs: tuple[str, ...] = ()
    build: Callable[..., Stage] | None = None  # build(config, **needs); None: not built yet


# A stage joins the chain with one import above and its `build` here.
CHAIN = (
    Link("calibration", build=calibrate.build),
    Link("mask", needs=("calibration",), build=search_mask.build),
    Link("model", needs=("mask",), build=materialize_model.build),
    Link("tokens", build=prepare_tokens.build),
    Link("train", needs=("model", "tokens")),  # evaluates step 0 and checkpoints on its way
    Link("report", needs=("train",)),
)


def main(arguments: Sequence[str]) -> None:
    command = parse_command(arguments, tuple(presets.PRESETS), presets.choose)
    controls = command.controls
    rank, world = rank_and_world()
    progress.set_up(rank)
    presets.read_shape(command.config.model)
    presets.check_method(command.config.method)
    stages, missing = build_chain(command.config)
    check_stage_names(command, missing)

    if controls.dry_run:
        introduce(command)
        for step in plan_run(command.run_path, stages, controls.fresh, controls.start):
            say(f"{step.stage.name}: {step.action} ({step.reason})")
    else:
        with RunFolder(command.run_path, rank, world, say) as run:
            progress.log_to(command.run_path / "recover.log")
            introduce(command)
            if rank == 0:
                refuse_blocked(run.plan(stages, controls.fresh, controls.start))
                run.set_aside(stages_to_redo(stages, controls.fresh, controls.start))
                run.save_config(command.config, arguments)
            for stage in stages:
                run.complete(stage)
    if missing:
        say(f"not built yet: {', '.join(missing)}")
    if (method := command.config.method) in presets.METHODS_TO_COME:
        say(
            f"the method {method} is to come; `recipes/search_mask.py --list` names those there are"
        )


def build_chain(config: Config) -> tuple[list[Stage], list[str]]:
    """The stages that exist, in order, and the names of those that do not."""
    stages: dict[str, Stage] = {}
    for link in CHAIN:
        if link.name == "mask" and config.method in presets.METHODS_TO_COME:
            continue
        if link.build and all(name in stages for name in link.needs):
            stages[link.name] = link.build(config, **{name: stages[name] for name in link.needs})
    return list(stages.values()), [link.name for link in CHAIN if link.name not in stages]


def check_stage_names(command: Command, missing: Sequence[str]) -> None:
    for option, name in (("--fresh", command.controls.fresh), ("--from", command.controls.start)):
        names = [link.name for link in CHAIN]
        if name and name not in names:
            raise ValueError(f"{option} {name}: no such stage; {suggest(name, names)}")
        if name in missing:
            raise ValueError(f"{option} {name}: this stage is not built yet.")


def introduce(command: Command) -> None:
    """Say what this run is, before work begins."""
    layers, groups = presets.read_shape(command.config.model).groups
    say(f"run folder {command.run_path}")
    say(describe_ratio(command.config.ratio, layers, groups))
    settings = describe_config(command.config, with_study=command.controls.dry_run)
    for line in [*command.chosen_by, *settings]:
        say(line)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
