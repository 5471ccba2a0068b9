"""Questions about the user's own text, made from that text alone.

    copy       a list that stands somewhere in the text, line by line
    look_up    the values of some of eight entries that are scattered over the text
    quote      how sentences of the text go on after their first words
    continue   what follows the text, in the model's own words
    summarize  what the text says, in the model's own words

Needles are one template, and a mask that is chosen by one template may lose others. Each task here
has several wordings. None is one of the suites that judge masks (own_formats, long_answers, RULER):
these stay a test of what nobody was prepared for.

    text = make_text(sentences)
    asked = ask("copy", text, length=1_024, count=token_counter(tokenizer), seed="0/copy/7")
    asked[0].prompt, asked[0].answer
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from bosch.data.needles import does_not_fit, largest
from bosch.run.errors import UserError

# How an entry of a list begins, what stands above the list, and the request for it.
LISTS = (
    ("-", "Points to remember:", "The points to remember once more:"),
    ("*", "Stops on the way:", "All stops on the way again, one a line:"),
    (">", "Headings of the next chapter:", "The headings of that chapter were:"),
)
# An entry, and how a question about it begins; the value follows.
ENTRIES = (
    ("Code for {key}: {value}.", "Code for {key}:"),
    ("[{key} -> {value}]", "[{key} ->"),
    ("(The file on {key} is stored under {value}.)", "The file on {key} is stored under"),
    ("Remark: {key} stands for {value}.", "In the remarks, {key} stands for"),
)
QUOTES = (
    'How does the sentence go on that begins with "{begin}"? {begin}',
    "From the text above, word for word: {begin}",
)
SUMMARIES = (
    "To sum up, the text above says that",
    "A summary of the text above:",
    "What is the text above about? It is about",
)
NUM_ENTRIES = 8
MOST_COMMON = 50
WITHOUT_ANSWERS = "Train without --data.answers, or on more text in Latin letters."
FEWEST_WORDS = 50  # of a text for lists and entries, or they would all be alike
BEGIN_WORDS, QUOTED_WORDS = 4, 6
WORD = re.compile(r"\b[a-z]{4,9}\b")
WORD_IN_WORDS = f"of 4 to 9 small Latin letters, without the {MOST_COMMON} most common"


class Asked(NamedTuple):
    """A question. Those on one text follow each other, each after the answer before it."""

    prompt: str  # of the first one: the text and the question. The answer comes right after it
    answer: str | None  # None: the model's own words
    source: str = ""  # passage of the text with the answer; "": nobody knows where it is


@dataclass(frozen=True)
class Text:
    sentences: tuple[str, ...]
    words: tuple[str, ...]  # those of lists and entries, in lower case


Writer = Callable[[Sequence[str], Sequence[str], int, random.Random], list[Asked]]


def make_text(sentences: Sequence[str]) -> Text:
    counts = Counter(word for sentence in sentences for word in WORD.findall(sentence))
    # Without the most common, "that" and "with": as names of things they read oddly.
    words = sorted(word for word, _ in counts.most_common()[MOST_COMMON:])
    return Text(tuple(sentences), tuple(words))


def check_words(text: Text, of: str, remedy: str) -> None:
    """Refuse a text without enough words for lists and entries."""
    if len(text.words) < FEWEST_WORDS:
        raise UserError(
            f"{of} has {len(text.words)} words for lists and entries ({WORD_IN_WORDS}), which take "
            f"{FEWEST_WORDS}. {remedy}"
        )


def words_needed(task: str, questions: int) -> int:
    """Words that a text must have for so many questions of a task on one text."""
    of_each = {"copy": 2, "look_up": 1}.get(task, 0)  # the other tasks have no lists and no entries
    return of_each and max(FEWEST_WORDS, of_each * questions)


def ask(
    task: str,
    text: Text,
    length: int,
    count: Callable[[str], int],
    seed: str,
    questions: int = 1,
    answer_tokens: int = 32,
) -> list[Asked]:
    """So many questions on as much of the text as fits into `length` tokens with the answers.
    `count` gives the tokens of a text, `seed` decides all. answer_tokens: for all answers, where
    they are the model's own words; it is asked one question then."""
    if len(text.words) < (needed := words_needed(task, questions)):
        raise UserError(
            f"{task} takes {needed} words ({WORD_IN_WORDS}), and the text has {len(text.words)}; "
            "ask fewer or other questions, or take more text."
        )
    first = random.Random(f"{seed}/first").randrange(len(text.sentences))

    def write(number: int) -> list[Asked]:
        places = range(first, first + number)
        sentences = [text.sentences[place % len(text.sentences)] for place in places]
        # The same draws for each size: what is hidden does not change while the size is searched.
        return TASKS[task](sentences, text.words, questions, random.Random(seed))

    counted = cache(count)  # answers and later questions are the same for each size

    def fits(number: int) -> bool:
        asked = write(number)
        tokens = sum(
            counted(one.prompt) + (answer_tokens if one.answer is None else counted(one.answer))
            for one in asked
        )
        return bool(asked) and tokens <= length

    # Quotes need sentences that are long enough. Where so few have none, more may have.
    least = next((number for number in range(1, 65) if write(number)), None)
    if least is None or not fits(least):
        raise does_not_fit(task, length, f"not with {questions} questions and their answers")
    return write(largest(fits, least, length))


