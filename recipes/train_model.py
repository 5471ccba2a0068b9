"""Trains the hybrid on packed tokens, to recover its quality: the stage `train`.

    python recipes/train_model.py --model hybrid --tokens-from tokens --out train
    accelerate launch recipes/train_model.py --model hybrid --tokens-from tokens --out train
    accelerate launch --use_fsdp --num_processes 2 recipes/train_model.py ...      # 2 CPU processes

--model may also be a dense model, as a control. Run the same command again to resume from the last
checkpoint. Ctrl-C, SIGTERM or a file named STOP in the folder end the training after the current
step, with everything saved.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bosch.command_line import parse
from bosch.config import FLAT, Config, TokenCount, TrainConfig, at_least, check_shares
from bosch.data.tokenizer_files import read_tokenizer
from bosch.methods._settings import learning_tokens
from bosch.model import check_weights, fetch_config, fetch_model, find_model
from bosch.recipes import presets
from bosch.run import progress
from bosch.run.errors import UserError, run_main
from bosch.run.folder import RunFolder, home_of
from bosch.run.progress import say, show_rows
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from bosch.training.rehearsal import Plan
    from bosch.training.schedule import TrainSchedule

TEACHER = "train.teacher"
VERSION = 1  # raised when the same settings, model and tokens give other weights

# on_checkpoint(step, tokens trained on so far, folder of the model), on all ranks
OnCheckpoint = Callable[[int, int, Path], bool | None]


@dataclass(frozen=True)
class Options:
    """Train a hybrid or dense model on packed tokens."""

    model: str  # folder or hub id of a hybrid or dense model
    tokens_from: Path  # folder that prepare_tokens.py wrote
    out: Path  # folder to write
    train: Annotated[TrainConfig, FLAT]
    tokens: TokenCount | None = None  # to train on; None: all in the folder, once
    evaluated: tuple[float, ...] = (0.0, 1.0)  # export the model after these shares of the steps
    document_mask: bool = True  # documents in one sequence do not attend to each other

    def __post_init__(self) -> None:
        at_least(1, self, "", "tokens")
        check_shares("--evaluated", self.evaluated)


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments, train=presets.for_stage(arguments).train)
    rank, world = rank_and_world()
    progress.set_up(rank)
    check_attention(options.train, options.document_mask)
    out = options.out.absolute()
    model, tokens = Artifact.load(fetch_model(options.model)), Artifact.load(options.tokens_from)
    check_weights(options.model)
    check_inputs(options, model.folder, tokens.folder, world)
    stage = make_stage(
        out.name,
        options.train,
        options.tokens,
        options.evaluated,
        options.document_mask,
        {"model": model, "tokens": tokens},
    )
    with RunFolder(out.parent, rank, world, say, home=home_of(out)) as run:
        run.complete(stage)
    exports = sorted(options.out.glob("step-*"))
    say(f"trained model in {exports[-1] if exports else options.out}")


def check_inputs(options: Options, model: Path, tokens: Path, world_size: int) -> None:
    """Refuse, before anything is written, what the training would refuse after it."""
    from bosch.data.loader import Loader, open_tokens
    from bosch.hybrid.models import check_native_window
    from bosch.training.model_start import read_config
    from bosch.training.parallel import choose_device, choose_kernels
    from bosch.training.schedule import make_schedule

    if options.train.until != "budget":
        raise UserError(
            f"--until {options.train.until} takes evaluations, which this command does not make; "
            "train with recover.py."
        )
    check_native_window(read_config(model))
    packed, device = open_tokens(tokens, read_tokenizer(model).hash), choose_device(os.environ)
    budget, shares = options.tokens or packed.train.rows.size, options.evaluated
    length, batch = packed.seq_len, options.train.batch_sequences
    schedule = make_schedule(options.train, budget, length, shares, world_size, device.type)
    Loader(packed, batch).sequences(schedule.num_steps - 1)
    choose_kernels(options.train.kernels, device)
    check_objective(options.train, options.model)


def check_machine(config: Config, world_size: int) -> None:
    """Refuse, before hours of search, a batch that these ranks cannot share, and kernels and
    attention that were named and cannot run here."""
    from bosch.training.parallel import choose_device, choose_kernels
    from bosch.training.schedule import choose_micro_batch

    device = choose_device(os.environ)
    choose_micro_batch(config.train, config.data.sequence_length, world_size, device.type)
    choose_kernels(config.train.kernels, device)
    check_attention(config.train, config.data.document_mask)
    check_objective(config.train, config.model)


def check_objective(settings: TrainConfig, model: str) -> None:
    """Refuse a teacher that cannot teach this model, and settings without what they are for."""
    if settings.trained != "lora" and settings.lora_rank != TrainConfig().lora_rank:
        raise UserError(
            f"train.lora_rank is {settings.lora_rank}, but train.trained is {settings.trained}; "
            "pass --train.trained lora."
        )
    if settings.objective != "distill":
        default = TrainConfig()
        for name in ("distill_weight", "temperature", "top_k", "layer_weight", "teacher"):
            if (value := getattr(settings, name)) != getattr(default, name):
                raise UserError(
                    f"train.{name} is {value}, but train.objective is {settings.objective}, which "
                    "has no teacher; pass --train.objective distill."
                )
        return
    from bosch.training.teacher import check_teacher, check_top_k

    if settings.top_k:
        from bosch.training.model_start import read_config

        check_top_k(settings, model, read_config(fetch_config(model)))
    if settings.teacher:
        check_teacher(fetch_model(model), fetch_model(settings.teacher, TEACHER))
        check_weights(settings.teacher)


def fit_memory(config: Config, world_size: int, is_named: bool) -> Config:
    """With the largest micro-batch up to the config's that fits these GPUs. One that the user named
    is refused if it does not, and so is a model that fits with none. Where all machines have the
    same GPUs, each rank comes to the same number by itself."""
    from bosch.training.parallel import choose_device, choose_kernels
    from bosch.training.rehearsal import choose_fitting, gpu_memory_gb

    memory_gb = gpu_memory_gb()
    if memory_gb is None:
        return config
    kernels, _ = choose_kernels(config.train.kernels, choose_device(os.environ))
    say("rehearsing a training step, which takes a minute or a few")
    micro = choose_fitting(make_plan(config, world_size, kernels), memory_gb, is_named)
    return replace(config, train=replace(config.train, micro_batch_sequences=micro))


def make_plan(config: Config, num_gpus: int, kernels: str) -> "Plan":
    from bosch.known_models import known_config
    from bosch.training.model_start import read_config
    from bosch.training.rehearsal import Plan, as_hybrid
    from bosch.training.teacher import check_top_k

    def shape_of(name: str) -> "PretrainedConfig":
        known = known_config(name) if find_model(name) is None else None
        return known or read_config(fetch_config(name))

    model = as_hybrid(shape_of(config.model), config.ratio, config.window)
    check_top_k(config.train, config.model, model)
    teacher = shape_of(config.train.teacher) if config.train.teacher else None
    return Plan(model, config.train, config.data.sequence_length, num_gpus, kernels, teacher)


def rehearse(config: Config, num_gpus: int) -> None:
    """Print the memory that a training step would take (training/rehearsal.py)."""
    from bosch.training.rehearsal import COLUMNS, KERNELS, gpu_memory_gb
    from bosch.training.rehearsal import rehearse as run

    memory_gb = gpu_memory_gb() or 80.0
    chosen = KERNELS if config.train.kernels == "auto" else (config.train.kernels,)
    plans = [make_plan(config, num_gpus, kernels) for kernels in chosen]
    rows = [run(plan).row(plan, memory_gb) for plan in plans]
    title = f"{config.model}, {config.data.sequence_length:,} tokens, on GPUs of {memory_gb:.0f} GB"
    show_rows(title, rows, COLUMNS)


def check_attention(settings: TrainConfig, packed: bool) -> None:
    """Refuse, before work begins, an attention backend that was named and cannot run here."""
    if settings.attention == "auto":
        return
    import torch

    from bosch.hybrid.dispatch import check_backend
    from bosch.training.parallel import choose_device

    device = choose_device(os.environ)
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    check_backend("train.attention", settings.attention, device, dtype, trains=True, packed=packed)


def build(
    config: Config,
    model: Stage | Artifact,
    tokens: Stage | Artifact,
    on_checkpoint: OnCheckpoint | None = None,
    fit: Callable[[], Config] | None = None,
) -> Stage:
    """The stage `train` of recover.py. `fit`: the config with a micro-batch that fits here."""
    return make_stage(
        "train",
        config.train,
        config.data.tokens,
        config.eval.checkpoints,
        config.data.document_mask,
        {"model": model, "tokens": tokens},
        on_checkpoint,
        learning_tokens(config),
        (lambda: fit().train) if fit else None,
    )


def schedule_of(config: Config) -> "TrainSchedule":
    """Steps and tokens of recover.py's training."""
    from bosch.training.schedule import make_schedule

    return make_schedule(
        config.train,
        config.data.tokens,
        config.data.sequence_length,
        config.eval.checkpoints,
        rank_and_world()[1],
        "cpu",
        learning_tokens(config),
    )


