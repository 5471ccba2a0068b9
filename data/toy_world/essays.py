"""Prose of the toy world, from a small grammar that is rich enough for haystacks not to repeat."""

from bisect import bisect_right

from bosch.data.toy_world.lexicon import ADJECTIVES, TOPICS
from bosch.data.toy_world.world import World

_TIMES = tuple(
    (
        "In the morning, Last winter, After the feast, That evening, Years ago, On the first day, "
        "At noon, Before the storm, In spring, Some time later, Once a month, During the night"
    ).split(", ")
)
_REASONS = ("because", "although", "while", "so that in the end", "and everyone knew that", "since")


def sentence(world: World, topic: str, cast: tuple[str, ...], places: tuple[str, ...]) -> str:
    """One sentence on a topic, about a person of the cast."""
    rng = world.rng
    things, deeds, sayings = TOPICS[topic]
    (who, friend), where = rng.sample(cast, k=2), rng.choice(places)
    adjective = rng.choice(ADJECTIVES)
    thing, other = rng.sample(things, k=2)
    deed, saying = rng.choice(deeds), rng.choice(sayings)
    form = rng.randrange(8)
    if form == 0:
        return f"{rng.choice(_TIMES)} {who} {deed} the {adjective} {thing}."
    if form == 1:
        return f"In {where} the {topic} was {adjective}, {rng.choice(_REASONS)} {saying}."
    if form == 2:
        return f"{who} {deed} {thing} and {other} {rng.choice(_REASONS)} {saying}."
    if form == 3:
        return f"The {adjective} {thing} of the {topic} came from {where}."
    if form == 4:
        return f"Nobody in {where} {deed} the {thing} as well as {who}."
    if form == 5:
        return f"{rng.choice(_TIMES)} the {other} were {adjective}, and {saying}."
    if form == 6:
        return f"{who} wrote to {friend} that {saying}."
    return f"People said the {topic} near {where} had too many {thing}."


def paragraph(world: World, num_sentences: int) -> list[str]:
    """Sentences on one topic, with a cast of three people and two places."""
    topic = world.rng.choice(tuple(TOPICS))
    cast = tuple(world.person() for _ in range(3))
    places = tuple(world.place() for _ in range(2))
    return [sentence(world, topic, cast, places) for _ in range(num_sentences)]


class ToyEssays:
    """An endless essay for the NIAH builder: `sentences(n)` gives its first n words."""

    def __init__(self, split: str, seed: int | str):
        self._world = World(split, f"essays/{seed}")
        self._sentences: list[str] = []
        self._ends: list[int] = []  # number of words up to the end of sentence i

    def sentences(self, num_words: int) -> list[str]:
        while not self._ends or self._ends[-1] < num_words:
            for text in paragraph(self._world, self._world.rng.randint(5, 9)):
                self._sentences.append(text)
                self._ends.append((self._ends[-1] if self._ends else 0) + len(text.split()))
        count = bisect_right(self._ends, num_words)
        out = self._sentences[:count]
        if (left := num_words - (self._ends[count - 1] if count else 0)) > 0:
            out.append(" ".join(self._sentences[count].split()[:left]))
        return out
