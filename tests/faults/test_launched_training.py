"""Training started as launch/ says, with CPU ranks in place of GPUs: by its config files, and on
two nodes by SLURM's script with SLURM's variables. A rank dies, and the same start goes on.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.training_program import (
    LAST_STEP,
    last_checkpoint,
    launch_by_accelerate,
    results,
    run,
)
from tests.fork_server import launch_environment
from tests.plain_training import model_folder

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
# scontrol and srun as SLURM has them: the names of the nodes, and a task on each.
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf '127.0.0.1\\nnode1\\n'
"""
SRUN = """#!/bin/bash
code=0
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SLURM = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_CPUS_PER_TASK": "1"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By number of ranks: results of a run that no launcher started, and when in it to kill the
    last rank, counted in its file operations."""
    found = {}
    for world in (1, 2):
        root = tmp_path_factory.mktemp("undisturbed")
        model_folder(root / "model")
        operations = re.findall(r"operations: (\d+)", run(root / "train", world))
        found[world] = results(root / "train") | {"kill at": int(operations[-1]) * 2 // 3}
    return found


def check_results(folder: Path, expected: dict[str, Any]) -> None:
    found = results(folder)
    assert found == {name: expected[name] for name in found}


def by_config(name: str, *more: str) -> list[str]:
    return ["--config_file", str(ROOT / "launch" / name), *more]


@pytest.mark.parametrize(
    ("arguments", "world", "says"),
    [
        (by_config("cpu.yaml"), 1, "computes in fp32, kernels torch"),
        (by_config("one_gpu.yaml"), 1, "mixed_precision bf16 is ignored"),
        (
            by_config("eight_gpus.yaml", "--num_processes", "2"),
            2,
            "mixed_precision bf16 is ignored",
        ),
    ],
)
def test_a_config_file_trains_as_ranks_without_a_launcher(
    arguments: list[str], world: int, says: str, tmp_path: Path, expected: Any
) -> None:
    model_folder(tmp_path / "model")
    code, output = launch_by_accelerate(tmp_path / "train", arguments)
    assert code == 0, output
    assert says in output
    check_results(tmp_path / "train", expected[world])


def test_slurms_script_goes_on_after_a_dead_rank(tmp_path: Path, expected: Any) -> None:
    model_folder(tmp_path / "model")
    code, output = run_slurm(tmp_path, at=expected[2]["kill at"], victim=1)
    assert code != 0
    check_end(output, tmp_path / "train")
    code, output = run_slurm(tmp_path)
    assert code == 0, output
    check_results(tmp_path / "train", expected[2])


def test_launches_on_one_machine_take_ports_of_their_own(tmp_path: Path) -> None:
    arguments = by_config("eight_gpus.yaml", "--num_processes", "2")
    programs = []
    for name in ("first", "second"):
        model_folder(tmp_path / name / "model")
        words = [*arguments, "--module", "tests.faults.training_program"]
        accelerate = str(Path(sys.executable).with_name("accelerate"))
        programs.append(
            subprocess.Popen(
                [accelerate, "launch", *words, str(tmp_path / name / "train"), "{}"], cwd=ROOT
            )
        )
    assert [program.wait() for program in programs] == [0, 0]


def check_end(output: str, folder: Path) -> None:
    """Rank 1 was killed: the launcher names it, nobody finished, and what was saved is there."""
    assert re.search(r"Root Cause.*rank +: 1 .*SIGKILL", output, re.DOTALL), output
    assert "ended: None" not in output
    assert 0 < last_checkpoint(folder) < LAST_STEP


def run_slurm(folder: Path, **options: Any) -> tuple[int, str]:
    """launch/slurm.sbatch with the changes that its comments ask for: one rank a node, another last
    command, another port if 29500 is taken."""
    repository = folder / "repository"
    shutil.copytree(ROOT / "launch", repository / "launch", dirs_exist_ok=True)
    port = launch_environment(1)[0]["MASTER_PORT"]
    config = repository / "launch" / "nodes.yaml"
    config.write_text(config.read_text().replace("29500", port))
    script = repository / "launch" / "slurm.sbatch"
    before, _, rest = script.read_text().partition("recipes/recover.py")
    module = f'--module tests.faults.training_program {folder / "train"} "$OPTIONS"\''
    text = before + module + rest[rest.index("'") + 1 :]
    script.write_text(text.replace("gpus_per_node=8", "gpus_per_node=1"))
    (repository / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    accelerate = repository / ".venv" / "bin" / "accelerate"
    if not accelerate.exists():
        accelerate.symlink_to(Path(sys.executable).with_name("accelerate"))
    for name, body in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (repository / name).write_text(body)
        (repository / name).chmod(0o755)
    environment = os.environ | SLURM | {"OPTIONS": json.dumps(options)}
    environment["PATH"] = f"{repository}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", str(script)],
        cwd=repository,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout
