"""One process at a time in a folder: `.lock` names its owner and holds a counter (the heartbeat)
that goes up every few seconds. On the owner's machine we look whether its process runs; from
another machine or container only the heartbeat shows it.
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
from bosch.run.inside import open_own_file, refuse_no_file
from bosch.run.manifest import write_atomically

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # an owner on another machine without a beat for so long is dead
POLL_SECONDS = 0.2

LOCK = ".lock"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Set by torchrun and SLURM, to the same values for all ranks of one launch.
LAUNCH_VARIABLES = (
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT SLURM_JOB_ID".split()
)


class FolderInUseError(UserError):
    """A running process uses the folder; the message names it."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies one process for good: a pid alone may be reused."""

    host: str
    boot_id: str
    pid_namespace: str  # each container on a machine has its own pids
    pid: int
    started: str  # in clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        return cls(*_this_machine(), pid, _process_state(pid)[1])

    def alive(self) -> bool | None:
        """Whether the process still runs; None if this machine cannot know. After a reboot that is
        the case: it may be another machine of the same name."""
        if (self.host, self.boot_id, self.pid_namespace) != _this_machine():
            return None
        state, started = _process_state(self.pid)
        return state not in ("gone", "Z", "X") and started == self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


@dataclass(frozen=True)
class LockRecord:
    """The content of a lock file, and of the file of each rank (bosch/run/ranks.py)."""

    owner: ProcessIdentity
    parent: ProcessIdentity  # the launcher, or the shell
    launch: str  # new each time the lock is taken
    launch_key: str  # equal for all ranks of a launch; with a fixed port, for other launches too
    beat: int = 0
    ended: bool = False  # the owner failed; stays so that other ranks do not wait for it

    @classmethod
    def of_this_process(cls) -> "LockRecord":
        owner, parent = (ProcessIdentity.of(pid) for pid in (os.getpid(), os.getppid()))
        key = "/".join(os.environ.get(name, "") for name in LAUNCH_VARIABLES)
        return cls(owner, parent, uuid.uuid4().hex, key)

    def is_of_this_launch(self) -> bool:
        """Whether its owner and this process were started by the same `accelerate launch`."""
        here = LockRecord.of_this_process()
        same_parent = self.parent == here.parent or self.parent.host != here.parent.host
        return self.launch_key == here.launch_key and same_parent

    @classmethod
    def parse(cls, content: dict[str, Any]) -> "LockRecord":
        owner, parent = (ProcessIdentity(**content.pop(name)) for name in ("owner", "parent"))
        record = cls(owner, parent, **content)
        for part in (record, owner, parent):
            for field in dataclasses.fields(part):
                if type(value := getattr(part, field.name)) is not field.type:
                    raise TypeError(f"{field.name} is {value!r:.60}")
        return record

    @classmethod
    def read(cls, folder: Path) -> "LockRecord | None":
        """The record in the folder's lock file; None where there is none."""
        refuse_no_file(folder / LOCK)
        try:
            return cls.parse(json.loads((folder / LOCK).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FolderInUseError(
                f"{folder / LOCK} is not a lock file ({error}); if no run uses this folder, delete "
                "that file."
            ) from error

    def write(self, folder: Path) -> None:
        write_atomically(folder / LOCK, json.dumps(dataclasses.asdict(self)) + "\n")


class FolderLock:
    """Holds the lock of a folder until the `with FolderLock(folder):` block or the process ends."""

    def __init__(
        self, folder: Path, say: Callable[[str], None] = print, wait: bool = False
    ) -> None:
        """wait: if the folder is in use, wait for it instead of raising FolderInUseError."""
        self.folder, self.say, self.wait = folder, say, wait
        self.on_beat: list[Callable[[], None]] = []
        self.record = LockRecord.of_this_process()
        self._released = threading.Event()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"{self.folder} cannot be made, because a file is in its place; choose another "
                "folder (--run-dir or --out), or move the file away."
            ) from error
        except FileNotFoundError as error:  # where no folder can be, as in /proc
            raise UserError(
                f"{self.folder} cannot be made: {error.strerror}; choose another folder (--run-dir "
                "or --out)."
            ) from error
        watch, reported_launch = LivenessWatch(), ""
        activity = "waiting for it" if self.wait else "checking whether it still runs"
        while True:
            with _one_at_a_time(self.folder):
                holder = LockRecord.read(self.folder)
                watch.look(holder)
                if holder is None or watch.alive is False:
                    if holder and not holder.ended:
                        self.say(
                            f"{self.folder}: took over the lock of {holder.owner}, which has ended"
                        )
                    self.record.write(self.folder)
                    break
            if watch.alive and not self.wait:
                raise FolderInUseError(
                    f"{self.folder} is in use by {holder.owner}; wait until it ends, or choose "
                    "another folder (--run-dir or --out)."
                )
            if holder.launch != reported_launch:  # it runs, or we wait for a beat to know
                reported_launch = holder.launch
                self.say(f"{self.folder} is in use by {holder.owner}: {activity}")
            time.sleep(POLL_SECONDS)
        self._released = start_beating(self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self, as_ended: bool = False) -> None:
        """Release the lock. as_ended: leave the record, for ranks that have not read it yet."""
        self._released.set()
        with _one_at_a_time(self.folder):
            if self._is_held() and as_ended:
                dataclasses.replace(self.record, ended=True).write(self.folder)
            elif self._is_held():
                (self.folder / LOCK).unlink()

    def check_held(self) -> None:
        """Stop if another run took the lock, as after a long suspension of this one."""
        if not self._is_held():
            raise FolderInUseError(
                f"{self.folder} was taken over by another run while this one was suspended; this "
                "run ends here."
            )

    def _is_held(self) -> bool:
        record = LockRecord.read(self.folder)
        return record is not None and record.launch == self.record.launch

    def _beat(self) -> None:
        with _one_at_a_time(self.folder):
            if self._released.is_set() or not self._is_held():
                return
            self.record = dataclasses.replace(self.record, beat=self.record.beat + 1)
            self.record.write(self.folder)
            for action in self.on_beat:
                action()


def start_beating(beat: Callable[[], None]) -> threading.Event:
    """Call `beat` every few seconds in a thread, until the returned event is set."""
    stopped = threading.Event()

    def keep_beating() -> None:
        while not stopped.wait(BEAT_SECONDS):
            # A full disk must not end the heartbeat: the next beat tries again.
            with contextlib.suppress(OSError, FolderInUseError):
                beat()

    threading.Thread(target=keep_beating, daemon=True, name="heartbeat").start()
    return stopped


class LivenessWatch:
    """Finds out from repeated looks whether a record's owner runs: True, False, None (unknown)."""

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
        elif (is_running := record.owner.alive()) is not None:
            self.alive = is_running
        elif before is None or before.launch != record.launch:
            self.alive = None
        elif before.beat != record.beat:
            self.alive = True
        elif self.is_stale():
            self.alive = False

    def is_stale(self) -> bool:
        """Whether the record has not changed for longer than a running owner needs for a beat."""
        return self.clock() - self._since > STALE_SECONDS


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """While a lock is read and changed. The kernel releases this guard even after a kill."""
    with open_own_file(folder / ".lock_guard", "a") as guard:
        # Some network file systems have no flock (ENOSYS, ENOLCK). Without it, two runs could both
        # take the lock only if they start within the same millisecond.
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
    """State letter and start time on Linux; elsewhere only whether the pid exists."""
    if os.path.exists("/proc/self/stat"):
        # Counted from behind the name in parentheses, which may contain anything.
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
