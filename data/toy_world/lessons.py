"""What the tiny model is trained on: sequences of the train world, with a weight on every token.

A lesson is a text with its answers marked. One context has several questions, because reading the
context is what costs; a sequence is filled with lessons, longest first. Sequence i of step s is a
pure function of the seed, so a killed training resumes with exactly the next batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bosch.data.needles import NEEDLE_PATTERN, PAPER_TASKS, TASKS, write_example
from bosch.data.toy_world.documents import write_document
from bosch.data.toy_world.tasks import DATASETS
from bosch.data.toy_world.tokenizer import END_OF_TEXT
from bosch.data.toy_world.world import ToyEssays, World, paragraph

Piece = tuple[str, bool]  # text, and whether it is an answer to learn
Lesson = list[Piece]

PRACTICE = tuple(
    f"toy_{name}" for name in "two_hops labels retrieval count code arithmetic".split()
)
# How a fact is stated, and how it is asked for. The first style is the simplest.
STYLES = (
    ("{key}: {value}\n", "{key}:"),
    (
        "One of the special magic numbers for {key} is: {value}.\n",
        "The special magic number for {key} mentioned in the provided text is",
    ),
    ("def {key}():\n    return {value}\n", "# {key} returns"),
    ("Text: {key}\nType: {value}\n", "Text: {key}\nType:"),
    ("The owner of {key} is {value}.\n", "Question: Who is the owner of {key}?\nAnswer:"),
    ("{key} lives in {value}.\n", "Question: Where does {key} live?\nAnswer:"),
)
MOST_QUESTIONS = 8  # about one context
HARD_NEEDLES = ("niah_multikey_2", "niah_multikey_3", "niah_single_3")


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of lesson. They need not add up to one."""

    recall: float = 0.0  # dense facts and questions, in varying styles
    needles: float = 0.0  # the six NIAH tasks
    tasks: float = 0.0  # the toy LongBench sets
    essays: float = 0.0  # prose without questions
    simple_recall: float = 0.0  # recall in its simplest style: `key: value`
    practice: float = 0.0  # the toy sets that are learned last: PRACTICE
    hard_needles: float = 0.0  # the NIAH tasks that are learned last: HARD_NEEDLES
    documents: float = 0.0  # the training text of hybrids, without questions


def recall_lesson(world: World, num_words: int, simple: bool) -> Lesson:
    """Facts, and questions about them at random distances, in a style drawn for each lesson."""
    rng = world.rng
    state, ask = rng.choice(STYLES[:1] if simple else STYLES)
    make_key = rng.choice(
        [world.key_word, world.person, world.code_name, world.coined_word, lambda: world.uuid()[:8]]
    )

    def part_of_uuid() -> str:
        return world.uuid()[: rng.choice([8, 13])]

    values = [world.number, world.place, world.coined_word, part_of_uuid, world.person]
    make_value = rng.choice(values)
    prose = 0.0 if simple else rng.choice([0.0, 0.0, 0.2, 0.5])
    known: list[tuple[str, str]] = []
    lesson: Lesson = []
    while num_words > 0:
        if prose and rng.random() < prose:
            lesson.append((" ".join(paragraph(world, rng.randint(1, 3))) + "\n", False))
            num_words -= 20
        elif known and rng.random() < 0.55:
            key, value = rng.choice(known)
            lesson += [(ask.format(key=key), False), (" " + value, True), ("\n", False)]
            num_words -= 3
        else:
            key, value = make_key(), make_value()
            known.append((key, value))
            lesson.append((state.format(key=key, value=value), False))
            num_words -= 3
    return lesson


def needle_lesson(world: World, size: int, task_name: str) -> Lesson:
    """A NIAH example, often with more needles than the task has, and further questions about it."""
    rng = world.rng
    task = TASKS[task_name]
    if rng.random() < 0.6 and task.haystack != "needle":
        task = replace(task, num_keys=rng.randint(1, min(8, size)))
    essays = ToyEssays(world.split, rng.getrandbits(32))
    example = write_example(task, size, rng, rng.getrandbits(32), world.key_words, essays)
    lesson: Lesson = [(example.prompt, False), (f" {example.outputs[0]}", True)]
    question = example.input[example.input.rindex("What ") :] + example.answer_prefix
    asked_key = question[question.index(" for ") + 5 : question.index(" mentioned")]
    pairs = [pair for pair in NEEDLE_PATTERN.findall(example.input) if pair[0] != asked_key]
    for key, value in rng.sample(pairs, k=min(len(pairs), rng.randint(0, MOST_QUESTIONS - 1))):
        before = rng.choice([END_OF_TEXT, "\n", ".\n"])
        lesson += [(before + question.replace(asked_key, key), False), (f" {value}", True)]
    return lesson


