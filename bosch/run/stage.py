"""Stages: steps of a run that are done once, survive a kill at any point, and are reused as long as
their settings and inputs stay the same.

    mask = Stage("mask", run=search, settings=config.mask, inputs={"calibration": calibration})
    with RunFolder(path, rank, world, say) as run:
        artifact = run.complete(mask)  # search(folder, calibration=Artifact), unless it is complete

A stage writes one folder: `started.json` first, `manifest.json` last. After a kill, `run` is called
again and continues from the files it had written. This file only reads: what will happen to a
stage, and why. bosch/run/folder.py does it.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import MANIFEST, STARTED, DamagedArtifactError, read_sealed_json, verify_folder
from bosch.run.fingerprint import fingerprint, fingerprint_files, plain

SHARED = "shared"  # beside the runs: the folder of what they have in common
REFERENCE = "reference.json"


@dataclass(frozen=True)
class Artifact:
    """The result of a stage: a complete folder, and the fingerprint of what decides its content."""

    folder: Path
    fingerprint: str

    @classmethod
    def load(cls, folder: Path) -> "Artifact":
        """A folder made elsewhere: of a stage, whose files are verified, or a run's reference to
        one, or of other files, which are known by their content."""
        folder = follow_reference(folder)
        if (folder / MANIFEST).is_file():
            try:
                return cls(folder, verify_folder(folder)["fingerprint"])
            except DamagedArtifactError as damage:
                problem = f"{damage} Restore {folder}, or make it again in another folder."
                raise DamagedArtifactError(problem) from damage
        if (folder / STARTED).is_file():
            raise UserError(f"{folder} has no {MANIFEST}. Finish the run that made it.")
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise MissingFileError(f"{folder} {problem}; pass the folder of a complete stage.")
        return cls(folder, fingerprint_files(folder))


def nothing_to_check() -> None:
    """Of a stage that is refused for nothing beforehand."""


@dataclass(frozen=True)
class Stage:
    """One step of a run, described before it is done. Its name is its folder's name."""

    name: str
    # run(folder, **inputs), each input an Artifact. What it returns, if anything, the first rank
    # calls once all ranks have run.
    run: Callable[..., Callable[[], None] | None]
    # A dataclass or mapping, whose fields marked speed_only do not count; or a function that gives
    # one, so that a chain can be described before the files are opened that it is to read.
    settings: object | Callable[[], object] = field(default_factory=dict)
    inputs: "Mapping[str, Stage | Artifact]" = field(default_factory=dict)
    version: int = 1  # raised when the same settings give another result
    ranks: Literal["first", "all"] = "first"  # which ranks call `run`; the others wait
    shared: bool = False  # kept in runs/shared and built once for all runs that need it
    # Checksums of files of the model that decide texts (bosch/model.py). A change is refused, but
    # they are not in the fingerprint, so that folders of earlier versions are still reused.
    model_files: Mapping[str, str] = field(default_factory=dict)
    # Refuses what cannot work, before anything is written and hours are spent on earlier stages.
    # Returns lines to print.
    check: Callable[[], Sequence[str] | None] = nothing_to_check
    num_bytes: int = 0  # that it writes, where it is so much that a disk may not have the room

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that decides the result, as it is written to started.json."""
        return {
            "stage": self.name,
            "version": self.version,
            "settings": plain(self.settings() if callable(self.settings) else self.settings),
            "inputs": {name: source.fingerprint for name, source in self.inputs.items()},
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.facts)


def named_path(run_path: Path) -> Path:
    """A run's folder with its name, also if it was given as `.`: the folder above holds what runs
    share."""
    return run_path if run_path.name not in ("", "..") else Path(os.path.abspath(run_path))


def locate(run_path: Path, stage: Stage) -> Path:
    """Where a stage's files are: in the run folder, or in the folder that runs share."""
    if not stage.shared:
        return run_path / stage.name
    return run_path.parent / SHARED / f"{stage.name.replace('/', '-')}-{stage.fingerprint[:16]}"


