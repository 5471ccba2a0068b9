"""Checkpoints of a training run. A kill at any moment leaves a complete one or none, and every
checkpoint is verified before it is used.

    .step-000500.tmp/  each rank writes its part and takes checksums of its files
    manifest.json      when every rank is done, rank 0 lists all files
    step-000500/       a rename puts it in place

The manifest reveals flipped bits, and data mixed with another save's table of contents. A run
resumes from the newest intact checkpoint. A damaged one is renamed to `.step-000500.bad`, so that
the run can save that step again.

Every tensor goes to torch.distributed.checkpoint (DCP) under a flat name, such as
`optimizer.model.norm.weight.exp_avg`. Numbers and lists go to a JSON file: DCP would pickle them,
and loading a pickle can run any code. DCP's table of contents, `.metadata`, is a pickle too. We
load it allowing only DCP's own classes.
"""

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from bosch.model import explain_library_errors
from bosch.run.checkout import provenance
from bosch.run.errors import UserError
from bosch.run.files import (
    MANIFEST,
    NO_RESULT,
    DamagedArtifactError,
    open_own_file,
    path_inside,
    read_sealed_json,
    remove_leftovers,
    sync_directory,
    verify_folder,
    write_sealed_json,
)
from bosch.run.fingerprint import hash_file, plain
from bosch.run.group import Group
from bosch.run.progress import say
from bosch.run.stage import differences

Manifest = Mapping[str, Any]
TRAINER = "trainer.json"  # everything that is not a tensor


class CheckpointError(UserError):
    """A checkpoint or the metrics cannot be written, or all checkpoints are damaged."""


