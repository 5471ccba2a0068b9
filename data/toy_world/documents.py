"""The toy world as training text: endless documents, none of which contains a NIAH template."""

from collections.abc import Iterator

from bosch.data.toy_world.essays import paragraph
from bosch.data.toy_world.records import write_records
from bosch.data.toy_world.tasks import DATASETS
from bosch.data.toy_world.world import World

VERSION = 2  # raise it when the same seed gives other documents
ESSAY_SHARE, TASK_SHARE = 0.1, 0.45  # of the documents; the rest are records
LONGEST_TASK, LONGEST_RECORDS = 400, 150  # words


class ToyDocuments:
    """Document i depends on nothing but the seed and i."""

    name = "toy"
    endless = True
    tokenizer: str | None = None

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
    num_words = int(60 * 25 ** world.rng.random())
    kind = world.rng.random()
    if kind < ESSAY_SHARE:
        return write_essay(world, num_words)
    if kind < ESSAY_SHARE + TASK_SHARE:
        return write_task(world, min(num_words, LONGEST_TASK))
    return write_records(world, min(num_words, LONGEST_RECORDS))


def write_essay(world: World, num_words: int) -> str:
    paragraphs: list[str] = []
    while num_words > 0:
        paragraphs.append(" ".join(paragraph(world, world.rng.randint(5, 9))))
        num_words -= len(paragraphs[-1].split())
    return "\n".join(paragraphs)


def write_task(world: World, num_words: int) -> str:
    """The task's prompt with one question. The text ends after its answer; otherwise a model would
    learn to write more questions where its answer is judged."""
    dataset = DATASETS[world.rng.choice(list(DATASETS))]
    scene = dataset.write(world, num_words)
    return "".join(dataset.ask(scene, world.rng.choice(scene.questions)))
