"""Reference training for the tests, in forty lines of plain torch without shards or our kernels,
and the small models and tokens that both train on."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from bosch.config import TrainConfig
from bosch.data.loader import IGNORED, Loader, Sequences, TokenFolder
from bosch.hybrid.conversion import deploy, head_size
from bosch.run.tensorboard import read_metrics
from bosch.sink import Sink, SinkConstants
from bosch.training.loop import TrainJob, train
from tests.hybrid_folders import WINDOW
from tests.model_factory import MIXED, TINY, tiny_model

SEQ_LEN = 48
NUM_SEQUENCES = 40
SETTINGS = TrainConfig(
    batch_sequences=4,
    micro_batch_sequences=1,
    peak_learning_rate=2e-3,
    precision="fp32",
    kernels="torch",
    compile=False,  # minutes of it on a GPU
    max_steps=5,
)


@dataclass
class Trace:
    """Losses, gradient norms and final weights of a training run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_run(cls, folder: Path, last_step: int) -> "Trace":
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
        assert [row["step"] for row in rows] == list(range(1, last_step + 1))
        weights = read_weights(folder / f"step-{last_step:06d}")
        return cls([row["loss"] for row in rows], [row["grad_norm"] for row in rows], weights)


def run(
    folder: Path, model: Path, settings: TrainConfig = SETTINGS, **more: Any
) -> list[dict[str, Any]]:
    """Train, and return the rows of the metrics."""
    assert train(job_of(folder, model, settings, **more)) is None
    return read_metrics(folder / "metrics.jsonl")


def job_of(folder: Path, model: Path, settings: TrainConfig, **more: Any) -> TrainJob:
    return TrainJob(settings, model, tokens_in_memory(), folder, NUM_SEQUENCES * SEQ_LEN, **more)


def launch_two(program: str, *arguments: object) -> None:
    """Run a program of tests/ as two ranks, by accelerate's launcher."""
    command = [sys.executable, *"-m accelerate.commands.accelerate_cli launch".split()]
    command += "--use_fsdp --mixed_precision no --num_processes 2 --main_process_port 0".split()
    command += [f"tests/{program}", *map(str, arguments)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1_800)
    assert done.returncode == 0, done.stdout + done.stderr


def read_weights(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def model_folder(folder: Path, hybrid: bool = True, family: str = "qwen3", **changes: Any) -> Path:
    """A tiny model in fp32. As a hybrid, its three layers are mixed, windowed and mixed, and have
    sinks."""
    model: Any = tiny_model(family, initializer_range=0.1, **changes)
    if hybrid:
        draw = torch.Generator().manual_seed(0)
        shape = len(MIXED), len(MIXED[0]), head_size(model.config)
        constants = SinkConstants(*(0.3 * torch.randn(shape, generator=draw) for _ in range(2)))
        model = deploy(model, MIXED, WINDOW, Sink("static", constants=constants))
    return save(model, folder)


def save(model: Any, folder: Path) -> Path:
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return folder


def tokens_in_memory(seed: int = 0, held_out: int = 3, epochs: int = 1) -> TokenFolder:
    """Random tokens, with several documents in a sequence."""
    generator = np.random.default_rng(seed)

    def sequences(count: int) -> Sequences:
        rows = generator.integers(2, TINY["vocab_size"], (count, SEQ_LEN), dtype=np.uint16)
        ends = np.cumsum(generator.integers(3, 40, count * SEQ_LEN // 10))
        return Sequences(rows, ends[ends < rows.size].astype(np.uint64))

    orders = [generator.permutation(NUM_SEQUENCES) for _ in range(epochs)]
    order = np.stack(orders).astype(np.uint32)
    summary = {"seq_len": SEQ_LEN, "epochs": epochs, "token_bytes": 2}
    parts = sequences(NUM_SEQUENCES), sequences(held_out)
    return TokenFolder(Path("memory"), summary, *parts, order)


def train_plainly(folder: Path, settings: TrainConfig = SETTINGS, masked: bool = True) -> Trace:
    """The same training in plain torch."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "bosch"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).train()
    teacher = AutoModelForCausalLM.from_pretrained(folder, **options)
    if hybrid := getattr(teacher.config, "bosch", None):
        hybrid["num_full"] = [teacher.config.num_key_value_heads] * len(MIXED)
    matrices = {n for n, p in model.named_parameters() if p.ndim > 1 and "_sink_" not in n}
    decayed = [p for n, p in model.named_parameters() if n in matrices]
    others = [p for n, p in model.named_parameters() if n not in matrices]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    steps, micro = settings.max_steps, settings.micro_batch_sequences
    assert steps is not None
    assert micro is not None
    loader = Loader(tokens_in_memory(), settings.batch_sequences, masked)
    trace = Trace()
    for step in range(steps):
        warmup = round(0.1 * steps)
        share = (step - warmup) / (steps - warmup)
        rate = settings.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate * (step + 1) / warmup if step < warmup else rate
        batch = loader.batch(step)
        loss_sum = 0.0
        for rows in chunks(settings.batch_sequences, micro):
            logits = forward(model, settings, batch.ids_BT[rows], batch.position_ids_BT[rows])
            with torch.no_grad():
                taught = forward(teacher, settings, batch.ids_BT[rows], batch.position_ids_BT[rows])
            labels = batch.labels_BT[rows].flatten()
            loss = summed_loss(logits.flatten(0, 1).float(), taught.flatten(0, 1), labels, settings)
            loss = loss * (1 / batch.num_targets)
            loss.backward()
            loss_sum += float(loss.detach())
        trace.losses.append(loss_sum)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        trace.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach() for name, p in model.named_parameters()}
    return trace


def summed_loss(
    logits_NV: Tensor, teacher_NV: Tensor, labels_N: Tensor, settings: TrainConfig
) -> Tensor:
    cross_entropy = F.cross_entropy(logits_NV, labels_N, reduction="sum")
    if settings.objective == "next-token":
        return cross_entropy
    heat, weight = settings.temperature, settings.distill_weight
    taught_NV = (teacher_NV.float() / heat).log_softmax(1)
    student_NV = (logits_NV / heat).log_softmax(1)
    rows_N = F.kl_div(student_NV, taught_NV, reduction="none", log_target=True).sum(1) * heat**2
    divergence = torch.where(labels_N != IGNORED, rows_N, 0.0).sum()
    return divergence if weight == 1 else weight * divergence + (1 - weight) * cross_entropy


def forward(model: Any, settings: TrainConfig, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """The logits. In bf16 they are computed with a bf16 copy of each parameter."""
    inputs = {"input_ids": ids_BT, "position_ids": positions_BT, "use_cache": False}
    if settings.precision == "fp32":
        return model(**inputs).logits
    copies = {name: p.bfloat16() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, copies, (), inputs).logits


def chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, total, size))