@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes. Data order and learning rate are functions of the step."""

    model: nn.Module  # its parameters are DTensors, sharded by fully_shard
    optimizer: Optimizer
    extra: dict[str, Stateful] = field(default_factory=dict)  # the same on every rank


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
        reader = CheckpointReader(path)
        tensors = self._ranks.all_succeed(lambda: self._matching_tensors(reader, path, state))
        dcp.load(dict(tensors), storage_reader=reader, process_group=self._ranks.gloo)
        self._ranks.all_succeed(lambda: self._restore_rest(path, manifest, state, tensors))
        self._resumed_from = int(manifest["step"])
        return self._resumed_from

    def _find_newest(self) -> tuple[Path, Manifest] | None:
        self._make_folder()
        for step, path in sorted(self._by_step().items(), reverse=True):
            try:
                manifest = verify_folder(path)
            except (DamagedArtifactError, FileNotFoundError) as damage:
                number, aside = 1, path.with_name(f".{path.name}.bad")
                while aside.exists():
                    number += 1
                    aside = path.with_name(f".{path.name}-{number}.bad")
                path.rename(aside)
                sync_directory(self.folder)
                say(f"the checkpoint of step {step} is damaged, moved to {aside}: {damage}")
                continue
            if changed := differences(manifest["facts"], self._facts):
                raise UserError(
                    f"{path} was made with other settings ({changed}). Use the old setting, or "
                    f"delete {self.folder} to begin again."
                )
            if changed := differences(manifest["circumstances"], self._circumstances):
                say(f"resumed with {changed}; results may differ in the last digits")
            return path, manifest
        if bad := sorted(path.name for path in self.folder.glob(".step-*.bad")):
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged ({', '.join(bad)}). Restore a good "
                "copy of one, or delete this folder to begin again."
            )
        return None

    def _matching_tensors(
        self, reader: "CheckpointReader", path: Path, state: TrainState
    ) -> dict[str, Tensor]:
        """The state's tensors, to be loaded in place. Refuses a checkpoint of another model, of
        which DCP alone would silently skip or convert tensors."""
        there: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        # A new optimizer gets the moments that the checkpoint has. A parameter that never had a
        # gradient has none.
        optimizer = state.optimizer
        if any(name.startswith("optimizer.") for name in there) and not optimizer.state:
            _init_optim_state(optimizer)  # makes a step with learning rate 0
        for name, parameter in _named_parameters(state):
            if not any(other.startswith(f"optimizer.{name}.") for other in there):
                optimizer.state.pop(parameter, None)

        tensors, _ = describe_state(state)
        for name in sorted(tensors.keys() | there.keys()):
            if name not in there:
                raise _unfit(path, f"it lacks {name}, which this run's model or optimizer has")
            if name not in tensors:
                raise _unfit(path, f"it has {name}, which this run's model or optimizer lacks")
            mine = _kind(tensors[name].shape, tensors[name].dtype)
            saved = _kind(there[name].size, there[name].properties.dtype)
            if mine != saved:
                raise _unfit(path, f"in it {name} is {saved}, in this run {mine}")
        return tensors

    def _restore_rest(
        self, path: Path, manifest: Manifest, state: TrainState, tensors: Mapping[str, Tensor]
    ) -> None:
        """What was not loaded in place: the extra parts and torch's generators."""
        rest = json.loads((path / TRAINER).read_text())["extra"]
        if rest.keys() != state.extra.keys():
            parts, needed = (", ".join(sorted(names)) for names in (rest, state.extra))
            raise _unfit(path, f"beside model and optimizer it has {parts}, this run {needed}")
        for name, part in state.extra.items():
            prefix = f"extra.{name}."
            loaded = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            part.load_state_dict(rest[name] | loaded)
        if manifest["circumstances"]["ranks"] == self._ranks.world:
            restore_random_state(path / self._random_state)

    # --------------------------------------------------------------------------------------- saving

    def save(self, state: TrainState, step: int) -> None:
        """Save the state after `step` steps, unless it is there."""
        tensors, rest = describe_state(state)
        folder, rank = self.folder / f".step-{step:06d}.tmp", self._ranks.rank

        def open_folder() -> bool:
            if (self.folder / f"step-{step:06d}" / MANIFEST).is_file():
                return False
            self._make_folder()
            folder.mkdir()
            return True

        def write_rest() -> None:
            save_random_state(folder / self._random_state)
            if rank == 0:
                (folder / TRAINER).write_text(json.dumps({"extra": rest}))

        def describe_own_files() -> Manifest:
            """Sizes and checksums, while the files are in the page cache."""
            paths = [*folder.glob(f"__{rank}_*"), folder / self._random_state]
            paths += [folder / name for name in (".metadata", TRAINER) if rank == 0]
            return {
                path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path, sync=True)}
                for path in sorted(paths)
            }

        try:
            with explain_refusal(f"the checkpoint of step {step} in {self.folder}"):
                if not self._ranks.from_rank_0(open_folder):
                    return
                self._ranks.all_succeed(write_rest)
                writer = dcp.FileSystemWriter(folder, sync_files=True)
                dcp.save(tensors, storage_writer=writer, process_group=self._ranks.gloo)
                files = self._ranks.gather(self._ranks.all_succeed(describe_own_files))
                self._ranks.from_rank_0(lambda: self._place(step, folder, files))
        except CheckpointError:
            if rank == 0:  # the unfinished files may be what fills the disk
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _place(self, step: int, folder: Path, files: Sequence[Manifest]) -> None:
        """On rank 0, when all is written: manifest, final name, and removal of old checkpoints,
        except the one this run resumed from, which is good."""
        manifest = {
            "step": step,
            "facts": self._facts,
            "circumstances": self._circumstances,
            **provenance(),
            "files": {name: facts for part in files for name, facts in part.items()},
        }
        write_sealed_json(folder / MANIFEST, manifest)
        folder.rename(self.folder / f"step-{step:06d}")
        sync_directory(self.folder)
        complete = []
        for number, path in sorted(self._by_step().items()):
            try:
                read_sealed_json(path / MANIFEST, "step")
            except (DamagedArtifactError, FileNotFoundError):
                continue  # dealt with if a run resumes from it
            complete.append((number, path))
        for number, path in complete[: -self.keep]:
            if number != self._resumed_from:
                # Renamed first, or after a kill the rest would look like a damaged checkpoint.
                hidden = path.rename(path.with_name(f".{path.name}.tmp"))
                shutil.rmtree(hidden, ignore_errors=True)

    # ---------------------------------------------------------------------------------- the folder

    @property
    def _random_state(self) -> str:
        return f"random-{self._ranks.rank:05d}.pt"

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        open_own_file(self.folder / NO_RESULT, "a").close()
        remove_leftovers(self.folder)

    def _by_step(self) -> dict[int, Path]:
        """Complete or not. A leading dot hides what is incomplete, damaged or being removed; copies
        under other names are the user's and are left alone."""
        steps = ((path.name.removeprefix("step-"), path) for path in self.folder.glob("step-*"))
        return {int(number): path for number, path in steps if number.isdecimal()}


