"""Materializes one model again and again in children that are killed: `materialize_attempts.py
MODEL MASK FOLDER`, with a job a line on standard input.

A job is {"name": ..., "kill_at": n} (SIGKILL before the n-th file operation below the target),
{"name": ..., "largest_file": n} (the kernel ends it when a file grows beyond n bytes), or {"name":
..., "count": true}, which prints `operations n` at its end. Children are forked from a process that
has loaded torch and transformers: an attempt takes a second, not ten. A line `ended STATUS` tells
how each ended.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  so that no child imports it

import bosch.hybrid.materialize  # noqa: F401  likewise
from recipes.materialize_model import main as materialize_model
from tests.kill_points import watch_operations


def attempt(model: str, mask: str, out: Path, job: dict[str, Any]) -> None:
    if "largest_file" in job:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would make an OSError of it
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seen = watch_operations(out, at=job.get("kill_at"))
    materialize_model(["--model", model, "--mask", mask, "--out", str(out)])
    if "count" in job:
        print(f"operations {seen[0]}", flush=True)


def main() -> None:
    model, mask, folder = sys.argv[1:]
    torch.set_num_threads(1)  # a forked child has no threads of its parent's
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                attempt(model, mask, Path(folder) / job["name"] / "hybrid", job)
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(f"ended {status}", flush=True)


if __name__ == "__main__":
    main()
