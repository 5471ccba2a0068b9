"""Starting points of a search: static rankings by other methods, and an existing mask."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bosch.masks.mask import read_mask
from bosch.method import Inputs, Scores, Table
from bosch.methods._settings import METHODS, load_method
from bosch.plugins import list_plugins, suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.progress import say
from bosch.search.optimizers._interface import WITH_PENALTY
from bosch.search.settings import SearchSettings, check_optimizer

STARTS = ("fisher", "qada", "apl", "retrieval_head")  # each as costly as a few evaluations
FOLDER = "rankings"  # subfolder of the stage, from which a killed ranking resumes


@dataclass(frozen=True)
class GuidedSettings(SearchSettings):
    """Settings of a guided search: one that starts from rankings or a mask."""

    objective: str = "accuracy+probability"  # how masks are scored; as in SearchSettings
    optimizer: str = "swap"  # a file of bosch/search/optimizers
    rankings: tuple[str, ...] = STARTS  # ranking methods to start from
    start: Path | None = None  # a mask.json to start from in addition


def check_guides(settings: GuidedSettings) -> None:
    """Refuse starting points that do not work, before work begins."""
    check_optimizer(settings)
    methods, start = list_plugins(METHODS), settings.start
    for name in settings.rankings:
        if name not in methods:
            raise UserError(f"--rankings {name}: no such method; {suggest(name, methods)}")
        if not hasattr(load_method(name), "score_groups"):
            problem = f"--rankings {name}: this method does not rank groups"
            raise UserError(f"{problem}; use one that does, such as {', '.join(STARTS)}.")
    if start is not None and settings.optimizer in WITH_PENALTY:
        problem = f"--start {start}: {settings.optimizer} starts from the dense model"
        raise UserError(f"{problem}, as in the paper; use --optimizer swap to start from a mask.")
    if start is not None and not start.is_file():
        raise MissingFileError(f"--start {start} does not exist; pass the mask.json of a run.")


def guides_of(inputs: Inputs) -> Callable[[], list[Table]]:
    """How global each group is, by the mask to start from and by each ranking. The mask is read at
    once and refused if it was made for another model; its ratio and window may differ."""
    settings: GuidedSettings = inputs.settings
    start: list[Table] = (
        [read_mask(settings.start, inputs.model_info).mask.z] if settings.start else []
    )

    def rank(name: str) -> Table:
        method, folder = load_method(name), inputs.folder / FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        say(f"ranking groups by {name}, as a starting point")
        ranking_inputs = dataclasses.replace(
            inputs,
            load_model=lambda: inputs.model,
            load_calibration=lambda: inputs.calibration,
            settings=method.Settings(),
            folder=folder,
        )
        scores: Scores = method.score_groups(ranking_inputs)
        sign = 1 if scores.larger_is == "global" else -1
        return tuple(tuple(sign * value for value in row) for row in scores.groups)

    def make() -> list[Table]:
        from bosch.run.group import agree  # imports torch

        # The full groups of a mask are global.
        return [*start, *(agree(rank(name)) for name in settings.rankings)]

    return make
