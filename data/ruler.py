"""RULER's five tasks beside its needles (data/needles.py): variable tracking (`vt`), common words
(`cwe`), frequent coded words (`fwe`), and questions on documents of SQuAD (`qa_1`) and HotpotQA
(`qa_2`). With the same seed, tokenizer and word list the bytes are RULER's.

So the draws keep RULER's order: one generator, `Draws.random`, serves the search for the size and
all samples, and each fixed shuffle has a fresh one. The templates are in ruler_tasks.json.
"""

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np

from bosch.data.key_words import words_of
from bosch.data.needles import NOISE, DoesNotFitError, Prompt, largest
from bosch.run.errors import MissingFileError, UserError

TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("ruler_tasks.json").read_text())
TASKS = ("vt", "cwe", "fwe", "qa_1", "qa_2")
SHORT_LENGTH = 4_096  # below it sizes are smaller
NUM_HOPS = 5  # names that have the value
ONE_SHOT_VALUE = "12345"
ONE_SHOT_TOKENS = 500
MOST_TRIES = 200  # at the smallest size, before a task is given up; RULER tries forever

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class RulerExample(Prompt):
    # Characters at which what the answer needs begins; none: it is all over the text.
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class Built:
    """A prompt that is not measured yet."""

    text: str
    outputs: tuple[str, ...]
    sources: tuple[str, ...] = ()  # what the answer needs, as it stands in the text


class Draws:
    """The random generators of a file of examples."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.numpy = np.random.RandomState(seed)  # RULER's, frozen for ever

    def name(self, letters: str, size: int) -> str:
        return "".join(self.random.choices(letters, k=size))

    def value(self) -> str:
        return str(self.numpy.randint(10_000, 99_999))

    def shuffle(self, items: list[Any]) -> None:
        """The same permutation for every list of one length."""
        random.Random(self.seed).shuffle(items)


def build_examples(
    task: str, length: int, num_samples: int, seed: int, count: Count, files: "Files"
) -> list[RulerExample]:
    """The first samples of RULER's file. Each fits into `length` tokens with its answer."""
    makers = {"vt": chains, "cwe": common_words, "fwe": coded_words}
    sample = makers.get(task, partial(documents, task))(Draws(seed), length, count, files)
    examples = []
    for index in range(num_samples):
        built = sample(index)
        start = built.text.rindex(fill(task, "prefix", query="", num_v="")[:10])
        examples.append(
            RulerExample(
                built.text[:start],
                built.text[start:],
                built.outputs,
                count(built.text) + TEMPLATES[task]["answer_tokens"],
                tuple(built.text.index(source) for source in built.sources),
            )
        )
    return examples


