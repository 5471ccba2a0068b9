"""Chains of stages as real processes: killed anywhere, locked, with a second rank. A fraction of a
second each."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import PATIENCE
from tests.hybrid_folders import files_of

PROGRAM = Path(__file__).with_name("synthetic_chain.py")


def start(run: Path, rank: int = 0, world: int = 1, **options: object) -> subprocess.Popen[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(run), json.dumps(options)],
        env=os.environ | variables | {"TORCHELASTIC_RUN_ID": "one"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()  # of no effect on one that has ended
    return process.returncode, output


# Results, and what a kill can choose from.
Undisturbed = tuple[dict[str, bytes], int]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Results of a chain that is not killed, and the number of its file operations."""
    root = tmp_path_factory.mktemp("undisturbed")
    code, output = finish(start(root / "run", count=True))
    assert code == 0, output
    return files_of(root), int(output.split("operations")[1])


@pytest.mark.parametrize("attempt", range(5))
def test_killed_anywhere_it_resumes(attempt: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    expected, num_operations = undisturbed
    point = random.Random(attempt).randint(1, num_operations)
    code, output = finish(start(tmp_path / "run", kill_at=point))
    assert code == -signal.SIGKILL, output
    code, output = finish(start(tmp_path / "run"))
    assert code == 0, output
    assert files_of(tmp_path) == expected


def test_runs_that_race_for_a_shared_artifact_build_it_once(tmp_path: Path) -> None:
    processes = [start(tmp_path / f"run-{number}", ratio=number / 4) for number in range(4)]
    outputs = [finish(process) for process in processes]
    assert [code for code, _ in outputs] == [0, 0, 0, 0], outputs
    assert sum("words: done" in output for _, output in outputs) == 1
    assert len(list((tmp_path / "shared").iterdir())) == 1


def test_shared_artifact_of_a_killed_run_is_finished_by_another(tmp_path: Path) -> None:
    # The 30th operation lies within the first stage, the shared one: asserted below.
    finish(start(tmp_path / "one", kill_at=30))
    [folder] = (tmp_path / "shared").iterdir()
    assert (folder / "started.json").is_file()
    assert not (folder / "manifest.json").exists()
    code, output = finish(start(tmp_path / "two"))
    assert code == 0, output
    assert "words: continues where it stopped" in output
    code, output = finish(start(tmp_path / "one", ratio=0.5))
    assert code == 0, output
    assert f"words: complete, reused from {tmp_path / 'shared'}" in output
    reference = json.loads((tmp_path / "one" / "words" / "reference.json").read_text())
    assert (tmp_path / "one" / "words" / reference["folder"] / "manifest.json").is_file()


@pytest.fixture
def owner(tmp_path: Path) -> subprocess.Popen[str]:
    """A process that holds the run folder until its standard input is closed."""
    process = start(tmp_path / "run", hold=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_in_use_names_its_owner(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    code, output = finish(start(tmp_path / "run"))
    assert code == 1
    assert "FolderInUseError" in output
    assert f"{tmp_path / 'run'} is in use by pid {owner.pid} " in output
    assert finish(owner)[0] == 0
    assert finish(start(tmp_path / "run"))[0] == 0


def test_a_dead_owners_lock_blocks_nobody(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # dead, its pid still exists
    assert (tmp_path / "run" / ".lock").exists()
    code, output = finish(start(tmp_path / "run"))
    assert code == 0, output
    finish(owner)


def test_two_ranks_make_what_one_makes_and_each_its_own_files(tmp_path: Path) -> None:
    ranks = [start(tmp_path / "run", rank, world=2) for rank in (1, 0)]
    outputs = [finish(process) for process in ranks]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert outputs[0][1] == "finished\n"  # only rank 0 writes the first two stages
    shards = tmp_path / "run" / "shards"
    assert (shards / "rank-0.txt").read_text() == "0 of 2: 5 lines\n"
    assert (shards / "rank-1.txt").read_text() == "1 of 2: 5 lines\n"
    files = set(json.loads((shards / "manifest.json").read_text())["files"])
    assert files == {"started.json", "rank-0.txt", "rank-1.txt"}


def test_ranks_that_mean_other_stages_end(tmp_path: Path) -> None:
    """As machines whose caches of the hub differ."""
    other = start(tmp_path / "run", 1, world=2, ratio=0.5)
    first = start(tmp_path / "run", 0, world=2)
    code, output = finish(other)
    assert code == 1
    assert "journal: rank 1 has other settings or inputs than rank 0" in output
    code, output = finish(first)
    assert code == 1
    assert "Rank 1 ended" in output


@pytest.mark.parametrize(("dead", "stage"), [(0, "words"), (1, "shards")])
def test_dead_rank_ends_the_other(dead: int, stage: str, tmp_path: Path) -> None:
    options = {"die_before": [dead, stage]}
    ranks = [start(tmp_path / "run", rank, world=2, **options) for rank in (1, 0)][::-1]
    assert finish(ranks[dead])[0] == -signal.SIGKILL
    code, output = finish(ranks[1 - dead])
    assert code == 1
    assert f"Rank {dead} ended" in output
    assert not (tmp_path / "run" / "shards" / "manifest.json").exists()
