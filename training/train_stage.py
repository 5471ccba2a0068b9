"""The stage `train`: continues the training of the hybrid on packed tokens (training/loop.py)."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bosch.config import (
    FLAT,
    NO_OPTION,
    OF_TEACHER,
    Config,
    TokenCount,
    TrainConfig,
    at_least,
    check_shares,
)
from bosch.data.tokenizer_files import read_tokenizer
from bosch.methods._settings import learning_tokens
from bosch.model import check_length, check_weights, fetch_config, fetch_model
from bosch.model_files import is_trained
from bosch.plugins import own_backend_files
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.fingerprint import plain
from bosch.run.folder import home_of
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage, nothing_to_check
from bosch.training.schedule import TrainSchedule, make_schedule

if TYPE_CHECKING:
    from bosch.training.fitting import Fitted  # imports torch

VERSION = 1  # raised when the same settings give other weights
TEACHER = "train.teacher"


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
        return make_schedule(
            self.train,
            budget_tokens=budget,
            seq_len=length,
            evaluated_shares=self.evaluated,
            world_size=rank_and_world()[1],
            device_type="cpu",
            tokens_before=self.tokens_before,
        )


def settings_of(config: Config) -> Settings:
    train = config.train
    if "weights=learned" in config.mask.options and train.objective == "distill":
        # The hybrid begins with weights that were trained with the mask. It learns from the model
        # that it came from, as stored lessons have it, and not from those weights without windows.
        train = replace(train, teacher=train.teacher or config.model)
    return Settings(
        train,
        tokens=config.data.tokens,
        evaluated=config.eval.checkpoints,
        document_mask=config.data.document_mask,
        tokens_before=learning_tokens(config),
    )


def schedule_of(config: Config) -> TrainSchedule:
    return settings_of(config).schedule(config.data.tokens, config.data.sequence_length)


def check(settings: TrainConfig, document_mask: bool, model: str, sink: str = "none") -> None:
    """Refuse a launch that cannot train, kernels and attention that were named and cannot run here,
    a teacher that cannot teach this model, and settings without what they are for."""
    import torch

    from bosch.attention.dispatch import check_backend
    from bosch.kernels import choose_kernels
    from bosch.training.model_start import (
        build_on_meta,
        check_fp8,
        check_positions,
        choose_trained,
        read_config,
    )
    from bosch.training.parallel import check_launch, choose_device
    from bosch.training.teacher import check_teacher

    check_launch()
    device, default = choose_device(os.environ), TrainConfig()
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    choose_kernels(settings.kernels, device)
    if settings.in_fp8:
        check_fp8(settings, device)
    if settings.context_parallel > 1:
        check_positions(settings, read_config(fetch_config(model)))
    if settings.trained == "norms":  # which have no weights in OLMo
        choose_trained(build_on_meta(read_config(fetch_config(model))), "norms", 0)
    check_backend(
        "train.attention",
        settings.attention,
        device,
        dtype,
        trains=True,
        packed=document_mask,
        has_sink=sink != "none",
    )
    if settings.lora_rank != default.lora_rank and not settings.trained.startswith("lora"):
        problem = f"train.lora_rank is {settings.lora_rank}, but train.trained {settings.trained}"
        raise UserError(f"{problem} has no such matrices; pass --train.trained lora.")
    if settings.objective != "distill":
        for name in OF_TEACHER:
            if (value := getattr(settings, name)) != getattr(default, name):
                problem = f"train.{name} is {value}, but train.objective {settings.objective}"
                raise UserError(f"{problem} has no teacher; pass --train.objective distill.")
        return
    if settings.reverse_weight != default.reverse_weight and not settings.on_policy:
        problem = f"train.reverse_weight is {settings.reverse_weight}, but train.on_policy is 0"
        raise UserError(f"{problem}, where it counts; pass --train.on-policy 0.2.")
    vocabulary = read_config(fetch_config(model)).vocab_size
    if settings.stored_shares and settings.stored_shares >= vocabulary:
        problem = f"train.stored_shares is {settings.stored_shares}, but {model} has"
        raise UserError(f"{problem} {vocabulary:,} tokens; store fewer.")
    if settings.teacher:
        check_teacher(fetch_model(model), fetch_model(settings.teacher, TEACHER))
        check_weights(settings.teacher)


def check_dense_is_known(settings: TrainConfig, model: Path) -> None:
    """Refuse to take a model that was trained for its own teacher."""
    if settings.objective == "distill" and settings.teacher is None and is_trained(model):
        problem = (
            f"{model} was trained, so it no longer has the dense model's weights to learn from"
        )
        raise UserError(f"{problem}. Name the dense model (bosch train --teacher).")


def check_tokens(settings: Settings, model: str, tokens: Artifact) -> None:
    """Refuse tokens of another tokenizer, in longer sequences than the models can read, or too few
    for the schedule; and a model with windows of its family's own."""
    from bosch.data.loader import Loader, open_tokens
    from bosch.hybrid.models import check_native_window
    from bosch.training.model_start import read_config

    folder = fetch_model(model)
    check_native_window(read_config(folder))
    packed = open_tokens(tokens.folder, read_tokenizer(folder).hash)
    for one in filter(None, (model, settings.train.teacher)):
        check_length("--tokens-from: sequences of", packed.seq_len, one)
    schedule = settings.schedule(settings.tokens or packed.train.rows.size, packed.seq_len)
    # The last step of all reads the tokens that are missing, if any are.
    Loader(packed, settings.train.batch_sequences).sequences(schedule.num_steps - 1)