def fill(task: str, part: str, **values: object) -> str:
    """What is filled in is not searched for braces: documents hold some."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), TEMPLATES[task][part])


def whole(task: str, **values: object) -> str:
    return fill(task, "text", **values) + fill(task, "prefix", **values)


def until_it_fits(
    task: str,
    length: int,
    size: int,
    step: int,
    build: Callable[[int], Built],
    count: Count,
    budget: int | None = None,
) -> Built:
    """Drawn again until it fits, each time a step smaller if possible."""
    least, budget = 0, TEMPLATES[task]["answer_tokens"] if budget is None else budget
    for _ in range(size // step + MOST_TRIES):
        try:
            built = build(size)
            needed = count(built.text) + budget
        except ValueError as error:  # too few lines or documents for what is put there
            if size <= step:
                raise too_short(task, length, f"it holds {size} of them: {error}") from None
        else:
            if needed <= length:
                return built
            least = min(least or needed, needed)
        if size > step:
            size -= step
    raise too_short(task, length, f"the smallest needs {least:,}")


def too_short(task: str, length: int, reason: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"{task} cannot be built in {length} tokens: {reason}. Use a greater length, or leave this "
        "task out."
    )


def chains(draws: Draws, length: int, count: Count, files: "Files") -> Callable[[int], Built]:
    """A chain of assignments in noise, below an example of one."""

    def chain(num_lines: int, is_example: bool = False) -> Built:
        names = [draws.name(ascii_uppercase, 3 if is_example else 5) for _ in range(NUM_HOPS)]
        value = ONE_SHOT_VALUE if is_example else draws.value()
        if len(set(names)) < NUM_HOPS:
            raise UserError(f"vt, seed {draws.seed}: two variables got one name; use another seed.")
        lines = [NOISE] * num_lines
        places = sorted(draws.random.sample(range(num_lines), NUM_HOPS))
        assigned = [f"VAR {names[0]} = {value}"]
        assigned += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
        for number, (place, line) in enumerate(zip(places, assigned, strict=True)):
            lines.insert(place + number, line)
        text = whole("vt", context="\n".join(lines), query=value, num_v=NUM_HOPS)
        return Built(text, tuple(names), tuple(assigned))

    def fit(step: int, room: int, tokens: int, is_example: bool = False) -> int:
        per_line = count(chain(step, is_example).text) / step
        high = max(int(tokens / per_line * 3), 2 * step)
        return largest(lambda n: count(chain(n, is_example).text) <= room, step, high)

    size = fit(5, ONE_SHOT_TOKENS, ONE_SHOT_TOKENS, is_example=True)
    one_shot = until_it_fits("vt", ONE_SHOT_TOKENS, size, 5, lambda n: chain(n, True), count, 0)
    example = f"{one_shot.text} {' '.join(one_shot.outputs)}\n"

    def build(num_lines: int) -> Built:
        built, text = chain(num_lines), example
        for word in example.split()[-NUM_HOPS:]:
            text = text.replace(word, draws.name(ascii_uppercase, len(word)))
        text = text.replace(ONE_SHOT_VALUE, draws.value())
        return Built(f"{text}\n{built.text}", built.outputs, built.sources)

    step = 5 if length < SHORT_LENGTH else 10
    room = length - count(example) - TEMPLATES["vt"]["answer_tokens"]
    size = fit(step, room, length)
    return lambda index: until_it_fits("vt", length, size, step, build, count)


def common_words(draws: Draws, length: int, count: Count, files: "Files") -> Callable[[int], Built]:
    """A numbered list in which ten words are more frequent, below an example of one."""
    words = sorted({word for kind in ("noun", "adjective", "verb") for word in words_of(kind)})
    draws.shuffle(words)

    def listed(num_words: int, often: int, seldom: int) -> tuple[str, tuple[str, ...]]:
        known = words if num_words <= len(words) else files.english_words()
        chosen = draws.random.sample(known, num_words)
        items = chosen[:10] * often + chosen[10:] * seldom
        draws.shuffle(items)
        return numbered(items), tuple(chosen[:10])

    def build(num_words: int) -> Built:
        sizes = ((20, 3, 1), (6, 1)) if length < SHORT_LENGTH else ((40, 10, 3), (30, 3))
        context, answer = listed(*sizes[0])
        example = f"{whole('cwe', context=context)} {numbered(answer)}\n"
        context, answer = listed(num_words, *sizes[1])
        return Built(example + whole("cwe", context=context), answer)

    room = length - TEMPLATES["cwe"]["answer_tokens"]
    per_word = count(build(4_096).text) / 4_096
    high = max(int(length // per_word) * 2, 20)
    size = largest(lambda n: count(build(n).text) <= room, 10, high)
    return lambda index: until_it_fits("cwe", length, size, 10, build, count)


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def coded_words(draws: Draws, length: int, count: Count, files: "Files") -> Callable[[int], Built]:
    """Words of random letters, the most frequent in their order, as by Zipf's law."""
    room = length - TEMPLATES["fwe"]["answer_tokens"]
    num_words, step = room // 50, room // 32
    if num_words < 4:
        raise too_short("fwe", length, "its vocabulary would have fewer than four words")

    def draw_vocabulary() -> list[str]:
        drawn: set[str] = set()
        while len(drawn) < num_words:
            drawn.add(draws.name(ascii_lowercase, 6))
        vocabulary = sorted(drawn)
        draws.shuffle(vocabulary)
        vocabulary[0] = "..."
        return vocabulary

    def text(size: int, vocabulary: list[str]) -> str:
        coded = []
        for rank, word in enumerate(vocabulary, 1):
            coded += [word] * int(size * rank**-2.0 / (math.pi**2 / 6))
        draws.shuffle(coded)
        return whole("fwe", context=" ".join(coded))

    searched, size = draw_vocabulary(), room // 6
    while count(text(size, searched)) < room:
        size += step
    size -= step

    def sample(index: int) -> Built:
        vocabulary, smaller = draw_vocabulary(), size
        while count(built := text(smaller, vocabulary)) > room:
            if smaller < 0:
                raise too_short("fwe", length, "its template alone is longer")
            smaller -= step
        return Built(built, tuple(vocabulary[1:4]))

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

    def english_words(self) -> list[str]:
        path = need("--english-words", self.words, "cwe with more words than wonderwords has")
        return list(map(str, read_source("--english-words", path).values()))


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


@cache
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
    def shown(item: Any) -> list[str]:
        return [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]

    texts = sorted({text for item in content for text in shown(item)})
    number = {text: index for index, text in enumerate(texts)}
    return texts, [
        Question(item["question"], (item["answer"],), tuple(number[t] for t in shown(item)), ())
        for item in content
    ]


def documents(
    task: str, draws: Draws, length: int, count: Count, files: Files
) -> Callable[[int], Built]:
    """A question on documents of which some hold the answer."""
    texts, questions = files.questions(task)

    def build(index: int, num_documents: int) -> Built:
        question = questions[index]
        gold, more = question.gold, question.more
        num_others = num_documents - len(gold)
        if num_documents >= len(texts):
            chosen = list(islice(cycle(range(len(texts))), num_documents))
        elif num_others > len(more):
            rest = sorted({*range(len(texts))} - {*gold, *more})
            chosen = [*gold, *more, *draws.random.sample(rest, num_others - len(more))]
        else:
            chosen = [*gold, *draws.random.sample(more, num_others)]
        draws.shuffle(chosen)
        shown = [f"Document {place}:\n{texts[number]}" for place, number in enumerate(chosen, 1)]
        sources = [text for text, number in zip(shown, chosen, strict=True) if number in gold]
        holding = [text for text in sources if any(one in text for one in question.answers)]
        context = whole(task, context="\n\n".join(shown), query=question.text)
        return Built(context, question.answers, tuple(holding or sources))

    room = length - TEMPLATES[task]["answer_tokens"]
    per_document = count(build(0, 10).text) / 10
    high = max(int(length / per_document * 3), 20)
    size = largest(lambda n: count(build(0, n).text) <= room, 10, high)

    def sample(index: int) -> Built:
        if index >= len(questions):
            raise UserError(f"{task} has {len(questions)} questions; ask for no more samples.")
        return until_it_fits(task, length, size, 10, lambda n: build(index, n), count)

    return sample
