"""The ranks of a launch: which one this is, what they decide together, and how one waits for
another. Also the lock by which a launch holds a folder.

    rank, world = rank_and_world()           # as the launcher says
    start_ranks()                            # the process group, once in a process
    ranks = Ranks.current()
    value = ranks.from_rank_0(propose)       # rank 0's value, on every rank
    shares = ranks.gather(mine)              # every rank's value, on every rank
    ranks.all_succeed(write_my_part)         # an error on one rank is raised on all

Decisions go over a gloo group of their own and never wait for a GPU. Every rank must make every
call, in the same order.

Work of hours is waited for by small files in the folder that rank 0 has locked (`RankFiles`): a
rank that waits so needs no process group yet, can be interrupted, and notices at once that the
other has died.

    .ranks/LAUNCH/rank-N         a line for each event that rank N has announced
                  rank-N.lock    locked as long as rank N runs

torch is imported inside functions: it takes seconds, and every `--help` reads this file.
"""

import atexit
import contextlib
import errno
import gc
import math
import os
import pickle
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from filelock import FileLock, Timeout

from bosch.run.errors import UserError
from bosch.run.files import refuse_unless_ours
from bosch.run.fingerprint import fingerprint
from bosch.run.memory import has_gpu

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")

# A rank that hangs in a collective of training ends the job after this time; one that dies is
# noticed at once. An evaluation at a checkpoint may take longer: it is waited for by files.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
# A rank may wait long in a decision, while another runs its share of an evaluation or writes to a
# slow disk. The default of half an hour would end the search.
DECISION_TIMEOUT = timedelta(days=1)
RANKS = ".ranks"
LEFT = "left"  # the last event of a rank
JOIN_SECONDS = 600.0  # a rank waits for another to appear
LOCK = ".lock"
POLL_SECONDS = 0.2
# Set by torchrun and SLURM, to the same values for all ranks of one launch.
LAUNCH_VARIABLES = (
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT SLURM_JOB_ID".split()
)


def rank_and_world() -> tuple[int, int]:
    """RANK and WORLD_SIZE as the launcher sets them; 0 and 1 without a launcher."""
    texts = os.environ.get("RANK") or "0", os.environ.get("WORLD_SIZE") or "1"
    with contextlib.suppress(ValueError):
        rank, world = map(int, texts)
        if 0 <= rank < world:
            return rank, world
    variables = f"RANK={texts[0]} and WORLD_SIZE={texts[1]}"
    raise UserError(f"{variables} are not of a launch; use accelerate launch, or unset both.")


# ------------------------------------------------------------------------------- the process group


@dataclass(frozen=True)
class Ranks:
    """The ranks of the process group. Before `start_ranks`, and in a process alone, there is one:
    then nothing is exchanged."""

    rank: int = 0
    world: int = 1
    gloo: "ProcessGroup | None" = None  # by which they decide; None: one rank

    @staticmethod
    def current() -> "Ranks":
        return _current

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, on every rank; its error too is raised on every rank."""
        if self.world == 1:
            return make()
        from torch import distributed

        result, own_error = _attempt(make) if self.rank == 0 else (None, None)
        message: list[Any] = [result, _as_sent(own_error)]
        distributed.broadcast_object_list(message, src=0, group=self.gloo)
        if (error := own_error or message[1]) is not None:
            raise error
        return cast(T, message[0])

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.from_rank_0(lambda: value)

    def all_succeed(self, do: Callable[[], T]) -> T:
        """Run `do` on every rank, each on its own. An error on one rank is raised on all, so that
        none goes on alone. `do` must not wait for other ranks."""
        with self.succeeding():
            result = do()
        return result

    @contextlib.contextmanager
    def succeeding(self) -> Iterator[None]:
        """As `all_succeed`, around a block: what raises in it on one rank ends it on all."""
        if self.world == 1:
            yield
            return
        own_error: Exception | None = None
        try:
            yield
        except Exception as error:
            own_error = error
        # This rank's own error first: it has the traceback.
        for failed in [own_error, *self.gather(_as_sent(own_error))]:
            if failed is not None:
                raise failed

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        values = [value] * self.world
        if self.world > 1:
            from torch import distributed

            distributed.all_gather_object(values, value, group=self.gloo)
        return values

    def sum(self, *values: float) -> list[float]:
        """Each value, added up over the ranks in float64."""
        if self.world == 1:
            return list(values)
        import torch

        total = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.gloo)
        return total.tolist()


def _attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _as_sent(error: Exception | None) -> Exception | None:
    """As other ranks can receive it: they would wait forever for what cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


_current = Ranks()


