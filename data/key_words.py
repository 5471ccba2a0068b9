"""The words that needle keys are drawn from: every `adjective-noun` of wonderwords.

RULER builds and sorts the list: 6,171,620 strings, 12 to 50 seconds and 865 MB each time. But
`random.choice` needs only the length of the list and one item, so here it is never built.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from itertools import accumulate, takewhile

from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError


class KeyWords:
    """The list `sorted({f"{adjective}-{noun}" ...})`, with `len` and indexing only."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str], name: str):
        self.name = name  # of the word lists with their version: other versions give other keys
        prefixes = sorted({f"{adjective}-" for adjective in adjectives})
        self._blocks = list(cut_blocks(prefixes, sorted(set(nouns))))
        self._ends = list(accumulate(len(tails) for _, tails in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"There is no key word {index} among {len(self)}; count from 0.")
        number = bisect_right(self._ends, index)
        prefix, tails = self._blocks[number]
        return prefix + tails[index - self._ends[number]]


def cut_blocks(prefixes: list[str], nouns: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(prefix, sorted tails) of consecutive words. The words of `high-pitched-` are among those of
    `high-`, where a noun `pitched-...` would be, so such prefixes make one block."""
    while prefixes:
        first = prefixes[0]
        family = list(takewhile(lambda other: other.startswith(first), prefixes))  # noqa: B023
        prefixes = prefixes[len(family) :]
        inner = [prefix.removeprefix(first) for prefix in family]
        # Nearly all families have one member, and their blocks share one list.
        yield first, nouns if len(inner) == 1 else sorted({i + n for i in inner for n in nouns})


@cache
def wonderwords_keys() -> KeyWords:
    """RULER's words. The nouns of wonderwords 2 and 3 differ, so the same seed gives other keys."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise UserError(
            "Needle keys are drawn from wonderwords, which is not installed: "
            f"{how_to_install('wonderwords', 'eval')}"
        ) from error
    words = RandomWord(enhanced_prefixes=False)
    return KeyWords(
        adjectives=words.filter(include_categories=["adjective"]),
        nouns=words.filter(include_categories=["noun"]),
        name=f"wonderwords {version('wonderwords')}",
    )
