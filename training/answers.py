"""Answers of the dense model as training data: questions on the training text (data/text_tasks.py)
in place of the text of some sequences, and what the model answers.

What windows take shows where a model writes: a text is predicted well without its far parts, an
answer that copies them is not. So of these sequences only the answers are learned from.

A question that has a right answer comes with it, and the model reads both: the answer counts if
each of its tokens is the likeliest, that is, if the model would have written it. Where nobody knows
the answer the model writes, the likeliest tokens or drawn ones. What does not count is left out,
and another question asked. Half of the questions are behind the chat template, if there is one.

Each file is made of its sequences alone, seeded by their numbers: a computation that was killed
goes on with the files that are missing, and any number of ranks writes the same bytes.
"""
# T tokens, B texts, N tokens of answers, V vocabulary

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from bosch.config import TrainConfig
from bosch.data import answer_files, text_tasks
from bosch.data.answer_files import FILE, SUMMARY, choose_sequences, row_type, rows_in_file
from bosch.data.loader import TokenFolder
from bosch.data.needle_text import split_sentences
from bosch.data.needles import DoesNotFitError, token_counter
from bosch.data.text_tasks import OWN_WORDS, TASKS, Asked, Text
from bosch.kernels import fuse_forward
from bosch.model import load_model, load_tokenizer
from bosch.model_files import read_json_object
from bosch.run.dist import Ranks
from bosch.run.files import write_atomically, write_sealed_json
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import say, track
from bosch.training.checkpoint import explain_refusal
from bosch.training.model_start import drop_windows, read_config
from bosch.training.parallel import start_world

TRIES = 6  # times that a sequence is asked until an answer counts; the last time any does
ANSWER_SHARE, MOST_TOKENS = 1 / 4, 512  # of a sequence, and at most: the tokens of what is written
FEWEST_TOKENS = 8  # of an answer in the model's own words
# Questions on one text, at least and at most; of a list the lines, as far as there is room.
QUESTIONS = {"copy": (8, 64), "look_up": (4, 16), "quote": (1, 4)}
LINE_TOKENS = 8  # more than a line of a list has
NO_ANSWER = "\ufffd"  # no answer begins like this
SEAM_TOKENS = 8  # by which a text may be longer than its parts
WORDS_FROM = 256  # sequences whose words stand in lists and entries
BATCH_TOKENS = 16_384  # of texts that are answered at once
SHOWN = 3


@dataclass(frozen=True)
class Question:
    """For one sequence: what is asked, and how."""

    sequence: int
    attempt: int  # from 1
    task: str
    asked: list[Asked]
    in_chat: bool  # behind the chat template
    is_drawn: bool  # what is written is a sample

    @property
    def is_written(self) -> bool:
        return self.task in OWN_WORDS


@dataclass(frozen=True)
class Document:
    ids: list[int]
    is_answer: list[bool]


def write_answers(
    folder: Path, model: Path, tokens: TokenFolder, settings: TrainConfig, share: float, seed: int
) -> None:
    """Every rank calls this, and writes its share of the files."""
    start_world()
    ranks = Ranks.current()
    chosen = choose_sequences(share, len(tokens.train.rows))
    per_file = rows_in_file(tokens.seq_len)
    groups = [chosen[begin : begin + per_file] for begin in range(0, len(chosen), per_file)]
    files = [folder / FILE.format(number) for number in range(len(groups))]
    # Rank 0 looks, since files appear at different times on several machines.
    left = ranks.from_rank_0(lambda: [n for n, file in enumerate(files) if not file.is_file()])
    if not left:
        return
    writer = Writer(model, tokens, settings, seed)
    done = len(chosen) - sum(len(groups[number]) for number in left)
    with track("answers", len(chosen), "sequences", done) as bar:
        for number in left[ranks.rank :: ranks.world]:
            content = io.BytesIO()
            np.save(content, writer.answer(groups[number]))
            with explain_refusal(str(files[number])):
                write_atomically(files[number], content.getvalue())
            bar.advance(len(groups[number]) * min(ranks.world, len(left)))


