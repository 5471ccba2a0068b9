"""Stages: steps of a run that are done once, survive a kill at any point, and are reused as long as
their settings and inputs stay the same.

    mask = Stage("mask", run=search, settings=config.mask, inputs={"calibration": calibration})
    with RunFolder(path, rank, world, say) as run:
        artifact = run.complete(mask)  # search(folder, calibration=Artifact), unless it is complete

A stage writes one folder in the run folder: `started.json` first, `manifest.json` last. After a
kill, `run` is called again, finds the files it had written, and continues from there. What happens
to each stage is decided in bosch/run/plan.py and done in bosch/run/folder.py.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bosch.run import manifest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint, fingerprint_files, plain
from bosch.run.manifest import MANIFEST, STARTED

SHARED = "shared"  # beside the runs: the folder of what they have in common


@dataclass(frozen=True)
class Artifact:
    """The result of a stage: a complete folder, and the fingerprint of what decides its content."""

    folder: Path
    fingerprint: str

    @classmethod
    def load(cls, folder: Path) -> "Artifact":
        """A folder made elsewhere: of a stage, whose files are verified, or of other files, which
        are known by their content."""
        if (folder / MANIFEST).is_file():
            return cls(folder, manifest.verify_folder(folder)["fingerprint"])
        if (folder / STARTED).is_file():
            raise UserError(
                f"{folder} is not complete: it has no {MANIFEST}. Finish the run that made it."
            )
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise MissingFileError(f"{folder} {problem}; pass the folder of a complete stage.")
        return cls(folder, fingerprint_files(folder))


@dataclass(frozen=True)
class Stage:
    """One step of a run, described before it is done. Its name is its folder's name."""

    name: str
    run: Callable[..., None]  # run(folder, **inputs), each input an Artifact
    # A dataclass or mapping; fields marked speed_only do not count.
    settings: object = field(default_factory=dict)
    inputs: "Mapping[str, Stage | Artifact]" = field(default_factory=dict)
    version: int = 1  # raised when the same settings give another result
    ranks: Literal["first", "all"] = "first"  # which ranks call `run`; the others wait
    shared: bool = False  # kept in runs/shared and built once for all runs that need it
    derived: bool = False  # a view of its inputs: made again by itself when they change
    # Checksums of files of the model that decide texts (bosch/model.py). A change is refused, but
    # they are not in the fingerprint, so that folders of earlier versions are still reused.
    model_files: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that decides the result, as it is written to started.json."""
        inputs = {name: source.fingerprint for name, source in self.inputs.items()}
        facts = {"stage": self.name, "version": self.version, "settings": plain(self.settings)}
        return facts | {"inputs": inputs}

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.facts)


def locate(run_path: Path, stage: Stage) -> Path:
    """Where a stage's files are: in the run folder, or in the folder that runs share."""
    if not stage.shared:
        return run_path / stage.name
    return run_path.parent / SHARED / f"{stage.name.replace('/', '-')}-{stage.fingerprint[:16]}"
