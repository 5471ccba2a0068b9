"""A run's folder: completes stages in it, each once, for all ranks of a launch. (The protocol is
described in bosch/run/stage.py.)"""

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from bosch.run import manifest, progress
from bosch.run.errors import UserError, is_user_error
from bosch.run.lock import FolderInUseError, FolderLock, LockRecord
from bosch.run.manifest import STARTED
from bosch.run.plan import REFERENCE, Decision, examine, plan_run, refuse_blocked
from bosch.run.progress import describe_seconds
from bosch.run.ranks import RANKS, Ranks
from bosch.run.stage import Artifact, Stage, locate

RUN = "run.json"


def home_of(stage_folder: Path) -> Path:
    """Where a stage keeps its lock and its curves: in the folder of its run, or in its own folder
    if it belongs to no run, so that other stages can be made next to it at the same time."""
    run_path = stage_folder.parent
    return run_path if (run_path / RUN).is_file() else stage_folder


class RunFolder:
    """One run's folder, held by this launch alone while the `with` block lasts."""

    def __init__(
        self,
        path: Path,
        rank: int = 0,
        world: int = 1,
        say: Callable[[str], None] = print,
        home: Path | None = None,
    ) -> None:
        """home: the folder to lock, if not the whole run folder (`home_of`)."""
        try:
            str(path.absolute()).encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{str(path)!r}: the name of a run's folder must be UTF-8, or tokenizers cannot be "
                "read from it."
            ) from None
        self.path, self.rank, self.world, self.say = path, rank, world, say
        self._lock = FolderLock(home or path, say)
        self._ranks = Ranks(home or path, rank, world)
        self._verified: set[Path] = set()
        self._calls = 0  # numbers the stages, so that their events differ
        self._names: tuple[str, ...] = ()  # of all stages, and those that have not begun
        self._left: list[str] = []
        self._eval_seconds = 0.0  # of an evaluation
        self.expected: dict[str, float] = {}  # seconds of a stage, before it begins

    def __enter__(self) -> Self:
        if self.rank == 0:
            self._lock.__enter__()
            self._ranks.lead(self._lock.record.launch)
        else:
            self._ranks.follow()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._ranks.leave(error)
        finally:
            if self.rank == 0:
                self._lock.release(as_ended=error is not None and self.world > 1)

    def plan(
        self, stages: Sequence[Stage], fresh: str | None = None, start: str | None = None
    ) -> list[Decision]:
        """Like `plan_run`, but remembers which folders are verified, so no file is read twice."""
        decisions = plan_run(self.path, stages, fresh, start, self._verified)
        self._left = [step.stage.name for step in decisions]
        self._names = tuple(self._left)
        progress.time_after = self._time_after
        return decisions

    def _time_after(self) -> tuple[float, bool]:
        """Seconds of the stages that have not begun, and whether they are but a lower bound: until
        an evaluation has been timed. Other stages of which nothing is known beforehand, mostly
        short ones, count as nothing."""
        seconds = [
            self._eval_seconds if name.startswith("eval/") else self.expected.get(name, 0)
            for name in self._left
        ]
        return sum(seconds), not self._eval_seconds

    def save_config(self, config: Any, command: Sequence[str]) -> None:
        """Describe the run in run.json: every setting, the command, versions and commit."""
        if self.rank == 0:
            content = {"config": dataclasses.asdict(config), "command": list(command)}
            text = json.dumps(content | manifest.provenance(), indent=1)
            manifest.write_atomically(self.path / RUN, text + "\n")

    def complete(self, stage: Stage) -> Artifact:
        """The stage's artifact: reused if it is complete, otherwise made. Every rank calls this in
        the same order. A stage that all ranks run may complete other stages while it runs."""
        self._calls += 1
        artifact = Artifact(locate(self.path, stage), stage.fingerprint)
        if self.rank == 0:
            self._lead(stage, artifact.folder, self._calls)
        else:
            self._follow(stage, artifact.folder, self._calls)
        return artifact

    def set_aside(self, stages: Sequence[Stage]) -> None:
        """Move stages to `replaced`, so that they are made again. The last one goes first: after a
        kill in between, no stage is left whose input was already replaced."""
        for stage in reversed(stages) if self.rank == 0 else ():
            self._set_aside(self.path / stage.name, self.path / "replaced", stage)
            if stage.shared:
                shared = locate(self.path, stage)
                self._set_aside(shared, shared.parent / "replaced", stage)

    def _set_aside(self, folder: Path, base: Path, stage: Stage) -> None:
        if not folder.is_dir():
            return
        record = LockRecord.read(folder)
        if record and record.owner.alive() is not False:
            raise FolderInUseError(
                f"{folder} is in use by {record.owner}; wait until it ends, then use --fresh "
                f"{stage.name} again."
            )
        self._verified.discard(folder)
        number = 1
        while (old := base / f"{stage.name.replace('/', '-')}-{number}").exists():
            number += 1
        base.mkdir(parents=True, exist_ok=True)
        folder.rename(old)
        manifest.sync_directory(base)
        self.say(
            f"{stage.name}: the old one was moved to {old}; delete it when you no longer need it"
        )

    def _lead(self, stage: Stage, folder: Path, call: int) -> None:
        decision = self._examine(stage)
        lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if stage.shared and decision.action != "reuse":
            lock = FolderLock(folder, self.say, wait=True)
        if stage.name in self._left:
            self._left.remove(stage.name)
        with lock:
            decision = self._examine(stage)  # another run may have made it while we waited
            if decision.action == "reuse":
                self.say(f"{stage.name}: {decision.reason}")
            else:
                self._make(stage, folder, decision, call)
        if stage.shared:
            _refer_to(folder, self.path / stage.name, stage)
        self._ranks.announce(f"{call} done")

    def _follow(self, stage: Stage, folder: Path, call: int) -> None:
        run, done = f"{call} run", f"{call} done"
        if stage.ranks == "all" and self._ranks.wait_for(0, run, done) == run:
            self._run(stage, folder)
            self._ranks.announce(f"{call} ran")
        self._ranks.wait_for(0, done)

    def _examine(self, stage: Stage) -> Decision:
        decision = examine(self.path, stage, self._verified)
        refuse_blocked([decision])
        return decision

    def _make(self, stage: Stage, folder: Path, decision: Decision, call: int) -> None:
        if stage.derived and decision.action == "run":
            shutil.rmtree(folder, ignore_errors=True)  # everything in it comes from its inputs
        folder.mkdir(parents=True, exist_ok=True)
        manifest.remove_leftovers(folder)
        number = ""
        if stage.name in self._names:
            number = f"stage {self._names.index(stage.name) + 1} of {len(self._names)}, "
        self.say(f"{number}{stage.name}: {decision.reason}")
        facts = stage.facts | {"fingerprint": stage.fingerprint}
        if stage.model_files:
            facts["model_files"] = dict(stage.model_files)
        if decision.action == "run":
            manifest.write_sealed_json(folder / STARTED, facts)
        wall_time = WallTime(folder)
        self._lock.on_beat.append(wall_time.save)
        try:
            self._ranks.announce(f"{call} run")
            self._run(stage, folder)
            for rank in range(1, self.world) if stage.ranks == "all" else ():
                self._ranks.wait_for(rank, f"{call} ran")
        except KeyboardInterrupt:
            self.say(
                f"{stage.name}: interrupted; run the same command without --fresh or --from to "
                "continue"
            )
            raise
        except Exception as error:
            if is_user_error(error):
                _forget_start(folder)
            raise
        finally:
            self._lock.on_beat.remove(wall_time.save)
        self._lock.check_held()
        seconds = wall_time.finish()
        manifest.seal_folder(folder, facts | {"wall_seconds": seconds} | manifest.provenance())
        self._verified.add(folder)
        self.say(f"{stage.name}: done in {describe_seconds(sum(seconds))}")
        if stage.name.startswith("eval/"):
            self._eval_seconds = sum(seconds)

    def _run(self, stage: Stage, folder: Path) -> None:
        inputs = {
            name: Artifact(locate(self.path, source), source.fingerprint)
            if isinstance(source, Stage)
            else source
            for name, source in stage.inputs.items()
        }
        if stage.ranks == "all":  # the stages that take most
            _free_memory()
        with self._ranks.watching() if stage.ranks == "all" else contextlib.nullcontext():
            stage.run(folder, **inputs)


