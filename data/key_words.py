"""The words that needle keys are drawn from: every `adjective-noun` of wonderwords.

RULER builds and sorts the list: 6,171,620 strings, 12 to 50 seconds and 865 MB each time. But
`random.choice` needs only the length of the list and one item, so here it is never built.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from itertools import accumulate, takewhile
from typing import NamedTuple

from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError


class Segment(NamedTuple):
    """Consecutive words of the sorted list: one prefix with neighboring tails."""

    prefix: str
    tails: list[str]  # sorted; shared by nearly all segments
    first: int
    stop: int


class KeyWords:
    """The list `sorted({f"{adjective}-{noun}" ...})`, with `len` and indexing only."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str], name: str):
        self.name = name  # of the word lists with their version: other versions give other keys
        prefixes = sorted({f"{adjective}-" for adjective in adjectives})
        self._segments = list(cut_segments("", [], prefixes, sorted(set(nouns))))
        self._ends = list(accumulate(segment.stop - segment.first for segment in self._segments))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"There is no key word {index} among {len(self)}; count from 0.")
        number = bisect_right(self._ends, index)
        segment = self._segments[number]
        return segment.prefix + segment.tails[segment.stop - (self._ends[number] - index)]


def cut_segments(
    prefix: str, tails: list[str], inner_prefixes: list[str], nouns: list[str]
) -> Iterator[Segment]:
    """The sorted block of words `prefix` + tail, with the blocks of longer prefixes inside it.

    The block of `high-pitched-` is inside that of `high-`, where a noun `pitched-...` would be, and
    includes such nouns.
    """
    first = 0
    while inner_prefixes:
        inner = inner_prefixes[0]
        block = list(takewhile(lambda other: other.startswith(inner), inner_prefixes))  # noqa: B023
        inner_prefixes = inner_prefixes[len(block) :]
        rest = inner.removeprefix(prefix)
        start = bisect_left(tails, rest)
        stop = bisect_left(tails, rest[:-1] + ".")  # the character after the hyphen
        included = {tail.removeprefix(rest) for tail in tails[start:stop]}
        inner_tails = sorted(included.union(nouns)) if included else nouns
        yield Segment(prefix, tails, first, start)
        yield from cut_segments(inner, inner_tails, block[1:], nouns)
        first = stop
    yield Segment(prefix, tails, first, len(tails))


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
