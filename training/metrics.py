"""metrics.jsonl, the record of a training run with one line per step, forced to disk before the
next; and the time and the FLOPs of a step, from which its share of the device's peak (MFU) is
computed. A run that resumes makes its TensorBoard files again from the record.

    FLOPs of a batch = (6 * N - 2 * F) * tokens + 12 * head size * pairs

N counts the weights used in products: the head and the active experts, but not the embedding
lookup. F counts the frozen ones of these, whose gradients are not computed.
A pair is one query of one head that sees one key; windows and ends of documents limit them.
Recomputation to save memory does not count. A teacher that is asked adds a third of this, a forward
pass; of stored lessons the share of a batch is recorded apart, since it was computed before.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from bosch.data.loader import Batch
from bosch.hybrid.conversion import head_size
from bosch.masks.window import full_layers, own_windows
from bosch.run.errors import UserError
from bosch.run.files import append_line, open_own_file, sealed_lines, write_atomically
from bosch.run.progress import say
from bosch.run.tensorboard import METRICS, TrainingCurves, read_metrics
from bosch.training.checkpoint import explain_refusal
from bosch.training.schedule import TrainSchedule

# Dense bf16 FLOPs per second, from the data sheets, by a part of the device's name: the first that
# is in it, so `H100 PCIe` stands before `H100`.
PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,  # GH200 too
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


class MetricsLog:
    """metrics.jsonl in a training stage's folder. Only rank 0 writes. curves: their name in
    TensorBoard. run_folder: holds `tb`; None: the folder's parent."""

    def __init__(
        self, folder: Path, rank: int, curves: str = "train", run_folder: Path | None = None
    ) -> None:
        self.path, self._name = folder / METRICS, curves
        self._run, self._writes = run_folder or folder.parent, rank == 0

    def start(self, step: int) -> None:
        """The next row is that of `step`. Drop later rows of an earlier attempt. UserError if
        earlier rows are missing: only training again would make them."""
        if not self._writes:
            return
        rows = read_metrics(self.path) if self.path.is_file() else []
        # A step has two rows if its training was killed before a checkpoint, and made it again: the
        # later one belongs to the weights.
        earlier = list({row["step"]: row for row in rows if row["step"] < step}.values())
        if [row["step"] for row in earlier] != list(range(step)):
            raise UserError(
                f"{self.path} is damaged: of the {step:,} rows before step {step:,} it has "
                f"{len(earlier):,}. Put the file back, or train again: `bosch recover --fresh "
                f"{self.path.parent.name}`, or for `bosch train` another --out."
            )
        if any(row["step"] >= step for row in rows):
            say(f"metrics: rows from step {step:,} on are dropped, because they are repeated")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with explain_refusal(str(self.path)):
            write_atomically(self.path, sealed_lines(earlier))
        self._curves = TrainingCurves(self._run, earlier, self._name)

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row: `step`, `tokens` and figures. The time of day is added."""
        if not self._writes:
            return
        timed = {**row, "time": round(time.time(), 3)}
        with explain_refusal(str(self.path)), open_own_file(self.path, "ab") as file:
            append_line(file, timed)
        self._curves.add(timed)


@dataclass(frozen=True)
class LessonCost:
    """What stored lessons have taken: forward passes of their teacher, and time."""

    flops_per_token: int
    flops_per_pair: int  # of a query and a key, in all heads
    seconds_per_token: float | None = None  # None: not known

    @classmethod
    def of(cls, teacher: PreTrainedModel) -> "LessonCost":
        config = teacher.config
        heads = config.num_hidden_layers * config.num_attention_heads
        return cls(2 * count_active_weights(teacher), 4 * head_size(config) * heads)

    def figures(self, lengths: Sequence[int], num_batches: int) -> dict[str, float]:
        """Of so many batches, which are about alike."""
        pairs = sum(visible_pairs(length, None) for length in lengths)
        flops = self.flops_per_token * sum(lengths) + self.flops_per_pair * pairs
        figures: dict[str, float] = {"lesson_flops": flops * num_batches}
        if self.seconds_per_token is not None:
            figures["lesson_seconds"] = self.seconds_per_token * sum(lengths) * num_batches
        return figures


class StepTimer:
    """Measures the time and throughput of a step. Its time is split into waiting for data,
    computing, and checkpoints with their evaluations."""

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: TrainSchedule,
        device: torch.device,
        teacher: PreTrainedModel | None = None,
        lessons: LessonCost | None = None,
    ) -> None:
        self.lessons = lessons
        self.schedule, self.device, self.peak = schedule, device, peak_flops(device)
        frozen = count_active_weights(model, only_frozen=True)
        self.work = [(model.config, count_active_weights(model), frozen, 1.0)]
        if teacher is not None:  # a forward is a third of a training step
            self.work.append((teacher.config, count_active_weights(teacher), 0, 1 / 3))
        self.seconds = {"data": 0.0, "compute": 0.0, "checkpoint": 0.0}
        self._since = time.perf_counter()

    def record(self, name: str) -> None:
        """Book the time since the last call under this name."""
        # Kernels run behind Python: without waiting for them their time would be booked as that of
        # whatever asks for a number first.
        if name == "compute" and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if name == "data" and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # `memory_gb` is the step's own
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now

    def figures(
        self, batch: Batch, with_flops: bool = True, is_written: bool = False
    ) -> dict[str, float]:
        """Times and throughput of this step. A checkpoint's time is in the figures of the next one.
        with_flops: no for steps with learned gates, whose work the formula does not know.
        is_written: the model has written the batch, and the teacher was asked."""
        schedule, busy = self.schedule, self.seconds["data"] + self.seconds["compute"]
        figures = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        figures["tokens_per_second"] = speed = schedule.batch_tokens / busy
        figures["tokens_per_second_per_device"] = speed / schedule.world_size
        if with_flops:
            lengths = batch.cu_seqlens.diff().tolist()
            flops = sum(
                training_flops(config, num_weights, lengths, num_frozen) * part
                for config, num_weights, num_frozen, part in self.work
            )
            if is_written:  # about a forward pass of it, and one of a teacher that is not in `work`
                own = training_flops(*self.work[0][:2], lengths, self.work[0][2])
                flops += own / 3 * (1 if self.lessons is None else 2)
            figures["flops"] = flops * schedule.num_groups  # all have about as much work
            if self.lessons is not None and not is_written:
                figures |= self.lessons.figures(lengths, schedule.num_groups)
            flops_per_second = flops / schedule.context_parallel / busy
            figures["tflops_per_device"] = flops_per_second / 1e12
            if self.peak is not None:
                figures["mfu"] = flops_per_second / self.peak
        if self.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return figures


def peak_flops(device: torch.device) -> float | None:
    """FLOPs per second of one device in bf16. None: not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return PEAK_FLOPS.get(gpu_type(name) or "")


