"""Trains the hybrid on packed tokens, to recover its quality: the stage `train`.

    python recipes/train_model.py --model hybrid --tokens-from tokens --out train
    accelerate launch recipes/train_model.py --model hybrid --tokens-from tokens --out train
    accelerate launch --use_fsdp --num_processes 2 recipes/train_model.py ...      # 2 CPU processes

--model may also be a dense model, as a control. Run the same command again to resume from the last
checkpoint. Ctrl-C, SIGTERM or a file named STOP in the folder end the training after the current
step, with everything saved.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import run_stage
from bosch.config import (
    FLAT,
    NO_OPTION,
    Config,
    TokenCount,
    TrainConfig,
    at_least,
    check_shares,
    fill_in,
)
from bosch.data.tokenizer_files import read_tokenizer
from bosch.methods._settings import learning_tokens
from bosch.model import (
    check_length,
    check_weights,
    describe_source,
    fetch_config,
    fetch_model,
    find_model,
)
from bosch.model_files import read_json_object
from bosch.recipes import presets
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.files import STARTED, read_sealed_json
from bosch.run.fingerprint import plain
from bosch.run.folder import home_of
from bosch.run.progress import say, show_rows
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage
from bosch.training.schedule import TrainSchedule, make_schedule

TEACHER = "train.teacher"
# What --hours chooses from, meant for small models; never less than one step, which alone has 2.1M
# tokens in the paper's settings. And the training's share of the hours.
FEWEST_TOKENS, MOST_TOKENS, TRAINING_SHARE = 300_000, 30_000_000, 0.6


@dataclass(frozen=True)
class Settings:
    """All that decides the training besides its model and tokens."""

    train: Annotated[TrainConfig, FLAT]
    tokens: TokenCount | None = None  # to train on; None: all in the folder, once
    evaluated: tuple[float, ...] = (0.0, 1.0)  # export the model after these shares of the steps
    document_mask: bool = True  # documents in one sequence do not attend to each other
    tokens_before: Annotated[int, NO_OPTION] = 0  # of the budget, used to learn the mask

    def __post_init__(self) -> None:
        at_least(1, self, "", "tokens")
        check_shares("--evaluated", self.evaluated)

    def schedule(self, budget: int, length: int) -> TrainSchedule:
        """But for the size of micro-batches on GPUs, which changes no step."""
        world, before = rank_and_world()[1], self.tokens_before
        return make_schedule(self.train, budget, length, self.evaluated, world, "cpu", before)


@dataclass(frozen=True)
class Options:
    model: str  # folder or hub id of a hybrid or dense model
    tokens_from: Path  # folder that prepare_tokens.py wrote
    out: Path  # folder to write
    settings: Annotated[Settings, FLAT]
    # Folder that prepare_lessons.py wrote for these tokens; None: ask the teacher at every step.
    lessons_from: Path | None = None


def main(arguments: Sequence[str]) -> None:
    # Lessons say themselves how many shares they have.
    train = replace(presets.for_stage(arguments).train, stored_shares=None)
    usual = {"settings": Settings(train)}
    options = run_stage(Options, arguments, check_and_build, usual)
    exports = sorted(options.out.glob("step-*"))
    say(f"trained model in {exports[-1] if exports else options.out}")


def check_and_build(options: Options, name: str) -> Stage:
    model, tokens = Artifact.load(fetch_model(options.model)), Artifact.load(options.tokens_from)
    check_weights(options.model)
    from bosch.data.loader import Loader, open_tokens
    from bosch.hybrid.models import check_native_window
    from bosch.training.model_start import read_config

    settings, lessons = options.settings, None
    if (until := settings.train.until) != "budget":
        raise UserError(f"--until {until} takes evaluations: train with recover.py.")
    check_settings(settings.train, settings.document_mask, options.model)
    if options.lessons_from is not None:
        lessons = Artifact.load(options.lessons_from)
        folder = lessons.folder
        try:
            facts = read_sealed_json(folder / STARTED, "settings", "inputs")
            found = facts["settings"] | facts["inputs"]
            train = replace(settings.train, stored_shares=found["shares"])
        except (MissingFileError, KeyError) as error:
            raise UserError(f"{folder} holds no lessons; prepare_lessons.py makes them.") from error
        if train.objective != "distill":
            raise UserError("--lessons-from is what a teacher says; pass --objective distill.")
        asked: dict[str, object] = {
            "temperature": train.temperature,
            "shares": settings.train.stored_shares,
            "document_mask": settings.document_mask,
            "tokens": tokens.fingerprint,
            "vocabulary": read_config(model.folder).vocab_size,
        }
        if train.teacher and plain(describe_source(train.teacher)) != found["teacher"]:
            raise UserError(f"The lessons of {folder} are not of train.teacher {train.teacher}.")
        for what, value in asked.items():
            if value is not None and (there := found.get(what)) != value:
                raise UserError(f"The lessons of {folder} are for {what} {there}, not {value}.")
        settings = replace(settings, train=train)
    elif settings.train.stored_shares:
        raise UserError("train.stored_shares needs --lessons-from; prepare_lessons.py makes them.")
    check_native_window(read_config(model.folder))
    packed = open_tokens(tokens.folder, read_tokenizer(model.folder).hash)
    for one in filter(None, (options.model, settings.train.teacher)):
        check_length("--tokens-from: sequences of", packed.seq_len, one)
    schedule = settings.schedule(settings.tokens or packed.train.rows.size, packed.seq_len)
    Loader(packed, settings.train.batch_sequences).sequences(schedule.num_steps - 1)
    return build(settings, model, tokens, lessons, name)


def check_settings(settings: TrainConfig, packed: bool, model: str, sink: str = "none") -> None:
    """Refuse kernels and attention that were named and cannot run here, a teacher that cannot teach
    this model, and settings without what they are for."""
    import torch

    from bosch.attention.dispatch import check_backend
    from bosch.kernels import choose_kernels
    from bosch.training.model_start import check_fp8
    from bosch.training.parallel import choose_device

    device, default = choose_device(os.environ), TrainConfig()
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    choose_kernels(settings.kernels, device)
    if settings.in_fp8:
        check_fp8(settings, device)
    check_backend("train.attention", settings.attention, device, dtype, True, packed, sink=sink)
    if settings.objective != "distill":
        for name in ("distill_weight", "temperature", "stored_shares", "layer_weight", "teacher"):
            if (value := getattr(settings, name)) != getattr(default, name):
                problem = f"train.{name} is {value}, but train.objective {settings.objective}"
                raise UserError(f"{problem} has no teacher; pass --train.objective distill.")
        return
    from bosch.training.model_start import read_config
    from bosch.training.teacher import check_teacher

    vocabulary = read_config(fetch_config(model)).vocab_size
    if settings.stored_shares and settings.stored_shares >= vocabulary:
        problem = f"train.stored_shares is {settings.stored_shares}, but {model} has"
        raise UserError(f"{problem} {vocabulary:,} tokens; store fewer.")
    if settings.teacher:
        check_teacher(fetch_model(model), fetch_model(settings.teacher, TEACHER))
        check_weights(settings.teacher)


def fit_memory(config: Config, world_size: int, is_named: bool) -> Config:
    """With the largest micro-batch up to the config's that fits these GPUs, and the fastest way to
    save memory that does. A micro-batch that the user named is refused if it does not fit, and so
    is a model that fits with none. Rank 0 decides, by the least memory of all ranks' GPUs: ranks
    with settings of their own, on slightly unequal machines, would wait for each other forever. So
    is what the machine with the least host memory cannot park."""
    from bosch.kernels import choose_kernels
    from bosch.run.group import Group, joined
    from bosch.run.memory import available_host_bytes, least
    from bosch.training.parallel import choose_device
    from bosch.training.rehearsal import choose_fitting, gpu_memory_gb, with_room_to_park

    with joined():
        ranks = Group.current()
        memory_gb = least(ranks.gather(ranks.all_succeed(gpu_memory_gb)))
        host_bytes = least(ranks.gather(available_host_bytes()))
        if memory_gb is None:
            return config

        def choose() -> TrainConfig:
            kernels, _ = choose_kernels(config.train.kernels, choose_device(os.environ))
            plan = with_room_to_park(make_plan(config, world_size, kernels), host_bytes)
            say("rehearsing a training step, which takes a minute or a few")
            return choose_fitting(plan, memory_gb, is_named)

        return replace(config, train=ranks.from_rank_0(choose))


def make_plan(config: Config, num_gpus: int, kernels: str = "torch") -> Any:
    """A training step as training/rehearsal.py estimates it."""
    from bosch.known_models import known_config
    from bosch.training.model_start import read_config
    from bosch.training.rehearsal import Plan, as_hybrid

    def shape_of(name: str) -> Any:
        known = known_config(name) if find_model(name) is None else None
        return known or read_config(fetch_config(name))

    model = as_hybrid(shape_of(config.model), config.ratio, config.window)
    teacher = shape_of(config.train.teacher) if config.train.teacher else None
    return Plan(model, config.train, config.data.sequence_length, num_gpus, kernels, teacher)


def rehearse(config: Config, num_gpus: int) -> None:
    """Print the memory that a training step would take (training/rehearsal.py)."""
    from bosch.training.rehearsal import COLUMNS, KERNELS, describe_parked, gpu_memory_gb
    from bosch.training.rehearsal import rehearse as run

    memory_gb = gpu_memory_gb() or 80.0
    chosen = KERNELS if config.train.kernels == "auto" else (config.train.kernels,)
    plans = [make_plan(config, num_gpus, kernels) for kernels in chosen]
    rows = [run(plan).row(plan, memory_gb) for plan in plans]
    title = f"{config.model}, {config.data.sequence_length:,} tokens, on GPUs of {memory_gb:.0f} GB"
    show_rows(title, rows, COLUMNS)
    say(describe_parked(plans[0]))


def settings_of(config: Config) -> Settings:
    data, before = config.data, learning_tokens(config)
    return Settings(config.train, data.tokens, config.eval.checkpoints, data.document_mask, before)


def with_hours(config: Config, hours: float, record: Path) -> tuple[Config, list[str]]:
    """The config with as many tokens, in whole steps, as fit into the hours here, and lines on it;
    of a run that has begun, with those that fitted then (`record`: its run.json). Search and
    evaluations get what the training leaves. Rank 0 measures: another would come to another
    number."""
    from bosch.run.group import Group
    from bosch.training.parallel import start_world

    if rank_and_world()[1] > 1:
        start_world()
    tokens, lines = Group.current().from_rank_0(lambda: _fit_tokens(config, hours, record))
    return replace(config, data=replace(config.data, tokens=tokens)), lines


def _fit_tokens(config: Config, hours: float, record: Path) -> tuple[int, list[str]]:
    from bosch.training.rehearsal import training_seconds

    if record.is_file():
        stored = fill_in(read_json_object(record).get("config") or {})
        return stored["data"]["tokens"], []
    step_tokens = config.train.batch_sequences * config.data.sequence_length

    def with_steps(steps: int) -> Config:
        return replace(config, data=replace(config.data, tokens=steps * step_tokens))

    def trains(steps: int) -> bool:
        """A learned mask takes its share of the tokens first."""
        return steps * step_tokens - learning_tokens(with_steps(steps)) >= step_tokens

    least = math.ceil(FEWEST_TOKENS / step_tokens)
    # If no number is enough, as with token_share=1, the schedule refuses it.
    fewest = next(filter(trains, range(least, least + 100)), least)
    most = max(MOST_TOKENS // step_tokens, fewest)
    one = with_steps(fewest)
    # All of its steps are measured; what ends a training early is checked with the tokens chosen.
    whole = replace(one, train=replace(one.train, until="budget", max_steps=None))
    seconds = training_seconds(make_plan(one, rank_and_world()[1]), schedule_of(whole))
    fit = math.floor(TRAINING_SHARE * hours * 3600 / seconds * fewest)
    chosen = with_steps(min(max(fit, fewest), most))
    line = f"--hours {hours:g}: {chosen.data.tokens:,} tokens"
    if fit < fewest:
        needed = seconds / TRAINING_SHARE / 3600
        line += f", the fewest that teach anything; they need about {needed:.1f} hours"
    elif fit > most:
        line += ", the most that --hours chooses; --data.tokens sets more"
    return chosen.data.tokens, [line]


def schedule_of(config: Config) -> TrainSchedule:
    return settings_of(config).schedule(config.data.tokens, config.data.sequence_length)


def build(
    settings: Settings,
    model: Stage | Artifact,
    tokens: Stage | Artifact,
    lessons: Stage | Artifact | None = None,
    name: str = "train",
    on_checkpoint: Callable[[int, int, Path], bool | None] | None = None,
    fit: Callable[[], Config] | None = None,
) -> Stage:
    """The stage. `on_checkpoint`: of training/loop.py. `fit`: the config with a micro-batch that
    fits here."""
    inputs = {"model": model, "tokens": tokens}
    facts = dict(vars(settings))
    if not settings.tokens_before:
        del facts["tokens_before"]  # as in runs without a learned mask from the first on
    if lessons is not None:
        inputs["lessons"] = lessons
    elif settings.train.objective == "distill" and settings.train.teacher is not None:
        inputs["teacher"] = Artifact.load(fetch_model(settings.train.teacher, TEACHER))

    def run(out: Path, model: Artifact, tokens: Artifact, **learned_from: Artifact) -> None:
        from bosch.data.loader import open_tokens
        from bosch.training.loop import TrainJob, train

        packed = open_tokens(tokens.folder, read_tokenizer(model.folder).hash)
        sources: dict[str, Any] = {n: given.folder for n, given in learned_from.items()}
        job = TrainJob(
            fit().train if fit else settings.train,
            model.folder,
            packed,
            out,
            settings.tokens or packed.train.rows.size,
            settings.evaluated,
            settings.document_mask,
            facts | {"model": model.fingerprint, "tokens_folder": tokens.fingerprint},
            on_checkpoint,
            run_folder=home_of(out),
            tokens_before=settings.tokens_before,
            **sources,
        )
        if stopped_by := train(job):
            say(f"{name}: stopped by {stopped_by}, and saved; the same command resumes here")
            raise SystemExit(0)

    return Stage(name, run, facts, inputs, ranks="all")


if __name__ == "__main__":
    run_main(main)
