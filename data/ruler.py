"""RULER's five tasks beside its needles (data/needles.py): variable tracking (`vt`), common words
(`cwe`), frequent coded words (`fwe`), and questions on documents of SQuAD (`qa_1`) and HotpotQA
(`qa_2`). With the same seed, tokenizer and word list the bytes are RULER's.

So the draws keep RULER's order: one generator, `Maker.random`, serves the search for the size and
all samples, and each fixed shuffle has a fresh one. The templates are in ruler_tasks.json.
"""

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np

from bosch.data import needles
from bosch.data.key_words import words_of
from bosch.data.needles import NOISE, SHORT_LENGTH, Prompt
from bosch.run.errors import MissingFileError, UserError
from bosch.run.kept import kept

TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("ruler_tasks.json").read_text())
TASKS = ("vt", "cwe", "fwe", "qa_1", "qa_2")
NUM_HOPS = 5  # names that have the value
ONE_SHOT_VALUE = "12345"
ONE_SHOT_TOKENS = 500

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class RulerExample(Prompt):
    # Characters at which what the answer needs begins; none: it is all over the text.
    sources: tuple[int, ...] = ()


Sample = Callable[[int], RulerExample]  # of each number


class Maker:
    """What the prompts of a file are made with."""

    def __init__(self, task: str, length: int, seed: int, count: Count, files: "Files") -> None:
        self.task, self.length, self.seed, self.count, self.files = task, length, seed, count, files
        self.budget = TEMPLATES[task]["answer_tokens"]
        self.random = random.Random(seed)
        self.numpy = np.random.RandomState(seed)  # RULER's, frozen for ever

    def shuffle(self, items: list[Any]) -> None:
        """The same permutation for every list of one length."""
        random.Random(self.seed).shuffle(items)

    def whole(self, **values: object) -> str:
        return fill(self.task, "text", **values) + fill(self.task, "prefix", **values)

    def example(
        self, text: str, outputs: Sequence[str], sources: Sequence[str] = ()
    ) -> RulerExample:
        """sources: what the answer needs, as it stands in the text."""
        # The text ends in the answer's prefix, whose length depends on what was filled in: its
        # first ten letters, before any of that, say where it begins. From the right, because an
        # example before the question has the same words.
        start = text.rindex(fill(self.task, "prefix", query="", num_v="")[:10])
        length, places = self.count(text) + self.budget, map(text.index, sources)
        return RulerExample(text[:start], text[start:], tuple(outputs), length, tuple(places))


def build_examples(
    task: str, length: int, num_samples: int, seed: int, count: Count, files: "Files"
) -> list[RulerExample]:
    """The first samples of RULER's file. Each fits into `length` tokens with its answer."""
    makers = {"vt": chains, "cwe": common_words, "fwe": coded_words}
    sample = makers.get(task, documents)(Maker(task, length, seed, count, files))
    return [sample(index) for index in range(num_samples)]


