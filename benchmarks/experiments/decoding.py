"""Decoding token by token: whether launches bound it, and what sinks and unequal layers cost."""

from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from benchmarks._measure import Row, now, short
from benchmarks.experiments._points import (
    DENSE,
    PLAIN,
    STATIC,
    UNEVEN,
    K,
    Models,
    Point,
    Points,
    Side,
    faster_from,
    free_memory,
    prompt_lengths,
)
from benchmarks.latency import run_steps
from benchmarks.launches import count_launches
from bosch.attention.cache import CACHE, allocated_bytes

MINUTES = 1.6
SIDES = (DENSE, PLAIN, STATIC, UNEVEN)
ROUNDS, TOKENS = 4, 8  # tokens of each side in each round
# Tokens per second of Qwen3-1.7B at 8k, by what a layer launches.
COMPUTED = {"dense": 35.0, ".75": 35.0, ".75 static": 25.0, ".75 static, uneven": 25.0}
models = cache(Models)


def points(device: torch.device) -> Points:
    for tokens in prompt_lengths(device):
        yield Point(f"decoding, {short(tokens)}", partial(decode, tokens, device))
    yield Point("one token", partial(profile_a_token, device))


def decode(tokens: int, device: torch.device) -> list[Row]:
    both, seconds = models(device), {side: list[float]() for side in SIDES}
    # All prompts are read before anything is timed, so that each round only decodes.
    caches = {side: read_prompt(both, side, tokens) for side in SIDES}
    new = both.ids(TOKENS).split(1, dim=1)
    # All sides in each round, and the same tokens for all.
    for _ in range(1 + ROUNDS):
        for side in SIDES:
            steps = run_steps(both.of(side), new, caches[side])
            seconds[side].append(median(each for each, _ in steps))
    speeds = {side: 1 / median(seconds[side][1:]) for side in SIDES}  # the first warms up
    held = {side: allocated_bytes(caches[side]) for side in SIDES}
    del caches
    free_memory()
    return [
        {
            "name": f"decoding, {short(tokens)}, {side.name}",
            "what": f"decoding, {side.name}",
            "tokens": tokens,
            "value": speed,
            "unit": "tokens/s",
            "dense": None if side is DENSE else speeds[DENSE],
            "kv_bytes": held[side],
            "computed": COMPUTED[side.name] if tokens == 8 * K else None,
        }
        for side, speed in speeds.items()
    ]


def read_prompt(both: Models, side: Side, tokens: int) -> Any:
    model = both.of(side)
    filled = DynamicCache(config=model.config)  # a hybrid replaces it by its own
    list(run_steps(model, both.ids(tokens).split(both.chunk, dim=1), filled))
    return filled


def profile_a_token(device: torch.device) -> list[Row]:
    both, rows = models(device), []
    for side in (DENSE, PLAIN, STATIC):
        model, filled = both.of(side), read_prompt(both, side, min(prompt_lengths(device)))
        token = both.ids(1)
        # Not the inference mode, in which torch shows operators that consist of others.
        with torch.no_grad():
            step = partial(model, token, use_cache=True, **{CACHE: filled})
            step()
            begin = now(device)
            step()
            wall = now(device) - begin
            row: Row = {"name": f"one token, {side.name}", "unit": "of its time on the GPU"}
            row |= {"what": f"one token, {side.name}", "value": None, "wall_ms": 1e3 * wall}
            activities = [ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            with profile(activities=activities) as found:
                step()
                now(device)  # waits for it
            operators = count_launches(found, device)
            row["operators_per_layer"] = operators / both.config.num_hidden_layers
            if device.type == "cuda":
                events = found.key_averages()
                # Of kernels alone: those of an operator are in its own time once more.
                kernels = [e for e in events if e.device_type == DeviceType.CUDA]
                busy = sum(event.self_device_time_total for event in kernels) / 1e6
                launches = sum(e.count for e in events if "LaunchKernel" in e.key)
                most = sorted(events, key=lambda e: -e.self_cpu_time_total)[:8]
                row |= {"value": min(1.0, busy / wall), "launches": launches}
                row["most_cpu_ms"] = {e.key: round(e.self_cpu_time_total / 1e3, 2) for e in most}
        rows.append(row)
        del filled, step
        free_memory()
    return rows


def conclude(rows: Sequence[Row]) -> list[str]:
    found = faster_from(rows)
    for row in rows:
        if "operators_per_layer" in row:
            busy = "" if row["value"] is None else f", the GPU busy for {row['value']:.0%} of it"
            found.append(
                f"{row['name']}: {row['operators_per_layer']:.0f} operators a layer, "
                f"{row['wall_ms']:.1f} ms{busy}"
            )
    return found
