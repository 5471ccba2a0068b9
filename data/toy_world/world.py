"""A seeded world: one random stream that draws people, places and words of one split."""

import random
import uuid
from collections.abc import Callable
from functools import cache

from bosch.data.toy_world.lexicon import (
    ADJECTIVES,
    NOUNS,
    PLACE_ENDINGS,
    SPLITS,
    SYLLABLES,
    split_of,
)
from bosch.plugins import suggest
from bosch.run.errors import UserError


@cache
def key_words(split: str) -> list[str]:
    """Every adjective-noun key of a split, sorted."""
    words = (f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)
    return sorted(word for word in words if split_of(word) == split)


class World:
    """Draws from one split. The same split and seed give the same story; splits share no names."""

    def __init__(self, split: str, seed: int | str):
        if split not in SPLITS:
            raise UserError(f"{split!r} is not a split of the toy world: {suggest(split, SPLITS)}")
        self.split = split
        self.rng = random.Random(f"toy world/{split}/{seed}")

    @property
    def key_words(self) -> list[str]:
        return key_words(self.split)

    def person(self) -> str:
        return self._draw(lambda: f"{self._syllables().title()} {self._syllables().title()}")

    def place(self) -> str:
        return self._draw(lambda: self._syllables().title() + self.rng.choice(PLACE_ENDINGS))

    def code_name(self) -> str:
        return self._draw(lambda: f"{self.rng.choice(NOUNS)}_{self._syllables()}")

    def coined_word(self) -> str:
        return self._draw(self._syllables)

    def key_word(self) -> str:
        return self.rng.choice(self.key_words)

    def number(self) -> str:
        return str(self.rng.randint(10**6, 10**7 - 1))

    def uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _syllables(self) -> str:
        return "".join(self.rng.choices(SYLLABLES, k=2))

    def _draw(self, make: Callable[[], str]) -> str:
        """A name of the split; in the smallest one this takes ten draws on average."""
        while split_of(name := make()) != self.split:
            continue
        return name
