"""A rank that has died ends the others, even where nothing else would wake them."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from tests.fork_server import PATIENCE
from training.heartbeat import PEER_DIED, Heartbeat

BEAT_SECONDS = 0.05


def wait_for_ever(folder: Path, rank: int, ends: bool, ready: Any) -> None:
    beat = Heartbeat(folder, rank, 2, BEAT_SECONDS)
    beat.start()
    if ends:
        beat.stop()
    ready.set()
    signal.pause()


def pair(folder: Path, ends: bool) -> list[Any]:
    context: Any = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in range(2)]
    ranks = [
        context.Process(
            target=wait_for_ever, args=(folder, n, ends and n == 1, ready[n]), daemon=True
        )
        for n in range(2)
    ]
    for rank, event in zip(ranks, ready, strict=True):
        rank.start()
        assert event.wait(PATIENCE)
    return ranks


def count_of(folder: Path, rank: int) -> int:
    return int(json.loads((folder / f"rank-{rank}").read_text())["count"])


def test_killed_rank_ends_the_one_that_waits(tmp_path: Path) -> None:
    waiting, killed = pair(tmp_path, ends=False)
    killed.kill()
    killed.join()
    waiting.join(PATIENCE)
    assert waiting.exitcode == PEER_DIED


def test_rank_that_is_done_ends_nobody(tmp_path: Path) -> None:
    waiting, done = pair(tmp_path, ends=True)
    done.kill()
    done.join()
    assert not Heartbeat(tmp_path, 0, 2)._is_dead(1)
    last = count_of(tmp_path, 0) + 20  # beats, at each of which it looks at the other
    for _ in range(1_200):
        waiting.join(BEAT_SECONDS)
        assert waiting.exitcode is None
        if count_of(tmp_path, 0) >= last:
            break
    assert count_of(tmp_path, 0) >= last
    waiting.kill()
    waiting.join()


def test_beats_of_an_earlier_launch_end_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "earlier")
    waiting, killed = pair(tmp_path, ends=False)
    for rank in (waiting, killed):
        rank.kill()
        rank.join()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "now")
    assert not Heartbeat(tmp_path, 0, 2)._is_dead(1)
    assert os.listdir(tmp_path)


def test_rank_on_another_machine_is_dead_when_its_count_stands_still(tmp_path: Path) -> None:
    here, there = Heartbeat(tmp_path, 0, 2, stale_seconds=0.0), Heartbeat(tmp_path, 1, 2)
    there._identity["host"] = "another machine"
    there._write()
    assert not here._is_dead(1)
    there._count += 1
    there._write()
    assert not here._is_dead(1)
    assert here._is_dead(1)


def test_beat_that_cannot_be_read_ends_neither_the_rank_nor_its_heart(tmp_path: Path) -> None:
    (tmp_path / "rank-1").mkdir()
    assert not Heartbeat(tmp_path, 0, 2)._is_dead(1)
    (tmp_path / "rank-1").rmdir()
    (tmp_path / "rank-1").touch()
    assert not Heartbeat(tmp_path, 0, 2)._is_dead(1)


def test_rank_that_failed_and_hangs_on_its_way_out_is_dead_before_long(tmp_path: Path) -> None:
    here, there = Heartbeat(tmp_path, 0, 2, stale_seconds=0.0), Heartbeat(tmp_path, 1, 2)
    there._write()
    there.stop(ended=False)
    assert not here._is_dead(1)  # it may just be telling why
    assert here._is_dead(1)


def test_rank_that_lives_is_not_dead_however_slow_it_is(tmp_path: Path) -> None:
    here, there = Heartbeat(tmp_path, 0, 2, stale_seconds=0.0), Heartbeat(tmp_path, 1, 2)
    there._write()
    assert not any(here._is_dead(1) for _ in range(3))


def test_beat_of_a_launch_with_the_same_port_is_cleared_before_anybody_reads_it(
    tmp_path: Path,
) -> None:
    waiting, killed = pair(tmp_path, ends=False)
    for rank in (waiting, killed):
        rank.kill()
        rank.join()
    here = Heartbeat(tmp_path, 0, 2)
    assert here._is_dead(1)
    Heartbeat(tmp_path, 1, 2).clear()
    assert not here._is_dead(1)
