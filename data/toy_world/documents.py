"""The toy world as training text: essays and the toy tasks, any number of documents, none with a
NIAH template in it."""

from collections.abc import Iterator
from typing import Any

from data.toy_world.essays import paragraph
from data.toy_world.tasks import DATASETS
from data.toy_world.world import World

VERSION = 1  # raised when the same seed gives other documents
ESSAY_SHARE = 0.5
MAX_QUESTIONS = 4


class ToyDocuments:
    """Document i is a function of the seed and i alone."""

    name = "toy"
    endless = True
    tokenizer = None

    def __init__(self, seed: int):
        self.seed = seed

    def facts(self) -> dict[str, Any]:
        return {"source": self.name, "seed": self.seed, "version": VERSION}

    def read(self, start: int) -> Iterator[tuple[str]]:
        while True:
            yield (write_document(self.seed, start),)
            start += 1


def write_document(seed: int, number: int) -> str:
    """An essay of 60 to 1,500 words, or a toy task with some of its questions answered. The lengths
    spread evenly on a logarithmic scale: most documents are short, most of the text stands in long
    ones."""
    world = World("train", f"documents/{seed}/{number}")
    num_words = int(60 * 25 ** world.rng.random())
    if world.rng.random() < ESSAY_SHARE:
        return write_essay(world, num_words)
    return write_task(world, min(num_words, 600))


def write_essay(world: World, num_words: int) -> str:
    paragraphs: list[str] = []
    while num_words > 0:
        paragraphs.append(" ".join(paragraph(world, world.rng.randint(5, 9))))
        num_words -= len(paragraphs[-1].split())
    return "\n".join(paragraphs)


def write_task(world: World, num_words: int) -> str:
    """The context once, then questions, each in the words of the task's prompt and with its
    answer."""
    dataset = DATASETS[world.rng.choice(list(DATASETS))]
    scene = dataset.write(world, num_words)
    questions = world.rng.sample(scene.questions, k=min(len(scene.questions), MAX_QUESTIONS))
    # Where nothing but the question changes, the context is not told again.
    context_end = dataset.prompt.find("{context}") + len("{context}")
    again = dataset.prompt[context_end:] if scene.context else dataset.prompt
    separator = "" if dataset.prompt.endswith("\n") else " "
    text = ""
    for index, question in enumerate(questions):
        prompt = again if index else dataset.prompt
        text += (
            prompt.format(context=scene.context, input=question.input)
            + separator
            + question.answer
            + "\n"
        )
    return text
