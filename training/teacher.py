"""The teacher of self-distillation: the dense model that the hybrid came from, frozen.

A hybrid whose groups all see everything is its dense model, so the teacher is read from the same
folder. It has its own embedding and head, since the student trains its own.
"""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from bosch.config import TrainConfig
from bosch.data.loader import IGNORED
from bosch.data.tokenizer_files import read_tokenizer
from bosch.hybrid.models import check_native_window, family_of
from bosch.run.errors import UserError
from bosch.training.loss import Lesson, install_kernels
from bosch.training.model_start import allocate, build_on_meta, fill_model, read_config
from bosch.training.trained import windowed_layers


class Pull(torch.autograd.Function):
    """Returns its input. Its gradient draws the input to a target: it is that of `strength` times
    the squared distance, as a share of the target's square."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, target: Tensor, strength: float) -> Tensor:
        ctx.save_for_backward(given, target)
        ctx.strength = strength
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        given, target = ctx.saved_tensors
        share = 2 * ctx.strength / target.float().square().sum()
        return grad_outputs[0] + ((given - target) * share).to(given.dtype), None, None


def start_teacher(
    folder: Path,
    settings: TrainConfig,
    device: torch.device,
    student: PreTrainedModel | None = None,
) -> "Teacher":
    config = read_config(folder)
    teacher = Teacher(build_dense(config, settings), settings, device, student)
    fill_model(teacher.model, folder, device, config.tie_word_embeddings)
    return teacher


def build_dense(config: PretrainedConfig, settings: TrainConfig) -> PreTrainedModel:
    """On the meta device: all groups of a hybrid on full attention, embedding and head apart."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    if (hybrid := getattr(config, "bosch", None)) is not None:
        hybrid["num_full"] = [config.num_key_value_heads] * config.num_hidden_layers
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    return build_on_meta(config, dtype)


class Teacher:
    """`model`, from `build_dense`, gets memory here, but no weights."""

    def __init__(
        self,
        model: Any,
        settings: TrainConfig,
        device: torch.device,
        student: PreTrainedModel | None = None,
    ) -> None:
        self.settings = settings
        model.requires_grad_(False)
        install_kernels(model, settings.kernels)
        # The student's loss multiplies the hidden states with the head's weight, chunk by chunk.
        model.lm_head.loss = lambda hidden_BTH, weight_VH: hidden_BTH
        self.outputs: dict[int, Tensor] = {}  # of the attention of windowed layers
        self.strength = 0.0
        if settings.layer_weight and student is not None:
            self.compare_layers(model, student)
        settings = replace(settings, activation_checkpointing=False)
        self.model = allocate(model, settings, device).eval()

    def compare_layers(self, teacher: Any, student: Any) -> None:
        """Keep what each windowed layer's attention gives to o_proj, and draw the student to it."""
        layers = [n for n, has_window in enumerate(windowed_layers(student.config)) if has_window]
        weight = self.settings.layer_weight / len(layers)

        def keep(number: int, module: nn.Module, given: tuple[Tensor]) -> None:
            self.outputs[number] = given[0]

        def draw(number: int, module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor] | None:
            if not torch.is_grad_enabled():
                return None
            return (Pull.apply(given[0], self.outputs[number], weight * self.strength),)

        for number in layers:
            for model, hook in ((teacher, keep), (student, draw)):
                projection = model.get_submodule(f"model.layers.{number}.self_attn.o_proj")
                projection.register_forward_pre_hook(partial(hook, number))

    @torch.no_grad()
    def teach(self, inputs: dict[str, object], labels_BT: Tensor, scale: float = 1.0) -> Lesson:
        """Inputs, labels and scale are those of the student's loss."""
        if self.settings.layer_weight:
            self.strength = scale * int((labels_BT != IGNORED).sum())
        hidden_BTH = self.model(**inputs, use_cache=False).logits
        # shard_model keeps the head gathered after a forward.
        head_VH, given = self.model.get_submodule("lm_head").weight, self.settings
        hidden_NH = hidden_BTH.flatten(0, 1)
        return Lesson(hidden_NH, head_VH, given.distill_weight, given.temperature)


def check_teacher(model: Path, teacher: Path) -> None:
    """Refuse a teacher whose distribution says nothing about this model's tokens."""
    own, other = read_config(model), read_config(teacher)
    check_native_window(other)

    def compare(what: str, wanted: str, found: str) -> None:
        if wanted != found:
            raise UserError(
                f"train.teacher {teacher} has another {what} ({found}) than the model to train "
                f"({wanted}). Leave the option out to learn from the dense model itself."
            )

    families = [family_of(config).plain_config_class.model_type for config in (own, other)]
    compare("family", *families)
    compare("vocabulary", f"{own.vocab_size:,} tokens", f"{other.vocab_size:,} tokens")
    compare("tokenizer", read_tokenizer(model).hash[:12], read_tokenizer(teacher).hash[:12])