class StageBlockedError(UserError):
    """A stage can be neither reused nor run: it has other settings, or a damaged file."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}. {remedy}" if remedy else problem)
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class Decision:
    stage: Stage
    action: Literal["reuse", "resume", "run", "blocked"]
    reason: str
    remedy: str = ""  # of a blocked stage; said once, with the error, not with every stage


def follow_reference(folder: Path) -> Path:
    """Where a stage's files are: a run's own folder of a shared stage only holds a reference."""
    reference = folder / REFERENCE
    if not reference.is_file():
        return folder
    name = read_sealed_json(reference, "folder")["folder"]
    target = Path(os.path.abspath(folder / name))
    # The folder of all runs: a stage's name has one to three parts.
    above = Path(os.path.abspath(folder)).parents[1:4]
    runs = next((place for place in above if (place / SHARED).is_dir()), target.parent.parent)
    if target.parent != runs / SHARED or runs not in above:
        advice = "Copy a run together with that folder, or make the stage again with --fresh."
        raise UserError(f"{reference} names {name!r}, not one in {SHARED} beside the run. {advice}")
    return target.resolve()


def refuse_blocked(decisions: Sequence[Decision]) -> None:
    """Stop before any work if a stage is blocked. The first one blocks the others."""
    for decision in decisions:
        if decision.action == "blocked":
            raise StageBlockedError(decision.reason, decision.remedy)


def stages_to_redo(stages: Sequence[Stage], fresh: str | None, start: str | None) -> list[Stage]:
    """--fresh: the stage and all that depend on it. --from: the stage, all that depend on it, and
    all later ones except shared stages that do not depend on it (their result would be the same).
    `eval` stands for every stage eval/..."""
    redone: list[Stage] = []
    unknown, started = {"--fresh": fresh, "--from": start}, False
    for stage in stages:
        called = {stage.name, stage.name.partition("/")[0]}
        unknown = {option: name for option, name in unknown.items() if name not in called}
        depends = any(source in redone for source in stage.inputs.values())
        if not called.isdisjoint((fresh, start)) or depends or (started and not stage.shared):
            redone.append(stage)
        started = started or start in called
    for option, name in unknown.items():
        if name is not None:
            there_are = suggest(name, [stage.name for stage in stages])
            raise UserError(f"{option} {name}: no such stage; {there_are}")
    return redone


def examine(run_path: Path, stage: Stage, verified: set[Path]) -> Decision:
    """What `complete` would do with the stage. verified: folders whose checksums were checked."""
    folder, reference = locate(run_path, stage), run_path / stage.name / REFERENCE
    try:
        if stage.shared and reference.is_file():
            old = read_sealed_json(reference, "facts")["facts"]
            if old != stage.facts:
                raise _conflict(reference.parent, stage, old)
        if folder.exists() and not folder.is_dir():
            raise StageBlockedError(f"{folder} is a file, not a folder; move it away.")
        # Listed first: if another run is just starting the stage, started.json exists by the time
        # we look for it.
        has_files = folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir())
        is_complete = (folder / MANIFEST).is_file()
        if is_complete and folder not in verified:
            verify_folder(folder)
        if not is_complete and not (folder / STARTED).is_file():
            if has_files:
                raise StageBlockedError(f"{folder} holds files that no run made; move them away.")
            where = f", shared in {folder}" if stage.shared else ""
            return Decision(stage, "run", f"starts{where}")
        old = read_sealed_json(folder / STARTED, "fingerprint", *stage.facts)
    except DamagedArtifactError as damage:
        raise StageBlockedError(f"{damage} To make it again, {_again(stage)}.") from damage
    if old["fingerprint"] != stage.fingerprint:
        raise _conflict(folder, stage, old)
    recorded = old.get("model_files", stage.model_files)  # earlier versions recorded none
    if changes := differences(recorded, stage.model_files):
        advice = f"Restore them, or, to make it again, {_again(stage)}."
        raise StageBlockedError(f"{folder}: files of the model changed since ({changes}). {advice}")
    if not is_complete:
        return Decision(stage, "resume", "continues where it stopped")
    verified.add(folder)
    return Decision(stage, "reuse", f"complete, reused{f' from {folder}' if stage.shared else ''}")


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Which settings changed (`ratio: 0.75 -> 0.5; seed: 0 -> 1`); '' if none did."""
    before, after = flatten(old), flatten(new)
    names = sorted(before.keys() | after.keys())
    pairs = {name: [facts.get(name, "(not there)") for facts in (before, after)] for name in names}
    return "; ".join(f"{name}: {a} -> {b}" for name, (a, b) in pairs.items() if a != b)


def _conflict(folder: Path, stage: Stage, old: Mapping[str, Any]) -> StageBlockedError:
    new, inputs = stage.facts, (old["inputs"], stage.facts["inputs"])
    names = sorted({*inputs[0], *inputs[1]})
    changed = [f"its input {name}" for name in names if inputs[0].get(name) != inputs[1].get(name)]
    settings = [{n: f[n] for n in ("stage", "version")} | f["settings"] for f in (old, new)]
    changes = "; ".join(filter(None, [differences(*settings), *changed]))
    if new["version"] != old["version"]:
        changes += "; this version of the code makes it otherwise"
    return StageBlockedError(
        f"{folder} was made with other settings or inputs ({changes})",
        "Use another folder (--run-dir or --out), or the old setting, or, to make it and what "
        f"depends on it again, {_again(stage)}.",
    )


def _again(stage: Stage) -> str:
    """What makes a stage again. Only some programs have an option for it."""
    by_search = "pass --fresh to `bosch search`, " if stage.name == "mask" else ""
    by_recover = f"pass --fresh {stage.name} to `bosch recover`"
    return f"{by_recover}, {by_search}or delete its folder"


def flatten(settings: object, prefix: str = "") -> dict[str, object]:
    """`train.schedule` -> value."""
    if not isinstance(settings, Mapping):
        return {prefix: settings}
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return flat
