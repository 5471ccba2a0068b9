"""What several suites do alike."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bosch.eval.suites._interface import Result, Scored, by_task, percent, result_of
from bosch.plugins import suggest
from bosch.run.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import


def task_results(
    scored: Sequence[Scored], mean: Callable[[list[float]], float] = percent
) -> list[Result]:
    """A result for each task and each metric of its scores."""
    return [
        result_of(task, metric, items, mean)
        for task, items in by_task(scored).items()
        for metric in items[0].scores
    ]


def check_names(names: Iterable[str], known: Iterable[str], kind: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not {kind}: {suggest(name, tuple(known))}")


def check_longest(what: str, lengths: Sequence[int], positions: int) -> None:
    if (longest := max(lengths, default=0)) > positions:
        problem = f"{what} {longest}: the model reads at most {positions:,} tokens"
        raise UserError(f"{problem}. Use smaller lengths, or stretch the positions with --yarn.")
