"""The calibration set: texts with hidden needles and questions about them, other tasks made of the
same text (text_tasks.py), or questions of the user's own, on which masks are scored.

Needles are hidden as in the test set, but with other seeds and in another region of the essays, or
in the toy world's calibration split. With q questions per context, one text hides q needles and
asks for one after another: one prefill scores them all, and each counts as one example. The search
reads the file of bosch/calibration.py; beside it are the texts and what they were made of."""

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from bosch.calibration import FILE, Calibration, Haystack, Question, write_calibration
from bosch.config import CalibrationConfig
from bosch.data import needle_text, needles, text_tasks
from bosch.data.essays import Essays, read_essays
from bosch.data.key_words import wonderwords_keys
from bosch.data.needles import TASKS, TOY_SIZES, Material, NeedleExample, NeedleTask
from bosch.data.sources.files import rows_of
from bosch.data.sources.source import take_field
from bosch.data.toy_world.world import ToyEssays, key_words
from bosch.plugins import suggest
from bosch.random_texts import REPEATS, block_lengths, draw_texts, ordinary_tokens, tokens_of
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_atomically, write_sealed_json
from bosch.run.fingerprint import hash_file
from bosch.run.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TEXTS, FACTS = "examples.jsonl", "calibration.json"
SEED = 1_000_003  # added to the user's: the seeds of the test set count up from 42
REGION = 0.5  # share of the essays at which calibration's texts begin; those of the test set: 0
TOY = "toy"
LEAD = 8  # tokens that a model's own answer may have beyond those of the expected one
OWN_TOKENS = 8  # of an answer that only the model knows, for each question
# Texts of which so many are made, since questions that the dense model does not get are left out.
SPARE = 2
TOY_WORDS = 20_000
COPIED = "random text"  # the task of single tokens of random texts
COPY_BEGINS, MOST_COPIED = 4, 512  # tokens of a copy that are not asked; most that are, of a text
ALL_TASKS = (*TASKS, *text_tasks.TASKS)
NO_TASK_FITS = "No task can be built in {} tokens; use a greater --length, or fewer questions."


@dataclass(frozen=True)
class CalibrationSettings(CalibrationConfig):
    """What the calibration set holds."""

    seed: int = 0  # of all random choices

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tasks", self.tasks or needles.PAPER_TASKS)
        # With questions of the user's own no task is built: those here are the preset's.
        for name in () if self.questions else self.tasks:
            if self.tasks.count(name) > 1:
                raise UserError(f"Task {name} is named twice; name each task once.")
            if name not in ALL_TASKS:
                raise UserError(f"{name!r} is no task: {suggest(name, ALL_TASKS)}")
            if name in text_tasks.OWN_WORDS and self.answers != "own-words":
                problem = f"the task {name} has no answer but what the model itself writes"
                remedy = "add --calibration.answers own-words, or leave it out of"
                of_calibrate = "bosch calibrate: --answers own-words, or --tasks"
                raise UserError(f"{problem}; {remedy} --calibration.tasks ({of_calibrate}).")
            if name in text_tasks.TASKS:
                continue
            if self.questions_per_context > 1 and TASKS[name].num_queries > 1:
                problem = f"{name} asks for {TASKS[name].num_queries} keys in one question"
                raise UserError(f"{problem}; leave it out, or ask one question a context.")


@dataclass(frozen=True)
class ContextText:
    """One context of the set, as text; `encode` makes tokens of it."""

    task: str
    pieces: tuple[tuple[str, str], ...]  # (prompt, answer) of each question, encoded apart
    answers: tuple[tuple[str, ...], ...]  # the values in them
    example: NeedleExample | None = None  # None: a task of text_tasks.py, or a question of
    place: str = ""  # the user's own, from this file and line
    sources: tuple[str, ...] = ()  # of a task of text_tasks.py: the passages with the answers
    own_answers: int = 0  # of such a task: parts of an answer that the model is to write itself
    left_out: tuple[int, ...] = ()  # questions that do not count: the dense model gets them wrong

    @property
    def text(self) -> str:
        return "".join(prompt + answer for prompt, answer in self.pieces)


Rewording = Callable[[list[ContextText]], list[ContextText]]