def gpu_type(name: str) -> str | None:
    """The type in PEAK_FLOPS of a GPU that its driver calls by this name."""
    return next((part for part in PEAK_FLOPS if part in name), None)


def count_active_weights(model: PreTrainedModel, only_frozen: bool = False) -> int:
    """N of a model, or F; it may be on the meta device or sharded."""
    config, count = model.config, 0
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        # Norms and biases are in no product. An embedding is looked up, unless it is the head too.
        is_used = parameter.ndim >= 2 and (tied or "embed_tokens" not in name)
        if is_used and not (only_frozen and parameter.requires_grad):
            is_expert = ".experts." in name
            share = (config.num_experts_per_tok, config.num_experts) if is_expert else (1, 1)
            count += parameter.numel() * share[0] // share[1]
    return count


def visible_pairs(length: int, window: int | None) -> int:
    """Of one head and one document. A query sees `window` keys up to its own; None: all of them."""
    # The first queries see 1, 2, ... `most` keys, the later ones `most` each.
    most = length if window is None else min(window, length)
    return most * (most + 1) // 2 + (length - most) * most


def training_flops(
    config: PretrainedConfig, num_weights: int, lengths: list[int], num_frozen: int = 0
) -> int:
    """Forward and backward pass over documents of these lengths."""
    heads = heads_by_window(config)
    pairs = sum(n * visible_pairs(length, window) for n, window in heads for length in lengths)
    # Of a weight and a token, and of a pair and a channel: a product and a sum are 2 FLOPs, forward
    # and for both gradients; a pair is in two products, of scores and of outputs.
    return (6 * num_weights - 2 * num_frozen) * sum(lengths) + 12 * head_size(config) * pairs


def heads_by_window(config: PretrainedConfig) -> list[tuple[int, int | None]]:
    """How many query heads of all layers have each window; None: full attention."""
    groups, layers = config.num_key_value_heads, config.num_hidden_layers
    masked = full_layers(config)
    dense: dict[str, Any] = {"num_full": [groups] * layers, "window": None}
    hybrid = getattr(config, "bosch", None) or dense
    num_full = sum(hybrid["num_full"][layer] for layer in masked)
    full_heads = num_full * (config.num_attention_heads // groups)
    window_heads = len(masked) * config.num_attention_heads - full_heads
    heads: list[tuple[int, int | None]] = [(full_heads, None), (window_heads, hybrid["window"])]
    return heads + [(config.num_attention_heads, own) for own in own_windows(config)]
