"""One process at a time in a folder: `.lock` names its owner, and counts a beat up every few
seconds. On one machine the process itself tells whether it lives; from another machine or container
only the beat does.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # an owner on another machine whose beat stands still for so long is dead
POLL_SECONDS = 0.2

LOCK = ".lock"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# What torchrun and SLURM tell each rank, equal for all ranks of one launch.
LAUNCH_VARIABLES = (
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT SLURM_JOB_ID".split()
)


class FolderInUseError(UserError):
    """A live process works in the folder; the message names it."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that no other can be mistaken for: pids are used again."""

    host: str
    boot_id: str
    pid_namespace: str  # containers on one machine count their pids apart
    pid: int
    started: str  # in clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        return cls(*_this_machine(), pid, _process_state(pid)[1])

    def alive(self) -> bool | None:
        """Whether the process still runs; None where this machine cannot tell. Another boot of this
        host may be another machine of its name, so that the beat has to tell."""
        if (self.host, self.boot_id, self.pid_namespace) != _this_machine():
            return None
        state, started = _process_state(self.pid)
        return state not in ("gone", "Z", "X") and started == self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


@dataclass(frozen=True)
class LockRecord:
    """What a lock file says, and the sign of life of each rank (bosch/run/ranks.py)."""

    owner: ProcessIdentity
    parent: ProcessIdentity  # the launcher, or the shell
    launch: str  # new each time the lock is taken
    launch_key: str  # equal for all ranks of a launch; with a fixed port, for other launches too
    beat: int = 0
    ended: bool = False  # the owner failed; left behind so that other ranks need not wait for it

    @classmethod
    def of_this_process(cls) -> "LockRecord":
        owner, parent = (ProcessIdentity.of(pid) for pid in (os.getpid(), os.getppid()))
        key = "/".join(os.environ.get(name, "") for name in LAUNCH_VARIABLES)
        return cls(owner, parent, uuid.uuid4().hex, key)

    def is_of_this_launch(self) -> bool:
        """Whether its owner was started together with this process, by one `accelerate launch`."""
        here = LockRecord.of_this_process()
        same_parent = self.parent == here.parent or self.parent.host != here.parent.host
        return self.launch_key == here.launch_key and same_parent

    @classmethod
    def parse(cls, told: dict[str, Any]) -> "LockRecord":
        owner, parent = (ProcessIdentity(**told.pop(name)) for name in ("owner", "parent"))
        return cls(owner, parent, **told)

    @classmethod
    def read(cls, folder: Path) -> "LockRecord | None":
        """The record in the folder's lock file; None where there is none."""
        try:
            return cls.parse(json.loads((folder / LOCK).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise FolderInUseError(
                f"{folder / LOCK} cannot be read ({error}); if no run uses this folder, delete it."
            ) from error

    def write(self, folder: Path) -> None:
        write_atomically(folder / LOCK, json.dumps(dataclasses.asdict(self)) + "\n")


class FolderLock:
    """Holds a folder from `with FolderLock(folder):` on, until the block or the process ends."""

    def __init__(
        self, folder: Path, say: Callable[[str], None] = print, wait: bool = False
    ) -> None:
        """wait: for a folder in use, instead of refusing it."""
        self.folder, self.say, self.wait = folder, say, wait
        self.on_beat: list[Callable[[], None]] = []
        self.record = LockRecord.of_this_process()
        self._released = threading.Event()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        watch, told = LivenessWatch(), ""
        doing = "waiting for it" if self.wait else "looking whether it still runs"
        while True:
            with _one_at_a_time(self.folder):
                holder = LockRecord.read(self.folder)
                watch.look(holder)
                if holder is None or watch.alive is False:
                    if holder and not holder.ended:
                        dead = holder.owner
                        self.say(f"{self.folder}: took over the lock of {dead}, which has ended")
                    self.record.write(self.folder)
                    break
            if watch.alive and not self.wait:
                raise FolderInUseError(
                    f"{self.folder} is in use by {holder.owner}; wait until it ends, or choose "
                    "another folder (--run-dir or --out)."
                )
            if holder.launch != told:  # it lives, or its beat from another machine may still move
                told = holder.launch
                self.say(f"{self.folder} is in use by {holder.owner}: {doing}")
            time.sleep(POLL_SECONDS)
        self._released = start_beating(self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self, as_ended: bool = False) -> None:
        """as_ended: leave a record of it, for ranks that have not looked yet."""
        self._released.set()
        with _one_at_a_time(self.folder):
            if self._is_held() and as_ended:
                dataclasses.replace(self.record, ended=True).write(self.folder)
            elif self._is_held():
                (self.folder / LOCK).unlink()

    def check_held(self) -> None:
        """Stop if another process took the folder over, as after a long suspension of this one."""
        if not self._is_held():
            raise FolderInUseError(
                f"{self.folder} was taken over by another run while this one stood still; this one "
                "ends here."
            )

    def _is_held(self) -> bool:
        found = LockRecord.read(self.folder)
        return found is not None and found.launch == self.record.launch

    def _beat(self) -> None:
        with _one_at_a_time(self.folder):
            if self._released.is_set() or not self._is_held():
                return
            self.record = dataclasses.replace(self.record, beat=self.record.beat + 1)
            self.record.write(self.folder)
            for action in self.on_beat:
                action()


def start_beating(beat: Callable[[], None]) -> threading.Event:
    """Call `beat` every few seconds from a thread, until the event that is returned is set."""
    stopped = threading.Event()

    def keep_beating() -> None:
        while not stopped.wait(BEAT_SECONDS):
            # A full disk must not end the heart: the next beat tries again.
            with contextlib.suppress(OSError, FolderInUseError):
                beat()

    threading.Thread(target=keep_beating, daemon=True, name="heartbeat").start()
    return stopped


class LivenessWatch:
    """Tells from repeated looks whether a record's owner lives: True, False, None (not known)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.record: LockRecord | None = None
        self.alive: bool | None = None
        self._since = clock()

    def look(self, record: LockRecord | None) -> None:
        before, self.record = self.record, record
        if record != before:
            self._since = self.clock()
        if record is None or record.ended:
            self.alive = False
        elif (known := record.owner.alive()) is not None:
            self.alive = known
        elif before is None or before.launch != record.launch:
            self.alive = None
        elif before.beat != record.beat:
            self.alive = True
        elif self.stands_still():
            self.alive = False

    def stands_still(self) -> bool:
        """Whether nothing has changed for longer than a live owner takes for a beat."""
        return self.clock() - self._since > STALE_SECONDS


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """For the moment of looking at a lock and changing it; the kernel frees it whatever happens."""
    with (folder / ".lock_guard").open("a") as guard:
        # Some network file systems have no flock (ENOSYS, ENOLCK). Without it only two starts
        # within the same millisecond could both take a lock.
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def _this_machine() -> tuple[str, str, str]:
    """Host, boot and pid namespace."""
    namespace = ""
    with contextlib.suppress(OSError):  # not Linux
        namespace = os.readlink("/proc/self/ns/pid")
    return platform.node(), _read(BOOT_ID), namespace


def _process_state(pid: int) -> tuple[str, str]:
    """State letter and start time, as Linux has them; elsewhere only whether the pid is there."""
    if os.path.exists("/proc/self/stat"):
        # Fields count from behind the name, in parentheses, which may hold anything.
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return (fields[0], fields[19]) if fields else ("gone", "")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone", ""
    except PermissionError:
        pass
    return "R", ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not Linux, or a process that is gone
        return ""
