"""A file of rates like that of `make gpu`, made up."""

from pathlib import Path
from typing import Any

import pytest

from bosch.attention import rates


def make_up_rates(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    device: str,
    flops: dict[tuple[bool, bool], float],  # a second, by (windowed, gradients)
    tokens: int = 4096,
) -> None:
    rows: list[dict[str, Any]] = [
        {
            "backend": backend,
            "tokens": tokens,
            "window_tokens": 1024 if windowed else None,
            "gradients": gradients,
            "documents": False,
            "sink": False,
            "calls_per_second": 1.0,
            "flops_per_second": speed,
        }
        for (windowed, gradients), fastest in flops.items()
        for backend, speed in (("flash", fastest), ("varlen", fastest / 2))
    ]
    monkeypatch.setattr(rates, "FILE", folder / "rates.json")
    rates.write_rates(rates.FILE, device, rows)
