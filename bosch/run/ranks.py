"""How the ranks of one launch follow rank 0: through small files in the folder that it has locked.
A search outlasts the timeout of any collective. (What ranks decide together: bosch/run/group.py.)

Each rank writes `.ranks/<launch>/rank-N`: its heartbeat, as in a lock, and the events that it has
announced. The other ranks poll these files. A rank that hangs in a GPU collective because another
has died is ended by its own heartbeat thread.
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
from collections.abc import Callable, Iterator
from pathlib import Path

from bosch.run.errors import UserError
from bosch.run.inside import refuse_link
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

    def __init__(
        self, home: Path, rank: int, world: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.home, self.rank, self.world = home, rank, world
        refuse_link(home / RANKS)  # folders in it are removed
        self.folder = Path()  # known after joining
        self.record = LockRecord.of_this_process()
        self._events: list[str] = []
        self._watches = {other: LivenessWatch(clock) for other in range(world) if other != rank}
        self._num_watching = 0  # how many `watching` blocks this process is in
        self._writing = threading.Lock()
        self._left = threading.Event()

    def lead(self, launch: str) -> None:
        """Rank 0, once it holds the lock: start this launch's folder, remove earlier ones."""
        for folder in (self.home / RANKS).glob("*"):
            if folder.name != launch:  # other ranks of this launch may be here already
                shutil.rmtree(folder, ignore_errors=True)
        self.join(launch)

    def follow(self, join_seconds: float = JOIN_SECONDS) -> None:
        """Any other rank: wait until rank 0 of the same launch holds the lock."""
        watch = LivenessWatch()
        give_up = time.monotonic() + join_seconds
        while True:
            watch.look(LockRecord.read(self.home))
            if watch.record and watch.record.is_of_this_launch():
                if watch.alive:
                    return self.join(watch.record.launch)
                # With a fixed port every launch has the same key: a dead record from another
                # machine may belong to an earlier launch, and rank 0 will take it over.
                if watch.alive is False and watch.record.parent.host == platform.node():
                    raise RankGoneError(
                        f"Rank 0 ended before rank {self.rank} joined; see its message above."
                    )
            if time.monotonic() > give_up:
                raise RankGoneError(
                    f"Rank {self.rank} waited {join_seconds:.0f} s for rank 0 to lock {self.home}; "
                    "check that rank 0 was started with the same folder."
                )
            time.sleep(POLL_SECONDS)

    def join(self, launch: str) -> None:
        """Announce this rank in the launch's folder, and start its heartbeat."""
        self.folder = self.home / RANKS / launch
        if self.world > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
            self._left = start_beating(self.beat)

    def leave(self, error: BaseException | None = None) -> None:
        """This rank has read all it needs. Rank 0 waits until every rank has left, then removes the
        folder. After an error nobody waits, and the other ranks end too."""
        self._left.set()
        if self.world == 1:
            return
        if error is not None and not isinstance(error, SystemExit):
            with contextlib.suppress(OSError):  # report the error itself, not what follows from it
                self.record = dataclasses.replace(self.record, ended=True)
                self._write()
            return
        self.announce(LEFT)
        if self.rank == 0 and error is None:
            for rank in self._watches:
                self.wait_for(rank, LEFT)
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    def announce(self, event: str) -> None:
        """Tell the other ranks about an event (one line of text)."""
        if self.world > 1:
            self._events.append(event)
            self._write()

    def wait_for(self, rank: int, *events: str) -> str:
        """The first of `events` that the other rank announces. RankGoneError if it ends first."""
        watch = LivenessWatch()
        give_up = time.monotonic() + JOIN_SECONDS
        while True:
            # In this order: otherwise a rank that announces an event and then ends could be taken
            # for one that ended without announcing it.
            watch.look(self._read(rank)[0])
            announced = self._read(rank)[1]
            for event in events:
                if event in announced:
                    return event
            if watch.alive is False and (watch.record or time.monotonic() > give_up):
                raise RankGoneError(self._describe_end(rank))
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While all ranks work: if another rank dies, this process ends at once."""
        self._num_watching += 1
        try:
            yield
        finally:
            self._num_watching -= 1

    def beat(self) -> None:
        """What the heartbeat thread does every few seconds."""
        with contextlib.suppress(OSError):
            self._write(is_beat=True)
        for rank in self._watches:
            if self._num_watching and self.has_died(rank):
                # The main thread may hang in a collective that nothing else can end.
                print(f"error: {self._describe_end(rank)}", file=sys.stderr, flush=True)
                os._exit(PEER_DIED)

    def has_died(self, rank: int) -> bool:
        """Whether another rank has ended without leaving."""
        watch = self._watches[rank]
        record, announced = self._read(rank)
        watch.look(record)
        if record is None or LEFT in announced or watch.alive is not False:
            return False
        # A rank that failed may still be printing its error, and so may this one.
        return not record.ended or watch.is_stale()

    def _describe_end(self, rank: int) -> str:
        return (
            f"Rank {rank} ended while rank {self.rank} was waiting for it, so rank {self.rank} "
            f"ends too; see the message of rank {rank} above."
        )

    def _write(self, is_beat: bool = False) -> None:
        with self._writing:
            if is_beat and self._left.is_set():
                return  # the final state stays
            self.record = dataclasses.replace(self.record, beat=self.record.beat + is_beat)
            content = dataclasses.asdict(self.record) | {"events": self._events}
            write_atomically(self.folder / f"rank-{self.rank}", json.dumps(content))

    def _read(self, rank: int) -> tuple[LockRecord | None, list[str]]:
        try:
            content = json.loads((self.folder / f"rank-{rank}").read_text())
            events = content.pop("events")
            return LockRecord.parse(content), events
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, []  # not there yet, or just replaced and unreadable for a moment (NFS)


def rank_and_world() -> tuple[int, int]:
    """RANK and WORLD_SIZE as the launcher sets them; 0 and 1 without a launcher."""
    texts = os.environ.get("RANK") or "0", os.environ.get("WORLD_SIZE") or "1"
    try:
        rank, world = map(int, texts)
        if 0 <= rank < world:
            return rank, world
    except ValueError:
        pass
    raise UserError(
        "the variables RANK={} and WORLD_SIZE={} are not those of a launch, where RANK counts from "
        "0 and is below WORLD_SIZE; use accelerate launch, or unset both.".format(*texts)
    )