def write_summary(folder: Path, model: Path, tokens: TokenFolder, share: float) -> None:
    """Once all files are there: what was asked, and what became of it."""
    length, num_sequences = tokens.seq_len, len(tokens.train.rows)
    chosen = choose_sequences(share, num_sequences)
    num_files = -(-len(chosen) // rows_in_file(length))
    summary: dict[str, Any] = {"share": share, "num_sequences": num_sequences}
    summary["answers"] = len(chosen)
    tokenizer = load_tokenizer(model)
    summary["end_tokens"] = end_tokens(model, tokenizer)
    if num_files:
        files = (answer_files.open_file(folder / FILE.format(n)) for n in range(num_files))
        rows = np.concatenate([*files])
        targets = np.unpackbits(rows["targets"], axis=1, count=length).astype(bool)
        summary["tokens"] = int(targets.sum())
        summary["left_out"] = int(rows["attempt"].sum()) - len(rows)
        tasks = summary["tasks"] = dict[str, dict[str, int]]()
        for number, task in enumerate(TASKS):
            of_task = rows["task"] == number
            tasks[task] = {
                "answers": int(of_task.sum()),
                "in_chat": int(rows["in_chat"][of_task].sum()),
                "drawn": int(rows["is_drawn"][of_task].sum()),
                "tokens": int(targets[of_task].sum()),
            }
        for row, is_answer in zip(rows[:SHOWN], targets, strict=False):
            text = tokenizer.decode(row["ids"][is_answer].tolist())
            say(f"answers, {[*TASKS][row['task']]}: {text[:120]!r}")
        say(
            f"answers: {summary['tokens']:,} tokens to learn from in {len(chosen):,} of "
            f"{num_sequences:,} sequences; {summary['left_out']:,} answers left out"
        )
    write_sealed_json(folder / SUMMARY, summary)


class Writer:
    """The dense model, and what it is asked."""

    def __init__(self, model: Path, tokens: TokenFolder, settings: TrainConfig, seed: int) -> None:
        self.tokens, self.seed, self.length = tokens, seed, tokens.seq_len
        self.tokenizer: Any = load_tokenizer(model)
        self.count = token_counter(self.tokenizer)
        self.model = load_dense(model, settings)
        self.ends = end_tokens(model, self.tokenizer)
        self.most_written = max(1, min(int(self.length * ANSWER_SHARE), MOST_TOKENS))
        # The same words whichever rank asks, since they decide the questions.
        rows = tokens.train.rows[:WORDS_FROM]
        text = text_tasks.make_text([s for row in rows for s in self.sentences(row)])
        text_tasks.check_words(text, "The training text", text_tasks.WITHOUT_ANSWERS)
        self.words = text.words

    def sentences(self, row_T: NDArray[np.unsignedinteger]) -> list[str]:
        text = self.tokenizer.decode(row_T.tolist(), skip_special_tokens=True)
        found = split_sentences([text], "training text")
        return found.sentences(len(found.words)) or ["-"]

    def answer(self, numbers: Sequence[int]) -> NDArray[Any]:
        """Rows of these sequences."""
        rows = np.zeros(len(numbers), row_type(self.length, self.tokens.summary["token_bytes"]))
        left = list(numbers)
        for attempt in range(1, TRIES + 1):
            questions = [q for number in left if (q := self.draw_question(number, attempt))]
            answered = [(q, self.read(q)) for q in questions if not q.is_written]
            for is_drawn in (False, True):
                asked = [q for q in questions if q.is_written and q.is_drawn == is_drawn]
                answered += zip(asked, self.write(asked), strict=True)
            for question, document in answered:
                if document is not None:
                    rows[numbers.index(question.sequence)] = self.as_row(question, document)
                    left.remove(question.sequence)
        assert not left, "the last time any answer counts"
        return rows

    def as_row(self, question: Question, document: Document) -> tuple[Any, ...]:
        """Of the type `row_type`."""
        end = len(document.ids)
        is_answer_T, ids_T = np.zeros(self.length, bool), np.empty(self.length, np.int64)
        is_answer_T[:end], ids_T[:end] = document.is_answer, document.ids
        ids_T[end:] = self.tokenizer.eos_token_id
        task, targets = [*TASKS].index(question.task), np.packbits(is_answer_T)
        how = (question.attempt, question.in_chat, question.is_drawn)
        return (question.sequence, task, *how, end, targets, ids_T)

    # ------------------------------------------------------------------------------- questions

    def draw_question(self, number: int, attempt: int) -> Question | None:
        """None if the one that is drawn does not fit into the sequence."""
        seed = f"{self.seed}/{number}/{attempt}"
        rng = random.Random(seed)
        task = rng.choice([*TASKS]) if attempt < TRIES else "continue"
        in_chat, is_drawn = rng.random() < 0.5, task in OWN_WORDS and rng.random() < 0.5
        if task == "continue" or not self.tokenizer.chat_template:
            in_chat = False  # nobody gives an assistant a bare text
        if attempt == TRIES:  # its own beginning, which fits in any case (`encode_prompt`)
            return Question(number, attempt, task, [], in_chat, is_drawn)
        low, high = QUESTIONS.get(task, (1, 1))
        if task == "copy":
            high = min(high, self.most_written // LINE_TOKENS, len(self.words) // 2)
        questions = rng.randint(min(low, high), high)
        room = self.length - SEAM_TOKENS
        if in_chat:
            turns = 1 if task == "copy" else questions
            room -= turns * len(self.tokenizer(self.in_chat(("", "")))["input_ids"])
        text = Text(tuple(self.sentences(self.tokens.train.rows[number])), self.words)
        try:
            asked = text_tasks.ask(
                task,
                text,
                length=room,
                count=self.count,
                seed=seed,
                questions=questions,
                answer_tokens=self.most_written,
            )
        except DoesNotFitError:
            return None
        question = Question(number, attempt, task, asked, in_chat, is_drawn)
        if in_chat and not question.is_written and self.find_in_chat(turns_of(question)) is None:
            return replace(question, in_chat=False)  # the template changes answers
        return question

    def in_chat(self, *turns: tuple[str, str | None]) -> str:
        """Each a prompt and its answer; None: to be written."""
        messages = []
        for prompt, answer in turns:
            messages.append({"role": "user", "content": prompt.strip()})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer.strip()})
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=turns[-1][1] is None
        )
        return text

    # --------------------------------------------------------------------------------- answers

    @torch.inference_mode()
    def read(self, question: Question) -> Document | None:
        """The questions with their right answers, of which those count that the model would have
        written; None if it would have written none."""
        text, spans = self.compose(question)
        encoded = self.tokenizer(text, **self.encoding(question), return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        if len(ids) > self.length:
            return None
        # `max`: a token without a character, such as the one that begins a text, is in no answer.
        answers = [
            [n for n, (a, b) in enumerate(offsets) if a < end and b > max(begin, a)]
            for begin, end in spans
        ]
        # The logits before the tokens of answers alone: those of all tokens may be many.
        places = [n - 1 for tokens in answers for n in tokens]
        device = self.model.device
        output = self.model(
            torch.tensor([ids], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(places, device=device),
        )
        logits_NV = output.logits[0]
        likeliest = dict(zip(places, logits_NV.argmax(1).tolist(), strict=True))
        is_answer = [False] * len(ids)
        for tokens in answers:
            if all(likeliest[n - 1] == ids[n] for n in tokens):
                for n in tokens:
                    is_answer[n] = True
        return Document(ids, is_answer) if any(is_answer) else None

    def compose(self, question: Question) -> tuple[str, list[tuple[int, int]]]:
        """A text with all answers, and where in it they are; of a list each line is one."""
        turns = turns_of(question)
        if question.in_chat:
            text, begins = self.in_chat(*turns), self.find_in_chat(turns)
            assert begins is not None, "draw_question takes no chat then"
        else:
            text, begins = "", []
            for prompt, answer in turns:
                begins.append(len(text + prompt))
                text += prompt + answer
        spans = []
        for begin, (_, answer) in zip(begins, turns, strict=True):
            for line in answer.splitlines(keepends=True):
                spans.append((begin, begin + len(line)))
                begin += len(line)
        return text, spans

    def find_in_chat(self, turns: Sequence[tuple[str, str]]) -> list[int] | None:
        """Where in the text of a chat each answer begins; None if the template changes one."""
        text, begins = self.in_chat(*turns), []
        for number, (prompt, answer) in enumerate(turns):
            # Up to an answer the text is the same with any other one. It is not always the end of a
            # generation prompt: Qwen3's template puts an empty think block before the last answer.
            # The dense model reads that block when its likeliest tokens are compared with the
            # answer, and the hybrid reads it in training; neither is to write it.
            other = self.in_chat(*turns[:number], (prompt, NO_ANSWER), *turns[number + 1 :])
            pairs = enumerate(zip(text, other, strict=False))
            begins.append(next((place for place, (a, b) in pairs if a != b), len(text)))
            if not text.startswith(answer, begins[-1]):
                return None
        return begins

    def write(self, questions: Sequence[Question]) -> list[Document | None]:
        """What the model answers; None if it is too short to count. All greedy, or all drawn."""
        documents: list[Document | None] = []
        at_once = max(1, BATCH_TOKENS // self.length)
        for begin in range(0, len(questions), at_once):
            batch = questions[begin : begin + at_once]
            prompts = [self.encode_prompt(question) for question in batch]
            most = [min(self.most_written, self.length - len(prompt)) for prompt in prompts]
            seed = fingerprint([self.seed, batch[0].sequence, batch[0].attempt])
            drawn = int(seed[:12], 16) if batch[0].is_drawn else None
            texts = write_tokens(self.model, prompts, max(1, *most), self.ends, drawn)
            for question, prompt, answer, count in zip(batch, prompts, texts, most, strict=True):
                answer = answer[: max(0, count)]
                fewest = FEWEST_TOKENS if question.attempt < TRIES else 1
                marks = [False] * len(prompt) + [True] * len(answer)
                whole = Document(prompt + answer, marks)
                documents.append(whole if len(answer) >= fewest else None)
        return documents

    def encode_prompt(self, question: Question) -> list[int]:
        if question.attempt == TRIES:
            return self.tokens.train.rows[question.sequence][: -(-self.length // 2)].tolist()
        text = question.asked[0].prompt
        if question.in_chat:
            text = self.in_chat((text, None))
        return list(self.tokenizer(text, **self.encoding(question))["input_ids"])

    def encoding(self, question: Question) -> dict[str, bool]:
        """A template writes the special tokens itself."""
        return {"add_special_tokens": not question.in_chat}


def turns_of(question: Question) -> list[tuple[str, str]]:
    """Its prompts, each with its answer."""
    turns = [(one.prompt, one.answer or "") for one in question.asked]
    if question.task == "copy":  # the prompts between the lines are written too
        (prompt, answer), *rest = turns
        turns = [(prompt, answer + "".join(prompt + answer for prompt, answer in rest))]
    if not question.in_chat:
        return turns
    if question.task == "copy":
        # The sign before the first line is the assistant's.
        above, _, sign = prompt.rpartition("\n")
        turns = [(above, sign + turns[0][1])]
    return [(prompt, answer.strip()) for prompt, answer in turns]


def load_dense(folder: Path, settings: TrainConfig) -> Any:
    """The whole model on this rank's device, a hybrid without its windows."""
    config = read_config(folder)
    drop_windows(config)
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    device = str(start_world())
    model = load_model(
        folder, dtype, device, settings.attention, config=config, attn_implementation="bosch"
    )
    fuse_forward(model)
    return model


def end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Those of the model's generation settings and of its tokenizer."""
    path = folder / "generation_config.json"
    found = read_json_object(path).get("eos_token_id") if path.is_file() else None
    ends = {*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id}
    return sorted(end for end in ends if end is not None)


@torch.no_grad()
def write_tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    most: int,
    ends: Sequence[int],
    seed: int | None = None,
    stops: bool = True,
) -> list[list[int]]:
    """What the model writes after each prompt, up to an end token, which is included. seed: of
    draws from its own distribution; None: the likeliest tokens. stops: no for a sharded model, of
    which every rank must make as many forwards."""
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[ends[0]] * (longest - len(p)) + list(p) for p in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    device, draws = next(model.parameters()).device, seed is not None
    how = GenerationConfig(
        max_new_tokens=most,
        do_sample=draws,
        top_k=0 if draws else None,
        eos_token_id=list(ends) if stops else None,
        pad_token_id=ends[0],
        use_cache=True,
    )
    # Of what is not set here transformers takes the folder's settings, such as a penalty or a
    # temperature: those of a chat, and not the model's own distribution.
    usual, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed or 0)
            written_BT = model.generate(
                ids_BT.to(device), attention_mask=mask_BT.to(device), generation_config=how
            )
    finally:
        model.generation_config = usual
    answers = []
    for row in written_BT[:, longest:].tolist():
        end = next((n for n, token in enumerate(row, 1) if token in ends), len(row))
        answers.append(row[:end])
    return answers
