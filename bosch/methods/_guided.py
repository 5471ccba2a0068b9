"""Starts of a search: what other methods of bosch/methods say of each group, and a mask that is
there already.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bosch.masks.mask import read_mask
from bosch.method import Inputs, Scores, Table
from bosch.plugins import list_plugins, load_plugin, suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.progress import say
from bosch.search.optimizers._interface import WITH_PENALTY
from bosch.search.settings import SearchSettings, check_optimizer

METHODS = "bosch.methods"
STARTS = ("fisher", "qada", "apl", "retrieval_head")  # each takes a few evaluations' time
FOLDER = "rankings"  # in the stage's: what a killed ranking goes on from


@dataclass(frozen=True)
class GuidedSettings(SearchSettings):
    """Of a search that starts from them."""

    objective: str = "accuracy+probability"  # what judges a mask; bosch's choices
    optimizer: str = "swap"  # a file of bosch/search/optimizers
    rankings: tuple[str, ...] = STARTS  # methods whose choice a search may start from
    start: Path | None = None  # a mask.json to start from as well


def check_guides(settings: GuidedSettings) -> None:
    """Refuse, before work begins, what a search cannot start from."""
    check_optimizer(settings)
    methods = list_plugins(METHODS)
    for name in settings.rankings:
        if name not in methods:
            raise UserError(f"--rankings {name}: no such method; {suggest(name, methods)}")
        if not hasattr(load_plugin(METHODS, name), "score_groups"):
            raise UserError(f"--rankings {name}: this method chooses a mask, it ranks no groups.")
    if settings.start is None:
        return
    if settings.optimizer in WITH_PENALTY:
        raise UserError(
            f"--start {settings.start}: {settings.optimizer} starts from the dense model, as in "
            "the paper; take --optimizer swap to start from a mask."
        )
    if not settings.start.is_file():
        raise MissingFileError(
            f"--start {settings.start} does not exist; pass the mask.json of a run."
        )


def guides_of(inputs: Inputs) -> Callable[[], list[Table]]:
    """For the mask to start from, and each ranking, how global it finds each group. The mask is
    read now, and refused if it was made for another model; its ratio and window may be others.
    """
    settings: GuidedSettings = inputs.settings
    start = read_mask(settings.start, inputs.model_info).mask.z if settings.start else None

    def make() -> list[Table]:
        found = rank_statically(inputs, settings.rankings)
        return found if start is None else [start, *found]  # full groups are global

    return make


def rank_statically(inputs: Inputs, names: Sequence[str]) -> list[Table]:
    """How global each ranking finds each group: one [layer][group] table per ranking."""
    from bosch.run.group import agree, is_first  # imports torch

    return [agree(_rank(inputs, name) if is_first() else None) for name in names]


def _rank(inputs: Inputs, name: str) -> Table:
    method = load_plugin(METHODS, name)
    folder = inputs.folder / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    say(f"ranking by {name}, to start from")
    own = dataclasses.replace(
        inputs,
        load_model=lambda: inputs.model,
        load_calibration=lambda: inputs.calibration,
        settings=method.Settings(),
        folder=folder,
    )
    scores: Scores = method.score_groups(own)
    sign = 1 if scores.larger_is == "global" else -1
    return tuple(tuple(sign * value for value in row) for row in scores.groups)
