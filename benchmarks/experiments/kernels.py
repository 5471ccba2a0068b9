"""Kernels against the reference, and a distillation's steps against plain torch: the mends."""

from functools import partial

from benchmarks.experiments._tests import conclude_tests, points_of_tests

MINUTES = 1.2
STAGES = "tests/gpu/test_stages_on_devices.py"
ON_GPU = {
    "kernels against the reference": ["tests/gpu/test_backends_gpu.py"],
    "steps of a distillation": [STAGES, "-k", "distill"],
}
ON_CPU = {
    "kernels against the reference": ["tests/contracts/test_backends.py", "-k", "w_shows_w_keys"],
    "steps of a distillation": [STAGES, "-k", "distill"],
}
points = partial(points_of_tests, ON_GPU, ON_CPU)
conclude = conclude_tests
