"""A run's folder: completes stages in it, each once, for all ranks of a launch. (The protocol is
described in bosch/run/stage.py.)"""

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from bosch.run import files, progress
from bosch.run.checkout import provenance
from bosch.run.dist import RANKS, FolderLock, RankFiles
from bosch.run.errors import Refusals, UserError, is_user_error
from bosch.run.files import MANIFEST, STARTED, write_atomically, write_sealed_json
from bosch.run.stage import (
    REFERENCE,
    Artifact,
    Decision,
    Stage,
    StageBlockedError,
    examine,
    locate,
    stages_to_redo,
)

Say = Callable[[str], None]
RUN = "run.json"
REDOING = "redoing"  # in it, while a command with --fresh or --from has not come to its end
SAVE_SECONDS = 5.0  # between two saves of the time that a stage has taken


def home_of(stage_folder: Path) -> Path:
    """Where a stage keeps its lock and its curves: in its run's folder, or in its own without one,
    so that others can be made next to it at the same time."""
    run_path = stage_folder.parent
    return run_path if (run_path / RUN).is_file() else stage_folder


class RunFolder:
    """One run's folder, held by this launch alone while the `with` block lasts."""

    def __init__(
        self, path: Path, rank: int = 0, world: int = 1, say: Say = print, home: Path | None = None
    ) -> None:
        """home: the folder to lock, if not the whole run folder (`home_of`)."""
        try:
            str(path.absolute()).encode()
        except UnicodeEncodeError:
            raise UserError(f"{str(path)!r}: the name of a run's folder must be UTF-8.") from None
        self.path, self.rank, self.world, self.say = path, rank, world, say
        self._lock = FolderLock(home or path, say)
        self._ranks = RankFiles(home or path, rank, world)
        self._verified: set[Path] = set()
        self._calls = 0  # numbers the stages, so that their events differ
        self._names: list[str] = []  # of all stages

    def __enter__(self) -> Self:
        if self.rank == 0:
            self._lock.__enter__()
        self._ranks.join()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._ranks.leave(failed=error is not None and not isinstance(error, SystemExit))
        finally:
            if self.rank == 0:
                self._lock.__exit__()

    def is_complete(self, stage: Stage) -> bool:
        """Whether its manifest is there. No file is read: `plan` and `complete` verify them."""
        return (locate(self.path, stage) / MANIFEST).is_file()

    def check(self, stages: Sequence[Stage], redo: Sequence[Stage] = ()) -> list[str]:
        """Refuse what cannot work, of all stages that are to be made: all of it at once, before
        anything is written. Returns lines to print. `redo`: those that are made again."""
        refusals, lines = Refusals(), list[str]()
        # What is locked is what is written: of a single stage its own folder.
        home = self._lock.folder
        place = next(one for one in (home, *home.absolute().parents) if one.exists())
        with refusals:
            may_write = os.access(
                place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
            )
            if place.is_dir() and not may_write:
                problem = f"{home} cannot be written: this user may not write in {place}"
                raise UserError(f"{problem}. Name another folder, or change its permissions.")
        for stage in stages:
            with refusals:
                _ = stage.facts  # that the files can be read that it takes
            with refusals:  # whatever is wrong with those
                if stage in redo or not self.is_complete(stage):
                    lines += stage.check() or ()
                    if stage.num_bytes:
                        self._find_room(stage, is_redone=stage in redo)
        refusals.raise_all()
        return list(dict.fromkeys(lines))

    def _find_room(self, stage: Stage, is_redone: bool) -> None:
        """Refuse a disk that cannot hold what is not there yet."""
        folder = locate(self.path, stage).absolute()
        # What is made again is set aside, and still takes its room.
        done = 0 if is_redone else sum(file.stat().st_size for file in folder.glob("*"))
        disk = next(path for path in (folder, *folder.parents) if path.exists())
        free, needed = shutil.disk_usage(disk).free, stage.num_bytes - done
        if needed > free:
            found = f"takes {needed / 1e9:,.1f} GB, and the disk has {free / 1e9:,.1f} GB free"
            raise UserError(f"{folder}: {stage.name} {found}. Make room, or store fewer.")

    def plan(
        self, stages: Sequence[Stage], fresh: str | None = None, start: str | None = None
    ) -> list[Decision]:
        """What each stage of a chain will do, in order. Changes nothing. No file is read twice."""
        self._names = [stage.name for stage in stages]
        redone, decisions = stages_to_redo(stages, fresh, start), list[Decision]()
        option = f"--fresh {fresh}" if fresh else f"--from {start}"
        for stage in stages:
            # One that is blocked does not end the plan: the user is told of all of them at once.
            try:
                decision = Decision(stage, "run", f"because of {option}")
                if stage not in redone:
                    decision = examine(self.path, stage, self._verified)
                for before in decisions:
                    if before.action == "blocked" and before.stage in stage.inputs.values():
                        needed = before.stage.name
                        raise StageBlockedError(f"{stage.name} needs {needed}, which is blocked")
            except StageBlockedError as error:
                decision = Decision(stage, "blocked", error.problem, error.remedy)
            decisions.append(decision)
        return decisions

    def is_redoing(self, command: Sequence[str]) -> bool:
        """Whether this command has set stages aside and was stopped before its end."""
        try:
            content = json.loads((self.path / RUN).read_text("utf-8"))
        except (OSError, ValueError):  # no run yet, or a file that the run is to write anew
            return False
        if not isinstance(content, dict) or not content.get(REDOING):
            return False
        return asked(command) == asked(content.get("command") or ())

    def save_config(self, config: Any, command: Sequence[str], **more: object) -> None:
        """Describe the run in run.json: every setting, the command, versions and commit."""
        if self.rank == 0:
            content = {"config": dataclasses.asdict(config), "command": list(command)} | more
            write_atomically(self.path / RUN, json.dumps(content | provenance(), indent=1) + "\n")

    def set_aside(self, stages: Sequence[Stage], with_products: bool = False) -> None:
        """Move stages to `replaced`, so that they are made again. The last one goes first: after a
        kill in between, no stage is left whose input was already replaced. with_products: also what
        was made of them, such as the evaluation of a step that the new training does not have:
        reports read all evaluations that are there."""
        if self.rank > 0:
            return
        own = self.path / "replaced"
        products = self._made_of(stages) if with_products else []
        moved = [(self.path / name, own) for name in reversed(products)]
        for stage in reversed(stages):
            moved.append((self.path / stage.name, own))
            if stage.shared:
                shared = locate(self.path, stage)
                moved.append((shared, shared.parent / "replaced"))
        for folder, base in moved:
            if not folder.is_dir():
                continue
            self._verified.discard(folder)
            is_own = base == own
            name = folder.relative_to(self.path).as_posix() if is_own else folder.name
            number = 1
            while (old := base / f"{name.replace('/', '-')}-{number}").exists():
                number += 1
            base.mkdir(parents=True, exist_ok=True)
            with FolderLock(folder):  # another run may be making a shared one
                folder.rename(old)
            files.sync_directory(base)
            self.say(f"{name}: the old one is now {old}; delete it when it is not needed")

    def _made_of(self, stages: Sequence[Stage]) -> list[str]:
        """Further folders of this run that were made of these stages' folders, and of what was made
        of them, in that order."""
        facts = dict[str, Any]()
        for depth in ("*", "*/*", "*/*/*"):  # a stage's name has one to three parts
            for file in sorted(self.path.glob(f"{depth}/{STARTED}")):
                name = file.parent.relative_to(self.path).as_posix()
                if not name.startswith("replaced/"):
                    with contextlib.suppress(files.DamagedArtifactError):
                        facts[name] = files.read_sealed_json(file, "fingerprint", "inputs")
        gone = [stage.name for stage in stages if stage.name in facts]
        found = dict[str, None]()
        for name in gone:  # which grows
            for other, of in facts.items():
                # Evaluations under a sweep's other windows and lengths name no input: they are of
                # the run's model. Those of the dense model are shared, and not in this folder.
                of_model = name == "model" and other.startswith("eval/") and not of["inputs"]
                is_of_it = of_model or facts[name]["fingerprint"] in of["inputs"].values()
                if is_of_it and other not in gone:
                    gone.append(other)
                    found[other] = None
        return list(found)

    def agree(self, stages: Sequence[Stage]) -> None:
        """Refuse ranks that mean other stages than rank 0, before hours are spent. Every rank calls
        this first."""
        if self.world == 1:
            return
        # Rank 0 says one line for each stage, and the others wait for it or for the end of all.
        mine = [f"stage {stage.name} is {stage.fingerprint}" for stage in stages]
        told, agreed = "all stages told", "agreed"
        if self.rank == 0:
            for event in (*mine, told):
                self._ranks.announce(event)
            for rank in range(1, self.world):
                self._ranks.wait_for(rank, agreed)
            return
        for stage, event in zip(stages, mine, strict=True):
            if self._ranks.wait_for(0, event, told) == told:
                raise UserError(
                    f"{stage.name}: rank {self.rank} has other settings or inputs than rank 0. "
                    "Machines differ in what the hub's cache has, or whether the hub can be "
                    "reached: name the suites (--eval.suites) and folders of models and data."
                )
        self._ranks.announce(agreed)

    def complete(self, stage: Stage) -> Artifact:
        """The stage's artifact: reused if it is complete, otherwise made. Every rank calls this in
        the same order. A stage that all ranks run may complete other stages while it runs."""
        self._calls += 1
        folder = locate(self.path, stage)
        begun, ran, done = (f"{self._calls} {event}" for event in ("begun", "ran", "done"))
        if self.rank > 0:
            # "done" without "begun": rank 0 has found it complete, so there is nothing to share.
            if stage.ranks == "all" and self._ranks.wait_for(0, begun, done) == begun:
                self._run(stage, folder)
                self._ranks.announce(ran)
            self._ranks.wait_for(0, done)
            return Artifact(folder, stage.fingerprint)
        with contextlib.ExitStack() as held:
            decision = examine(self.path, stage, self._verified)
            if stage.shared and decision.action != "reuse":
                held.enter_context(FolderLock(folder, self.say, wait=True))
                # Another run may have made it while we waited.
                decision = examine(self.path, stage, self._verified)
            if decision.action == "reuse":
                self.say(f"{stage.name}: {decision.reason}")
            else:
                self._make(stage, folder, decision, begun, ran)
        reference = self.path / stage.name / REFERENCE
        if stage.shared and not reference.is_file():
            reference.parent.mkdir(parents=True, exist_ok=True)
            relative = os.path.relpath(folder, reference.parent)  # all runs can be moved together
            write_sealed_json(reference, {"folder": relative, "facts": stage.facts})
        self._ranks.announce(done)
        return Artifact(folder, stage.fingerprint)

    def _make(self, stage: Stage, folder: Path, decision: Decision, begun: str, ran: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(folder)
        line, names = f"{stage.name}: {decision.reason}", self._names
        if stage.name in names:
            line = f"stage {names.index(stage.name) + 1} of {len(names)}, {line}"
        self.say(line)
        facts = stage.facts | {"fingerprint": stage.fingerprint}
        # Beside the fingerprint, not in it: folders of earlier versions recorded none.
        if stage.model_files:
            facts["model_files"] = dict(stage.model_files)
        if decision.action == "run":
            write_sealed_json(folder / STARTED, facts)
        try:
            with measured(folder) as seconds_so_far:
                self._ranks.announce(begun)
                finish = self._run(stage, folder)
                # The scores need the predictions of all ranks, so they are made after the wait.
                for rank in range(1, self.world) if stage.ranks == "all" else ():
                    self._ranks.wait_for(rank, ran)
                if finish:
                    finish()
        except KeyboardInterrupt:
            self.say(f"{stage.name}: interrupted")
            raise
        except Exception as error:
            # After a user's error before the first file (unfinished files can be in a hidden
            # folder) the corrected settings are not to be refused as different ones.
            paths = [path for path in folder.rglob("[!.]*") if RANKS not in path.parts]
            written = [path for path in paths if path.is_file()]
            if is_user_error(error) and written == [folder / STARTED]:
                (folder / STARTED).unlink()
            raise
        seconds = seconds_so_far()
        files.seal_folder(folder, facts | {"wall_seconds": seconds} | provenance())
        self._verified.add(folder)
        self.say(f"{stage.name}: done in {progress.describe_seconds(sum(seconds))}")

    def _run(self, stage: Stage, folder: Path) -> Callable[[], None] | None:
        inputs = dict[str, Artifact]()
        for name, source in stage.inputs.items():
            folder_of = locate(self.path, source) if isinstance(source, Stage) else source.folder
            inputs[name] = Artifact(folder_of, source.fingerprint)
        if stage.ranks == "all":  # those load a model
            free_memory()
        return stage.run(folder, **inputs)


def asked(command: Sequence[str]) -> list[str]:
    """A command's words without those that only ask for more to be shown. Options are written with
    - or with _, and with their value as one word or as two."""
    found = list[str]()
    for word in map(str, command):
        option, *value = word.split("=", 1) if word.startswith("--") else [word]
        if word.startswith("--"):
            option = option.replace("_", "-")
        if option not in ("--dry-run", "--show-settings", "--debug"):
            found += [option, *value]
    return found


def free_memory() -> None:
    """Before and after work that takes most of it: Python collects cycles by their number alone."""
    gc.collect()
    torch = sys.modules.get("torch")  # not imported for this: that takes seconds
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def measured(folder: Path) -> Iterator[Callable[[], list[float]]]:
    """Tells the seconds spent on a stage in each attempt, saved every few seconds so that killed
    attempts count too."""
    path, begin, stopped = folder / ".wall_seconds.json", time.monotonic(), threading.Event()
    earlier: list[float] = []
    with contextlib.suppress(UserError):  # only a statistic: else counted from now on
        earlier = files.read_sealed_json(path, "seconds")["seconds"]

    def seconds_so_far() -> list[float]:
        return [*earlier, round(time.monotonic() - begin, 3)]

    def save() -> None:
        while not stopped.wait(SAVE_SECONDS):
            with contextlib.suppress(OSError):  # of a full disk
                write_sealed_json(path, {"seconds": seconds_so_far()})

    # A thread: a kill leaves no chance to save, and the work may stay in one call for an hour.
    threading.Thread(target=save, daemon=True, name="wall time").start()
    try:
        yield seconds_so_far
    finally:
        stopped.set()
    path.unlink(missing_ok=True)
