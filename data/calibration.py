"""The calibration set: needle contexts with their answers, on which masks are scored.

Built by data/needles.py as the test set is, but with other seeds and from another region of the
essays, or the toy world's calibration split. With q questions in a context, q needles lie in one
haystack and are asked for one after the other: one prefill scores them all, and each counts as one
example. The search reads bosch/calibration.py's file; `examples.jsonl` beside it holds the texts,
and `calibration.json` what they were made of, with hashes."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bosch.calibration import FILE, Calibration, Haystack, Question, write_calibration
from bosch.config import CalibrationConfig
from bosch.data.needles import (
    PAPER_TASKS,
    TASKS,
    TOY_SIZES,
    DoesNotFitError,
    EssaySource,
    NeedleExample,
    NeedleQuestion,
    NeedleTask,
    Sizes,
    Words,
    ask_other_keys,
    build_examples,
    pairs_in,
)
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file
from bosch.run.manifest import write_atomically, write_sealed_json
from bosch.run.progress import say

TEXTS, FACTS = "examples.jsonl", "calibration.json"
SEED = 1_000_003  # added to the user's: the test set counts its seeds up from 42
REGION = 0.5  # of the essays: where calibration's haystacks begin; those of the test set begin at 0
TOY = "toy"


@dataclass(frozen=True)
class CalibrationSettings(CalibrationConfig):
    """What the set holds."""

    seed: int = 0  # of all random choices

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tasks", self.tasks or PAPER_TASKS)
        for name in self.tasks:
            if self.tasks.count(name) > 1:
                raise UserError(
                    f"{name} is among the tasks twice, which would only repeat its examples; name "
                    "each task once."
                )
            if name not in TASKS:
                raise UserError(f"{name!r} is no needle task: {suggest(name, tuple(TASKS))}")
            if self.questions_per_context > 1 and TASKS[name].num_queries > 1:
                raise UserError(
                    f"{name} asks for {TASKS[name].num_queries} keys in one question, so a context "
                    "cannot hold several questions; leave it out, or ask one question a context."
                )


@dataclass(frozen=True)
class Material:
    """What haystacks and keys are drawn from."""

    essays: EssaySource
    words: Words
    sizes: Sizes
    facts: dict[str, Any]


@dataclass(frozen=True)
class Context:
    """One text of the set."""

    task: str
    example: NeedleExample
    questions: tuple[NeedleQuestion, ...]  # the example's own is the first

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """(what is read, the answer) of each question, encoded apart as generation does it."""
        others = (f"\n{question.text}{question.answer_prefix}" for question in self.questions[1:])
        answers = (" " + ", ".join(question.outputs) for question in self.questions)
        return list(zip([self.example.prompt, *others], answers, strict=True))

    @property
    def text(self) -> str:
        return "".join(read + answer for read, answer in self.pieces)


def gather_material(settings: CalibrationSettings) -> Material:
    """Essays, key words and sizes: the toy world's calibration split, or real ones."""
    if settings.essays == TOY:
        from bosch.data.toy_world.essays import ToyEssays
        from bosch.data.toy_world.world import World

        words = World("calibration", 0).key_words
        return Material(ToyEssays("calibration", settings.seed), words, TOY_SIZES, {"essays": TOY})
    from bosch.data.essays import read_essays
    from bosch.data.key_words import wonderwords_keys

    punkt = Path(settings.punkt) if settings.punkt else None
    essays = read_essays(Path(settings.essays), punkt).starting_at(REGION)
    keys = wonderwords_keys()
    facts = {"essays": essays.name, "essays_sha256": essays.sha256, "words": keys.name}
    return Material(essays, keys, Sizes(), facts)


def build_contexts(
    settings: CalibrationSettings, material: Material, tokenizer: Any
) -> list[Context]:
    """By task. One that does not fit the length is left out by name; the others share its part."""
    tasks = [name for name in settings.tasks if fits(name, settings, material, tokenizer)]
    if not tasks:
        raise UserError(f"No task can be built in {settings.length} tokens; ask for more.")
    contexts = settings.examples // settings.questions_per_context
    return [
        context
        for name, count in zip(tasks, share_evenly(contexts, len(tasks)), strict=True)
        for context in build_task(name, count, settings, material, tokenizer)
    ]


def fits(name: str, settings: CalibrationSettings, material: Material, tokenizer: Any) -> bool:
    try:
        build_task(name, 1, settings, material, tokenizer)
    except DoesNotFitError as error:
        say(f"calibration: left out: {error}")
        return False
    return True


