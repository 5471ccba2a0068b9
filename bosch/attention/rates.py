"""How fast attention was measured to be on a device: rates.json, which `python -m benchmarks gpu`
writes. By it `auto` chooses a backend for windows, and the time of a run is computed
(training/attention_speed.py). Of a device that is not in it, backends are asked by their own
priorities, and rules say the time.

    {"NVIDIA H200": [{"backend": "varlen", "tokens": 4096, "window_tokens": 1024,
                      "gradients": true, "documents": false, "sink": false,
                      "calls_per_second": 812.0, "flops_per_second": 1.9e+14}, ...]}

Without a window (null) it is full attention.
"""

import json
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bosch.attention.call import AttentionCall

Row = dict[str, Any]
CALL = ("tokens", "window_tokens", "gradients", "documents", "sink")
FILE = Path(__file__).with_name("rates.json")  # absent where a hybrid's folder brings this code


def measured_rates(call: AttentionCall) -> dict[str, float]:
    """Calls per second of each backend that was measured with calls like this one on this device;
    empty if none was."""
    device, num_queries = call.q_BHTD.device, call.q_BHTD.shape[2]
    is_like_measured = call.window_tokens is not None and call.mask_BNTS is None
    if device.type != "cuda" or not is_like_measured or torch.compiler.is_compiling():
        return {}
    if not _read(FILE):  # no device was measured
        return {}
    alike = rates_like(
        name_of(device),
        windowed=True,
        sink=call.sink is not None,
        gradients=call.needs_grad,
        documents=call.documents is not None,
    )
    return {row["backend"]: row["calls_per_second"] for row in nearest(alike, num_queries)}


def known_devices() -> list[str]:
    return sorted(_read(FILE))


def rates_like(
    device: str, windowed: bool, gradients: bool, documents: bool = False, sink: bool = False
) -> list[Row]:
    """What was measured on a device with calls of this kind."""
    kind = {"gradients": gradients, "documents": documents, "sink": sink}
    return [
        row
        for row in _read(FILE).get(device, [])
        if (row["window_tokens"] is not None) == windowed and all(row[k] == kind[k] for k in kind)
    ]


def nearest(rows: list[Row], tokens: int) -> list[Row]:
    """Those of the length that is nearest to so many tokens, by its ratio."""
    lengths = [row["tokens"] for row in rows]
    length = min(lengths, key=lambda n: max(n / tokens, tokens / n), default=None)
    return [row for row in rows if row["tokens"] == length]


def call_of(row: Row) -> tuple[Any, ...]:
    """What was measured, by whatever backend."""
    return tuple(row[name] for name in CALL)


def write_rates(file: Path, device: str, rows: list[Row]) -> None:
    """Beside what was known of this device; of calls that were measured again, by any backend,
    nothing older stays."""
    known, measured = dict(_read(file)), {call_of(row) for row in rows}
    older = [row for row in known.get(device, []) if call_of(row) not in measured]
    known[device] = [*older, *rows]
    lines = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in of_device) + "]"
        for name, of_device in sorted(known.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    _read.cache_clear()


@cache
def _read(file: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    if file.is_file():
        found = json.loads(file.read_text("utf-8"))
    return found


@cache
def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
