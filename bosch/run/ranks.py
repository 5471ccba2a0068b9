"""How the ranks of one launch follow rank 0: through small files in the folder that it has locked,
which the others poll. A search outlasts the timeout of any collective. (What ranks decide together:
bosch/run/group.py.)

    .ranks/LAUNCH/rank-N         a line for each event that rank N has announced
                  rank-N.lock    locked as long as rank N runs
"""

import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from bosch.run.errors import UserError
from bosch.run.files import refuse_link
from bosch.run.fingerprint import fingerprint
from bosch.run.lock import POLL_SECONDS

RANKS = ".ranks"
LEFT = "left"  # the last event of a rank
JOIN_SECONDS = 600.0  # a rank waits for another to appear
# Set by torchrun and SLURM, to the same values for all ranks of one launch.
LAUNCH_VARIABLES = (
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT SLURM_JOB_ID".split()
)


class RankGoneError(UserError):
    """Another rank ended before it did what this one waits for."""


class Ranks:
    def __init__(self, home: Path, rank: int, world: int) -> None:
        self.home, self.rank, self.world = home, rank, world
        self.folder = Path()  # known after joining
        refuse_link(home / RANKS)  # folders in it are removed

    def join(self, join_seconds: float = JOIN_SECONDS) -> None:
        """Rank 0, which holds the folder's lock, begins the files of its launch; the others wait
        for them."""
        ranks = self.home / RANKS
        is_on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)
        values = [os.environ.get(name, "") for name in LAUNCH_VARIABLES]
        launch = fingerprint([*values, os.getppid() if is_on_one_machine else None])
        if self.rank == 0:
            shutil.rmtree(ranks, ignore_errors=True)  # of earlier launches
            if self.world > 1:
                self._enter(ranks / f"{launch}-{uuid.uuid4().hex}")
            return
        give_up = time.monotonic() + join_seconds
        while True:
            for folder in ranks.glob(f"{launch}-*"):
                self.folder = folder
                if self._events(0) and self._is_running(0):
                    return self._enter(folder)
                # With a fixed port every launch from several machines has the same name: this may
                # be an earlier one, whose files rank 0 will remove.
                if is_on_one_machine and not self._is_running(0):
                    raise RankGoneError(f"Rank 0 ended before rank {self.rank} joined; see above.")
            if time.monotonic() > give_up:
                waited = f"Rank {self.rank} waited {join_seconds:.0f} s for rank 0 to lock"
                raise RankGoneError(f"{waited} {self.home}; start rank 0 with the same folder.")
            time.sleep(POLL_SECONDS)

    def leave(self, failed: bool) -> None:
        """This rank has read all it needs. Rank 0 waits until every rank has left, then removes the
        files. After an error nobody waits, and the other ranks end too."""
        if self.world == 1:
            return
        try:
            if not failed:
                self.announce(LEFT)
            if not failed and self.rank == 0:
                for rank in range(1, self.world):
                    self.wait_for(rank, LEFT)
                shutil.rmtree(self.home / RANKS, ignore_errors=True)
        finally:
            self._lock.release()

    def announce(self, event: str) -> None:
        if self.world > 1:
            with (self.folder / f"rank-{self.rank}").open("a") as file:
                file.write(event + "\n")

    def wait_for(self, rank: int, *events: str) -> str:
        """The first of `events` that the other rank announces. RankGoneError if it ends first."""
        give_up = time.monotonic() + JOIN_SECONDS
        while True:
            is_running = self._is_running(rank)  # first: it may announce an event and then end
            announced = self._events(rank)
            if found := [event for event in events if event in announced]:
                return found[0]
            if not is_running or (not announced and time.monotonic() > give_up):
                raise RankGoneError(f"Rank {rank} ended while {self.rank} waited; see above.")
            time.sleep(POLL_SECONDS)

    def _enter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = FileLock(folder / f"rank-{self.rank}.lock")
        self._lock.acquire()
        self.announce("joined")

    def _is_running(self, rank: int) -> bool:
        """True also before it has joined."""
        if not self._events(rank):
            return True
        try:
            with FileLock(self.folder / f"rank-{rank}.lock").acquire(blocking=False):
                return False
        except Timeout:
            return True

    def _events(self, rank: int) -> list[str]:
        with contextlib.suppress(OSError):  # not there yet, or unreadable for a moment (NFS)
            return (self.folder / f"rank-{rank}").read_text().split("\n")[:-1]
        return []


def rank_and_world() -> tuple[int, int]:
    """RANK and WORLD_SIZE as the launcher sets them; 0 and 1 without a launcher."""
    texts = os.environ.get("RANK") or "0", os.environ.get("WORLD_SIZE") or "1"
    with contextlib.suppress(ValueError):
        rank, world = map(int, texts)
        if 0 <= rank < world:
            return rank, world
    variables = "RANK={} and WORLD_SIZE={}".format(*texts)
    raise UserError(f"{variables} are not of a launch; use accelerate launch, or unset both.")
