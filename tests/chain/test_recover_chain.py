"""The chain as it is, started as the README says, on one rank and on two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import recipes
from bosch.stage import Stage
from recipes.presets import smoke
from recipes.recover import CHAIN, build_chain

RECOVER = Path(recipes.__path__[0]) / "recover.py"
LAUNCH = [str(Path(sys.executable).with_name("accelerate")), "launch"]


def launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *options, str(RECOVER), "--preset", "smoke"]
    environment = os.environ | {"HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_launched_chain_finishes_and_says_what_is_missing(
    num_processes: int, tmp_path: Path
) -> None:
    several = ("--use_fsdp", "--num_processes", "2", "--main_process_port", "0")
    run = launch(tmp_path, *(several if num_processes == 2 else ()))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("run folder runs/") == 1  # rank 0 alone speaks
    missing = build_chain(smoke())[1]
    assert (f"not built yet: {', '.join(missing)}\n" in run.stdout) == bool(missing)
    assert (tmp_path / "runs" / "tiny-qwen3-2layer-bosch-r0.75" / "run.json").is_file()


def test_chain_reads_only_stages_that_stand_before() -> None:
    before: set[str] = set()
    for link in CHAIN:
        assert before.issuperset(link.needs)
        before.add(link.name)


def test_every_stage_is_built_or_named_as_missing() -> None:
    stages, missing = build_chain(smoke())
    assert all(isinstance(stage, Stage) for stage in stages)
    assert sorted([stage.name for stage in stages] + missing) == sorted(l.name for l in CHAIN)
