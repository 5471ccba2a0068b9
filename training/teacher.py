"""The teacher of self-distillation: the dense model that the hybrid came from, frozen. And its
lessons: what it says of packed tokens, computed once for all runs that train on them.

A hybrid whose groups all see everything is its dense model, so the teacher is read from the same
folder. It has its own embedding and head, since the student trains its own.

    lessons-00000.npy    of one sequence or of 32,768 tokens: for each token a sample of the
                         next ones (loss.draw) and the logarithms of their shares
    cost.json            the tokens, and the FLOPs of the teacher's forward pass

A training that reads lessons needs no teacher in memory. A computation of them that was killed goes
on with the files that are missing.
"""
# B sequences of a micro-batch, T tokens, N = B * T, K drawn tokens, V vocabulary, H hidden size

import copy
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from bosch.config import TrainConfig
from bosch.data.loader import IGNORED, Batch, TokenFolder
from bosch.data.tokenizer_files import read_tokenizer
from bosch.hybrid.export import MASK_KEY
from bosch.hybrid.models import check_native_window, family_of
from bosch.masks.mask import describe_bytes
from bosch.model import known_to_hub
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.files import MANIFEST, read_sealed_json, write_atomically, write_sealed_json
from bosch.run.progress import say, track
from bosch.training import loss, model_start
from bosch.training.checkpoint import explain_refusal
from bosch.training.loss import Lesson, StoredLesson
from bosch.training.metrics import LessonCost
from bosch.training.model_start import read_config, windowed_layers
from bosch.training.parallel import decide, start_world

FILE_TOKENS = 32_768
FORWARD_TOKENS = 8_192  # at once
FILE = "lessons-{:05d}.npy"
COST = "cost.json"


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
    folder: Path, settings: TrainConfig, device: torch.device, student: Any = None
) -> "Teacher":
    config = read_config(folder)
    teacher = Teacher(build_dense(config, settings), settings, device, student)
    model_start.fill_model(teacher.model, folder, device, config.tie_word_embeddings)
    return teacher


def build_dense(config: PretrainedConfig, settings: TrainConfig) -> PreTrainedModel:
    """On the meta device: all groups of a hybrid on full attention, embedding and head apart."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    model_start.drop_windows(config)
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    return model_start.build_on_meta(config, dtype)


class Teacher:
    """`model`, from `build_dense`, gets memory here, but no weights. `student`: its layers are
    drawn to the teacher's, if the settings say so."""

    def __init__(
        self, model: Any, settings: TrainConfig, device: torch.device, student: Any = None
    ) -> None:
        self.settings = settings
        model.requires_grad_(False)
        loss.install_kernels(model, settings.kernels, in_blocks=not settings.compile)
        # The student's loss multiplies the hidden states with the head's weight, chunk by chunk.
        model.lm_head.loss = lambda hidden_BTH, weight_VH: hidden_BTH
        self.outputs: dict[int, Tensor] = {}  # of the attention of windowed layers
        self.strength = 0.0
        if settings.layer_weight and student is not None:
            self.compare_layers(model, student)
        settings = replace(settings, activation_checkpointing=False)
        self.model = model_start.allocate(model, settings, device).eval()

    def compare_layers(self, teacher: Any, student: Any) -> None:
        """Keep what each windowed layer's attention gives to o_proj, and draw the student to it."""
        layers = [n for n, has_window in enumerate(windowed_layers(student.config)) if has_window]
        weight = self.settings.layer_weight / len(layers)

        def keep(number: int, module: nn.Module, given: tuple[Tensor]) -> None:
            self.outputs[number] = given[0]

        def draw(number: int, module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor] | None:
            if not torch.is_grad_enabled():  # held-out texts, which no teacher has read
                return None
            return (Pull.apply(given[0], self.outputs[number], weight * self.strength),)

        # The teacher reads a micro-batch before the student does (`teach`), so what the student's
        # hook finds is of the same tokens; also when a block is recomputed in the backward.
        for number in layers:
            for model, hook in ((teacher, keep), (student, draw)):
                projection = model.model.layers[number].self_attn.o_proj
                projection.register_forward_pre_hook(partial(hook, number))

    @torch.no_grad()
    def teach(
        self, inputs: Any, labels_BT: Tensor, scale: float = 1.0, numbers: object = None
    ) -> Lesson:
        """Inputs, labels and scale are those of the student's loss."""
        if self.settings.layer_weight:
            self.strength = scale * int((labels_BT != IGNORED).sum())
        hidden_NH = self.model(**inputs, use_cache=False).logits.flatten(0, 1)
        # shard_model keeps the head gathered after a forward.
        given, head_VH = self.settings, self.model.lm_head.weight
        return Lesson(hidden_NH, head_VH, given.distill_weight, given.temperature)