def read_questions(path: Path) -> list[ContextText]:
    """The user's own: JSON lines with text, question and answer, or with a text alone, of which the
    model is to continue with the last quarter. It reads the text, a line break and the question;
    the answer follows after a blank."""
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist; name a file with your questions.")
    contexts = []
    for number, row in rows_of(path):
        place = f"{path}, {number}"
        lacking = [name for name in ("text", "question", "answer") if name not in row]
        for key in row:
            if meant := get_close_matches(str(key), lacking, n=1, cutoff=0.7):
                problem = f"{place}: a question has no field {key!r}"
                raise UserError(f"{problem}; did you mean {meant[0]!r}?")
        is_text = row.keys() & {"text", "question", "answer"} == {"text"}
        names = ("text",) if is_text else ("text", "question", "answer")
        text, *asked = (str(take_field(row, name, place, None)).strip() for name in names)
        if is_text:
            quarter = len(text) * 3 // 4
            blank = text.find(" ", quarter)  # cut before a word, where the text has blanks
            cut = quarter if blank < 0 else blank
            prompt, answer = text[:cut], text[cut:]
        else:
            prompt, answer = f"{text}\n{asked[0]}".strip(), asked[1] and f" {asked[1]}"
        if not answer or not prompt:
            problem = f"{place} has too little text, or no answer"
            raise UserError(f"{problem}; fill it in, or leave the line out.")
        contexts.append(ContextText("own", ((prompt, answer),), ((answer.strip(),),), place=place))
    if not contexts:
        raise UserError(f"{path} holds no questions; write one a line, as a JSON object.")
    return contexts


def gather_material(settings: CalibrationSettings) -> Material:
    """Essays, key words and sizes: the toy world's calibration split, or real ones."""
    if settings.essays == TOY:
        words = key_words("calibration")
        toy = ToyEssays("calibration", settings.seed)
        return Material(toy, words, TOY_SIZES, {"essays": TOY}, keys_may_repeat=False)
    if needle_text.is_text(settings.essays):
        return needle_text.gather_text(settings.essays, settings.length, "calibration")
    punkt = Path(settings.punkt) if settings.punkt else None
    essays = read_essays(Path(settings.essays), punkt).starting_at(REGION)
    keys = wonderwords_keys()
    facts = {"essays": essays.name, "essays_sha256": essays.sha256, "words": keys.name}
    return Material(essays, keys, facts=facts)


def build_contexts(
    settings: CalibrationSettings, material: Material, tokenizer: "Tokenizer"
) -> list[ContextText]:
    """Task by task. A task that does not fit the length is left out, with a message; the others
    share its part."""
    # That a task does not fit shows only while it is built. Then all are built again, with other
    # counts: each task has a generator of its own, so its first examples stay the same.
    tasks, left_out = list(settings.tasks), []
    num_contexts = settings.examples // settings.questions_per_context
    while tasks:
        share, remainder = divmod(num_contexts, len(tasks))
        contexts: list[ContextText] = []
        try:
            for number, name in enumerate(tasks):
                count = share + (number < remainder)
                contexts += build_task(name, count, settings, material, tokenizer)
        except needles.DoesNotFitError as error:
            left_out.append(f"calibration: left out: {error}")
            tasks.remove(name)
        else:
            for message in left_out:
                say(message)
            return contexts
    raise UserError(NO_TASK_FITS.format(settings.length))


def least_length(
    name: str, settings: CalibrationSettings, material: Material, tokenizer: "Tokenizer"
) -> int:
    """About how many tokens the smallest context of a task takes."""
    task = task_with_keys(name, settings)
    context = ask_questions(task, needles.write_smallest(task, settings.length, material), settings)
    return len(tokenizer(context.text)["input_ids"]) + material.sizes.answer_tokens


def build_task(
    name: str, count: int, settings: CalibrationSettings, material: Material, tokenizer: "Tokenizer"
) -> list[ContextText]:
    """Contexts of one task. Further questions need room like the answer does; if a context is too
    long, all are drawn again with that much more room."""
    if name in text_tasks.TASKS:
        return build_text_task(name, count, settings, material, tokenizer)
    task = task_with_keys(name, settings)
    # The model's own answers are known only later, and replace these: room for longer ones.
    spare = LEAD * settings.questions_per_context if settings.answers == "own-words" else 0
    # One for each seed of the user's and each task, none of them twice.
    seed = SEED + settings.seed * len(TASKS) + list(TASKS).index(name)
    # Examples are built for one question each. How much longer the others make a context is known
    # only when they are asked, so what is too long is built again with so much more set aside.
    while True:
        examples = needles.build_examples(task, settings.length, count, seed, tokenizer, material)
        contexts = [ask_questions(task, example, settings) for example in examples]
        lengths = (len(encode(context, tokenizer).ids_T) for context in contexts)
        longest = max(lengths, default=0) + spare
        if longest <= settings.length:
            return contexts
        room = material.sizes.answer_tokens + longest - settings.length
        material = replace(material, sizes=replace(material.sizes, answer_tokens=room))


