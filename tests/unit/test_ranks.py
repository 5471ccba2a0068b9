"""Ranks of a launch: they find each other by rank 0's lock, and one that dies ends the others, even
if nothing else would wake them. Whole chains of stages are in tests/faults."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.methods import single_group
from bosch.run import lock
from bosch.run.errors import UserError
from bosch.run.group import Group, joined
from bosch.run.lock import LockRecord
from bosch.run.ranks import PEER_DIED, RankGoneError, Ranks
from tests.attention_matrices import inputs_of
from tests.fork_server import PATIENCE, launch_environment, start
from tests.search_cases import answered_calibration, small_model


@pytest.fixture(autouse=True)
def no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 1_000)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0)


def member(folder: Path, rank: int, clock: Callable[[], float] = time.monotonic) -> Ranks:
    """A rank of two that has joined."""
    ranks = Ranks(folder, rank, 2, clock)
    ranks.join("launch")
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


class NotPickledError(Exception):
    """pickle calls it with one argument."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def fail_together(folder: Path, environment: dict[str, str]) -> None:
    """Each rank's errors, in a file: what one raises, all raise."""
    os.environ.update(environment)
    with joined():
        group = Group.current()

        def fail_on_first(error: Exception) -> None:
            if group.rank == 0:
                raise error

        errors = []
        for error in (NotPickledError(4, "no key"), UserError("no ratio")):
            for call in (group.from_rank_0, group.all_succeed):
                try:
                    call(lambda error=error: fail_on_first(error))
                except Exception as caught:
                    errors.append(f"{type(caught).__name__} {caught}")
    (folder / f"rank-{group.rank}").write_text("\n".join(errors))


def test_error_of_one_rank_is_raised_on_all_even_if_it_cannot_be_pickled(tmp_path: Path) -> None:
    ranks = [start(fail_together, tmp_path, variables) for variables in launch_environment(2)]
    for rank in ranks:
        rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    own, user = ["NotPickledError 4: no key"] * 2, ["UserError no ratio"] * 2
    assert (tmp_path / "rank-0").read_text().splitlines() == own + user
    sent = ["RuntimeError NotPickledError: 4: no key"] * 2
    assert (tmp_path / "rank-1").read_text().splitlines() == sent + user


def ask_transformers(folder: Path, environment: dict[str, str]) -> None:
    from transformers.modeling_utils import is_fsdp_enabled

    os.environ.update(environment)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    with joined():
        answer = is_fsdp_enabled()
    (folder / f"rank-{environment['RANK']}").write_text(str(answer))


def test_a_search_under_use_fsdp_loads_weights_on_every_rank(tmp_path: Path) -> None:
    ranks = [start(ask_transformers, tmp_path, variables) for variables in launch_environment(2)]
    for rank in ranks:
        rank.join(PATIENCE)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["False", "False"]


def score_single_groups(folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    (folder / f"rank-{environment['RANK']}").write_text(str(scores_of_groups(folder / "shared")))


def scores_of_groups(folder: Path) -> list[list[float]]:
    model = small_model()
    calibration = answered_calibration(model, (40, 33, 36))
    return single_group.score_groups(inputs_of(single_group, model, calibration, folder)).groups


def test_ranks_share_the_texts_of_single_group(tmp_path: Path) -> None:
    ranks = [start(score_single_groups, tmp_path, variables) for variables in launch_environment(2)]
    for rank in ranks:
        rank.join(PATIENCE)
    expected = str(scores_of_groups(tmp_path / "alone"))
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == [expected] * 2


@pytest.mark.parametrize("error", [None, SystemExit(0)])
def test_rank_that_is_done_ends_nobody(tmp_path: Path, error: SystemExit | None) -> None:
    here, there = member(tmp_path, 0), member(tmp_path, 1)
    gone = replace(there.record.owner, started="another process of this pid")
    there.record = replace(there.record, owner=gone)
    there.beat()
    assert here.has_died(1)
    there.leave(error)
    assert not here.has_died(1)
    assert here.wait_for(1, "left") == "left"


def test_rank_on_another_machine_is_dead_when_its_beat_stands_still(tmp_path: Path) -> None:
    here, there = member(tmp_path, 0), member(tmp_path, 1)
    there.record = replace(there.record, owner=replace(there.record.owner, host="another"))
    for _ in range(3):
        there.beat()
        assert not here.has_died(1)
    assert here.has_died(1)


def test_rank_that_failed_and_hangs_on_its_way_out_is_dead_before_long(tmp_path: Path) -> None:
    now = 0.0
    here, there = member(tmp_path, 0, lambda: now), member(tmp_path, 1)
    assert not any(here.has_died(1) for _ in range(3))  # it runs, however slow it is
    there.leave(ValueError("no such file"))
    there.beat()  # its final state stays
    assert not here.has_died(1)  # it may still be printing its error
    now = 0.1  # later than STALE_SECONDS, which are 0
    assert here.has_died(1)
    with pytest.raises(RankGoneError, match="Rank 1 ended"):
        here.wait_for(1, "done")


def test_file_of_a_rank_that_cannot_be_read_ends_nobody(tmp_path: Path) -> None:
    here = member(tmp_path, 0)
    (here.folder / "rank-1").mkdir()
    assert not here.has_died(1)
    (here.folder / "rank-1").rmdir()
    (here.folder / "rank-1").touch()
    assert not here.has_died(1)


def test_folder_of_an_earlier_launch_is_removed_and_that_of_this_one_kept(tmp_path: Path) -> None:
    earlier = member(tmp_path, 1)
    follower = Ranks(tmp_path, 1, 2)
    follower.join("now")
    leader = Ranks(tmp_path, 0, 2)
    leader.lead("now")
    follower.announce("here")
    assert leader.wait_for(1, "here") == "here"
    assert not earlier.folder.exists()
    earlier.beat()  # a rank that still runs for a moment does not bring the folder back
    assert not earlier.folder.exists()


def test_rank_on_another_machine_waits_for_rank_0_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fixed port, an earlier launch that an error or SIGTERM ended has the same key."""
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
    with pytest.raises(RankGoneError, match="rank 0 to lock"):
        Ranks(tmp_path, 8, 16).follow(join_seconds=0)
    replace(here, ended=True).write(tmp_path)
    with pytest.raises(RankGoneError, match="Rank 0 ended before rank 8 joined"):
        Ranks(tmp_path, 8, 16).follow()
