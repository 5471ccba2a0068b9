"""The whole chain: choose the groups, build the hybrid, recover its quality, show the curves.

    accelerate launch recipes/recover.py --ratio 0.75                          # embedded tiny model
    accelerate launch recipes/recover.py --ratio 0.75 --model Qwen/Qwen3-1.7B-Base --preset paper
    accelerate launch recipes/recover.py --ratio 0              # the control: dense, trained

Run the same command again to resume where it stopped. --help-all shows all options.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from bosch.command_line import parse, peek
from bosch.config import FLAT, NO_OPTION, Config, above_0, describe_config
from bosch.data import calibration_stage, tokens_stage
from bosch.eval.judging import check_attention, check_calibration, check_data, judging_of
from bosch.eval.report.compare import compare, has_recovered
from bosch.eval.report.page import summarize, write_report
from bosch.hybrid import model_stage
from bosch.masks.kv_budget import with_kv_budget
from bosch.methods._settings import (
    describe_choice,
    describe_settings,
    learning_tokens,
    resolve_sink,
    traits_of,
    usual_path,
)
from bosch.recipes import (
    compare_runs,
    evaluate_model,
    prepare_lessons,
    presets,
    train_model,
)
from bosch.run.errors import UserError, check_all, run_main
from bosch.run.files import MANIFEST
from bosch.run.folder import RUN, RunFolder
from bosch.run.progress import log_to, say, set_up
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Stage, locate, refuse_blocked, stages_to_redo
from bosch.search import mask_stage

LONG_SECONDS = 3_600  # a run that takes longer than this is told of its shorter form


@dataclass(frozen=True)
class Command:
    config: Annotated[Config, FLAT]
    # Where defaults come from: tiny (the embedded model), small, brief (small in less time), large,
    # paper (as published), or smoke (for tests). None: what suits the model.
    preset: Annotated[str | None, "NAME"] = None
    # In place of --ratio: the smallest whose KV cache fits, as 4GiB@128k.
    kv_budget: Annotated[str | None, "BYTES@TOKENS"] = None
    # Hours that all of it may take here: sets the tokens to train on, from 0.3M (at least one step)
    # to 30M.
    hours: Annotated[float | None, "HOURS"] = None
    run_dir: Annotated[Path | None, "DIR"] = None  # folder; None: runs/<model>-<method>-r<ratio>
    # Redo this stage (--dry-run lists all) and those that depend on it; old results are set aside.
    fresh: Annotated[str | None, "STAGE"] = None
    from_: Annotated[str | None, "STAGE"] = None  # redo this stage and all later ones
    zero_shot: bool = False  # stop before training: choose the groups, evaluate the hybrid
    dry_run: bool = False  # print all settings and what each stage would do, then stop
    # Say what memory a training step would take on this many GPUs, then stop.
    rehearse: Annotated[int | None, "GPUS"] = None
    # Lines on where the settings come from.
    chosen_by: Annotated[tuple[str, ...], NO_OPTION] = ()

    def __post_init__(self) -> None:
        if self.fresh is not None and self.from_ is not None:
            raise UserError(f"--fresh {self.fresh} contradicts --from {self.from_}; pass one.")
        above_0(self, "", "hours")

    @property
    def run_path(self) -> Path:
        return self.run_dir or usual_path(self.config)


def main(arguments: Sequence[str]) -> None:
    # Configure.
    rank, world = rank_and_world()
    set_up(rank)
    command = parse_command(arguments)
    config, is_first = command.config, rank == 0
    if command.rehearse is not None:  # of the paper's models without fetching anything
        presets.check_lengths(config)
        train_model.rehearse(config, command.rehearse)
        return
    folder = RunFolder(command.run_path, rank, world, say)
    names_micro_batch = any(peek(arguments, "train.micro-batch-sequences").values())
    fit = cache(partial(train_model.fit_memory, config, world, names_micro_batch))

    # Plan.
    if command.dry_run:
        introduce(command, config)
    stages, texts = check_and_build(command, folder, fit)
    if command.dry_run:
        say(*describe_time(command))
        steps = folder.plan(stages, command.fresh, command.from_)
        say(*(f"{step.stage.name}: {step.action} ({step.reason})" for step in steps))
        refuse_blocked(steps)
        say(*texts)
        if any(step.action != "reuse" for step in steps):
            from bosch.training.rehearsal import estimate  # torch, which takes seconds

            schedule = None if command.zero_shot else train_model.schedule_of(config)
            say(*estimate(config, train_model.make_plan(config, world), schedule))
        return
    redo = stages_to_redo(stages, command.fresh, command.from_)
    is_trained = (folder.path / "train" / MANIFEST).is_file()
    trains = not command.zero_shot and (not is_trained or any(s.name == "train" for s in redo))
    config = fit() if trains else config  # it may take minutes, so all is checked before

    # Run.
    with folder:
        log_to(folder.path / "recover.log")
        if is_first and not (folder.path / RUN).is_file():
            say(*describe_time(command))
        introduce(command, config)
        if is_first:
            # Again, now that no other launch can change the folder.
            refuse_blocked(folder.plan(stages, command.fresh, command.from_))
            say(*texts)
            folder.set_aside(redo)
            # Without what is fitted to this machine: run.json tells runs apart.
            folder.save_config(command.config, arguments)
        for stage in stages:
            folder.complete(stage)
            if stage.name == "eval/dense" and is_first:  # the test examples are there now
                check_calibration(config, folder.path)
        if is_first:  # each time: what only shows results has no checksum
            evaluate_model.publish(folder.path)
            comparison = compare([folder.path])
            written = write_report(comparison, folder.path / "report")
    if is_first:
        say(*summarize(comparison))
        compare_runs.warn(comparison)
        say(f"report in {written[0]}; for details:")
        programs, runs = Path(sys.executable).parent, shlex.quote(str(folder.path.parent))
        say(f"  {programs / 'tensorboard'} --logdir {runs}")
        say(f"  {programs / 'bosch'} compare {runs}/*")


def parse_command(arguments: Sequence[str]) -> Command:
    preset, model = peek(arguments, "preset", "model").values()
    config, origin = presets.choose(preset, model)
    config, left_out = presets.with_longbench(config, arguments)
    origin = [*origin, *left_out]
    if peek(arguments, "train.objective")["train.objective"] == "next-token":
        # The preset's are of no use then. Those that the user names are refused.
        config = replace(config, train=replace(config.train, stored_shares=None))
    defaults = {"config": config, "preset": preset, "chosen_by": tuple(origin)}
    command = parse(Command, arguments, defaults, hides_rare=True)
    config, lines = resolve_sink(command.config), [*origin]
    if command.kv_budget is not None:
        config, line = with_kv_budget(config, command.kv_budget, arguments)
        lines.append(line)
    if command.hours is not None:
        if given := peek(arguments, "data.tokens")["data.tokens"]:
            raise UserError(f"--hours and --data.tokens {given} both set the tokens; pass one.")
        record = replace(command, config=config).run_path / RUN
        config, chosen = train_model.with_hours(config, command.hours, record)
        lines += chosen
    return replace(command, config=config, chosen_by=tuple(lines))


def check_and_build(
    command: Command, folder: RunFolder, fit: Callable[[], Config]
) -> tuple[list[Stage], list[str]]:
    """The chain, and lines on the texts of the evaluations. All that cannot work is refused here,
    at once, before anything is written and before hours are spent."""
    config, is_new = command.config, not folder.path.exists()
    training = config.train, config.data.document_mask, config.model
    sink = config.sink if config.ratio else "none"  # without windows there is none
    stages, texts = list[Stage](), list[str]()

    def build() -> None:
        model_stage.check(config.model)
        stages.extend(build_chain(config, folder, command.zero_shot, fit))

    def check_sources() -> None:
        for stage in (stage for stage in stages if stage.name == "tokens"):
            tokens_stage.check(config, folder.path, stage)

    def check_room() -> None:
        redo = stages_to_redo(stages, command.fresh, command.from_) if stages else []
        for stage in (stage for stage in stages if stage.name == prepare_lessons.NAME):
            room = (
                config.train,
                tokens_stage.count(config),
                locate(folder.path, stage),
                stage in redo,
            )
            prepare_lessons.check_room(config.train.teacher or config.model, *room)

    def check_texts() -> None:
        if not is_new:
            plans = stages and folder.rank == 0
            steps = folder.plan(stages, command.fresh, command.from_) if plans else []
            if not any("eval/" in step.stage.name and step.action != "reuse" for step in steps):
                return
        described, *_ = check_all(
            lambda: check_data(judging_of(config), config.model),
            lambda: calibration_stage.check(config.model, calibration_stage.settings_of(config)),
            lambda: presets.check_needles(config) if stages else None,
        )
        texts.extend(described or [])

    check_all(
        partial(presets.check_lengths, config),
        build,
        partial(mask_stage.check, config),
        lambda: check_attention(judging_of(config)),
        lambda: None if command.zero_shot else train_model.check_settings(*training, sink),
        check_sources,
        check_room,
        check_texts,
    )
    return stages, texts


def build_chain(
    config: Config, folder: RunFolder, zero_shot: bool, fit: Callable[[], Config]
) -> list[Stage]:
    """The stages in their order. Each checkpoint of the training is evaluated by its own stage,
    which the training runs. `fit`: the settings with a micro-batch that fits."""
    run_path, learns = folder.path, traits_of(config.method).learns_from_tokens
    from bosch.eval.own_words import rewording  # imports torch, which takes seconds
    from bosch.training.learner import make_learning

    calibration = calibration_stage.stage(
        config.model, calibration_stage.settings_of(config), rewording, shared=True
    )
    tokens = tokens_stage.stage_or_reused(config)
    dense = evaluate_model.build(config)
    mask = mask_stage.stage(
        config,
        read_set=calibration_stage.read_set,
        make_learning=make_learning,
        calibration=calibration,
        tokens=tokens if learns else None,
    )
    model = model_stage.stage(config.model, mask=mask)
    start = evaluate_model.build_step(config, run_path, 0, learning_tokens(config), model)
    packing = [tokens] if isinstance(tokens, Stage) else []  # else they are another run's
    # The search before any evaluation: it refuses at once a calibration set that is of no use.
    untrained = [calibration, *(packing if learns else []), mask, dense, model, start]
    if zero_shot:
        return untrained

    def evaluate(step: int, tokens: int, exported: Path) -> bool:
        if step:  # step 0 is evaluated before training
            folder.complete(checkpoints[step])
        return config.train.until == "recovered" and has_recovered(compare([run_path]), step)

    settings, lessons, schedule = config.train, None, train_model.schedule_of(config)
    if settings.objective == "distill" and settings.stored_shares:
        teacher, mask_documents = settings.teacher or config.model, config.data.document_mask
        lessons = prepare_lessons.build(teacher, settings, mask_documents, tokens, shared=True)
    given = train_model.settings_of(config), model, tokens, lessons
    train = train_model.build(*given, on_checkpoint=evaluate, fit=fit)
    checkpoints = {
        step: evaluate_model.build_step(config, run_path, step, schedule.tokens_at(step), train)
        for step in schedule.exported_steps
        if step
    }
    trained = [*filter(None, [lessons]), train, *checkpoints.values()]
    return [*untrained, *([] if learns else packing), *trained]


def describe_time(command: Command) -> list[str]:
    """Lines on how long the whole run takes here, and on a shorter form of one that takes long."""
    from bosch.recipes import duration  # imports torch, which takes seconds

    def seconds_of(config: Config) -> dict[str, float]:
        schedule = None if command.zero_shot else train_model.schedule_of(config)
        return duration.stage_seconds(config, schedule)

    config = command.config
    found = seconds_of(config)
    lines = [f"time here, of the whole run: {duration.describe(found)}"]
    if sum(found.values()) > LONG_SECONDS and presets.name_of(command.preset, config) == "small":
        shorter = duration.describe(seconds_of(presets.shortened(config)))
        lines.append(f"a shorter form of it, by --preset brief: {shorter}")
    return lines


def introduce(command: Command, config: Config) -> None:
    """Print what this run will do, before work begins."""
    say(f"run folder {command.run_path}", *describe_choice(config), *command.chosen_by)
    say(*describe_config(config), *describe_settings(config), *presets.warnings(config))
    if used := learning_tokens(config):
        of = f"{used:,} of the {config.data.tokens:,} tokens"
        say(f"{of} are used to learn the mask, the rest to train")


if __name__ == "__main__":
    run_main(main)