def build_text_task(
    name: str, count: int, settings: CalibrationSettings, material: Material, tokenizer: "Tokenizer"
) -> list[ContextText]:
    """Contexts of a task of text_tasks.py, with spare ones if questions may be left out."""
    text = gather_questioned(settings, material)
    count_tokens, asked_for = needles.token_counter(tokenizer), settings.questions_per_context
    spare = SPARE if settings.answers == "own-words" and name not in text_tasks.OWN_WORDS else 1
    contexts = []
    for number in range(count * spare):
        asked = text_tasks.ask(
            name,
            text,
            # Room for the model's own answers, and for tokens that seams and a beginning add.
            settings.length - LEAD * asked_for,
            count_tokens,
            seed=f"calibration/{settings.seed}/{name}/{number}",
            questions=asked_for,
            answer_tokens=OWN_TOKENS * asked_for,
        )
        context = ContextText(
            name,
            tuple((one.prompt, one.answer or "") for one in asked),
            tuple(((one.answer or "").strip(),) for one in asked),
            sources=tuple(one.source for one in asked),
            own_answers=asked_for if name in text_tasks.OWN_WORDS else 0,
        )
        contexts.append(context)
    return contexts


def gather_questioned(settings: CalibrationSettings, material: Material) -> text_tasks.Text:
    """The text that the tasks of text_tasks.py ask about. UserError if it has too few words."""
    text = text_tasks.make_text(sentences_of(settings, material))
    questions = settings.questions_per_context
    needed = {name: text_tasks.words_needed(name, questions) for name in settings.tasks}
    if lacking := [name for name in needed if needed[name] > len(text.words)]:
        names, most = " and ".join(lacking), max(needed.values())
        fewer = "ask fewer questions a context, " if most > text_tasks.FEWEST_WORDS else ""
        raise UserError(
            f"The lists and entries of {names} take {most} words ({text_tasks.WORD_IN_WORDS}), and "
            f"the text has {len(text.words)}. Name --calibration.tasks (bosch calibrate: --tasks) "
            f"without {names}, {fewer}or name more text in Latin letters."
        )
    return text


def sentences_of(settings: CalibrationSettings, material: Material) -> list[str]:
    """Those of the material that no test set begins with."""
    essays = material.essays
    if not isinstance(essays, Essays):
        return ToyEssays("calibration", settings.seed).sentences(TOY_WORDS)
    share = 1.0 if needle_text.is_text(settings.essays) else 1 - REGION
    return essays.sentences(int(share * len(essays.words)))


def task_with_keys(name: str, settings: CalibrationSettings) -> NeedleTask:
    """The task with a key for every question of a context."""
    num_keys = max(TASKS[name].num_keys, settings.questions_per_context)
    return replace(TASKS[name], num_keys=num_keys)


def ask_questions(
    task: NeedleTask, example: NeedleExample, settings: CalibrationSettings
) -> ContextText:
    # One text and then all of its questions, each after the answer before it: so a single prefill
    # scores them, and later questions see earlier answers as they would in a conversation.
    others = needles.ask_other_keys(task, example)[: settings.questions_per_context - 1]
    prompts = [example.prompt, *(f"\n{other.prompt}" for other in others)]
    answers = (example.outputs, *(other.outputs for other in others))
    pieces = zip(prompts, (" " + ", ".join(values) for values in answers), strict=True)
    return ContextText(task.name, tuple(pieces), answers, example)


def encode(context: ContextText, tokenizer: "Tokenizer") -> Haystack:
    """The context in tokens, with the positions of the answers and of their needles: the needle
    sentence; the whole prompt of a question of the user's own, since nobody says where in it the
    answer is; and nothing where the answer stands nowhere, as in what follows a text."""
    import torch

    hidden = hidden_passages(context, tokenizer)
    ids: list[int] = []
    questions = []
    for number, (prompt, answer) in enumerate(context.pieces):
        # Tokens that a tokenizer puts before any text come before the first piece only.
        ids += encode_after(ids, prompt, tokenizer) if ids else tokenizer(prompt)["input_ids"]
        start = len(ids)
        ids += encode_after(ids, answer, tokenizer)
        if number not in context.left_out:
            needle = hidden.get(number, range(0) if context.sources else range(start))
            questions.append(Question(range(start, len(ids)), needle, context.task))
    return Haystack(torch.tensor(ids), tuple(questions))


