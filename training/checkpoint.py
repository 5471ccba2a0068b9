"""Checkpoints of a training run. A kill at any moment leaves a complete one or none, and every
checkpoint is verified before it is used.

    .step-000500.tmp/  each rank writes its part (DCP) and takes checksums of its files
    manifest.json      when every rank is done, rank 0 lists all files
    step-000500/       a rename puts it in place

The manifest reveals flipped bits, and data mixed with another save's table of contents. DCP alone
finds neither. A run resumes from the newest intact checkpoint. A damaged one is renamed to
`.step-000500.bad`, so that the run can save that step again.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, plain
from bosch.run.group import Group
from bosch.run.inside import open_own_file
from bosch.run.manifest import (
    MANIFEST,
    NO_RESULT,
    DamagedArtifactError,
    provenance,
    read_sealed_json,
    remove_leftovers,
    sync_directory,
    verify_folder,
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

Manifest = Mapping[str, Any]
TRAINER = "trainer.json"  # everything that is not a tensor


class CheckpointError(UserError):
    """A checkpoint cannot be written, or all of them are damaged."""


class Checkpoints:
    """The checkpoints in one folder. Every rank calls every method, in the same order, in the
    process group that training/parallel.py starts.

    facts: settings that a resumed run must have too. circumstances: what may change between two
    attempts, and changes the last digits of results (micro-batch, kernels); changes are logged.
    keep: how many of the newest to keep.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, object],
        keep: int,
        circumstances: Mapping[str, object] | None = None,
    ) -> None:
        self.folder, self.keep = folder, keep
        self._ranks = Group.current()
        self._facts: dict[str, object] = plain(facts)
        self._circumstances = plain({"ranks": self._ranks.world, **(circumstances or {})})
        self._resumed_from: int | None = None

    # ------------------------------------------------------------------------------------- resuming

    def load_newest(self, state: TrainState) -> int:
        """Load the newest intact checkpoint and return its step; 0 if there is none."""
        newest = self._ranks.from_rank_0(self._find_newest)
        if newest is None:
            return 0
        path, manifest = newest
        tensors = self._ranks.all_succeed(lambda: self._matching_tensors(path, state))
        reader = CheckpointReader(path)
        dcp.load(dict(tensors), storage_reader=reader, process_group=self._ranks.gloo)
        self._ranks.all_succeed(lambda: self._restore_rest(path, manifest, state, tensors))
        self._resumed_from = int(manifest["step"])
        return self._resumed_from

    def _find_newest(self) -> tuple[Path, Manifest] | None:
        self._make_folder()
        for step, path in sorted(checkpoints_in(self.folder).items(), reverse=True):
            try:
                manifest = verify_folder(path)
            except (DamagedArtifactError, FileNotFoundError) as damage:
                aside = set_aside(path)
                say(f"the checkpoint of step {step} is damaged, moved to {aside}: {damage}")
                continue
            self._check_facts(path, manifest)
            return path, manifest
        if bad := sorted(path.name for path in self.folder.glob(".step-*.bad")):
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged ({', '.join(bad)}). Restore a good "
                "copy of one, or delete this folder to begin again."
            )
        return None

    def _check_facts(self, path: Path, manifest: Manifest) -> None:
        if changed := differences(manifest["facts"], self._facts):
            raise UserError(
                f"{path} was made with other settings ({changed}). Use the old setting, or delete "
                f"{self.folder} to begin again."
            )
        if changed := differences(manifest["circumstances"], self._circumstances):
            say(f"resumed with {changed}; results may differ in the last digits")

    def _matching_tensors(self, path: Path, state: TrainState) -> dict[str, Tensor]:
        """The state's tensors, to be loaded in place, once the checkpoint is known to have them."""
        there = CheckpointReader(path).read_metadata().state_dict_metadata
        prepare_optimizer(state, set(there))
        tensors, _ = describe_state(state)
        compare_names(path, tensors, there)
        return tensors

    def _restore_rest(
        self, path: Path, manifest: Manifest, state: TrainState, tensors: Mapping[str, Tensor]
    ) -> None:
        restore_extra(path, state, json.loads((path / TRAINER).read_text()), tensors)
        if manifest["circumstances"]["ranks"] == self._ranks.world:
            restore_random_state(path / _random_state_name(self._ranks.rank))

    # --------------------------------------------------------------------------------------- saving

    def save(self, state: TrainState, step: int) -> None:
        """Save the state after `step` steps."""
        tensors, rest = describe_state(state)
        folder = self.folder / f".{step_name(step)}.tmp"
        with self._explaining(step, folder):
            if not self._ranks.from_rank_0(lambda: self._open(step, folder)):
                return
            self._ranks.all_succeed(lambda: self._write_rest(folder, rest))
            writer = dcp.FileSystemWriter(folder, sync_files=True)
            dcp.save(tensors, storage_writer=writer, process_group=self._ranks.gloo)
            own_files = self._ranks.all_succeed(lambda: self._describe_own_files(folder))
            files = self._ranks.gather(own_files)
            self._ranks.from_rank_0(lambda: self._place(step, folder, files))

    def _open(self, step: int, folder: Path) -> bool:
        """Make its folder. False: the checkpoint exists already."""
        if (self.folder / step_name(step) / MANIFEST).is_file():
            return False
        self._make_folder()
        folder.mkdir()
        return True

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        open_own_file(self.folder / NO_RESULT, "a").close()
        remove_leftovers(self.folder)

    def _write_rest(self, folder: Path, rest: object) -> None:
        """Write what does not go through DCP."""
        save_random_state(folder / _random_state_name(self._ranks.rank))
        if self._ranks.rank == 0:
            (folder / TRAINER).write_text(json.dumps(rest))

    def _describe_own_files(self, folder: Path) -> Manifest:
        """Sizes and checksums of this rank's files, while they are in the page cache."""
        rank = self._ranks.rank
        paths = [*folder.glob(f"__{rank}_*"), folder / _random_state_name(rank)]
        paths += [folder / name for name in (".metadata", TRAINER) if rank == 0]
        return {
            path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path, sync=True)}
            for path in sorted(paths)
        }

    def _place(self, step: int, folder: Path, files: Sequence[Manifest]) -> None:
        """On rank 0, when all is written: manifest, final name, and removal of old checkpoints."""
        manifest = {
            "step": step,
            "facts": self._facts,
            "circumstances": self._circumstances,
            **provenance(),
            "files": {name: facts for part in files for name, facts in part.items()},
        }
        write_sealed_json(folder / MANIFEST, manifest)
        folder.rename(self.folder / step_name(step))
        sync_directory(self.folder)
        self._prune()

    def _prune(self) -> None:
        """Remove old checkpoints, except the one this run resumed from, which is good."""
        complete = []
        for step, path in sorted(checkpoints_in(self.folder).items()):
            try:
                read_sealed_json(path / MANIFEST, "step")
            except (DamagedArtifactError, FileNotFoundError):
                continue  # dealt with if a run resumes from it
            complete.append((step, path))
        for step, path in complete[: -self.keep]:
            if step != self._resumed_from:
                # Renamed first, or after a kill the rest would look like a damaged checkpoint.
                hidden = path.rename(path.with_name(f".{path.name}.tmp"))
                shutil.rmtree(hidden, ignore_errors=True)

    @contextmanager
    def _explaining(self, step: int, folder: Path) -> Iterator[None]:
        """One sentence if the machine refuses to write. Any other error is a bug and passes."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            if (cause := _refusal(error)) is None:
                raise
            if self._ranks.rank == 0:  # the unfinished files may be what fills the disk
                shutil.rmtree(folder, ignore_errors=True)
            checkpoints = checkpoints_in(self.folder).items()
            steps = [step for step, path in checkpoints if (path / MANIFEST).is_file()]
            resumes = f"resumes after step {max(steps)}" if steps else "starts from the beginning"
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder}: {cause}. "
                f"Free some space (or fix the cause) and run the same command again: it {resumes}."
            ) from error


def _refusal(error: BaseException | None) -> str | None:
    """What the machine refused, most often for a full disk. None: it was no OSError of any rank."""
    if isinstance(error, OSError):
        return os.strerror(error.errno).lower() if error.errno else str(error)
    if isinstance(error, CheckpointException):
        reasons = {rank: _refusal(inner) for rank, (inner, _) in error.failures.items()}
        return next((f"rank {rank}: {reason}" for rank, reason in reasons.items() if reason), None)
    if isinstance(error, RuntimeError):  # torch's, raised while it handles the file's error
        return _refusal(error.__cause__ or error.__context__)
    return None


def _random_state_name(rank: int) -> str:
    return f"random-{rank:05d}.pt"


# ----------------------------------------------------------------------------- folders by name
# A leading dot hides what is incomplete, damaged or being removed.


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """By step, complete or not. Copies under other names are the user's and are left alone."""
    steps = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*"))
    return {int(number): path for number, path in steps if number.isdecimal()}


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint. Returns its new path."""
    number, aside = 1, path.with_name(f".{path.name}.bad")
    while aside.exists():
        number += 1
        aside = path.with_name(f".{path.name}-{number}.bad")
    path.rename(aside)
    sync_directory(path.parent)
    return aside
