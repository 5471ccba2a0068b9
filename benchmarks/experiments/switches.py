"""Every switch of the training, one at a time: each must give the losses of the usual settings."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks import switches
from benchmarks._measure import Row
from benchmarks.experiments._points import Point, Points

MINUTES = 5.0


def points(device: torch.device) -> Points:
    options = switches.GPU_OPTIONS if device.type == "cuda" else switches.CPU_OPTIONS
    yield Point("switches", partial(measure, options))


def measure(options: switches.Options) -> Iterator[Row]:
    for row in switches.measure(options):
        speed = None if row["seconds"] is None else 1 / row["seconds"]
        yield row | {"loss": row["value"], "value": speed, "unit": "steps/s"}


def conclude(rows: Sequence[Row]) -> list[str]:
    done = [row["switch"] for row in rows if row["skipped"] is None]
    return (
        [f"switches of the training that gave the same losses: {', '.join(done)}"] if done else []
    )