def hidden_passages(context: ContextText, tokenizer: "Tokenizer") -> dict[int, range]:
    """For each question of which it is known, the tokens of the passage with its answer."""
    prompt, places = context.pieces[0][0], dict[int, tuple[int, int]]()  # places: in characters
    if context.example:
        needles = {each.value: each for each in context.example.needles}
        for number, values in enumerate(context.answers):
            # Of several values from the first one's sentence to the last one's.
            asked = [needles[value] for value in values]
            ends = [needle.start + len(needle.sentence) for needle in asked]
            places[number] = min(needle.start for needle in asked), max(ends)
    for number, source in enumerate(context.sources):
        if source:
            begin = prompt.index(source)
            places[number] = begin, begin + len(source)
    if not places:
        return {}
    encoded = tokenizer(prompt, return_offsets_mapping=True)
    offsets, found = list(enumerate(encoded["offset_mapping"])), {}
    for number, (begin, end) in places.items():
        # Every token with a character of the passage; `max`: a token without any, such as the one
        # that begins a text, has first == last and is in none.
        inside = [i for i, (first, last) in offsets if first < end and last > max(begin, first)]
        found[number] = range(inside[0], inside[-1] + 1)
    return found


def encode_after(ids: Sequence[int], text: str, tokenizer: "Tokenizer") -> list[int]:
    """The tokens of a text that follows others.

    Not the rest of the tokens of both together: answers must be tokens of their own, as generation
    makes them, and a tokenizer may merge over the seam. But some put a blank before whatever they
    encode, which would double it here; after a line break they put none. So both ways are tried,
    and the first that decodes to the text is taken."""
    texts = text, "\n", f"\n{text}"
    alone, line, after_line = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts)
    candidates = [alone]
    if after_line[: len(line)] == line:
        candidates.append(after_line[len(line) :])
    last = list(ids[-8:])  # as much as decoding may depend on
    for candidate in candidates:
        # Some write a letter and its accent as one sign.
        found = f"{tokenizer.decode(last + candidate)}", f"{tokenizer.decode(last)}{text}"
        if len({unicodedata.normalize("NFC", each) for each in found}) == 1:
            return candidate
    raise UserError(
        f"This tokenizer cannot continue a text with {text[:40]!r}: decoded, it reads "
        f"{tokenizer.decode(last + alone)!r}. Use one that gives a text back unchanged."
    )


def check_disjoint(folder: Path, test_texts: Iterable[str]) -> int:
    """The number of test texts compared. UserError if one holds a needle of the set in the folder:
    the same key with the same value."""
    texts = (json.loads(line)["text"] for line in (folder / TEXTS).read_text("utf-8").splitlines())
    pairs = {pair for text in texts for pair in needles.pairs_in(text)}
    count = 0
    for count, text in enumerate(test_texts, start=1):
        # A key alone may stand in both: what is asked for is its value.
        if shared := sorted(pairs & needles.pairs_in(text)):
            problem = f"The calibration set and test example {count} share the needle {shared[0]}"
            raise UserError(f"{problem}, which must not be. Use another --seed.")
    return count


def build_set(
    settings: CalibrationSettings,
    tokenizer: "Tokenizer",
    positions: int | None = None,
    reword: Rewording | None = None,
) -> tuple[Calibration, list[ContextText], dict[str, str]]:
    """The set, its texts, and facts on what they were made of. `positions` of the model: questions
    on longer texts are refused. `reword`: of eval/own_words.py, if the settings ask for that."""
    if settings.questions:
        contexts = read_questions(Path(settings.questions))
        facts = {"questions_xxh3": hash_file(Path(settings.questions))}
    else:
        material = gather_material(settings)
        contexts, facts = build_contexts(settings, material, tokenizer), material.facts
    if settings.answers == "own-words" and reword is not None:
        contexts = without_spare(reword(contexts), settings)
        if not contexts:
            tasks = ", ".join(settings.tasks)
            raise UserError(
                f"The dense model answers no question of {tasks}, so none is left. Add needles, as "
                "niah_single_1, to the tasks, or use shorter texts."
            )
    haystacks = [encode(context, tokenizer) for context in contexts]
    longest = max(len(haystack.ids_T) for haystack in haystacks)
    haystacks += random_haystacks(settings, tokenizer, longest)
    for context, haystack in zip(contexts, haystacks, strict=False):  # random ones come after
        if context.example is None and len(haystack.ids_T) > (positions or math.inf):
            problem = f"{context.place} takes {len(haystack.ids_T):,} tokens"
            raise UserError(
                f"{problem}, the model has {positions:,} positions; shorten or omit it."
            )
    return Calibration(haystacks), contexts, facts


