"""serving/gpu_check.sh on a CPU with small models: everything but the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make serving runs this")

from benchmarks.gpu import is_failure, read_rows

ROOT = Path(__file__).parents[2]


def test_the_check_for_gpus_runs_on_a_cpu(tmp_path: Path) -> None:
    asked = {"DEVICE": "cpu", "PYTHON": sys.executable, "ROWS": str(tmp_path), "MINUTES": "60"}
    done = subprocess.run(
        [ROOT / "serving" / "gpu_check.sh"], capture_output=True, text=True, env=os.environ | asked
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    print(done.stdout)
    (path,) = tmp_path.glob("*.jsonl")
    rows = {row["name"]: row for row in read_rows(path)}
    assert not any(map(is_failure, rows.values()))
    for heads in (16, 128):
        agreement = rows[f"vLLM agreement, heads of {heads}, log-probabilities"]
        # What the check is for would be seen: a window of one token more.
        wrong = agreement["error_of_a_window_of_one_more"]
        assert wrong["largest"] > 1.5 * agreement["error_of_ours"]["largest"]
        assert rows[f"vLLM agreement, heads of {heads}, new tokens"]["value"] > 0.9
    assert rows["vLLM, KV bytes of 1,000 tokens, packed"]["value"] > 2
    assert rows["vLLM, 4 x 300 tokens, packed"]["dense"] > 0
    assert all(name in done.stdout for name in rows)