def task_lesson(world: World, size: int, dataset_name: str) -> Lesson:
    """A toy LongBench prompt, then further questions about its scene; each answer ends a text."""
    dataset = DATASETS[dataset_name]
    scene = dataset.write(world, size)
    count = min(len(scene.questions), world.rng.randint(1, MOST_QUESTIONS))
    chosen = world.rng.sample(scene.questions, k=count)
    again = dataset.prompt.split("{context}")[-1]  # the whole prompt if it has no context
    lesson: Lesson = []
    for index, question in enumerate(chosen):
        prompt, answer = (replace(dataset, prompt=again) if index else dataset).ask(scene, question)
        lesson += [(prompt, False), (answer + END_OF_TEXT, True)]
    return lesson


class LessonWriter:
    """Writes lessons of about a given number of tokens and packs them into batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, split: str = "train"):
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        end = self._backend.token_to_id(END_OF_TEXT)
        assert end is not None, "the toy world's tokenizer has it"
        self._end = end
        self._seed, self._split = seed, split
        self._sizes: dict[str, tuple[float, float]] = {}

    def batch(
        self, step: int, sequences: int, length: int, mixture: Mixture, text_weight: float
    ) -> tuple[Tensor, Tensor]:
        """(ids, weights), both (sequences, length + 1): answers weigh 1, the rest `text_weight`."""
        kinds = [name for name, share in vars(mixture).items() if share > 0]
        shares = [getattr(mixture, name) for name in kinds]
        ids = torch.full((sequences, length + 1), self._end)
        weights = torch.zeros(sequences, length + 1)
        for row in range(sequences):
            world = World(self._split, f"lessons/{self._seed}/{step}/{row}")
            used = 0
            while (room := length + 1 - used) > 24:
                kind = world.rng.choices(kinds, shares)[0]
                full = world.rng.random() < 0.6
                target = room if full else world.rng.randint(min(room, 64), room)
                lesson = self._lesson(world, kind, target)
                if lesson is None:  # no lesson of this kind is that short
                    lesson = recall_lesson(world, target // 6, simple=kind == "simple_recall")
                tokens, is_answer = self._encode([*lesson, (END_OF_TEXT, False)])
                end = used + min(room, len(tokens))
                ids[row, used:end] = torch.tensor(tokens[:room])
                weights[row, used:end] = torch.where(
                    torch.tensor(is_answer[:room]), 1.0, text_weight
                )
                used = end
        return ids, weights

    def _lesson(self, world: World, kind: str, target: int) -> Lesson | None:
        if kind in ("recall", "simple_recall"):
            return recall_lesson(world, target // 4, simple=kind == "simple_recall")
        if kind == "essays":
            essays = ToyEssays(world.split, world.rng.getrandbits(32))
            return [(" ".join(essays.sentences(target // 2)), False)]
        if kind == "documents":
            seed = world.rng.getrandbits(32) + 2**32  # no recovery uses it
            return [(write_document(seed, 0), False)]
        if kind in ("needles", "hard_needles"):
            usual = [*PAPER_TASKS, "niah_multikey_2", "niah_multikey_3"]
            name = world.rng.choice(usual if kind == "needles" else HARD_NEEDLES)
            return self._write_under(target, name, partial(needle_lesson, task_name=name), world)
        name = world.rng.choice(PRACTICE if kind == "practice" else list(DATASETS))
        if kind == "practice" and name == "toy_arithmetic":  # short, so a dozen of them
            return [piece for _ in range(12) for piece in task_lesson(world, 0, name)]
        return self._write_under(target, name, partial(task_lesson, dataset_name=name), world)

    def _write_under(
        self, target: int, name: str, write: Callable[..., Lesson], world: World
    ) -> Lesson | None:
        """A lesson of just under `target` tokens; its size is estimated from two measured sizes."""
        if name not in self._sizes:  # tokens at size 0, and for each unit of size
            world_of_sizes = World(self._split, f"sizes/{name}")
            few, many = (
                sum(len(self._encode(write(world_of_sizes, size=size))[0]) for _ in range(8)) / 8
                for size in (20, 120)
            )
            per_unit = max((many - few) / 100, 0.1)
            self._sizes[name] = few - per_unit * 20, per_unit
        fixed, per_unit = self._sizes[name]
        size = max(1, int((target - fixed) / per_unit))
        for _ in range(6):
            lesson = write(world, size=size)
            excess = len(self._encode(lesson)[0]) - target
            if excess <= 0:
                return lesson
            if size == 1:
                return None
            size = max(1, min(size - 1, int(size - excess / per_unit)))
        return None

    def _encode(self, lesson: Lesson) -> tuple[list[int], list[bool]]:
        """(ids, whether each is of an answer). Prompt and answer are encoded apart."""
        tokens: list[int] = []
        answers: list[bool] = []
        texts = [text for text, _ in lesson]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        for encoding, (_, is_answer) in zip(encodings, lesson, strict=True):
            tokens += encoding.ids
            answers += [is_answer] * len(encoding.ids)
        return tokens, answers
