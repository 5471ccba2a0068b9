"""One process at a time in a folder: a lock file that names its owner, and the heartbeat by which
others see that it lives.

The lock is `.lock` in the folder: host, boot id, pid and start time of the owner, and a beat
counted up every few seconds. On one machine the process itself tells whether it lives; from another
machine only the beat does.
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

from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # an owner on another machine whose beat stands still for so long is dead
POLL_SECONDS = 0.2

LOCK = ".lock"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class FolderInUseError(UserError):
    """A live process works in the folder; the message names it."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that no other can be mistaken for: pids are used again, after a reboot and within
    one."""

    host: str
    boot_id: str
    pid_namespace: str  # containers on one machine count their pids apart
    pid: int
    started: str  # in clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        boot_id = _read(BOOT_ID)
        return cls(platform.node(), boot_id, _pid_namespace(), pid, _process_state(pid)[1])

    def alive(self) -> bool | None:
        """Whether the process still runs; None where this machine cannot tell. Another boot of this
        host may be another machine of its name, so that the beat has to tell."""
        if (self.host, self.boot_id) != (platform.node(), _read(BOOT_ID)):
            return None
        if self.pid_namespace != _pid_namespace():
            return None
        state, started = _process_state(self.pid)
        return state not in ("gone", "Z", "X") and started == self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


@dataclass(frozen=True)
class LockRecord:
    """What a lock file says."""

    owner: ProcessIdentity
    parent: ProcessIdentity  # the launcher, or the shell
    launch: str  # new each time the lock is taken
    launch_key: str
    beat: int = 0
    ended: bool = False  # the owner failed; left behind so that other ranks need not wait for it

    @classmethod
    def of_this_process(cls) -> "LockRecord":
        owner, parent = (ProcessIdentity.of(pid) for pid in (os.getpid(), os.getppid()))
        return cls(owner, parent, uuid.uuid4().hex, launch_key())

    def is_of_this_launch(self) -> bool:
        """Whether its owner was started together with this process, by one `accelerate launch`."""
        here = LockRecord.of_this_process()
        on_one_host = self.parent.host == here.parent.host
        return self.launch_key == here.launch_key and (
            not on_one_host or self.parent == here.parent
        )

    @classmethod
    def read(cls, folder: Path) -> "LockRecord | None":
        """The record in the folder's lock file; None where there is none."""
        try:
            found = json.loads((folder / LOCK).read_text())
            owner, parent = (ProcessIdentity(**found.pop(name)) for name in ("owner", "parent"))
            return cls(owner, parent, **found)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise FolderInUseError(
                f"{folder / LOCK} cannot be read ({error}); if no run uses this folder, delete it."
            ) from error

    def write(self, folder: Path) -> None:
        write_atomically(folder / LOCK, json.dumps(dataclasses.asdict(self)) + "\n")


class FolderLock:
    """Holds a folder from `with FolderLock(folder):` on, until the block or the process ends."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None] = print,
        wait: bool = False,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        """wait: a folder in use is waited for instead of refused (two runs that need the same
        shared artifact)."""
        self.folder, self.say, self.wait = folder, say, wait
        self.beat_seconds, self.stale_seconds = beat_seconds, stale_seconds
        self.on_beat: list[Callable[[], None]] = []
        self.record = LockRecord.of_this_process()
        self._released = threading.Event()

    def __enter__(self) -> "FolderLock":
        self.folder.mkdir(parents=True, exist_ok=True)
        watch = LivenessWatch(self.stale_seconds)
        told = None
        while not self._try_to_take(watch):
            # Someone else has it and may live. A wait also serves to see whether a beat from
            # another machine still moves.
            holder = watch.record
            if holder and holder.launch != told:
                told = holder.launch
                self.say(
                    f"{self.folder} is in use by {holder.owner}: "
                    + ("waiting for it" if self.wait else "looking whether it still runs")
                )
            time.sleep(POLL_SECONDS)
        self._released.clear()
        threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat").start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self, as_ended: bool = False) -> None:
        """Give the folder free. `as_ended` leaves a record of it, for ranks that have not looked
        yet."""
        self._released.set()
        with _one_at_a_time(self.folder):
            found = LockRecord.read(self.folder)
            if not found or found.launch != self.record.launch:
                return
            if as_ended:
                dataclasses.replace(found, ended=True).write(self.folder)
            else:
                (self.folder / LOCK).unlink()

    def check_held(self) -> None:
        """Stop if another process took the folder over, as it may after a long suspension of this
        one."""
        found = LockRecord.read(self.folder)
        if not found or found.launch != self.record.launch:
            by = f"by {found.owner}" if found else "by hand"
            raise FolderInUseError(
                f"{self.folder} was taken over {by} while this run stood still; this run ends here."
            )

    def _try_to_take(self, watch: "LivenessWatch") -> bool:
        with _one_at_a_time(self.folder):
            watch.look(LockRecord.read(self.folder))
            if watch.record and watch.alive is not False:
                if watch.alive and not self.wait:
                    raise FolderInUseError(
                        f"{self.folder} is in use by {watch.record.owner}; wait until it ends, or "
                        "choose another folder (--run-dir or --out)."
                    )
                return False
            if watch.record and not watch.record.ended:
                self.say(
                    f"{self.folder}: took over the lock of {watch.record.owner}, which has ended"
                )
            self.record.write(self.folder)
            return True

    def _keep_beating(self) -> None:
        while not self._released.wait(self.beat_seconds):
            with contextlib.suppress(OSError, FolderInUseError), _one_at_a_time(self.folder):
                # A full disk must not end the heart: the next beat tries again.
                found = LockRecord.read(self.folder)
                if self._released.is_set() or not found or found.launch != self.record.launch:
                    return
                self.record = dataclasses.replace(self.record, beat=self.record.beat + 1)
                self.record.write(self.folder)
                for action in self.on_beat:
                    action()


class LivenessWatch:
    """Tells from repeated looks at a lock whether its owner lives: True, False, or None for not
    known yet."""

    def __init__(self, stale_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stale_seconds, self.clock = stale_seconds, clock
        self.record: LockRecord | None = None
        self.alive: bool | None = None
        self._since = clock()

    def look(self, record: LockRecord | None) -> None:
        known = False if record is None or record.ended else record.owner.alive()
        if record is None or known is not None:
            self.alive = known
        elif self.record is None or self.record.launch != record.launch:
            self.alive = None
        elif self.record.beat != record.beat:
            self.alive = True
        elif self.clock() - self._since > self.stale_seconds:
            self.alive = False
        if record != self.record:
            self._since = self.clock()
        self.record = record


def launch_key() -> str:
    """Equal for all ranks of one launch: what torchrun tells each of them. Keeps the ranks of two
    launches apart."""
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
    )
    return "/".join(os.environ.get(name, "") for name in names)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Only for the moment of looking at a lock and changing it; the kernel frees it whatever
    happens."""
    with (folder / ".lock_guard").open("a") as guard:
        # Some network file systems have no flock (ENOSYS, ENOLCK). Without it only two starts
        # within the same millisecond could both take a lock.
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def _process_state(pid: int) -> tuple[str, str]:
    """State letter and start time of a process, as Linux has them; elsewhere only whether there is
    one of this pid."""
    if os.path.exists("/proc/self/stat"):
        # The name, in parentheses, may hold anything: fields count from behind it. Number 3 is the
        # state, 22 the start.
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return (fields[0], fields[19]) if fields else ("gone", "")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone", ""
    except PermissionError:
        pass
    return "R", ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not Linux, or a process that is gone
        return ""
