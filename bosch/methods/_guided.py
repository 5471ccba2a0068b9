"""Starting points of a search: static rankings by other methods.

A ranking does not depend on the ratio. So what one search has computed is kept in `runs/shared`, as
outcomes of masks are, and serves all searches on the same model, calibration set and window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from filelock import FileLock

from bosch.method import Inputs, Scores, Table
from bosch.methods._examples import identify
from bosch.methods._settings import METHODS, load_method
from bosch.plugins import list_plugins, suggest
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.files import STARTED, parse_lines, sealed_lines, write_atomically
from bosch.run.progress import say
from bosch.run.stage import SHARED
from bosch.search.settings import SearchSettings, check_optimizer

STARTS = ("fisher", "qada", "apl", "retrieval_head")  # each as costly as a few evaluations
FOLDER = "rankings"  # subfolder of the stage, from which a killed ranking resumes


@dataclass(frozen=True)
class GuidedSettings(SearchSettings):
    """Settings of a guided search: one that starts from rankings."""

    # How masks are scored, on the calibration answers: accuracy, probability, logprob,
    # accuracy+probability or accuracy+logprob.
    objective: str = "accuracy+probability"
    optimizer: str = "swap"  # a file of bosch/search/optimizers
    rankings: tuple[str, ...] = STARTS  # ranking methods to start from


def check_rankings(settings: SearchSettings, field: str, names: Sequence[str]) -> None:
    """Refuse starting points that do not work, before work begins. field: the setting's name."""
    check_optimizer(settings)
    methods = list_plugins(METHODS)
    for name in names:
        if name not in methods:
            raise UserError(f"--{field} {name}: no such method; {suggest(name, methods)}")
        if not hasattr(load_method(name), "score_groups"):
            problem = f"--{field} {name}: this method does not rank groups"
            raise UserError(f"{problem}; use one that does, such as {', '.join(STARTS)}.")


def rankings_of(inputs: Inputs) -> list[Table]:
    """How global each group is, by each ranking to start from."""
    tables = []
    for name in inputs.settings.rankings:
        say(f"ranking groups by {name}, as a starting point")
        tables.append(global_table(scores_of(name, inputs)))
    return tables


def global_table(scores: Scores) -> Table:
    """How global each group is: the scores, or where large ones are local, the negative."""
    sign = 1 if scores.larger_is == "global" else -1
    return tuple(tuple(sign * value for value in row) for row in scores.groups)


def scores_of(name: str, inputs: Inputs) -> Scores:
    """The scores of a ranking with its usual settings, the same on every rank."""
    method, folder = load_method(name), inputs.folder / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    ranking_inputs = replace(inputs, settings=method.Settings(), folder=folder)
    # What the search has loaded, with its sink attached: no second copy, and no constants that are
    # measured again.
    vars(ranking_inputs).update(model=inputs.model, calibration=inputs.calibration)
    made_of, ranks = identify(ranking_inputs, name), Ranks.current()
    shared = None
    if (inputs.folder / STARTED).is_file():  # a stage's folder: runs lie beside each other
        shared = inputs.folder.parent.parent / SHARED / "rankings" / f"{name}-{made_of[:16]}.jsonl"

    def find() -> Scores | None:
        content = shared.read_bytes() if shared and shared.is_file() else b""
        for _, line in parse_lines(content, made_of):
            if line:
                groups = tuple(map(tuple, line["groups"]))
                return Scores(groups, line["larger_is"], drawn=line["drawn"])
        return None

    if found := ranks.from_rank_0(find):
        return found
    scores: Scores = method.score_groups(ranking_inputs)
    # Rank 0's: a last digit that differs would send the ranks to different masks.
    scores = replace(scores, groups=ranks.agree(scores.groups))
    if shared and ranks.rank == 0:
        shared.parent.mkdir(parents=True, exist_ok=True)
        names = ("groups", "larger_is", "drawn")
        content = {name: getattr(scores, name) for name in names}
        # Several searches may write it at once, and `write_atomically` has one temporary name.
        with FileLock(shared.with_name(f".{shared.name}.lock")):
            write_atomically(shared, sealed_lines([content], made_of))
    return scores