def make_stage(
    name: str,
    settings: TrainConfig,
    budget_tokens: int | None,
    evaluated_shares: tuple[float, ...],
    document_mask: bool,
    inputs: dict[str, Stage | Artifact],
    on_checkpoint: OnCheckpoint | None = None,
    tokens_before: int = 0,
    fit: Callable[[], TrainConfig] | None = None,
) -> Stage:
    """`tokens_before`: tokens of the budget that learning the mask has used."""
    facts: dict[str, object] = {
        "train": settings,
        "tokens": budget_tokens,
        "evaluated": evaluated_shares,
        "document_mask": document_mask,
        **({"tokens_before": tokens_before} if tokens_before else {}),
    }

    if settings.objective == "distill" and settings.teacher is not None:
        inputs = {**inputs, "teacher": Artifact.load(fetch_model(settings.teacher, TEACHER))}

    def run(out: Path, model: Artifact, tokens: Artifact, teacher: Artifact | None = None) -> None:
        from bosch.data.loader import open_tokens
        from bosch.training.loop import TrainJob, train

        packed = open_tokens(tokens.folder, read_tokenizer(model.folder).hash)
        job = TrainJob(
            fit() if fit else settings,
            model.folder,
            packed,
            out,
            packed.train.rows.size if budget_tokens is None else budget_tokens,
            evaluated_shares,
            document_mask,
            facts | {"model": model.fingerprint, "tokens_folder": tokens.fingerprint},
            on_checkpoint,
            run_folder=home_of(out),
            tokens_before=tokens_before,
            teacher=None if teacher is None else teacher.folder,
        )
        stopped_by = train(job)
        if stopped_by is not None:
            say(f"{name}: stopped by {stopped_by}, and saved; the same command resumes here")
            raise SystemExit(0)

    return Stage(name, run=run, settings=facts, inputs=inputs, version=VERSION, ranks="all")


if __name__ == "__main__":
    run_main(main)
