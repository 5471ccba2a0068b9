"""Checkpoints of a training run. A kill at any moment leaves a complete one or none, and every
checkpoint is verified before it is used.

    .step-000500.tmp/  each rank writes its rows of every tensor and takes checksums of its files
    manifest.json      when every rank is done, rank 0 lists all files
    step-000500/       a rename puts it in place

A run resumes from the newest intact checkpoint. A damaged one is renamed to `.step-000500.bad`, so
that the run can save that step again.

Tensors lie in safetensors files under flat names, such as `optimizer.model.norm.weight.exp_avg`,
all else in a JSON file. torch.distributed.checkpoint would pickle its table of contents, and
loading a pickle can run any code.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from bosch.hybrid.shards import save_weights
from bosch.run import files
from bosch.run.checkout import provenance
from bosch.run.dist import Ranks
from bosch.run.errors import FREE_SPACE, UserError
from bosch.run.files import MANIFEST, DamagedArtifactError, read_sealed_json
from bosch.run.fingerprint import hash_file, plain
from bosch.run.progress import say
from bosch.run.stage import differences
from bosch.training.parallel import is_first_copy, own_rows, plain_name

Manifest = Mapping[str, Any]
TRAINER = "trainer.json"  # everything that is not a tensor, and the shape of every tensor
FIRST_ROWS = "first_rows"  # in the metadata of a file: of each tensor in it


@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes. Data order and learning rate are functions of the step."""

    model: nn.Module  # its parameters are DTensors, sharded by fully_shard
    optimizer: Optimizer
    extra: dict[str, Stateful] = field(default_factory=dict)  # the same on every rank


