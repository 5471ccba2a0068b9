"""Evaluation, checkpoints, a search's cached states, a kill and a resume, against the CPU's."""

from collections.abc import Sequence

import torch

from benchmarks._measure import Row
from benchmarks.experiments._points import Points
from benchmarks.experiments._tests import conclude_tests, points_of_tests

MINUTES = 4.0
STAGES = "tests/gpu/test_stages_on_devices.py"
ON_GPU = {"stages": [STAGES, "-k", "not distill"]}
ON_CPU = {"stages": [STAGES, "-k", "states"]}


def points(device: torch.device) -> Points:
    return points_of_tests(ON_GPU if device.type == "cuda" else ON_CPU, device)


def conclude(rows: Sequence[Row]) -> list[str]:
    return conclude_tests(rows)
