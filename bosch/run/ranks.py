"""How the ranks of one launch follow rank 0: through small files in the folder that it has locked.
A search outlasts the timeout of any collective. (What ranks decide together: bosch/run/group.py.)

    .ranks/LAUNCH/rank-N         a line for each event that rank N has announced
                  rank-N.lock    locked as long as rank N runs

The other ranks poll these files. LAUNCH begins with a name that only ranks of one launch share.
"""

import contextlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from bosch.run.errors import UserError
from bosch.run.files import refuse_link
from bosch.run.fingerprint import fingerprint
from bosch.run.lock import POLL_SECONDS, repeat

RANKS = ".ranks"
# Events that every rank announces.
JOINED, LEFT, FAILED = "joined", "left", "failed"
JOIN_SECONDS = 600.0  # a rank waits for another to appear
EXIT_SECONDS = 60.0  # a rank that failed prints its error and ends
WATCH_SECONDS = 5.0
PEER_DIED = 1  # exit code of a rank that ends because another did
# Set by torchrun and SLURM, to the same values for all ranks of one launch.
LAUNCH_VARIABLES = (
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT SLURM_JOB_ID".split()
)


class RankGoneError(UserError):
    """Another rank ended before it did what this one waits for."""


class Ranks:
    """This process among the ranks of its launch."""

    def __init__(self, home: Path, rank: int, world: int) -> None:
        self.home, self.rank, self.world = home, rank, world
        refuse_link(home / RANKS)  # folders in it are removed
        self.folder = Path()  # known after joining
        self._others = [other for other in range(world) if other != rank]

    def join(self, join_seconds: float = JOIN_SECONDS) -> None:
        """Rank 0, which holds the folder's lock, begins the files of its launch; the others wait
        for them."""
        ranks = self.home / RANKS
        if self.rank == 0:
            shutil.rmtree(ranks, ignore_errors=True)  # of earlier launches
            if self.world > 1:
                self._enter(ranks / f"{self._launch()}-{uuid.uuid4().hex}")
            return
        give_up = time.monotonic() + join_seconds
        while True:
            for folder in ranks.glob(f"{self._launch()}-*"):
                self.folder = folder
                if self._events(0) and self._is_running(0):
                    return self._enter(folder)
                # With a fixed port every launch from several machines has the same name: this may
                # be an earlier one, whose files rank 0 will remove.
                if self._is_on_one_machine() and not self._is_running(0):
                    raise RankGoneError(
                        f"Rank 0 ended before rank {self.rank} joined; see its message above."
                    )
            if time.monotonic() > give_up:
                raise RankGoneError(
                    f"Rank {self.rank} waited {join_seconds:.0f} s for rank 0 to lock {self.home}; "
                    "check that rank 0 was started with the same folder."
                )
            time.sleep(POLL_SECONDS)

    def leave(self, error: BaseException | None = None) -> None:
        """This rank has read all it needs. Rank 0 waits until every rank has left, then removes the
        files. After an error nobody waits, and the other ranks end too."""
        if self.world == 1:
            return
        if error is not None and not isinstance(error, SystemExit):
            with contextlib.suppress(OSError):  # report the error itself, not what follows from it
                self.announce(FAILED)
            return  # its lock is held until it has printed the error and ends
        self.announce(LEFT)
        if self.rank == 0 and error is None:
            for rank in self._others:
                self.wait_for(rank, LEFT)
            shutil.rmtree(self.folder.parent, ignore_errors=True)
        self._lock.release()

    def announce(self, event: str) -> None:
        """Tell the other ranks about an event (one line of text)."""
        if self.world > 1:
            with (self.folder / f"rank-{self.rank}").open("a") as file:
                file.write(event + "\n")

    def wait_for(self, rank: int, *events: str) -> str:
        """The first of `events` that the other rank announces. RankGoneError if it ends first."""
        give_up = time.monotonic() + JOIN_SECONDS
        while True:
            # In this order: otherwise a rank that announces an event and then ends could be taken
            # for one that ended without announcing it.
            is_running = self._is_running(rank)
            announced = self._events(rank)
            for event in events:
                if event in announced:
                    return event
            never_joins = not announced and time.monotonic() > give_up
            if FAILED in announced or never_joins or not is_running:
                raise RankGoneError(self._describe_end(rank))
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While all ranks work: if another rank dies, this process ends within seconds, even if it
        hangs in a collective that nothing else can end."""
        stopped = repeat(self._end_with_others, WATCH_SECONDS) if self.world > 1 else None
        try:
            yield
        finally:
            if stopped:
                stopped.set()

    def _end_with_others(self) -> None:
        for rank in filter(self.has_died, self._others):
            print(f"error: {self._describe_end(rank)}", file=sys.stderr, flush=True)
            os._exit(PEER_DIED)

    def has_died(self, rank: int) -> bool:
        """Whether another rank has ended without leaving, or failed and hangs on its way out."""
        is_running = self._is_running(rank)
        announced = self._events(rank)
        if not announced or LEFT in announced:
            return False  # not announced: rank 0 has removed the files
        age = time.time() - (self.folder / f"rank-{rank}").stat().st_mtime
        return not is_running or (FAILED in announced and age > EXIT_SECONDS)

    def _describe_end(self, rank: int) -> str:
        return (
            f"Rank {rank} ended while rank {self.rank} was waiting for it, so rank {self.rank} "
            f"ends too; see the message of rank {rank} above."
        )

    def _enter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = FileLock(folder / f"rank-{self.rank}.lock")
        self._lock.acquire()
        self.announce(JOINED)

    def _is_running(self, rank: int) -> bool:
        """True also before it has joined."""
        if not self._events(rank):
            return True
        try:
            with FileLock(self.folder / f"rank-{rank}.lock").acquire(blocking=False):
                return False
        except Timeout:
            return True
        except FileNotFoundError:  # rank 0 has removed the folder
            return False

    def _events(self, rank: int) -> list[str]:
        with contextlib.suppress(OSError):  # not there yet, or unreadable for a moment (NFS)
            return (self.folder / f"rank-{rank}").read_text().split("\n")[:-1]
        return []

    def _is_on_one_machine(self) -> bool:
        return os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)

    def _launch(self) -> str:
        """Equal for all ranks of a launch; on one machine, for no other launch."""
        values = [os.environ.get(name, "") for name in LAUNCH_VARIABLES]
        launcher = os.getppid() if self._is_on_one_machine() else None
        return fingerprint([*values, launcher])


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
