"""What suites check alike."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bosch.plugins import suggest
from bosch.run.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import


def check_names(names: Iterable[str], known: Iterable[str], kind: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not {kind}: {suggest(name, tuple(known))}")
