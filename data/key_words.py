"""The words that needle keys are drawn from: every `adjective-noun` of wonderwords.

RULER builds and sorts the list: 6,171,620 strings, 12 to 50 seconds and 865 MB each time. But
`random.choice` needs only the length of the list and one item, so here it is never built.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError


class KeyWords(Sequence[str]):
    """The list `sorted({f"{adjective}-{noun}" ...})`, with `len` and indexing only."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str], name: str):
        self.name = name  # of the word lists with their version: other versions give other keys
        tails = sorted(set(nouns))
        # (prefix, sorted tails) of consecutive words. The words of `high-pitched-` are among those
        # of `high-`, where a noun `pitched-...` would be, so such prefixes make one block. Nearly
        # all blocks have one prefix, and share one list.
        self._blocks: list[tuple[str, list[str]]] = []
        for prefix in sorted({f"{word}-" for word in adjectives}):
            if self._blocks and prefix.startswith(self._blocks[-1][0]):
                first, known = self._blocks.pop()
                inner = prefix.removeprefix(first)
                self._blocks.append((first, sorted({*known, *(inner + tail for tail in tails)})))
            else:
                self._blocks.append((prefix, tails))
        self._ends = list(accumulate(len(tails) for _, tails in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1]

    # Without slices and negative numbers, which `random.choice` does not ask for.
    def __getitem__(self, index: Any) -> Any:
        # The block that the index lies in: the first that ends behind it.
        number = bisect_right(self._ends, index)
        prefix, tails = self._blocks[number]
        return prefix + tails[index - self._ends[number]]


@cache
def wonderwords_keys() -> KeyWords:
    """RULER's words. The nouns of wonderwords 2 and 3 differ, so the same seed gives other keys."""
    adjectives, nouns = words_of("adjective"), words_of("noun")
    return KeyWords(adjectives, nouns, f"wonderwords {version('wonderwords')}")


def words_of(kind: str) -> list[str]:
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        problem = "Needle keys are drawn from wonderwords, which is not installed"
        raise UserError(f"{problem}: {how_to_install('wonderwords', 'eval')}") from error
    found: list[str] = RandomWord(enhanced_prefixes=False).filter(include_categories=[kind])
    return found
