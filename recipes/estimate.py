"""What a run takes, as far as the model's shape tells: disk, downloads, and the training's time.
`recover.py --dry-run` prints it."""

import os
import time

import torch

from bosch.config import Config
from bosch.hybrid.models import plain_config
from bosch.masks.mask import describe_bytes
from bosch.model import find_model
from bosch.recipes.train_model import make_plan, schedule_of
from bosch.run.progress import describe_seconds
from bosch.training.flops import count_active_weights, training_flops
from bosch.training.model_start import build_on_meta
from bosch.training.parallel import choose_device

STATE_BYTES = 12  # of a weight in a checkpoint: fp32, with the optimizer's two moments
SPEED_SHARE = 0.5  # of the speed of large matrix products that a training step may reach


def estimate(config: Config, world: int, zero_shot: bool) -> list[str]:
    """Lines for people. Predictions, curves and reports are too small to count."""
    plan = make_plan(config, world, "torch")
    dtype = plan.model.dtype or torch.float32
    weights = sum(p.numel() for p in build_on_meta(plan.model).parameters())
    model_bytes = weights * (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    lines, disk = [], {"the hybrid": model_bytes}
    if find_model(config.model) is None:
        lines.append(f"to download: {config.model}, {describe_bytes(model_bytes)}")
    if not zero_shot:
        exported = [step for step in schedule_of(config).exported_steps if step]
        states = config.train.keep_checkpoints
        disk[f"{len(exported)} evaluated checkpoints"] = len(exported) * model_bytes
        disk[f"{states} training states"] = states * STATE_BYTES * weights
        if config.data.tokens_from is None:
            disk["tokens"] = config.data.tokens * (2 if plan.model.vocab_size <= 1 << 16 else 4)
        lines.append(
            f"training: about {describe_seconds(training_seconds(config, world))}, at half the "
            "speed of this machine's matrix products; search and evaluations come on top"
        )
    parts = ", ".join(f"{name} {describe_bytes(count)}" for name, count in disk.items())
    return [*lines, f"disk: about {describe_bytes(sum(disk.values()))} ({parts})"]


def training_seconds(config: Config, world: int) -> float:
    """From the FLOPs and from the speed of large matrix products here, which is measured."""
    plan, device = make_plan(config, world, "torch"), choose_device(os.environ)
    schedule = schedule_of(config)
    sequences = [plan.seq_len] * (schedule.num_steps * schedule.batch_sequences)
    models = [(plan.model, 1.0)]
    if config.train.objective == "distill":  # the teacher's forward is a third of a step
        models.append((plan.teacher or plain_config(plan.model), 1 / 3))
    flops = sum(
        training_flops(one, count_active_weights(build_on_meta(one)), sequences) * part
        for one, part in models
    )
    num_devices = 1 if device.type == "cpu" else world  # ranks on a CPU share its cores
    return flops / (SPEED_SHARE * num_devices * product_speed(device))


def product_speed(device: torch.device) -> float:
    """FLOPs per second of large matrix products, in the type that a training has there."""
    size, dtype = (1024, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    left, right = torch.ones(2, size, size, dtype=dtype, device=device)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        float((left @ right)[0, 0])  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best