@contextmanager
def explain_refusal(what: str) -> Iterator[None]:
    """One sentence if the machine refuses to write it. Any other error is a bug and passes."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        if (cause := _refusal(error)) is None:
            raise
        raise CheckpointError(
            f"{what} cannot be written: {cause}. Free some space (or fix the cause) and run the "
            "same command again: it goes on from the last checkpoint."
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


def _unfit(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} does not fit this run: {reason}. Delete {path.parent} to begin again, or write to "
        "another folder."
    )


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'a number'} of {str(dtype).removeprefix('torch.')}"


# ------------------------------------------------------------------------------------- the content


def describe_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
    """The tensors by name, sharing memory with the state, and the other values of extra parts."""
    # The model first, since this also reshards all parameters. Tied parameters once.
    model: Mapping[str, Any] = get_model_state_dict(state.model)
    once = {plain_name(name) for name, _ in state.model.named_parameters()}
    names = {plain_name(n) for n, _ in state.model.named_parameters(remove_duplicate=False)}
    tensors = {f"model.{name}": model[name] for name in model if name not in names - once}
    for name, parameter in _named_parameters(state):
        moments = state.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments.items()}
    rest: dict[str, dict[str, object]] = {}
    for part_name, part in state.extra.items():
        rest[part_name] = {}
        for key, value in part.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"extra.{part_name}.{key}"] = value
            else:
                rest[part_name][key] = value
    return {name: tensor.detach() for name, tensor in tensors.items()}, rest


def _named_parameters(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    """Those in the optimizer: the model's, and those of extra parts that are modules."""
    modules = {"": state.model}
    modules |= {f"{n}.": part for n, part in state.extra.items() if isinstance(part, nn.Module)}
    names = {
        parameter: prefix + plain_name(name)
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def plain_name(name: str) -> str:
    """A parameter's name without the part that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def save_random_state(path: Path) -> None:
    """The state of torch's generators in this process. Only dropout uses them."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    with path.open("wb") as file:  # given a path, torch would not say that the disk is full
        torch.save({"torch": torch.get_rng_state(), "cuda": cuda}, file)


def restore_random_state(path: Path) -> None:
    with explain_library_errors(f"{path} is not the state of torch's generators"):
        content = torch.load(path, weights_only=True)
        torch.set_rng_state(content["torch"])
        if content["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(content["cuda"])


# -------------------------------------------------------------------------- DCP's table of contents


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader, but its table of contents may only contain DCP's own classes, and name only
    files of the folder."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata: Metadata = _MetadataUnpickler(file).load()
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{file.name} {error}, which no checkpoint of ours does. Somebody may have "
                    "changed it to run code: delete this checkpoint."
                ) from error
            except Exception as error:  # of the classes, about their arguments
                raise UserError(
                    f"{file.name} is damaged ({error}): delete this checkpoint."
                ) from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise UserError(f"{file.name} is no table of contents: delete this checkpoint.")
        for place in metadata.storage_data.values():
            name = getattr(place, "relative_path", None)
            path_inside(Path(self.path), name, Path(file.name), flat=True)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING".split()
    ),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    "pathlib": ["PosixPath"],
    "pathlib._local": ["PosixPath"],  # in Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"names {module}.{name}")


def _enum_member(kind: object, name: str) -> Enum:
    """Python 3.11.2 (in Debian 12) pickles a member of an enumeration as getattr(class, name)."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"asks for {name} of {kind}")
    return kind[name]