class Checkpoints:
    """The checkpoints in one folder. Every rank calls every method, in the same order.

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
        self.folder, self.keep, self._ranks = folder, keep, Ranks.current()
        self._facts: dict[str, object] = plain(facts)
        self._circumstances = plain({"ranks": self._ranks.world, **(circumstances or {})})
        self._resumed_from: int | None = None

    def load_newest(self, state: TrainState) -> int:
        """Load the newest intact checkpoint and return its step; 0 if there is none."""
        ranks = self._ranks
        # One rank looks, since what the others see of a shared file system may lag behind. It looks
        # again for as long as the newest turns out to be damaged.
        while (newest := ranks.from_rank_0(self._find_newest)) is not None:
            path, manifest = newest
            damage = None
            try:  # hundreds of GB: every rank takes the checksums of its share
                files.verify_folder(path, ranks.rank, ranks.world)
            except (DamagedArtifactError, FileNotFoundError) as error:
                damage = str(error)
            if not (damage := next(filter(None, ranks.gather(damage)), None)):
                ranks.all_succeed(partial(self._load, path, manifest, state))
                self._resumed_from = int(manifest["step"])
                return self._resumed_from
            ranks.from_rank_0(partial(self._set_aside, path, damage))
        return 0

    def _set_aside(self, path: Path, damage: str) -> None:
        names = (f".{path.name}{end}.bad" for end in ("", *(f"-{n}" for n in range(2, 10**4))))
        aside = next(place for name in names if not (place := path.with_name(name)).exists())
        path.rename(aside)
        files.sync_directory(self.folder)
        say(f"the checkpoint of {path.name} is damaged, moved to {aside}: {damage}")

    def _find_newest(self) -> tuple[Path, Manifest] | None:
        """The newest of which the manifest is intact."""
        self._make_folder()
        for path in reversed(self._by_step()):
            try:
                manifest = read_sealed_json(path / MANIFEST, "files", "facts", "circumstances")
            except UserError as damage:
                self._set_aside(path, str(damage))
                continue
            if changed := differences(manifest["facts"], self._facts):
                problem = f"{path} was made with other settings ({changed}). Use the old setting"
                raise UserError(f"{problem}, or delete {self.folder} to begin again.")
            if changed := differences(manifest["circumstances"], self._circumstances):
                say(f"resumed with {changed}; results may differ in the last digits")
            return path, manifest
        if bad := sorted(path.name for path in self.folder.glob(".step-*.bad")):
            problem = f"every checkpoint in {self.folder} is damaged ({', '.join(bad)})"
            raise UserError(f"{problem}. Restore one, or delete this folder to begin again.")
        return None

    def _load(self, path: Path, manifest: Manifest, state: TrainState) -> None:
        content = json.loads((path / TRAINER).read_text())
        there, rest = content["tensors"], content["extra"]
        _give_moments(state, there)
        tensors, own_rest = describe_state(state)
        here = _kinds(tensors) | {f"extra.{name}": "a part" for name in own_rest}
        saved = there | {f"extra.{name}": "a part" for name in rest}
        for name in sorted(here.keys() | saved.keys()):
            in_it, in_run = saved.get(name, "missing"), here.get(name, "missing")
            if in_it != in_run:
                problem = f"{path} does not fit this run: in it {name} is {in_it}, here {in_run}"
                raise UserError(f"{problem}. Delete {path.parent}, or write to another folder.")

        with ExitStack() as stack:
            # A tensor's rows may lie in the files of several ranks, and a run with another number
            # of ranks needs others of them than any rank has written (_read_rows).
            pieces: dict[str, list[tuple[int, Any]]] = {}  # first row and file, by tensor
            for file_name in manifest["files"]:
                if file_name.endswith(".safetensors"):
                    file = stack.enter_context(safe_open(path / file_name, framework="pt"))
                    for name, begin in json.loads(file.metadata()[FIRST_ROWS]).items():
                        pieces.setdefault(name, []).append((begin, file))
            for name, tensor in tensors.items():
                _read_rows(name, tensor, pieces[name])
            # Each rank has a generator of its own. With another number of ranks there is none that
            # fits, and dropout, the only one to ask, goes on with new numbers.
            if manifest["circumstances"]["ranks"] == self._ranks.world:
                mine = f"random.{self._ranks.rank}."
                states = {n: pieces[n][0][1].get_tensor(n) for n in pieces if n.startswith(mine)}
                set_random_state({n.removeprefix(mine): states[n] for n in states})
        # Model and optimizer share memory with `tensors`, and have their values by now. Other parts
        # get theirs by their own method, so last.
        for name, part in state.extra.items():
            prefix = f"extra.{name}."
            loaded = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            part.load_state_dict(rest[name] | loaded)

    def save(self, state: TrainState, step: int) -> None:
        """Save the state after `step` steps, unless it is there."""
        tensors, rest = describe_state(state)
        complete = self.folder / f"step-{step:06d}"
        folder, ranks = complete.with_name(f".{complete.name}.tmp"), self._ranks

        def open_folder() -> bool:
            if (complete / MANIFEST).is_file():
                return False
            self._make_folder()
            folder.mkdir()
            content = {"extra": rest, "tensors": _kinds(tensors)}
            (folder / TRAINER).write_text(json.dumps(content))
            return True

        # In three parts, between which the ranks wait: files in a folder that nobody takes for a
        # checkpoint, and its name only once all are written.
        def write_own_files() -> Manifest:
            """Returns sizes and checksums, taken while the files are in the page cache."""
            # A file for each moment: safetensors holds a copy of a whole file in memory.
            groups: dict[str, dict[str, tuple[Tensor, int]]] = {"rest": {}}
            for name, tensor in tensors.items():
                if is_first_copy(tensor, ranks.rank):
                    kind = name.rpartition(".")[2]
                    group = kind if kind in ("exp_avg", "exp_avg_sq") else "rest"
                    groups.setdefault(group, {})[name] = own_rows(tensor)
            for name, tensor in random_state().items():
                groups["rest"][f"random.{ranks.rank}.{name}"] = tensor, 0
            paths = [folder / TRAINER] if ranks.rank == 0 else []
            for group, parts in groups.items():
                paths.append(folder / f"rank-{ranks.rank:05d}-{group}.safetensors")
                begins = json.dumps({name: begin for name, (_, begin) in parts.items()})
                rows = {name: part.contiguous() for name, (part, _) in parts.items()}
                save_weights(rows, paths[-1], {FIRST_ROWS: begins})
            return {
                path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path, sync=True)}
                for path in paths
            }

        def put_in_place() -> None:
            about = {"step": step, "facts": self._facts, "circumstances": self._circumstances}
            listed = {name: facts for part in written for name, facts in part.items()}
            manifest = {**about, **provenance(), "files": listed}
            files.write_sealed_json(folder / MANIFEST, manifest)
            folder.rename(complete)
            files.sync_directory(self.folder)
            self._remove_old()

        try:
            with explain_refusal(f"the checkpoint of step {step} in {self.folder}"):
                if not ranks.from_rank_0(open_folder):
                    return
                written = ranks.gather(ranks.all_succeed(write_own_files))
                ranks.from_rank_0(put_in_place)
        except UserError:
            if ranks.rank == 0:  # the unfinished files may be what fills the disk
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _remove_old(self) -> None:
        """All but the newest, and the one this run resumed from, which is good."""
        complete = []
        for path in self._by_step():
            # A damaged one is dealt with if a run resumes from it.
            with suppress(DamagedArtifactError, FileNotFoundError):
                read_sealed_json(path / MANIFEST, "step")
                complete.append(path)
        for path in complete[: -self.keep]:
            if int(path.name[5:]) != self._resumed_from:
                # Renamed first, or after a kill the rest would look like a damaged checkpoint.
                hidden = path.rename(path.with_name(f".{path.name}.tmp"))
                shutil.rmtree(hidden, ignore_errors=True)

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.open_own_file(self.folder / files.NO_RESULT, "a").close()
        files.remove_leftovers(self.folder)

    def _by_step(self) -> list[Path]:
        """In order, complete or not. A leading dot hides what is incomplete, damaged or being
        removed; copies under other names are the user's and are left alone."""
        steps = [path for path in self.folder.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(steps, key=lambda path: int(path.name[5:]))


def _give_moments(state: TrainState, saved: Mapping[str, object]) -> None:
    """Give a new optimizer the moments that are saved, so that they have a place to be read into. A
    parameter that never had a gradient has none."""
    optimizer = state.optimizer
    if any(name.startswith("optimizer.") for name in saved) and not optimizer.state:
        _init_optim_state(optimizer)  # makes a step with learning rate 0
    for name, parameter in _named_parameters(state):
        if not any(other.startswith(f"optimizer.{name}.") for other in saved):
            optimizer.state.pop(parameter, None)


@contextmanager
def explain_refusal(what: str) -> Iterator[None]:
    """One sentence if the machine refuses to write it, most often for a full disk."""
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno).lower() if error.errno else error
        problem = f"{what} cannot be written: {cause}"
        raise UserError(f"{problem}. {FREE_SPACE}") from error


