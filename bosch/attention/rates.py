"""How fast each backend was measured to compute windows on a device: rates.json, which
`python -m benchmarks gpu` writes. Of a device that is not in it, backends are asked by their own
priorities.

    {"NVIDIA H200": [{"backend": "varlen", "tokens": 4096, "gradients": true, "documents": false,
                      "sink": false, "calls_per_second": 812.0}, ...]}
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bosch.attention.call import AttentionCall

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
    return nearest_rates(
        _name_of(device),
        num_queries,
        gradients=call.needs_grad,
        documents=call.documents is not None,
        sink=call.sink is not None,
    )


def nearest_rates(device: str, tokens: int, **kind: bool) -> dict[str, float]:
    """Those of the measured length that is nearest to so many tokens, by its ratio."""
    alike = [row for row in _read(FILE).get(device, []) if all(row[k] == kind[k] for k in kind)]
    if not alike:
        return {}
    nearest = min((row["tokens"] for row in alike), key=lambda n: max(n / tokens, tokens / n))
    return {row["backend"]: row["calls_per_second"] for row in alike if row["tokens"] == nearest}


def write_rates(file: Path, device: str, rows: list[dict[str, Any]]) -> None:
    """In the place of what was known of this device."""
    known = _read(file) | {device: rows}
    lines = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in of_device) + "]"
        for name, of_device in sorted(known.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    _read.cache_clear()


@cache
def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    if file.is_file():
        found = json.loads(file.read_text("utf-8"))
    return found


@cache
def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