def stage(
    settings: Settings,
    model: Stage | Artifact,
    tokens: Stage | Artifact,
    lessons: Stage | Artifact | None = None,
    name: str = "train",
    on_checkpoint: Callable[[int, int, Path], bool | None] | None = None,
    fitted: "Fitted | None" = None,
    seconds_left: Callable[[int], float] | None = None,
    check: Callable[[], None] = nothing_to_check,
    answers: Stage | Artifact | None = None,
) -> Stage:
    """`lessons`: of training/lessons_stage.py, in place of a teacher, but for what the hybrid
    writes. `on_checkpoint`: of training/loop.py, as `seconds_left`. `fitted`: settings with a
    micro-batch that fits here; None: as they are. `answers`: of training/answers_stage.py, in place
    of some of the tokens."""
    inputs = {"model": model, "tokens": tokens}
    facts = dict(vars(settings))
    if not settings.train.on_policy:  # as in runs from before there was any
        facts["train"] = plain(settings.train)
        del facts["train"]["on_policy"], facts["train"]["reverse_weight"]
    if not settings.tokens_before:
        del facts["tokens_before"]  # as in runs without a learned mask from the first on
    if own := own_backend_files(settings.train.attention):
        facts["plugins"] = own
    if answers is not None:
        inputs["answers"] = answers
    if lessons is not None:
        inputs["lessons"] = lessons
    # Lessons say nothing of what the hybrid will write.
    is_asked = settings.train.on_policy or lessons is None
    if settings.train.objective == "distill" and settings.train.teacher is not None and is_asked:
        inputs["teacher"] = Artifact.load(fetch_model(settings.train.teacher, TEACHER))

    def run(
        out: Path,
        model: Artifact,
        tokens: Artifact,
        lessons: Artifact | None = None,
        teacher: Artifact | None = None,
        answers: Artifact | None = None,
    ) -> None:
        from bosch.data.loader import open_tokens  # torch: seconds
        from bosch.training.loop import TrainJob, train

        answered = answers.folder if answers else None
        packed = open_tokens(tokens.folder, read_tokenizer(model.folder).hash, answered)
        read = {"tokens_folder": tokens.fingerprint}
        read |= {"answers": answers.fingerprint} if answers else {}
        # What fits is asked for only now: that takes minutes, and a training that is complete never
        # comes here. The facts go into each checkpoint too, with what the folder's inputs are, so
        # that it resumes no other training.
        job = TrainJob(
            fitted.train if fitted else settings.train,
            model.folder,
            packed,
            out,
            budget_tokens=settings.tokens or packed.train.rows.size,
            evaluated_shares=settings.evaluated,
            document_mask=settings.document_mask,
            facts=facts | {"model": model.fingerprint} | read,
            on_checkpoint=on_checkpoint,
            seconds_left=seconds_left,
            run_folder=home_of(out),
            tokens_before=settings.tokens_before,
            lessons=lessons.folder if lessons else None,
            teacher=teacher.folder if teacher else None,
        )
        if stopped_by := train(job):
            say(f"{name}: stopped by {stopped_by}, and saved; the same command resumes here")
            raise SystemExit(0)

    return Stage(
        name,
        run=run,
        settings=facts,
        version=VERSION,
        inputs=inputs,
        ranks="all",
        check=check,
    )
