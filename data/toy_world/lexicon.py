"""The words of the toy world: lists of English words (words.txt, topics.txt), and names made of
syllables.

Every name and every key word belongs to exactly one of three splits, by a checksum of its text. A
model trained on the `train` world has never seen a person, a place or a key of the `test` world,
though it knows all their syllables.
"""

import zlib
from pathlib import Path

Words = tuple[str, ...]

FOLDER = Path(__file__).parent
SPLITS = ("train", "calibration", "test")
SPLIT_OF_BUCKET = ("train",) * 7 + ("calibration",) + ("test",) * 2  # shares of all names


def read_words() -> dict[str, Words]:
    """Lists by name: a line with the name, then words, with commas between if some are of two."""
    lists = {}
    for block in (FOLDER / "words.txt").read_text().split("\n\n"):
        name, _, words = block.partition("\n")
        one_line = " ".join(words.split())
        lists[name] = tuple(one_line.split(", " if "," in words else " "))
    return lists


def read_topics() -> dict[str, tuple[Words, Words, Words]]:
    """Three lines a topic: its name and what one finds there, what people do there, and what is
    said of it."""
    lines = (FOLDER / "topics.txt").read_text().splitlines()
    topics = {}
    for first, deeds, sayings in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, things = first.split(": ")
        topics[name] = tuple(things.split()), tuple(deeds.split()), tuple(sayings.split("; "))
    return topics


WORDS = read_words()
ADJECTIVES, NOUNS = WORDS["adjectives"], WORDS["nouns"]
TOPICS = read_topics()

_ONSETS = "b br d dr f fl g gr h j k kl l m n p pl r s sk st t tr v w z".split()
_VOWELS = "a e i o u ai or an el in ar".split()
SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)[::3]  # about a hundred
PLACE_ENDINGS = tuple("by dale ford ham ley mere mouth port stead ton vale wick".split())


def split_of(text: str) -> str:
    """The one split that a name or key word belongs to."""
    return SPLIT_OF_BUCKET[zlib.crc32(text.encode()) % len(SPLIT_OF_BUCKET)]
