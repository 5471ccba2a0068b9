"""The toy world as training text: endless documents, none of which contains a NIAH template."""

from collections.abc import Iterator

from bosch.data.sources.source import Source
from bosch.data.toy_world.tasks import DATASETS
from bosch.data.toy_world.world import Kind, World, paragraph

VERSION = 2  # raise it when the same seed gives other documents
ESSAY_SHARE, TASK_SHARE = 0.1, 0.45  # of the documents; the rest are records
LONGEST_TASK, LONGEST_RECORDS = 400, 150  # words

# How an entry of records is stated, and how it is looked up. None resembles the question of a toy
# task, where the text ends with the answer.
STYLES = (
    ("{key}: {value}\n", "{key}: {value}\n"),
    ("{key} has the entry {value}.\n", "The entry of {key} is {value}.\n"),
    ("def {key}():\n    return {value}\n", "# {key} returns {value}\n"),
    ("The sign of {key} is {value}.\n", "Look up the sign of {key}: {value}\n"),
    ("{key} is known as {value}.\n", "By which name is {key} known? It is {value}.\n"),
)
KEYS: tuple[Kind, ...] = ("key word", "person", "code name", "coined word", "uuid")
VALUES: tuple[Kind, ...] = ("number", "uuid", "place", "coined word", "person")
SHARES_OF_PROSE = (0.0, 0.2, 0.5)  # one is drawn for each document
# The rest are look-ups: only they can be learned, since entries are drawn at random.
SHARE_OF_ENTRIES = 0.25
WORDS_OF_PROSE = 20
WORDS_OF_ENTRY = 4


class ToyDocuments(Source):
    """Document i depends on nothing but the seed and i."""

    name = "toy"
    endless = True

    def __init__(self, seed: int):
        self.seed = seed

    def facts(self) -> dict[str, object]:
        return {"source": self.name, "seed": self.seed, "version": VERSION}

    def read(self, start: int) -> Iterator[tuple[str]]:
        while True:
            yield (write_document(self.seed, start),)
            start += 1


def write_document(seed: int, number: int) -> str:
    """An essay of 60 to 1,500 words, a toy task with its answer, or records. Lengths are uniform on
    a logarithmic scale: most documents are short, but most of the text is in long ones."""
    world = World("train", f"documents/{seed}/{number}")
    num_words = int(60 * 25 ** world.rng.random())  # 60 times 25^0 to 25^1
    kind = world.rng.random()
    if kind < ESSAY_SHARE:
        paragraphs: list[str] = []
        while num_words > 0:
            paragraphs.append(" ".join(paragraph(world, world.rng.randint(5, 9))))
            num_words -= len(paragraphs[-1].split())
        return "\n".join(paragraphs)
    if kind < ESSAY_SHARE + TASK_SHARE:
        # With one question. The text ends after its answer; otherwise a model would learn to write
        # more questions where its answer is judged.
        dataset = DATASETS[world.rng.choice(list(DATASETS))]
        scene = dataset.write(world, min(num_words, LONGEST_TASK))
        return dataset.ask(scene, *world.rng.choice(scene.questions))
    return write_records(world, min(num_words, LONGEST_RECORDS))


def write_records(world: World, num_words: int) -> str:
    """Entries that are stated once, and prose, then look-ups in random order. A hybrid can practice
    long-range recall on them, as on real code and books, without seeing a NIAH template."""
    rng = world.rng
    state, look_up = rng.choice(STYLES)
    key_kind, value_kind = rng.choice(KEYS), rng.choice(VALUES)  # of all entries of a document
    prose = rng.choice(SHARES_OF_PROSE)
    # First entries, until their share of the words is used, then look-ups for the rest.
    text, words_of_look_ups = "", num_words * (1 - SHARE_OF_ENTRIES)
    entries: list[tuple[str, str]] = []  # a key and its value
    while num_words > words_of_look_ups or not entries:
        if rng.random() < prose:
            text += " ".join(paragraph(world, rng.randint(1, 3))) + "\n"
            num_words -= WORDS_OF_PROSE
        else:
            key, value = world.draw(key_kind), world.draw(value_kind)
            entries.append((key, value))
            text += state.format(key=key, value=value)
            num_words -= WORDS_OF_ENTRY
    while num_words > 0:
        key, value = rng.choice(entries)
        text += look_up.format(key=key, value=value)
        num_words -= WORDS_OF_ENTRY
    return text