def write_copy(
    sentences: Sequence[str], words: Sequence[str], questions: int, rng: random.Random
) -> list[Asked]:
    """A list with a line for each question. Each line is a question, so that a line counts though
    another is wrong."""
    sign, title, request = rng.choice(LISTS)
    drawn = rng.sample(words, 2 * max(4, questions))
    lines = [f"{sign} {a} {b}" for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    hidden = "\n".join(["", title, *lines, ""])
    prompt = f"{hide([hidden], sentences, rng)}\n\n{request}\n{sign}"
    starts = [prompt, *[f"\n{sign}"] * (len(lines) - 1)]
    answers = (line.removeprefix(sign) for line in lines)
    asked = [Asked(*each) for each in zip(starts, answers, lines, strict=True)]
    return asked[:questions]


def write_look_up(
    sentences: Sequence[str], words: Sequence[str], questions: int, rng: random.Random
) -> list[Asked]:
    """Entries with words or numbers as values."""
    entry, question = rng.choice(ENTRIES)
    num_entries = max(NUM_ENTRIES, questions)
    keys, values = rng.sample(words, num_entries), rng.sample(words, num_entries)
    if rng.random() < 0.5:
        values = [str(number) for number in rng.sample(range(100, 10_000), num_entries)]
    pairs = list(zip(keys, values, strict=True))
    entries = {key: entry.format(key=key, value=value) for key, value in pairs}
    text = hide(list(entries.values()), sentences, rng)
    asked = [
        Asked(f"\n{question.format(key=key)}", f" {value}", entries[key])
        for key, value in rng.sample(pairs, questions)
    ]
    return [asked[0]._replace(prompt=f"{text}\n{asked[0].prompt}"), *asked[1:]]


def write_quote(
    sentences: Sequence[str], words: Sequence[str], questions: int, rng: random.Random
) -> list[Asked]:
    text = " ".join(sentences)
    found = {}
    for sentence in sentences:
        parts = sentence.split(" ")
        begin, answer = parts[:BEGIN_WORDS], parts[BEGIN_WORDS:][:QUOTED_WORDS]
        # Only one sentence begins like this, and it is long enough.
        if len(answer) == QUOTED_WORDS and text.count(" ".join(begin)) == 1:
            found[" ".join(begin)] = " ".join(answer)
    if len(found) < questions:
        return []
    template = rng.choice(QUOTES)
    asked = [
        Asked(f"\n{template.format(begin=begin)}", f" {found[begin]}", f"{begin} {found[begin]}")
        for begin in rng.sample(list(found), questions)
    ]
    return [asked[0]._replace(prompt=f"{text}\n{asked[0].prompt}"), *asked[1:]]


def write_continue(
    sentences: Sequence[str], words: Sequence[str], questions: int, rng: random.Random
) -> list[Asked]:
    return [Asked(" ".join(sentences), None)]


def write_summarize(
    sentences: Sequence[str], words: Sequence[str], questions: int, rng: random.Random
) -> list[Asked]:
    return [Asked(f"{' '.join(sentences)}\n\n{rng.choice(SUMMARIES)}", None)]


TASKS: dict[str, Writer] = {
    "copy": write_copy,
    "look_up": write_look_up,
    "quote": write_quote,
    "continue": write_continue,
    "summarize": write_summarize,
}
OWN_WORDS = ("continue", "summarize")  # tasks whose answers only a model can give


def hide(passages: Sequence[str], sentences: Sequence[str], rng: random.Random) -> str:
    """The sentences with the passages between them, at random places and in a random order."""
    places = sorted(int(rng.random() * (len(sentences) + 1)) for _ in passages)
    parts = []
    for passage, (begin, end) in zip(
        rng.sample(passages, len(passages)), pairwise([0, *places]), strict=True
    ):
        parts += [*sentences[begin:end], passage]
    return " ".join([*parts, *sentences[places[-1] :]])