def random_haystacks(
    settings: CalibrationSettings, tokenizer: "Tokenizer", longest: int
) -> list[Haystack]:
    """Texts of random tokens, about as long as the longest other, in which single tokens of later
    copies are the questions."""
    if not settings.random_texts:
        return []
    if (usual := longest // REPEATS) < 2 * COPY_BEGINS:
        raise UserError(
            f"Texts of {longest} tokens are too short for texts of random tokens, which need "
            f"{2 * COPY_BEGINS * REPEATS}. Use longer texts, or --random-texts 0 (in "
            "`bosch recover` --calibration.random-texts 0)."
        )
    blocks = block_lengths(usual, settings.random_texts)
    known = ordinary_tokens(tokens_of(tokenizer), tokenizer)
    texts = draw_texts(known, blocks, REPEATS * usual, SEED + settings.seed)
    # As much as another text: one of the user's own has one question.
    counts_as = 1 if settings.questions else settings.questions_per_context
    found = []
    for ids_T, block in zip(texts, blocks, strict=True):
        # A copy is known for one after its first tokens. Not every token after them: they are
        # thousands, and each takes logits for the whole vocabulary.
        places = range(block + COPY_BEGINS, len(ids_T))
        step = -(-len(places) // MOST_COPIED)
        asked = [Question(range(p, p + 1), range(0), COPIED) for p in places[::step]]
        found.append(Haystack(ids_T, tuple(asked), counts_as=counts_as))
    return found


def without_spare(contexts: list[ContextText], settings: CalibrationSettings) -> list[ContextText]:
    """Of each task of text_tasks.py as many questions as are asked for, if so many are left, with
    the first of its contexts."""
    drawn, counts = Counter(context.task for context in contexts), Counter[str]()
    kept = []
    for context in contexts:
        if context.sources:
            spare = 1 if context.own_answers else SPARE
            wanted = drawn[context.task] // spare * settings.questions_per_context
            open_ones = [n for n in range(len(context.pieces)) if n not in context.left_out]
            surplus = open_ones[max(0, wanted - counts[context.task]) :]
            counts[context.task] += len(open_ones) - len(surplus)
            context = replace(context, left_out=(*context.left_out, *surplus))
            if len(open_ones) == len(surplus):
                continue
        kept.append(context)
    return kept


def write_set(
    folder: Path,
    settings: CalibrationSettings,
    tokenizer: "Tokenizer",
    tokenizer_hash: str,
    positions: int | None = None,
    reword: Rewording | None = None,
) -> Calibration:
    """Build the set and write it into a folder."""
    calibration, contexts, material = build_set(settings, tokenizer, positions, reword)
    write_calibration(folder, calibration)
    lines = ""
    for context in contexts:
        pairs = context.example.pairs if context.example else ()
        row = {"task": context.task, "text": context.text, "answers": context.answers}
        lines += json.dumps(row | {"pairs": pairs}) + "\n"
    write_atomically(folder / TEXTS, lines)
    facts = {
        "settings": settings,
        "material": material,
        "tokenizer_hash": tokenizer_hash,
        "contexts": Counter(context.task for context in contexts),
        "questions": calibration.texts.num_questions,
        "longest": calibration.longest,
        "files": {name: hash_file(folder / name) for name in (FILE, TEXTS)},
    }
    write_sealed_json(folder / FACTS, facts)
    say(
        f"calibration: {calibration.texts.num_questions} questions in {len(contexts)} contexts of "
        f"at most {calibration.longest:,} tokens"
    )
    if settings.random_texts:
        say(f"and {settings.random_texts} texts of random tokens, for searches")
    return calibration
