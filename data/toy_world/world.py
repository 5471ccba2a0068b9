"""A seeded world: one random stream, and the people, places and words that its split allows."""

import random
import uuid
from functools import lru_cache

from data.toy_world import lexicon


@lru_cache(maxsize=len(lexicon.SPLITS))
def key_words(split: str) -> list[str]:
    return lexicon.key_words(split)


class World:
    """Draws from one split. Same split and seed: same story. Two splits share no entity."""

    def __init__(self, split: str, seed: int | str):
        if split not in lexicon.SPLITS:
            raise ValueError(
                f"no split {split!r} in the toy world; there are {', '.join(lexicon.SPLITS)}"
            )
        self.split = split
        self.rng = random.Random(f"toy world/{split}/{seed}")

    @property
    def key_words(self) -> list[str]:
        return key_words(self.split)

    def person(self) -> str:
        return lexicon.draw_in_split(lambda: lexicon.person_name(self.rng), self.split)

    def place(self) -> str:
        return lexicon.draw_in_split(lambda: lexicon.place_name(self.rng), self.split)

    def code_name(self) -> str:
        return lexicon.draw_in_split(lambda: lexicon.code_name(self.rng), self.split)

    def coined_word(self) -> str:
        return lexicon.draw_in_split(lambda: lexicon.coined_word(self.rng), self.split)

    def key_word(self) -> str:
        return self.rng.choice(self.key_words)

    def number(self) -> str:
        return str(self.rng.randint(10**6, 10**7 - 1))

    def uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
