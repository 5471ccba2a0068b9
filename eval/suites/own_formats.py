"""Facts hidden in the user's own text, in formats that no calibration and no training uses.

    sentence  a number in a sentence about a person
    word      a word in a sentence about a person
    json      a field of a JSON record
    keys_4    a number in one of four sentences about different people
    keys_8    the same of eight
    list      five words, to be given back in their order

Calibration sets and RULER share a template: a mask chosen by it may lose other formats, and RULER
does not show that. Templates, names and words are of this file alone. Right is only what stands
first in the answer: its first number, or its first of the suite's words.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bosch.config import at_least
from bosch.data import needle_text
from bosch.data.needles import DoesNotFitError, distances_to_end, largest, token_counter
from bosch.data.toy_world.world import ToyEssays
from bosch.eval.averages import AVERAGE
from bosch.eval.suites import niah
from bosch.eval.suites._common import Tokenizer, check_names
from bosch.eval.suites._interface import Average, Cell, Example, Request, Stop, Task
from bosch.run.kept import kept

title = "own formats"
report_order = 4
METRIC = "right"
NUM_KEYS = {"sentence": 1, "word": 1, "json": 1, "keys_4": 4, "keys_8": 8, "list": 1}
LIST_WORDS = 5
TOY_WORDS = 20_000  # of the embedded toy world

INTRO = "Read the following text. A question about it comes after it.\n\n"
# The sentence in the text, the question, and how its answer begins.
NUMBERS = (
    (
        "{name} paid {value} crowns for the old clock.",
        "How many crowns did {name} pay for the old clock?",
        "{name} paid",
    ),
    (
        "In the attic of {name} lay exactly {value} letters.",
        "How many letters lay in the attic of {name}?",
        "In the attic of {name} lay exactly",
    ),
    (
        "The library card of {name} has the number {value}.",
        "Which number does the library card of {name} have?",
        "The library card of {name} has the number",
    ),
    (
        "The telescope that {name} built weighs {value} grams.",
        "How many grams does the telescope that {name} built weigh?",
        "The telescope that {name} built weighs",
    ),
)
WORDS = (
    (
        "The password that {name} chose for the boathouse is {value}.",
        "Which password did {name} choose for the boathouse?",
        "The password that {name} chose for the boathouse is",
    ),
    (
        "{name} hid the key of the cellar under a {value}.",
        "Under what did {name} hide the key of the cellar?",
        "{name} hid the key of the cellar under a",
    ),
    (
        "On the coat of arms of {name} there is a {value}.",
        "What is on the coat of arms of {name}?",
        "On the coat of arms of {name} there is a",
    ),
    (
        "The present that {name} got in May was a {value}.",
        "What was the present that {name} got in May?",
        "The present that {name} got in May was a",
    ),
)
LISTS = (
    (
        "{name} packed five things, in this order: {value}.",
        "Which five things did {name} pack, in their order?",
        "{name} packed",
    ),
    (
        "The shelf of {name} holds, from left to right, {value}.",
        "What does the shelf of {name} hold, from left to right?",
        "The shelf of {name} holds, from left to right,",
    ),
)
FIELDS = ("locker", "weight", "animal", "thing")  # of a record; the last two hold words
FIRST_NAMES = (
    "Ada Boris Clara Dmitri Elena Felix Greta Hugo Ines Jonas Katya Lorenz Mina Nils Olga Pavel "
    "Rosa Stefan Tilda Viktor Wanda Yusuf Zora Anton"
).split()
LAST_NAMES = (
    "Abernathy Bellweather Castellan Dunmore Eastlake Farrow Greenhalgh Hollander Ivanhoe Jessop "
    "Kettering Lindqvist Marchbanks Northcote Okonkwo Pemberton Quillfeather Ravensworth Sandoval "
    "Thistlewood Underhill Vandermeer Whitlock Yardley"
).split()
ANIMALS = (
    "badger beetle donkey falcon ferret hedgehog lizard lobster parrot pelican pigeon rabbit "
    "salmon spider squirrel turtle weasel zebra"
).split()
THINGS = (
    "bagpipe barrel basket bobbin bucket candle canoe cello chisel compass cradle drum feather "
    "fiddle funnel goblet hammer hammock harp helmet kettle ladder lantern lemon magnet mallet "
    "medal mirror needle paddle pebble pumpkin rake ribbon saddle scarf shovel sickle sponge "
    "teapot thimble trumpet turnip violin walnut whistle"
).split()
NUMBER = re.compile(r"\d+")
WORD = re.compile(rf"\b({'|'.join(ANIMALS + THINGS)})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    essays: str = niah.TOY  # the text, as in the suite niah
    punkt: Path | None = None  # folder of the English Punkt data, for texts that need it
    tasks: tuple[str, ...] = tuple(NUM_KEYS)
    lengths: tuple[int, ...] = (1_024, 4_096, 8_192)  # tokens with the answer
    samples: int = 100  # for each task and length
    seed: int = 42

    def __post_init__(self) -> None:
        check_names(self.tasks, NUM_KEYS, "a task of own formats")
        at_least(1, self, "own_formats", "samples")

    @property
    def needle(self) -> niah.Settings:
        return niah.Settings(self.essays, self.punkt, lengths=self.lengths)


def configure(request: Request) -> tuple[Settings, int]:
    config = request.config
    settings = Settings(
        essays=config.niah_essays or request.essays or niah.TOY,
        punkt=Path(request.punkt) if request.punkt else None,
        lengths=config.niah_lengths or Settings.lengths,
        samples=max(Settings.samples, config.niah_samples),
    )
    return settings, config.niah_samples


def files(settings: Settings) -> dict[str, str]:
    return niah.files(settings.needle)


def hashes(settings: Settings) -> dict[str, str | None]:
    return niah.hashes(settings.needle)


def list_tasks(settings: Settings) -> list[Task]:
    return [Task(name, length) for length in settings.lengths for name in settings.tasks]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    _, digest = read_text(settings)
    return {"samples": str(settings.samples), "seed": str(settings.seed), "essays": digest}


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    return [build(settings, task, index, tokenizer) for index in range(settings.samples)[:limit]]


def build(settings: Settings, task: Task, index: int, tokenizer: Tokenizer) -> Example:
    """Needs no other example. Each has a part of the text and depths of its needles of its own."""
    rng = random.Random(f"own_formats/{settings.seed}/{task.name}/{task.length}/{index}")
    count, (sentences, _) = token_counter(tokenizer), read_text(settings)
    needles, question, answers = write_needles(task.name, rng)
    depths = [rng.random() for _ in needles]
    first = rng.randrange(len(sentences))
    tail = f"\n\nQuestion: {question}"
    budget = count(f" {', '.join(answers)}") * 2 + 8

    def write(num_sentences: int) -> str:
        parts = [sentences[i % len(sentences)] for i in range(first, first + num_sentences)]
        # The deepest first: what is put in does not move the places of the others.
        for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            parts.insert(int(depth * (num_sentences + 1)), needle)
        return INTRO + " ".join(parts) + tail

    def fits(num_sentences: int) -> bool:
        return count(write(num_sentences)) + budget <= task.length

    if not fits(0):
        problem = f"{task.name} cannot be built in {task.length} tokens"
        raise DoesNotFitError(f"{problem}. Use a greater length, or leave this task out.")
    # Doubled first: half of the length as sentences would be many times too long.
    high = 1
    while high < task.length and fits(high):
        high *= 2
    prompt = write(largest(fits, high // 2, min(high, task.length)))
    begin = prompt.index(needles[0])  # the first is the one that is asked for
    distances = distances_to_end(prompt, [begin], tokenizer)
    stop, facts = Stop(strings=("\n",)), {"distances": distances}
    return Example(index, prompt, answers, budget, stop, facts)


def write_needles(task: str, rng: random.Random) -> tuple[list[str], str, tuple[str, ...]]:
    """What is hidden, the one asked for first; the question with the beginning of its answer; and
    the answers."""
    people = [f"{a} {b}" for a in FIRST_NAMES for b in LAST_NAMES]
    names = rng.sample(people, NUM_KEYS[task])
    if task == "json":
        values: list[int | str] = [rng.randrange(1_000, 10_000), rng.randrange(100, 1_000)]
        values += [rng.choice(ANIMALS), rng.choice(THINGS)]
        asked = rng.randrange(len(FIELDS))
        record = json.dumps({"person": names[0]} | dict(zip(FIELDS, values, strict=True)))
        question = f'In the record of {names[0]}, what is the value of "{FIELDS[asked]}"?\nAnswer: '
        question += json.dumps({"person": names[0]})[:-1] + f', "{FIELDS[asked]}":'
        return [f"\n{record}\n"], question, (str(values[asked]),)
    if task == "list":
        template, answers = rng.choice(LISTS), tuple(rng.sample(THINGS, LIST_WORDS))
        given = [", ".join(answers)]
    elif task == "word":
        template, answers = rng.choice(WORDS), (rng.choice(THINGS),)
        given = [*answers]
    else:
        template = rng.choice(NUMBERS)
        given = [str(number) for number in rng.sample(range(10_000, 100_000), len(names))]
        answers = (given[0],)
    hidden, asked_for, begins = template
    pairs = zip(names, given, strict=True)
    needles = [hidden.format(name=name, value=value) for name, value in pairs]
    question = f"{asked_for}\nAnswer: {begins}".format(name=names[0])
    return needles, question, answers


@kept
def read_text(settings: Settings) -> tuple[list[str], str]:
    """The sentences of the text, and its hash."""
    if settings.essays == niah.TOY:
        return ToyEssays("test", "own_formats").sentences(TOY_WORDS), niah.TOY
    if needle_text.is_text(settings.essays):  # the passages that no calibration set has
        text = needle_text.make_haystack(settings.essays, max(settings.lengths), "test")
    else:
        text = niah.load_essays(settings.essays, settings.punkt)
    return text.sentences(len(text.words)), text.sha256


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    """The share of the answers that stand at their places among the prediction's numbers or words:
    an answer after a wrong one does not count, nor does a part of a longer number."""
    if example.answers[0].isdigit():
        # 12,345 is one number.
        found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", prediction))
    else:
        found = [word.lower() for word in WORD.findall(prediction)]
    places = zip(example.answers, found, strict=False)
    return {METRIC: sum(answer == word for answer, word in places) / len(example.answers)}


def averages(settings: Settings, cells: Sequence[Cell]) -> list[Average]:
    """The mean of the tasks at each length, and of all."""
    lengths = sorted({length for _, length in cells})
    found = [Average(AVERAGE, [cell for cell in cells if cell[1] == n], n) for n in lengths]
    return [*found, Average(AVERAGE, cells)] if cells else []


def floor(example: Example, window_tokens: int) -> float | None:
    """The score of a model that sees only the last `window_tokens` tokens of the prompt."""
    return float(example.facts["distances"][0] <= window_tokens)
