"""A seeded world: people, places and words of one split, and prose about them from a small grammar.

Every name and every key word belongs to exactly one of three splits, by a checksum of its text. A
model trained on the `train` world has never seen a person, a place or a key of the `test` world.
"""

import random
import uuid
import zlib
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import Literal

from bosch.plugins import suggest
from bosch.run.errors import UserError

FOLDER = Path(__file__).parent
SPLITS = ("train", "calibration", "test")
SPLIT_OF_BUCKET = ("train",) * 7 + ("calibration",) + ("test",) * 2  # shares of all names

Words = tuple[str, ...]
Kind = Literal["person", "place", "code name", "coined word", "key word", "number", "uuid"]

# Lists by name: a line with the name, then words, with commas between if some are of two.
WORDS: dict[str, Words] = {}
for _block in (FOLDER / "words.txt").read_text().split("\n\n"):
    _name, _, _words = _block.partition("\n")
    WORDS[_name] = tuple(" ".join(_words.split()).split(", " if "," in _words else " "))
ADJECTIVES, NOUNS = WORDS["adjectives"], WORDS["nouns"]

# Three lines a topic: its name and what one finds there, what people do there, what is said of it.
TOPICS: dict[str, tuple[Words, Words, Words]] = {}
_lines = (FOLDER / "topics.txt").read_text().splitlines()
for _first, _deeds, _sayings in zip(_lines[::3], _lines[1::3], _lines[2::3], strict=True):
    _name, _things = _first.split(": ")
    TOPICS[_name] = tuple(_things.split()), tuple(_deeds.split()), tuple(_sayings.split("; "))

_ONSETS = "b br d dr f fl g gr h j k kl l m n p pl r s sk st t tr v w z".split()
_VOWELS = "a e i o u ai or an el in ar".split()
SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)[::3]  # about a hundred
PLACE_ENDINGS = tuple("by dale ford ham ley mere mouth port stead ton vale wick".split())
SENTENCES = (FOLDER / "sentences.txt").read_text().splitlines()


def split_of(text: str) -> str:
    """The one split that a name or key word belongs to. Not by `hash`, which differs by process."""
    return SPLIT_OF_BUCKET[zlib.crc32(text.encode()) % len(SPLIT_OF_BUCKET)]


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

    def draw(self, kind: Kind) -> str:
        """A name, a word or a number."""
        rng = self.rng
        if kind == "number":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuid":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if kind == "key word":
            return rng.choice(key_words(self.split))
        # There are too many names to list, so one is drawn until it is of the split: in the
        # smallest split ten times on average.
        while True:
            if kind == "person":
                a, b, c, d = rng.choices(SYLLABLES, k=4)
                name = f"{a}{b} {c}{d}".title()
            elif kind == "place":
                name = "".join(rng.choices(SYLLABLES, k=2)).title() + rng.choice(PLACE_ENDINGS)
            elif kind == "code name":
                name = rng.choice(NOUNS) + "_" + "".join(rng.choices(SYLLABLES, k=2))
            else:  # a coined word
                name = "".join(rng.choices(SYLLABLES, k=2))
            if split_of(name) == self.split:
                return name


def sentence(world: World, topic: str, cast: tuple[str, ...], places: tuple[str, ...]) -> str:
    """One sentence on a topic, about a person of the cast."""
    rng = world.rng
    things, deeds, sayings = TOPICS[topic]
    parts = {"topic": topic}
    parts["who"], parts["friend"] = rng.sample(cast, k=2)
    parts |= {"where": rng.choice(places), "adjective": rng.choice(ADJECTIVES)}
    parts["thing"], parts["other"] = rng.sample(things, k=2)
    parts |= {"deed": rng.choice(deeds), "saying": rng.choice(sayings)}
    form = rng.choice(SENTENCES)
    for part in ("time", "reason"):
        if f"{{{part}}}" in form:
            parts[part] = rng.choice(WORDS[f"{part}s"])
    return form.format_map(parts)


def paragraph(world: World, num_sentences: int) -> list[str]:
    """Sentences on one topic, with a cast of three people and two places."""
    topic = world.rng.choice(tuple(TOPICS))
    cast = tuple(world.draw("person") for _ in range(3))
    places = tuple(world.draw("place") for _ in range(2))
    return [sentence(world, topic, cast, places) for _ in range(num_sentences)]


class ToyEssays:
    """An endless essay for the NIAH builder: `sentences(n)` gives its first n words."""

    def __init__(self, split: str, seed: int | str):
        self._world = World(split, f"essays/{seed}")
        self._sentences: list[str] = []
        self._starts = [0]  # number of words before sentence i

    def sentences(self, num_words: int) -> list[str]:
        while self._starts[-1] < num_words:  # written only as far as somebody has read
            for text in paragraph(self._world, self._world.rng.randint(5, 9)):
                self._sentences.append(text)
                self._starts.append(self._starts[-1] + len(text.split()))
        count = bisect_right(self._starts, num_words) - 1
        # As many whole sentences as fit, and the beginning of the next: a prefix of one endless
        # text, so that a longer haystack begins with a shorter one.
        out = self._sentences[:count]
        if (left := num_words - self._starts[count]) > 0:
            out.append(" ".join(self._sentences[count].split()[:left]))
        return out
