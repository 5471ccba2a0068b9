"""The ranks of one launch follow rank 0 through small files in the folder it has locked: no
collective, whose timeout a search outlasts. (What they decide together: bosch/run/group.py.)

Each rank keeps `.ranks/<launch>/rank-N`: its sign of life, as in a lock, and the events that it has
announced. The others poll. Who waits for the dead in a GPU's collective is ended by its own beat.
"""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bosch.run.errors import UserError
from bosch.run.lock import POLL_SECONDS, LivenessWatch, LockRecord, start_beating
from bosch.run.manifest import write_atomically

RANKS = ".ranks"
LEFT = "left"
JOIN_SECONDS = 600.0  # a rank waits for another to appear; rank 0 may itself wait for a stale lock
PEER_DIED = 1  # exit code of a rank that ends because another did


class RankGoneError(UserError):
    """Another rank ended before it did what this one waits for."""


class Ranks:
    """This process among the ranks of its launch."""

    def __init__(self, home: Path, rank: int, world: int) -> None:
        self.home, self.rank, self.world = home, rank, world
        self.folder = Path()  # known once joined
        self._record = LockRecord.of_this_process()
        self._events: list[str] = []
        self._others = {n: LivenessWatch() for n in range(world) if n != rank}
        self._watching = 0  # blocks of `watching` that this process is in
        self._writing = threading.Lock()
        self._left = threading.Event()

    def lead(self, launch: str) -> None:
        """Rank 0, once it holds the lock: open the board of this launch, remove earlier ones."""
        for board in (self.home / RANKS).glob("*"):
            if board.name != launch:  # others of this launch may be here already
                shutil.rmtree(board, ignore_errors=True)
        self._join(launch)

    def follow(self, join_seconds: float = JOIN_SECONDS) -> None:
        """Any other rank: wait until rank 0 of the same launch holds the folder."""
        watch = LivenessWatch()
        give_up = time.monotonic() + join_seconds
        while True:
            watch.look(LockRecord.read(self.home))
            if watch.record and watch.record.is_of_this_launch():
                if watch.alive:
                    return self._join(watch.record.launch)
                # With a fixed port every launch has the same key: what another machine has left
                # may be of an earlier one, which rank 0 takes over as soon as it is here.
                if watch.alive is False and watch.record.parent.host == platform.node():
                    raise RankGoneError(
                        f"Rank 0 ended before rank {self.rank} joined; see its message above."
                    )
            if time.monotonic() > give_up:
                waited = f"Rank {self.rank} has waited {join_seconds:.0f} s for rank 0 to open"
                raise RankGoneError(f"{waited} {self.home}.")
            time.sleep(POLL_SECONDS)

    def leave(self, error: BaseException | None = None) -> None:
        """This rank has read all it needs. Rank 0 waits until all have, so that nobody looks for it
        in vain, and removes the board. With an error nobody waits, and the others end too."""
        self._left.set()
        if self.world == 1:
            return
        if error is not None and not isinstance(error, SystemExit):
            with contextlib.suppress(OSError):  # the error is told, not what it leads to
                self._write(ended=True)
            return
        self.announce(LEFT)
        if self.rank == 0 and error is None:
            for rank in self._others:
                self.wait_for(rank, LEFT)
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    def announce(self, event: str) -> None:
        """Let the other ranks know of an event (one line of text)."""
        if self.world > 1:
            self._events.append(event)
            self._write()

    def wait_for(self, rank: int, *events: str) -> str:
        """The first of `events` that the other rank announces. RankGoneError if it ends without."""
        watch = LivenessWatch()
        give_up = time.monotonic() + JOIN_SECONDS
        while True:
            # In this order: a rank that announces and then ends must not be taken for one that
            # ended without a word.
            watch.look(self._read(rank)[0])
            said = self._read(rank)[1]
            for event in events:
                if event in said:
                    return event
            if watch.alive is False and (watch.record or time.monotonic() > give_up):
                raise RankGoneError(self._describe_end(rank))
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While all ranks work: the death of another ends this process at once."""
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1

    def _join(self, launch: str) -> None:
        self.folder = self.home / RANKS / launch
        if self.world > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
            self._left = start_beating(self._beat)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            self._write(beat=self._record.beat + 1)
        for rank in self._others:
            if self._watching and self._has_died(rank):
                # The main thread may wait in a collective that nothing else can end.
                print(f"error: {self._describe_end(rank)}", file=sys.stderr, flush=True)
                os._exit(PEER_DIED)

    def _has_died(self, rank: int) -> bool:
        watch = self._others[rank]
        record, said = self._read(rank)
        watch.look(record)
        if record is None or LEFT in said or watch.alive is not False:
            return False
        # One that failed may just be telling why, and so may this one.
        return not record.ended or watch.stands_still()

    def _describe_end(self, rank: int) -> str:
        return (
            f"Rank {rank} ended before rank {self.rank} could go on, so this one ends too; see its "
            "message above."
        )

    def _write(self, **changes: Any) -> None:
        with self._writing:
            if "beat" in changes and self._left.is_set():
                return  # nothing is written over the last word
            self._record = dataclasses.replace(self._record, **changes)
            told = dataclasses.asdict(self._record) | {"events": self._events}
            write_atomically(self.folder / f"rank-{self.rank}", json.dumps(told))

    def _read(self, rank: int) -> tuple[LockRecord | None, list[str]]:
        try:
            told = json.loads((self.folder / f"rank-{rank}").read_text())
        except (OSError, ValueError):
            return None, []  # not there yet, or just replaced and unreadable for a moment (NFS)
        events = told.pop("events")
        return LockRecord.parse(told), events


def rank_and_world() -> tuple[int, int]:
    """RANK and WORLD_SIZE as the launcher sets them; 0 and 1 where there is none."""
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
