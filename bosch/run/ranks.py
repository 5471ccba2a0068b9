"""The ranks of one launch follow rank 0 through small files in the folder it has locked: no
collective, whose timeout a search outlasts.

Each rank appends events to `.ranks/<launch>/rank-N`, and the others poll. A rank that has died is
seen by its process on the same machine, rank 0 from anywhere by the beat of its lock: nobody waits
for the dead.
"""

import dataclasses
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from bosch.run.errors import UserError
from bosch.run.lock import (
    POLL_SECONDS,
    STALE_SECONDS,
    LivenessWatch,
    LockRecord,
    ProcessIdentity,
)

RANKS = ".ranks"
JOIN_SECONDS = (
    600.0  # how long a rank waits for rank 0 to appear; rank 0 may itself wait for a stale lock
)


class RankGoneError(UserError):
    """Another rank ended before it did what this one waits for."""


class Ranks:
    """This process among the ranks of its launch."""

    def __init__(
        self, home: Path, rank: int, world: int, stale_seconds: float = STALE_SECONDS
    ) -> None:
        self.home, self.rank, self.world = home, rank, world
        self.stale_seconds = stale_seconds
        self.folder = Path()  # known once joined
        self._opened = time.monotonic()

    def lead(self, launch: str) -> None:
        """Rank 0, once it holds the lock: open the board of this launch, remove those of earlier
        ones."""
        self._join(launch, clear=True)

    def follow(self, join_seconds: float = JOIN_SECONDS) -> None:
        """Any other rank: wait until rank 0 of the same launch holds the folder."""
        watch = LivenessWatch(self.stale_seconds)
        begin = time.monotonic()
        give_up = begin + join_seconds
        found_first = LockRecord.read(self.home)
        while True:
            watch.look(LockRecord.read(self.home))
            if watch.record and watch.record.is_of_this_launch():
                if watch.alive:
                    return self._join(watch.record.launch)
                # With a fixed port every launch has the same key: what lay there before may be of
                # an earlier one, which rank 0 takes over as soon as it is here and sees it dead.
                may_be_old = (
                    found_first is not None
                    and watch.record.launch == found_first.launch
                    and watch.record.parent.host != platform.node()
                    and time.monotonic() < begin + 2 * self.stale_seconds
                )
                if watch.alive is False and not may_be_old:
                    raise RankGoneError(
                        f"Rank 0 ended before rank {self.rank} joined; see its message above."
                    )
            if time.monotonic() > give_up:
                raise RankGoneError(
                    f"Rank {self.rank} has waited {join_seconds:.0f} s for rank 0 to open "
                    f"{self.home}."
                )
            time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        """Tell rank 0 that this rank has read all it needs; rank 0 waits for that, so that nobody
        looks for it in vain, and removes the board."""
        self.announce("left")
        if self.rank == 0:
            for rank in range(1, self.world):
                self.wait_for(rank, "left")
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    def announce(self, event: str) -> None:
        """Let the other ranks know of an event (one line of text)."""
        with (self.folder / f"rank-{self.rank}").open("a") as board:
            board.write(event + "\n")
            board.flush()
            os.fsync(board.fileno())

    def wait_for(self, rank: int, *events: str) -> str:
        """The first of `events` that the other rank announces. RankGoneError if it ends without."""
        watch = LivenessWatch(self.stale_seconds)
        while True:
            # In this order: a rank that announces and then ends must not be taken for one that
            # ended without a word.
            alive = self._alive(rank, watch)
            said = self._read(rank)
            for event in events:
                if event in said:
                    return event
            if not alive:
                raise RankGoneError(
                    f"Rank {rank} ended before rank {self.rank} could go on, so this one ends too; "
                    "see its message above."
                )
            time.sleep(POLL_SECONDS)

    def _join(self, launch: str, clear: bool = False) -> None:
        self.folder = self.home / RANKS / launch
        self.folder.mkdir(parents=True, exist_ok=True)
        for other in self.folder.parent.iterdir() if clear else ():
            if other != self.folder:
                shutil.rmtree(other)
        self.announce(json.dumps(dataclasses.asdict(ProcessIdentity.of(os.getpid()))))

    def _alive(self, rank: int, watch: LivenessWatch) -> bool:
        if rank == 0:
            record = LockRecord.read(self.home)
            watch.look(record if record and record.launch == self.folder.name else None)
            return watch.alive is not False
        said = self._read(rank)
        if not said:
            return time.monotonic() < self._opened + JOIN_SECONDS
        # Of a process on another machine nothing is known (None): its launcher ends the job when it
        # dies.
        return ProcessIdentity(**json.loads(said[0])).alive() is not False

    def _read(self, rank: int) -> list[str]:
        try:
            text = (self.folder / f"rank-{rank}").read_text()
        except FileNotFoundError:
            return []
        return text[
            : text.rfind("\n") + 1
        ].splitlines()  # a line still being written does not count


def rank_and_world(environment: Callable[[str], str | None] = os.environ.get) -> tuple[int, int]:
    """RANK and WORLD_SIZE as the launcher sets them; 0 and 1 where there is none."""
    return int(environment("RANK") or 0), int(environment("WORLD_SIZE") or 1)
