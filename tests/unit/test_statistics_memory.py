"""The static methods build no T x T matrix: their memory grows with the text, not with its square.

Measured as the peak resident memory of a separate process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Peak memory after texts of 512 tokens (everything warm), 2,048 and 8,192.
CHILD = """
import json, re, sys, tempfile
from pathlib import Path
from bosch.plugins import load_plugin
from tests.attention_matrices import inputs_of, toy_calibration
from tests.model_factory import tiny_model

method = load_plugin("bosch.methods", sys.argv[1])
model = tiny_model("qwen3", num_hidden_layers=1, max_position_embeddings=8192)
peaks = []
for length in (512, 2048, 8192):
    with tempfile.TemporaryDirectory() as folder:
        calibration = toy_calibration(length, count=1)
        method.score_groups(
            inputs_of(method, model, calibration, Path(folder), chunk_elements=1 << 20)
        )
    # Not getrusage, which starts at the peak of the parent process.
    status = Path("/proc/self/status").read_text()
    peaks.append(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]))
print(json.dumps(peaks))
"""

# Freed memory returns to the system at once, by a fixed threshold: what the allocator would keep is
# noise.
RELEASE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dcam", "apl", "proxy", "qada", "razor", "fisher", "retrieval_head"]
)
def test_memory_grows_with_the_text_and_not_with_its_square(name: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, name],
        cwd=ROOT,
        env=os.environ | RELEASE_MEMORY,
        capture_output=True,
        text=True,
        check=True,
    )
    start, short, long = json.loads(child.stdout)
    # One float32 matrix for the 8 heads has 2 GB at 8,192 tokens and 128 MB at 2,048. Four times
    # the text may add four times the memory. If that is next to nothing, the allocator's noise
    # decides, so at least 16 MB count.
    assert long - start <= 4 * max(short - start, 2**24)