def fill(task: str, part: str, **values: object) -> str:
    """What is filled in is not searched for braces: documents hold some."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), TEMPLATES[task][part])


def chains(make: Maker) -> Sample:
    """A chain of assignments in noise, below an example of one."""

    def chain(num_lines: int, is_example: bool = False) -> tuple[str, list[str], list[str]]:
        size = 3 if is_example else 5  # letters of a name
        names = ["".join(make.random.choices(ascii_uppercase, k=size)) for _ in range(NUM_HOPS)]
        # From numpy's generator, as in RULER; the names are from Python's.
        value = ONE_SHOT_VALUE if is_example else str(make.numpy.randint(10_000, 99_999))
        if len(set(names)) < NUM_HOPS:
            raise UserError(f"vt, seed {make.seed}: two variables got one name; use another seed.")
        lines = [NOISE] * num_lines
        places = sorted(make.random.sample(range(num_lines), NUM_HOPS))
        assigned = [f"VAR {names[0]} = {value}"]
        assigned += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
        for number, (place, line) in enumerate(zip(places, assigned, strict=True)):
            lines.insert(place + number, line)
        text = make.whole(context="\n".join(lines), query=value, num_v=NUM_HOPS)
        return text, names, assigned

    def build_example(num_lines: int) -> RulerExample:
        text, names, assigned = chain(num_lines, is_example=True)
        return make.example(text, names, assigned)

    room = ONE_SHOT_TOKENS + make.budget  # it needs none, for its answer is in it
    size = needles.find_size(build_example, 5, ONE_SHOT_TOKENS, make.budget, room)
    tried = range(size, NUM_HOPS - 1, -5)
    one_shot = needles.first_that_fits("vt", room, build_example, tried)
    example = f"{one_shot.prompt} {' '.join(one_shot.outputs)}\n"

    def build(num_lines: int) -> RulerExample:
        below, names, assigned = chain(num_lines)
        # The example of every sample has names and a value of its own. Its last words are its
        # answer: the names.
        text = example
        for word in example.split()[-NUM_HOPS:]:
            letters = make.random.choices(ascii_uppercase, k=len(word))
            text = text.replace(word, "".join(letters))
        text = text.replace(ONE_SHOT_VALUE, str(make.numpy.randint(10_000, 99_999)))
        return make.example(f"{text}\n{below}", names, assigned)

    step = 5 if make.length < SHORT_LENGTH else 10
    room = make.length - make.count(example)
    size = needles.find_size(
        lambda n: make.example(*chain(n)), step, make.length, make.budget, room
    )
    sizes = range(size, NUM_HOPS - 1, -step)
    return lambda index: needles.first_that_fits("vt", make.length, build, sizes)


def common_words(make: Maker) -> Sample:
    """A numbered list in which ten words are more frequent, below an example of one."""
    words = sorted({word for kind in ("noun", "adjective", "verb") for word in words_of(kind)})
    make.shuffle(words)

    def listed(num_words: int, often: int, seldom: int) -> tuple[str, tuple[str, ...]]:
        known = words
        if num_words > len(words):
            task = "cwe with more words than wonderwords has"
            path = need("--english-words", make.files.words, task)
            known = list(map(str, read_source("--english-words", path).values()))
        chosen = make.random.sample(known, num_words)
        items = chosen[:10] * often + chosen[10:] * seldom
        make.shuffle(items)
        return number_words(items), tuple(chosen[:10])

    def build(num_words: int) -> RulerExample:
        # Words of the example, and how often the frequent and the other ones stand in it; then how
        # often in the list itself.
        sizes = ((20, 3, 1), (6, 1)) if make.length < SHORT_LENGTH else ((40, 10, 3), (30, 3))
        context, answer = listed(*sizes[0])
        example = f"{make.whole(context=context)} {number_words(answer)}\n"
        context, answer = listed(num_words, *sizes[1])
        return make.example(example + make.whole(context=context), answer)

    per_word = (build(4_096).length - make.budget) / 4_096
    high = max(int(make.length // per_word) * 2, 20)
    size = needles.largest(lambda n: build(n).length <= make.length, 10, high)
    sizes = range(size, 0, -10)
    return lambda index: needles.first_that_fits("cwe", make.length, build, sizes)


def number_words(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def coded_words(make: Maker) -> Sample:
    """Words of random letters, the most frequent in their order, as by Zipf's law."""
    room = make.length - make.budget
    num_words, step = room // 50, room // 32
    if num_words < 4:
        reason = "its vocabulary would have fewer than four words"
        raise needles.does_not_fit("fwe", make.length, reason)

    def draw_vocabulary() -> list[str]:
        drawn: set[str] = set()
        while len(drawn) < num_words:
            drawn.add("".join(make.random.choices(ascii_lowercase, k=6)))
        # Sorted before it is shuffled: the order of a set differs from process to process.
        vocabulary = sorted(drawn)
        make.shuffle(vocabulary)
        vocabulary[0] = "..."  # the most frequent is noise, and the next three are the answer
        return vocabulary

    def text(size: int, vocabulary: list[str]) -> str:
        coded = []
        # The word of rank k has a share of k^-2 / (1 + 1/4 + 1/9 + ...), whose sum is pi^2 / 6.
        for rank, word in enumerate(vocabulary, 1):
            coded += [word] * int(size * rank**-2.0 / (math.pi**2 / 6))
        make.shuffle(coded)
        return make.whole(context=" ".join(coded))

    # The first size that is too long, and back by one step; a sample that is longer than this
    # search saw goes back further.
    searched, size = draw_vocabulary(), room // 6
    while make.count(text(size, searched)) < room:
        size += step
    size -= step

    def sample(index: int) -> RulerExample:
        vocabulary, smaller = draw_vocabulary(), size
        while make.count(built := text(smaller, vocabulary)) > room:
            if smaller < 0:
                raise needles.does_not_fit("fwe", make.length, "its template alone is longer")
            smaller -= step
        return make.example(built, vocabulary[1:4])

    return sample


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # numbers of the documents it is about
    more: tuple[int, ...]  # of those beside them, which come before any others


