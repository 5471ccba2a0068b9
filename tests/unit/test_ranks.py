"""Ranks of a launch: they find each other by rank 0's lock, and one that has died ends the others,
even where nothing else would wake them. Whole chains of stages are in tests/faults."""

import multiprocessing
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.run import lock
from bosch.run.lock import LockRecord
from bosch.run.ranks import PEER_DIED, RankGoneError, Ranks
from tests.fork_server import PATIENCE


@pytest.fixture(autouse=True)
def beats_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 1_000)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0)


def member(folder: Path, rank: int) -> Ranks:
    """A rank of two that has joined."""
    ranks = Ranks(folder, rank, 2)
    ranks._join("launch")
    return ranks


def wait_for_ever(folder: Path, rank: int, ready: Any) -> None:
    lock.BEAT_SECONDS = 0.05
    with member(folder, rank).watching():
        ready.set()
        signal.pause()


def test_killed_rank_ends_the_one_that_waits(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(2):
        ready = context.Event()
        processes.append(context.Process(target=wait_for_ever, args=(tmp_path, rank, ready)))
        processes[-1].start()
        assert ready.wait(PATIENCE)
    waiting, killed = processes
    killed.kill()
    waiting.join(PATIENCE)
    assert waiting.exitcode == PEER_DIED


@pytest.mark.parametrize("error", [None, SystemExit(0)])
def test_rank_that_is_done_ends_nobody(tmp_path: Path, error: SystemExit | None) -> None:
    here, there = member(tmp_path, 0), member(tmp_path, 1)
    gone = replace(there._record.owner, started="another process of this pid")
    there._record = replace(there._record, owner=gone)
    there._beat()
    assert here._has_died(1)
    there.leave(error)
    assert not here._has_died(1)
    assert here.wait_for(1, "left") == "left"


def test_rank_on_another_machine_is_dead_when_its_beat_stands_still(tmp_path: Path) -> None:
    here, there = member(tmp_path, 0), member(tmp_path, 1)
    there._record = replace(there._record, owner=replace(there._record.owner, host="another"))
    for _ in range(3):
        there._beat()
        assert not here._has_died(1)
    assert here._has_died(1)


def test_rank_that_failed_and_hangs_on_its_way_out_is_dead_before_long(tmp_path: Path) -> None:
    here, there = member(tmp_path, 0), member(tmp_path, 1)
    assert not any(here._has_died(1) for _ in range(3))  # it lives, however slow it is
    there.leave(ValueError("no such file"))
    there._beat()  # nothing is written over its last word
    here._others[1].clock = lambda: float("-inf")
    assert not here._has_died(1)  # it may just be telling why
    here._others[1].clock = lambda: 0.0
    assert here._has_died(1)
    with pytest.raises(RankGoneError, match="Rank 1 ended before rank 0 could go on"):
        here.wait_for(1, "done")


def test_sign_of_life_that_cannot_be_read_ends_nobody(tmp_path: Path) -> None:
    here = member(tmp_path, 0)
    (here.folder / "rank-1").mkdir()
    assert not here._has_died(1)
    (here.folder / "rank-1").rmdir()
    (here.folder / "rank-1").touch()
    assert not here._has_died(1)


def test_board_of_an_earlier_launch_is_removed_and_that_of_this_one_kept(tmp_path: Path) -> None:
    earlier = member(tmp_path, 1)
    follower = Ranks(tmp_path, 1, 2)
    follower._join("now")
    leader = Ranks(tmp_path, 0, 2)
    leader.lead("now")
    follower.announce("here")
    assert leader.wait_for(1, "here") == "here"
    assert not earlier.folder.exists()
    earlier._beat()  # still there for a moment: its beat does not bring the board back
    assert not earlier.folder.exists()


def test_rank_on_another_machine_waits_for_rank_0_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fixed port an earlier launch, which an error or SIGTERM ended, has the same key."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    here = LockRecord.of_this_process()
    owner, parent = (replace(identity, host="machine-0") for identity in (here.owner, here.parent))
    earlier = replace(here, owner=owner, parent=parent, ended=True)
    earlier.write(tmp_path)
    ranks = Ranks(tmp_path, 8, 16)
    looks: list[int] = []

    def meanwhile(seconds: float) -> None:
        looks.append(1)
        beat = max(0, len(looks) - 3)
        if beat:  # rank 0 has taken over
            replace(earlier, launch="now", beat=beat, ended=False).write(tmp_path)
        assert len(looks) < 10

    monkeypatch.setattr("bosch.run.ranks.time.sleep", meanwhile)
    ranks.follow()
    assert ranks.folder.name == "now"
    replace(earlier, launch="later").write(tmp_path)
    with pytest.raises(RankGoneError, match="waited 0 s"):
        Ranks(tmp_path, 8, 16).follow(join_seconds=0)
    replace(here, ended=True).write(tmp_path)
    with pytest.raises(RankGoneError, match="Rank 0 ended before rank 8 joined"):
        Ranks(tmp_path, 8, 16).follow()