def _read_rows(name: str, tensor: Tensor, pieces: Sequence[tuple[int, Any]]) -> None:
    """Copy this rank's rows of a tensor from where they lie: the number of ranks may be another."""
    # A tensor of 11 rows, saved by three ranks and read by two; rank 1 takes two rows of the second
    # piece and all of the third:
    #     pieces       0 1 2 3 | 4 5 6 7 | 8 9 10
    #     target       - - - -   - - 6 7   8 9 10      first = 6
    target, first = own_rows(tensor)
    if target.ndim == 0:
        target.copy_(pieces[0][1].get_tensor(name))
        return
    missing = len(target)
    for begin, file in pieces:
        there = file.get_slice(name)
        low, high = max(first, begin), min(first + len(target), begin + there.get_shape()[0])
        if low < high:
            target[low - first : high - first].copy_(there[low - begin : high - begin])
            missing -= high - low
    assert missing == 0, f"{name}: {missing} rows of the checkpoint are missing"


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and type of each, as text."""
    return {
        name: f"{' x '.join(map(str, tensor.shape)) or 'a number'} of {str(tensor.dtype)[6:]}"
        for name, tensor in tensors.items()
    }


def describe_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
    """The tensors by name, sharing memory with the state, and the other values of extra parts."""
    # The model first, since this also reshards all parameters. Tied parameters once: `names` has
    # all names of each, `once` the first.
    model: Mapping[str, Any] = get_model_state_dict(state.model)
    once = {plain_name(name) for name, _ in state.model.named_parameters()}
    names = {plain_name(n) for n, _ in state.model.named_parameters(remove_duplicate=False)}
    tensors = {f"model.{name}": model[name] for name in model if name not in names - once}
    for name, parameter in _named_parameters(state):
        moments = state.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments.items()}
    rest: dict[str, dict[str, object]] = {name: {} for name in state.extra}
    for part_name, part in state.extra.items():
        for key, value in part.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"extra.{part_name}.{key}"] = value
            else:
                rest[part_name][key] = value
    return {name: tensor.detach() for name, tensor in tensors.items()}, rest


def _named_parameters(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    """Those in the optimizer: the model's, and those of extra parts that are modules."""
    modules: dict[str, object] = {"": state.model}
    modules |= {f"{name}.": part for name, part in state.extra.items()}
    names = {
        parameter: prefix + plain_name(name)
        for prefix, module in modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def random_state() -> dict[str, Tensor]:
    """Of torch's generators in this process. Only dropout uses them."""
    states = {"torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