class WallTime:
    """Seconds spent on a stage in each attempt, saved at every heartbeat so that killed attempts
    count too."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".wall_seconds.json"
        self.earlier: list[float] = []
        # Only a statistic: without a valid file the time is counted from now on.
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, RecursionError):
            earlier = json.loads(self.path.read_text())
            if all(type(seconds) is float and 0 <= seconds < 1e9 for seconds in earlier):
                self.earlier = list(earlier)
        self._begin = time.monotonic()

    def save(self) -> None:
        manifest.write_atomically(self.path, json.dumps(self._seconds()))

    def finish(self) -> list[float]:
        self.path.unlink(missing_ok=True)
        return self._seconds()

    def _seconds(self) -> list[float]:
        return [*self.earlier, round(time.monotonic() - self._begin, 3)]


def _free_memory() -> None:
    """Of earlier stages. Python collects cycles by their number, whatever memory they hold."""
    gc.collect()
    torch = sys.modules.get("torch")  # not imported for this: that takes seconds
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _forget_start(folder: Path) -> None:
    """After a user's error before the first file: without started.json, the corrected settings are
    not refused as different ones. Unfinished files can be in a hidden folder."""
    files = [path for path in folder.rglob("[!.]*") if path.is_file() and RANKS not in path.parts]
    if files == [folder / STARTED]:
        (folder / STARTED).unlink()


def _refer_to(shared: Path, folder: Path, stage: Stage) -> None:
    """Write a reference to a shared stage's files into the run's own folder."""
    if not (folder / REFERENCE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        relative = os.path.relpath(shared, folder)  # the folder of all runs can be moved
        manifest.write_sealed_json(folder / REFERENCE, {"folder": relative, "facts": stage.facts})
