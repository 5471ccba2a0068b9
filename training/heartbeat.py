"""A sign of life of each rank, so that one that died ends the others: a GPU collective would wait
for it until its own timeout, hours perhaps, and keep the whole allocation.

Each rank writes a small file every few seconds and reads the others'. On one machine the process
itself tells whether it lives, from another machine the count in the file does. One that failed says
so: should it hang on its way out, as in the end of a GPU's process group, it counts as dead too.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

from bosch.run.lock import BEAT_SECONDS, STALE_SECONDS, ProcessIdentity, launch_key
from bosch.run.manifest import write_atomically

PEER_DIED = 1  # exit code of a rank that ends because another did


class Heartbeat:
    """Beats in a thread from `start` to `stop`, if there are others. A dead one ends this process
    at once."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.beat_seconds, self.stale_seconds = beat_seconds, stale_seconds
        self._launch = launch_key()
        self._identity = dataclasses.asdict(ProcessIdentity.of(os.getpid()))
        self._count = 0
        self._seen: dict[int, tuple[int, float]] = {}  # rank: its count, and since when
        self._stopped = threading.Event()
        self._writing = threading.Lock()

    def clear(self) -> None:
        """Take away this rank's beat of an earlier launch, which may have had the same port."""
        if self.world > 1:
            (self.folder / f"rank-{self.rank}").unlink(missing_ok=True)

    def start(self) -> None:
        if self.world == 1:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat").start()

    def stop(self, ended: bool = True) -> None:
        """No more beats. ended: this rank is done, and its end no reason for others to end. Not
        ended: it failed, and others that do not fail by themselves end before long."""
        with self._writing:
            self._stopped.set()
        if self.world > 1:
            with contextlib.suppress(OSError):
                self._write("ended" if ended else "failed")

    def _keep_beating(self) -> None:
        while not self._stopped.wait(self.beat_seconds):
            with contextlib.suppress(OSError):  # a full disk must not end the heart
                self._count += 1
                self._write()
            for rank in range(self.world):
                if rank != self.rank and self._is_dead(rank):
                    if self._stopped.is_set():
                        return
                    # The main thread may wait in a collective that nothing else can end.
                    print(
                        f"rank {self.rank}: rank {rank} has died, so this one ends too; the same "
                        "command goes on from the last checkpoint",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(PEER_DIED)

    def _write(self, last_word: str | None = None) -> None:
        beat = {
            "launch": self._launch,
            "process": self._identity,
            "count": self._count,
            "last_word": last_word,
        }
        with self._writing:
            if last_word or not self._stopped.is_set():  # nothing is written over the last word
                write_atomically(self.folder / f"rank-{self.rank}", json.dumps(beat))

    def _is_dead(self, rank: int) -> bool:
        try:
            beat = json.loads((self.folder / f"rank-{rank}").read_text())
        except (OSError, ValueError):
            # Not there yet (whoever never starts is missed by the process group), or just replaced
            # and not to be read for a moment, as on NFS.
            return False
        if beat["launch"] != self._launch or beat["last_word"] == "ended":
            return False  # left over from an earlier launch, or done
        alive = ProcessIdentity(**beat["process"]).alive()
        if alive is False:
            return True
        if alive and beat["last_word"] is None:
            return False
        count, since = self._seen.get(rank, (-1, 0.0))
        if beat["count"] != count:
            self._seen[rank] = (beat["count"], time.monotonic())
            return False
        return time.monotonic() - since > self.stale_seconds
