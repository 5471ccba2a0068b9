"""Evaluation, checkpoints, a search's cached states, a kill and a resume, against the CPU's."""

from functools import partial

from benchmarks.experiments._tests import conclude_tests, points_of_tests

MINUTES = 4.0
STAGES = "tests/gpu/test_stages_on_devices.py"
ON_GPU = {"stages": [STAGES, "-k", "not distill"]}
ON_CPU = {"stages": [STAGES, "-k", "states"]}
points = partial(points_of_tests, ON_GPU, ON_CPU)
conclude = conclude_tests