def share_evenly(total: int, parts: int) -> list[int]:
    """Equal shares; a remainder goes to the first."""
    return [total // parts + (number < total % parts) for number in range(parts)]


def build_task(
    name: str, count: int, settings: CalibrationSettings, material: Material, tokenizer: Any
) -> list[Context]:
    """Contexts of one task. Room for further questions is kept free as it is for the answer; should
    a draw need more, all are drawn again with a little more room."""
    task = TASKS[name]
    task = replace(task, num_keys=max(task.num_keys, settings.questions_per_context))
    seed = SEED + settings.seed * len(TASKS) + list(TASKS).index(name)
    room = 0
    while True:
        sizes = replace(material.sizes, answer_tokens=material.sizes.answer_tokens + room)
        examples = build_examples(
            task, settings.length, count, seed, tokenizer, material.essays, material.words, sizes
        )
        contexts = [ask(task, example, settings.questions_per_context) for example in examples]
        longest = max((len(encode(context, tokenizer).ids_T) for context in contexts), default=0)
        if longest <= settings.length:
            return contexts
        room += longest - settings.length


def ask(task: NeedleTask, example: NeedleExample, num_questions: int) -> Context:
    question = NeedleQuestion(
        "", example.answer_prefix, example.outputs
    )  # its text is in the input
    others = ask_other_keys(task, example)[: num_questions - 1]
    return Context(task.name, example, (question, *others))


def encode(context: Context, tokenizer: Any) -> Haystack:
    """The context in tokens, with the places of answers and of the needles that hold them."""
    ids: list[int] = []
    questions = []
    spans = needle_spans(context.example, tokenizer)
    for number, (read, answer) in enumerate(context.pieces):
        # The tokens that a model puts before any text stand before the first piece only.
        ids += encode_behind(ids, read, tokenizer) if number else tokenizer(read)["input_ids"]
        start = len(ids)
        ids += encode_behind(ids, answer, tokenizer)
        needle = spans[context.questions[number].outputs[0]]
        questions.append(Question(range(start, len(ids)), needle, context.task))
    import torch

    return Haystack(torch.tensor(ids), tuple(questions))


def encode_behind(ids: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text behind others. Some tokenizers put a blank before whatever they are
    given, which would make two of them here; what is behind a line break has none."""
    alone, line, behind = (
        tokenizer(told, add_special_tokens=False)["input_ids"] for told in (text, "\n", f"\n{text}")
    )
    candidates = [alone]
    if behind[: len(line)] == line:
        candidates.append(behind[len(line) :])
    last = list(ids[-8:])
    for found in candidates:
        if tokenizer.decode(last + found) == tokenizer.decode(last) + text:
            return found
    raise UserError(
        f"This tokenizer cannot write {text[:40]!r} behind a text: it reads back "
        f"{tokenizer.decode(last + alone)!r}."
    )


def needle_spans(example: NeedleExample, tokenizer: Any) -> dict[str, range]:
    """Tokens of the needle sentence with each value, counted in the encoded prompt."""
    encoded = tokenizer(example.prompt, return_offsets_mapping=True)
    spans = {}
    for needle in example.needles:
        begin, end = needle.start, needle.start + len(needle.sentence)
        inside = [
            i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > max(begin, a)
        ]
        spans[needle.value] = range(inside[0], inside[-1] + 1)
    return spans


def check_disjoint(texts: Iterable[str], test_texts: Iterable[str]) -> int:
    """How many test texts were compared. UserError if one holds a needle of the set: the same key
    with the same value."""
    pairs = {pair for text in texts for pair in pairs_in(text)}
    count = 0
    for count, text in enumerate(test_texts, start=1):
        if shared := sorted(pairs & pairs_in(text)):
            raise UserError(
                f"The calibration set and test example {count} both hold the needle {shared[0]}: "
                "a mask chosen on it would be judged on what it was chosen by. Use another seed."
            )
    return count


def check_set(folder: Path, test_texts: Iterable[str]) -> int:
    """The same for a set that is written already."""
    lines = (folder / TEXTS).read_text("utf-8").splitlines()
    return check_disjoint((json.loads(line)["text"] for line in lines), test_texts)


def write_set(
    folder: Path,
    settings: CalibrationSettings,
    tokenizer: Any,
    tokenizer_hash: str,
    test_texts: Iterable[str] = (),
) -> Calibration:
    """Build the set, check it against the test texts and write it into a folder."""
    material = gather_material(settings)
    contexts = build_contexts(settings, material, tokenizer)
    num_compared = check_disjoint([context.text for context in contexts], test_texts)
    calibration = Calibration([encode(context, tokenizer) for context in contexts])
    write_calibration(folder, calibration)
    rows = [
        {
            "task": context.task,
            "text": context.text,
            "answers": [list(question.outputs) for question in context.questions],
            "pairs": [list(pair) for pair in context.example.pairs],
        }
        for context in contexts
    ]
    write_atomically(folder / TEXTS, "".join(json.dumps(row) + "\n" for row in rows))
    facts = {
        "settings": settings,
        "material": material.facts,
        "tokenizer_hash": tokenizer_hash,
        "contexts": Counter(context.task for context in contexts),
        "questions": calibration.num_questions,
        "longest": calibration.longest,
        "test_examples_compared": num_compared,
        "files": {name: hash_file(folder / name) for name in (FILE, TEXTS)},
    }
    write_sealed_json(folder / FACTS, facts)
    compared = f"; none of their needles in {num_compared} test examples" if num_compared else ""
    say(
        f"calibration: {calibration.num_questions} questions in {len(contexts)} contexts of at "
        f"most {calibration.longest:,} tokens{compared}"
    )
    return calibration