def check_teacher(model: Path, teacher: Path) -> None:
    """Refuse a teacher whose distribution says nothing about this model's tokens."""
    check_native_window(read_config(teacher))
    for (what, wanted), (_, found) in zip(shared_by(model), shared_by(teacher), strict=True):
        if wanted != found:
            raise UserError(
                f"train.teacher {teacher} has another {what} ({found}) than the model to train "
                f"({wanted}). Leave the option out to learn from the dense model itself."
            )


def shared_by(folder: Path) -> Iterator[tuple[str, str]]:
    config = read_config(folder)
    yield "family", family_of(config).plain_config_class.model_type
    yield "vocabulary", f"{config.vocab_size:,} tokens"
    yield "tokenizer", read_tokenizer(folder).hash[:12]


# ----------------------------------------------------------------------------------------- lessons


def write_lessons(
    folder: Path, teacher: Path, tokens: TokenFolder, settings: TrainConfig, document_mask: bool
) -> None:
    """Every rank calls this, and writes its share of the files."""
    device = start_world()
    settings = decide(settings, device)
    assert settings.stored_shares is not None
    ranks, model = Ranks.current(), start_teacher(teacher, settings, device)
    kind = lesson_type(settings.stored_shares, read_config(teacher).vocab_size)
    sequences, length, total = tokens.train, tokens.seq_len, len(tokens.train.rows)
    per_file = min(max(1, FILE_TOKENS // length), total)
    at_once = max(1, FORWARD_TOKENS // length)
    starts = range(0, total, per_file)
    files = {begin: folder / FILE.format(begin // per_file) for begin in starts}
    # Rank 0 looks, since files appear at different times on several machines: all must agree.
    left = ranks.from_rank_0(lambda: [begin for begin in starts if not files[begin].is_file()])
    done = min((len(starts) - len(left)) * per_file, total)
    size = describe_bytes(total * length * kind.itemsize)
    say(f"lessons: {size}, {kind.itemsize} bytes a token")
    with track("lessons", total * length, "tokens", done * length) as bar:
        for turn in range(0, len(left), ranks.world):
            place = turn + ranks.rank
            # A forward of a sharded model takes all ranks; those without a file do the last again.
            begin = left[min(place, len(left) - 1)]
            numbers = np.arange(begin, min(begin + per_file, total))
            # All ranks as many: the last file may be shorter.
            padded = np.pad(numbers, (0, per_file - len(numbers)), mode="edge")
            found = np.empty((per_file, length), kind)
            for first in range(0, per_file, at_once):
                batch = sequences.batch(padded[first : first + at_once], document_mask).to(device)
                said = taught(model, batch, kind, padded[first], settings.attention)
                found[first : first + at_once] = said
            content = io.BytesIO()
            np.save(content, found[: len(numbers)])
            with explain_refusal(str(files[begin])):
                write = partial(write_atomically, files[begin], content.getvalue())
                ranks.all_succeed(write if place < len(left) else lambda: None)
            bar.advance(len(numbers) * length * min(ranks.world, len(left) - turn))
    cost = LessonCost.of(model.model)
    flops = {"per_token": cost.flops_per_token, "per_pair": cost.flops_per_pair}
    if ranks.rank == 0:
        facts = {"tokens": total * length, "flops": flops, "revision": known_to_hub(teacher)[1]}
        write_sealed_json(folder / COST, facts)


@torch.no_grad()
def taught(
    model: Teacher, batch: Batch, kind: np.dtype[Any], seed: int, attention: str = "auto"
) -> NDArray[Any]:
    """(sequences, tokens)"""
    # Seeded by a sequence's number, so that another attempt, or more ranks, draw the same.
    generator = torch.Generator(batch.ids_BT.device).manual_seed(int(seed))
    inputs: dict[str, Any] = {"input_ids": batch.ids_BT, "position_ids": batch.position_ids_BT}
    if attention != "auto":
        inputs["bosch_backend"] = attention
    lesson = model.teach(inputs, batch.labels_BT)
    found = np.empty(batch.ids_BT.numel(), kind)
    for begin in range(0, len(found), loss.CHUNK_ROWS):
        rows = slice(begin, begin + loss.CHUNK_ROWS)
        logits_NV = F.linear(lesson.hidden_NH[rows], lesson.head_VH).float() / lesson.temperature
        drawn = loss.draw(F.log_softmax(logits_NV, dim=1), kind["ids"].shape[0], generator)
        found["ids"][rows], found["log_shares"][rows] = (each.cpu().numpy() for each in drawn)
    return found.reshape(batch.ids_BT.shape)


def read_cost(folder: Path) -> LessonCost | None:
    """None for lessons from before it was recorded."""
    if not (folder / COST).is_file():
        return None
    cost, seconds = read_sealed_json(folder / COST, "tokens", "flops"), None
    if (folder / MANIFEST).is_file():
        taken = read_sealed_json(folder / MANIFEST, "wall_seconds")["wall_seconds"]
        seconds = sum(taken) / cost["tokens"]
    return LessonCost(cost["flops"]["per_token"], cost["flops"]["per_pair"], seconds)


def check_revision(folder: Path, model: PretrainedConfig) -> None:
    """Refuse lessons of another commit of the dense model on the hub than a hybrid is of: what is
    shared is known by the model's name, so that planning a run downloads nothing."""
    hybrid = getattr(model, "bosch", None) or {}
    wanted = ((hybrid.get(MASK_KEY) or {}).get("model") or {}).get("revision")
    found = read_sealed_json(folder / COST).get("revision") if (folder / COST).is_file() else None
    if wanted and found and wanted != found:
        raise UserError(
            f"the lessons of {folder} are of commit {found[:12]} of the dense model, and the "
            f"hybrid is of {wanted[:12]}: the model on the hub has changed. --fresh lessons of "
            "`bosch recover` makes them again."
        )


def lesson_type(shares: int, vocabulary: int) -> np.dtype[Any]:
    """What is stored of a token."""
    ids = ("ids", "<u2" if vocabulary <= 1 << 16 else "<u4", (shares,))
    return np.dtype([ids, ("log_shares", "<f2", (shares + 1,))])


class Lessons:
    """A finished folder of them."""

    def __init__(self, folder: Path, settings: TrainConfig) -> None:
        self.folder, self.settings = folder, settings
        self.per_file, self.cost = len(self.open(0)), read_cost(folder)

    @lru_cache(maxsize=64)  # noqa: B019  one for each training
    def open(self, number: int) -> NDArray[Any]:
        # Mapped, not read: a batch needs a few rows of some files, of which there may be thousands.
        return np.load(self.folder / FILE.format(number), mmap_mode="r")

    def teach(
        self, inputs: Any, labels_BT: Tensor, scale: float, numbers: Sequence[int]
    ) -> StoredLesson:
        """Of sequences by their numbers in the tokens' file, where the labels are."""
        pieces = inputs.get("bosch_pieces")
        spans = [(0, None)] if pieces is None else pieces.spans(pieces.rank)
        found = [
            self.open(number // self.per_file)[number % self.per_file][begin:end]
            for number in numbers
            for begin, end in spans
        ]
        ids, shares = (np.concatenate([each[n] for each in found]) for n in ("ids", "log_shares"))
        device = labels_BT.device
        return StoredLesson(
            ids_NK=torch.from_numpy(ids.astype(np.int64)).to(device),
            log_shares_NR=torch.from_numpy(shares).to(device),
            weight=self.settings.distill_weight,
            temperature=self.settings.temperature,
        )