def start_ranks(device: "torch.device | None" = None, even_alone: bool = False) -> None:
    """Join the ranks of this launch in a process group, once; it lasts until the process ends.

    device: this rank's; None: a GPU of its own, on a machine with GPUs. even_alone: a single
    process makes a group too (fully_shard needs one), and opens no port."""
    global _current
    import torch
    from torch import distributed

    # transformers would leave the weights of all ranks but the first for FSDP to fill. Every launch
    # with --use_fsdp sets these; training reads other variables.
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)
    rank, world = rank_and_world()
    if _current.gloo is not None or (world == 1 and not even_alone):
        return
    if not distributed.is_initialized():
        if device is None and has_gpu():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        backend = "gloo"
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(
            backend,
            store=distributed.HashStore() if world == 1 else None,  # None: the launcher's
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        atexit.register(leave_ranks)
    if world > 1:
        # Now, not at the first decision: when the launcher has died, ranks can still decide to
        # save, but make no new group.
        gloo = distributed.new_group(backend="gloo", timeout=DECISION_TIMEOUT)
        # A rank that had nothing to decide could end while another still connects to it.
        distributed.barrier(group=gloo)
        _current = Ranks(rank, world, gloo)


def leave_ranks() -> None:
    """Leave the process group, if there is one."""
    global _current
    _current = Ranks()
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    # Sharded models are garbage in cycles that hold the group. Left to the interpreter's end, a
    # thread of gloo may still free a tensor then, and the process aborts (seen rarely).
    gc.collect()
    distributed.destroy_process_group()


# ---------------------------------------------------------------- waiting for what takes hours


class RankGoneError(UserError):
    """Another rank ended before it did what this one waits for."""


def wait_for(find: Callable[[], T | None], seconds: float = math.inf) -> T | None:
    """The first result of `find` that is not None, asked several times a second; None when the
    seconds are over."""
    give_up = time.monotonic() + seconds
    while (found := find()) is None and time.monotonic() <= give_up:
        time.sleep(POLL_SECONDS)
    return found


class RankFiles:
    """The files of one launch in the folder `home`, which its rank 0 has locked."""

    def __init__(self, home: Path, rank: int, world: int) -> None:
        self.home, self.rank, self.world = home, rank, world
        self.folder = Path()  # known after joining
        refuse_unless_ours(home / RANKS, is_folder=True)  # folders in it are removed

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

        def find_launch() -> Path | None:
            for folder in ranks.glob(f"{launch}-*"):
                self.folder = folder
                if self._events(0) and self._is_running(0):
                    return folder
                # With a fixed port every launch from several machines has the same name: this may
                # be an earlier one, whose files rank 0 will remove.
                if is_on_one_machine and not self._is_running(0):
                    raise RankGoneError(f"Rank 0 ended before rank {self.rank} joined; see above.")
            return None

        folder = wait_for(find_launch, join_seconds)
        if folder is None:
            waited = f"Rank {self.rank} waited {join_seconds:.0f} s for rank 0 to lock"
            raise RankGoneError(f"{waited} {self.home}; start rank 0 with the same folder.")
        self._enter(folder)

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

        def find_event() -> str | None:
            is_running = self._is_running(rank)  # first: it may announce an event and then end
            announced = self._events(rank)
            if found := [event for event in events if event in announced]:
                return found[0]
            if not is_running or (not announced and time.monotonic() > give_up):
                raise RankGoneError(f"Rank {rank} ended while {self.rank} waited; see above.")
            return None

        return cast(str, wait_for(find_event))

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


# ------------------------------------------------------------------------------- a folder's lock


class FolderInUseError(UserError):
    """A running process uses the folder; the message names it."""


class FolderLock:
    """One process at a time in a folder, until the `with FolderLock(folder):` block or the process
    ends, however it ends: the kernel releases `.lock`, whose text names the owner. On a file system
    without locks the file's existence is the lock: a killed owner on another machine blocks the
    folder until it is deleted.

    wait: for a folder that is in use, instead of raising FolderInUseError."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print, wait: bool = False):
        self.folder, self.say, self.wait = folder, say, wait
        self._lock = FileLock(folder / LOCK)

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            # FileNotFoundError: where no folder can be, as in /proc.
            advice = "choose another folder (--run-dir or --out), or move the file away"
            raise UserError(f"{self.folder} cannot be made: {error.strerror}; {advice}.") from error
        path = self.folder / LOCK
        refuse_unless_ours(path)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            owner = "another process"
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if text := re.fullmatch(r"(pid \d+ on host \S+)\n", path.read_text()):
                    owner = text[1]
            if not self.wait:
                advice = "wait until it ends, or choose another folder (--run-dir or --out)"
                raise FolderInUseError(f"{self.folder} is in use by {owner}; {advice}.") from None
            self.say(f"{self.folder} is in use by {owner}: waiting for it")
            self._lock.acquire(poll_interval=POLL_SECONDS)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOLCK:
                raise
            raise UserError(f"{path} cannot be locked: {error}; choose another disk.") from error
        path.write_text(f"pid {os.getpid()} on host {platform.node()}\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
