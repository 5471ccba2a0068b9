"""launch/: accelerate reads the configs, and starts what their comments say. SLURM's script parses.

No process needs a GPU here: accelerate only starts as many as the config says.
"""

import os
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
PROGRAM = """
import os
names = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "FSDP_ACTIVATION_CHECKPOINTING")
os.write(1, (" ".join(os.environ.get(name, "-") for name in names) + "\\n").encode())
"""


def test_eight_gpus_starts_eight_ranks_with_what_training_reads(tmp_path: Path) -> None:
    """The other configs: tests/faults/test_launched_training.py."""
    (tmp_path / "program.py").write_text(PROGRAM)
    accelerate = Path(sys.executable).with_name("accelerate")
    config = LAUNCH / "eight_gpus.yaml"
    command = [accelerate, "launch", "--config_file", config, tmp_path / "program.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{rank} 8 bf16 true" for rank in range(8)]


def test_the_slurm_script_hands_cores_on_and_requeues_only_at_the_time_limit(
    tmp_path: Path,
) -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    for needed in ("#SBATCH --signal=TERM@300", "#SBATCH --requeue", "launch/nodes.yaml"):
        assert needed in text
    srun = 'echo "cores $SRUN_CPUS_PER_TASK"; exit 1'
    for name, body in {"scontrol": 'echo "scontrol $1"', "srun": srun}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = ["bash", str(LAUNCH / "slurm.sbatch")]
    outputs = []
    for end in ({}, {"SLURM_JOB_END_TIME": "4000000000"}, {"SLURM_JOB_END_TIME": "1000"}):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "64"}
        ended = subprocess.run(script, env=environment | end, capture_output=True, text=True)
        assert ended.returncode == 1
        outputs.append(ended.stdout.splitlines())
    assert outputs == [["cores 64"], ["cores 64"], ["cores 64", "scontrol requeue"]]