Corpus = tuple[list[str], list[Question]]  # documents, sorted and distinct; questions


@dataclass(frozen=True)
class Files:
    """What the tasks read besides the tokenizer."""

    squad: Path | None = None  # dev-v2.0.json
    hotpot: Path | None = None  # hotpot_dev_distractor_v1.json
    words: Path | None = None  # english_words.json

    def questions(self, task: str) -> Corpus:
        option, path = ("--squad", self.squad) if task == "qa_1" else ("--hotpot", self.hotpot)
        corpus: Corpus = read_source(option, need(option, path, task))
        return corpus


SOURCES = {
    "--squad": "SQuAD 2.0's dev-v2.0.json (rajpurkar.github.io/SQuAD-explorer, CC BY-SA 4.0)",
    "--hotpot": "HotpotQA's hotpot_dev_distractor_v1.json (CC BY-SA 4.0; hf namlh2004/hotpotqa)",
    "--english-words": "RULER's english_words.json (scripts/data/synthetic/json)",
}


def need(option: str, path: Path | None, task: str) -> Path:
    if path is None or not path.is_file():
        problem = "name its file with" if path is None else f"{path} does not exist:"
        raise MissingFileError(f"{task} needs {SOURCES[option]}; {problem} {option}.")
    return path


@kept
def read_source(option: str, path: Path) -> Any:
    readers: dict[str, Callable[[Any], Any]] = {"--squad": squad, "--hotpot": hotpot}
    try:
        return readers.get(option, dict)(json.loads(path.read_text("utf-8")))
    except (KeyError, TypeError, IndexError, ValueError, RecursionError) as error:
        raise UserError(f"{option} {path} is not {SOURCES[option]}: {error!r}.") from None


def squad(content: Any) -> Corpus:
    articles = [article["paragraphs"] for article in content["data"]]
    texts = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: index for index, text in enumerate(texts)}
    questions = []
    for article in articles:
        numbers = [number[paragraph["context"]] for paragraph in article]
        for place, paragraph in enumerate(article):
            more = (*numbers[:place], *numbers[place + 1 :])
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Question(asked["question"], answers, (numbers[place],), more))
    return texts, questions


def hotpot(content: Any) -> Corpus:
    documents = [
        [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
        for item in content
    ]
    texts = sorted({text for shown in documents for text in shown})
    number = {text: index for index, text in enumerate(texts)}
    return texts, [
        Question(item["question"], (item["answer"],), tuple(number[text] for text in shown), ())
        for item, shown in zip(content, documents, strict=True)
    ]


def documents(make: Maker) -> Sample:
    """A question on documents of which some hold the answer."""
    texts, questions = make.files.questions(make.task)

    def build(index: int, num_documents: int) -> RulerExample:
        question = questions[index]
        gold, more = question.gold, question.more
        num_others = num_documents - len(gold)
        # Documents are added in this order: those with the answer, those beside them, any others.
        if num_documents >= len(texts):
            chosen = list(islice(cycle(range(len(texts))), num_documents))
        elif num_others > len(more):
            rest = sorted({*range(len(texts))} - {*gold, *more})
            chosen = [*gold, *more, *make.random.sample(rest, num_others - len(more))]
        else:
            chosen = [*gold, *make.random.sample(more, num_others)]
        make.shuffle(chosen)
        shown = [f"Document {place}:\n{texts[number]}" for place, number in enumerate(chosen, 1)]
        sources = [text for text, number in zip(shown, chosen, strict=True) if number in gold]
        holding = [text for text in sources if any(one in text for one in question.answers)]
        context = make.whole(context="\n\n".join(shown), query=question.text)
        return make.example(context, question.answers, holding or sources)

    size = needles.find_size(partial(build, 0), 10, make.length, make.budget)

    def sample(index: int) -> RulerExample:
        if index >= len(questions):
            raise UserError(f"{make.task} has {len(questions)} questions; ask for no more samples.")
        least = len(questions[index].gold)
        sizes = range(max(size, least), least - 1, -10)
        return needles.first_that_fits(make.task, make.length, partial(build, index), sizes)

    return sample
