"""Starting points of a search: static rankings by other methods."""

from dataclasses import dataclass, replace

from bosch.method import Inputs, Scores, Table
from bosch.methods._settings import METHODS, load_method
from bosch.plugins import list_plugins, suggest
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.progress import say
from bosch.search.settings import SearchSettings, check_optimizer

STARTS = ("fisher", "qada", "apl", "retrieval_head")  # each as costly as a few evaluations
FOLDER = "rankings"  # subfolder of the stage, from which a killed ranking resumes


@dataclass(frozen=True)
class GuidedSettings(SearchSettings):
    """Settings of a guided search: one that starts from rankings."""

    objective: str = "accuracy+probability"  # how masks are scored; as in SearchSettings
    optimizer: str = "swap"  # a file of bosch/search/optimizers
    rankings: tuple[str, ...] = STARTS  # ranking methods to start from


def check_guides(settings: GuidedSettings) -> None:
    """Refuse starting points that do not work, before work begins."""
    check_optimizer(settings)
    methods = list_plugins(METHODS)
    for name in settings.rankings:
        if name not in methods:
            raise UserError(f"--rankings {name}: no such method; {suggest(name, methods)}")
        if not hasattr(load_method(name), "score_groups"):
            problem = f"--rankings {name}: this method does not rank groups"
            raise UserError(f"{problem}; use one that does, such as {', '.join(STARTS)}.")


def rankings_of(inputs: Inputs) -> list[Table]:
    """How global each group is, by each ranking to start from."""
    tables = []
    for name in inputs.settings.rankings:
        method, folder = load_method(name), inputs.folder / FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        say(f"ranking groups by {name}, as a starting point")
        ranking_inputs = replace(
            inputs,
            # What the search has loaded, with its sink attached, and not a second copy of it.
            load_model=lambda: inputs.model,
            load_calibration=lambda: inputs.calibration,
            settings=method.Settings(),
            folder=folder,
        )
        scores: Scores = method.score_groups(ranking_inputs)
        sign = 1 if scores.larger_is == "global" else -1
        table = tuple(tuple(sign * value for value in row) for row in scores.groups)
        # Rank 0's: a last digit that differs would send the ranks to different masks.
        tables.append(Ranks.current().agree(table))
    return tables
