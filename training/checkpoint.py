"""Checkpoints of a run: whole or not there, whatever was killed when, and checked before they are
believed.

    .step-000500.tmp/  each rank writes its part (DCP), then the sizes and checksums of its files
    manifest.json      rank 0 lists all files, when every rank is done
    step-000500/       a rename puts it in place

DCP alone finds neither a flipped bit nor data of one save beside the table of contents of another;
the manifest does. Resuming takes the newest checkpoint that is true. A damaged one is set aside as
`.step-000500.bad`: under its old name it would be in the way when the run reaches that step again.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, plain
from bosch.run.group import Group
from bosch.run.manifest import (
    MANIFEST,
    NO_RESULT,
    DamagedArtifactError,
    provenance,
    read_sealed_json,
    remove_leftovers,
    sync_directory,
    verify_folder,
    write_atomically,
    write_sealed_json,
)
from bosch.run.plan import differences
from bosch.run.progress import say
from bosch.training.checkpoint_content import (
    CheckpointReader,
    TrainState,
    compare_names,
    describe_state,
    prepare_optimizer,
    restore_extra,
    restore_random_state,
    save_random_state,
)
from bosch.training.parallel import COLLECTIVE_TIMEOUT

TRAINER = "trainer.json"  # what is no tensor


class CheckpointError(UserError):
    """A checkpoint cannot be written, or none can be read; the message says what to do."""


class Checkpoints:
    """The checkpoints in one folder. Every rank calls every method but `poll`, in the same order,
    in the process group that training/parallel.py starts.

    facts: settings a resumed run must share. circumstances: what may change between attempts and
    then moves results in the last digits (micro-batch, kernels); a change is told. keep: rolling
    checkpoints that stay, beside all milestones. asynchronous: files are written while training
    goes on; at most one save is under way.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        keep: int,
        asynchronous: bool = False,
        circumstances: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.keep = folder, keep
        self._ranks = Group.current()
        self._facts: dict[str, Any] = plain(facts)
        self._circumstances = plain({"ranks": self._ranks.world, **(circumstances or {})})
        self._resumed_from: int | None = None
        self._pending: _Save | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._group = self._ranks.gloo
        if asynchronous:
            # Its messages come from a thread: on a shared group they would mix with others.
            self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    # ------------------------------------------------------------------------------------- resuming

    def load_newest(self, state: TrainState) -> int:
        """Load the newest checkpoint that is true. Its step; 0 if there is none."""
        found = self._ranks.from_rank_0(self._find_newest)
        if found is None:
            return 0
        path, manifest = found
        tensors = self._ranks.all_succeed(lambda: self._matching_tensors(path, state))
        reader = CheckpointReader(path)
        dcp.load(dict(tensors), storage_reader=reader, process_group=self._ranks.gloo)
        self._ranks.all_succeed(lambda: self._restore_rest(path, manifest, state, tensors))
        self._resumed_from = int(manifest["step"])
        return self._resumed_from

    def _find_newest(self) -> tuple[Path, dict[str, Any]] | None:
        self._make_folder()
        for step, path in sorted(checkpoints_in(self.folder).items(), reverse=True):
            try:
                manifest = verify_folder(path)
            except (DamagedArtifactError, FileNotFoundError) as damage:
                aside = set_aside(path)
                say(f"checkpoint of step {step} is damaged and set aside as {aside}: {damage}")
                continue
            self._check_facts(path, manifest)
            return path, manifest
        if bad := sorted(path.name for path in self.folder.glob(".step-*.bad")):
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged ({', '.join(bad)}), and training is "
                "not begun anew without being asked. Put back a good copy of one, or pass --fresh "
                f"{self.folder.parent.name}."
            )
        return None

    def _check_facts(self, path: Path, manifest: Mapping[str, Any]) -> None:
        if changed := differences(manifest["facts"], self._facts):
            raise UserError(
                f"{path} was made with other settings ({changed}). Three ways on: another "
                f"--run-dir, --fresh {self.folder.parent.name} to begin anew, or the old setting."
            )
        if changed := differences(manifest["circumstances"], self._circumstances):
            say(f"resumed with {changed}: results may differ in the last digits")

    def _matching_tensors(self, path: Path, state: TrainState) -> dict[str, Tensor]:
        """Those of the state, ready to be loaded in place: the checkpoint has the same."""
        there = CheckpointReader(path).read_metadata().state_dict_metadata
        prepare_optimizer(state, set(there))
        tensors, _ = describe_state(state)
        compare_names(path, tensors, there)
        return tensors

    def _restore_rest(
        self,
        path: Path,
        manifest: Mapping[str, Any],
        state: TrainState,
        tensors: Mapping[str, Tensor],
    ) -> None:
        restore_extra(state, json.loads((path / TRAINER).read_text()), tensors)
        if manifest["circumstances"]["ranks"] == self._ranks.world:
            restore_random_state(path / _random_state_name(self._ranks.rank))

    # --------------------------------------------------------------------------------------- saving

    def save(self, state: TrainState, step: int, milestone: bool) -> None:
        """Save the state after `step` steps. Milestones stay; of the others the newest `keep`."""
        self.finish()
        tensors, rest = describe_state(state)
        save = _Save(step, milestone, self.folder / f".{step_name(step)}.tmp")
        with self._explaining(save):
            if not self._ranks.from_rank_0(lambda: self._open(save)):
                return
            self._ranks.all_succeed(lambda: self._write_rest(save, rest))
            target: dict[str, Any] = {
                "storage_writer": dcp.FileSystemWriter(save.folder, sync_files=True),
                "process_group": self._group,
            }
            if self._background is None:
                dcp.save(tensors, **target)
                self._ranks.all_succeed(lambda: self._describe_own_files(save))
                self._ranks.from_rank_0(lambda: self._place(save))
            else:
                saving: Any = dcp.async_save(tensors, **target)
                saving = getattr(saving, "upload_completion", saving)  # as versions differ
                save.done = self._background.submit(self._describe_own_files, save, saving)
                self._pending = save

    def poll(self) -> None:
        """Put in place a save that was written meanwhile. Asks no other rank: costs nothing."""
        save = self._pending
        if save and save.done and save.done.done():
            with self._explaining(save):
                save.done.result()  # raises what the thread met
                is_written = all(path.is_file() for path in self._descriptions(save))
                if self._ranks.rank == 0 and is_written:
                    self._pending = None
                    self._place(save)

    def finish(self) -> None:
        """Wait until a save under way is in its place."""
        if self._background is None:
            return
        save, self._pending = self._pending, None
        with self._explaining(save):
            # Rank 0 may have put it in place already (poll), the others do not know.
            self._ranks.all_succeed(lambda: save.done.result() if save and save.done else None)
            self._ranks.from_rank_0(lambda: self._place(save) if save else None)

    def _open(self, save: "_Save") -> bool:
        """Make its folder. False: the checkpoint is there already."""
        if (self.folder / step_name(save.step) / MANIFEST).is_file():
            return False
        self._make_folder()
        save.folder.mkdir()
        return True

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / NO_RESULT).touch()
        remove_leftovers(self.folder)

    def _write_rest(self, save: "_Save", rest: Any) -> None:
        """What does not go through DCP."""
        save_random_state(save.folder / _random_state_name(self._ranks.rank))
        if self._ranks.rank == 0:
            (save.folder / TRAINER).write_text(json.dumps(rest))

    def _describe_own_files(self, save: "_Save", saving: "Future[Any] | None" = None) -> None:
        """Leave sizes and checksums of this rank's files, read while they are in memory."""
        if saving is not None:
            saving.result()
        rank = self._ranks.rank
        paths = [*save.folder.glob(f"__{rank}_*"), save.folder / _random_state_name(rank)]
        paths += [save.folder / name for name in (".metadata", TRAINER) if rank == 0]
        files = {
            path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path, sync=True)}
            for path in sorted(paths)
        }
        write_atomically(self._descriptions(save)[rank], json.dumps(files))

    def _descriptions(self, save: "_Save") -> list[Path]:
        """What each rank says of its files once they are written."""
        return [save.folder / f".files-{rank:05d}.json" for rank in range(self._ranks.world)]

    def _place(self, save: "_Save") -> None:
        """Rank 0, when everything is written: the manifest, the name, and older ones removed."""
        files: dict[str, Any] = {}
        for description in self._descriptions(save):
            files |= json.loads(description.read_text())
            description.unlink()
        manifest = {
            "step": save.step,
            "milestone": save.milestone,
            "facts": self._facts,
            "circumstances": self._circumstances,
            **provenance(),
            "files": files,
        }
        write_sealed_json(save.folder / MANIFEST, manifest)
        save.folder.rename(self.folder / step_name(save.step))
        sync_directory(self.folder)
        self._prune()

    def _prune(self) -> None:
        """Remove old rolling checkpoints, but not the one this run came from: that one loads."""
        rolling = []
        for step, path in sorted(checkpoints_in(self.folder).items()):
            try:
                milestone = read_sealed_json(path / MANIFEST)["milestone"]
            except (DamagedArtifactError, FileNotFoundError):
                continue  # counts for nothing, and is looked at when it is needed
            rolling += [] if milestone else [(step, path)]
        for step, path in rolling[: -self.keep]:
            if step != self._resumed_from:
                # Renamed first: killed in between, half of it under its name would look damaged.
                hidden = path.rename(path.with_name(f".{path.name}.tmp"))
                shutil.rmtree(hidden, ignore_errors=True)

    @contextmanager
    def _explaining(self, save: "_Save | None") -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError) as error:
            assert save is not None
            if self._ranks.rank == 0:  # what was written may be what fills the disk
                shutil.rmtree(save.folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {save.step} cannot be written to {self.folder}: "
                f"{_cause(error)}. {self._way_on()}"
            ) from error

    def _way_on(self) -> str:
        found = checkpoints_in(self.folder).items()
        steps = [step for step, path in found if (path / MANIFEST).is_file()]
        last = f"Step {max(steps)} is saved and whole" if steps else "There is no earlier one"
        return f"{last}; make room (or mend what is wrong) and run the same command again."


@dataclass
class _Save:
    """One save under way."""

    step: int
    milestone: bool
    folder: Path
    done: "Future[None] | None" = None  # this rank's files, in the background


def _cause(error: BaseException) -> str:
    """What one rank met, in a few words; a full disk most of all."""
    for rank, (inner, _) in getattr(error, "failures", {}).items():
        return f"rank {rank}: {_cause(inner)}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return f"{type(error).__name__}: {error}"


def _random_state_name(rank: int) -> str:
    return f"random-{rank:05d}.pt"


# ----------------------------------------------------------------------------- folders by name
# Whatever does not count has a dot in front: half-written, damaged, on its way out.


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """By step. Whether they are whole is not asked. A copy under another name is the user's."""
    steps = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*"))
    return {int(number): path for number, path in steps if number.isdecimal()}


def set_aside(path: Path) -> Path:
    """Where a damaged checkpoint is kept from now on."""
    number, aside = 1, path.with_name(f".{path.name}.bad")
    while aside.exists():
        number += 1
        aside = path.with_name(f".{path.name}-{number}.bad")
    path.rename(aside)
    sync_directory(path.parent)
    return aside
