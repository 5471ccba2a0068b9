"""A duel at equal KV bytes: our hybrids against KV eviction, as kvpress 0.5.5 does it.

    python3 -m venv .venv-kvpress && .venv-kvpress/bin/pip install torch kvpress==0.5.5
    python launch/fetch_real_model.py runs/real
    python -m benchmarks rivals --folder runs/real --rows rows.jsonl \
        --masks benchmarks/results/real-formats.jsonl

`--masks` are rows of the benchmark real_model. All sides continue the same needle prompts greedily,
in fp32. KV bytes are what a cache allocates at the end of the prompt, before the first new token:
of ours with its spare room. A share is that of the dense model's prompt in transformers' own cache,
which has no spare room. Of the masks that `--masks` records, a hybrid has that with the most full
groups which fits, so it may hold less. A press keeps exactly what the share leaves beside the
tokens that follow the text: question and beginning of the answer, or, with the question known, the
latter alone. `--hybrids` are folders (of a trained hybrid, say), and each adds its own share.
Answers come on top on all sides: of a press its new tokens, of a hybrid room for a few in each
window.

A row is one text on one side, written when it is done; the same command goes on with those that are
missing. Rows without `allocated_bytes` are older: their `kv_bytes` count entries in use. Those of
hybrids and of the dense model are written again with what is allocated, and not answered again,
also where their share is another one now. Those of presses stay: their cache has no spare room. The
table counts the texts that all sides have. Speed is that of one thread's CPU time;
peak bytes are what the process took during prefill beyond what it had.
"""

import ctypes
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np
import torch
from transformers import Cache, DynamicCache

from benchmarks import real_model
from benchmarks._measure import DeviceOptions, PeakMemory, Row, append_row, now, read_rows
from benchmarks.real_model import DENSE, JUDGING_SEED, QUESTIONS, UNUSUAL, Bench
from bosch.attention.cache import CACHE, GrowingLayer, RollingLayer, allocated_bytes, kv_bytes
from bosch.config import CalibrationConfig, shared_fields
from bosch.data import calibration, needles
from bosch.eval.generate import end_tokens
from bosch.eval.metrics import string_match_all
from bosch.eval.prompt_cache import copy_cache, new_cache
from bosch.eval.report.intervals import resample_examples
from bosch.hybrid.conversion import deploy, head_size
from bosch.hybrid.sinks import measure_static_sink
from bosch.masks.mask import GroupMask
from bosch.model import load_model
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import say, say_once
from bosch.sink import Sink
from bosch.training.model_start import read_config

SIDE_PROGRAM = Path(__file__).with_name("_kvpress_side.py")
AGNOSTIC = "KVzipPress"  # made for unknown questions
PRESSES = ("ExpectedAttentionPress", "SnapKVPress", "StreamingLLMPress", AGNOSTIC)
KNOWN_PRESSES = (*PRESSES, "TOVAPress", "KnormPress", "KeyDiffPress")
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1")  # that a small model can do
LONG_ENOUGH = 0.7  # of the length: where a draw is too long, RULER leaves 500 words out
SIZES = ("kv_bytes", "allocated_bytes")  # of our caches: in use, and with their spare room
SPEED = ("peak_bytes", "prefill", "decode")
QUESTION = {None: "", False: "unknown", True: "known"}
TITLE = "{folder}, equal KV bytes, {place}, fp32"
COLUMNS = {"tokens": "length", "share": "share", "side": "side", "question": "question"}
COLUMNS |= {"right, %": "value:.1f", "hybrid - side": "against", "KV allocated": "held:.3f"}
COLUMNS |= {"peak MB": "peak_bytes:.0f", "prefill tokens/s": "prefill:.0f", "decode": "decode:.1f"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    folder: Path = Path("runs/real")  # made by launch/fetch_real_model.py
    rows: Path = Path("runs/rivals.jsonl")  # gets the rows
    kvpress_python: Path = Path(".venv-kvpress/bin/python")  # of an environment with kvpress
    presses: tuple[str, ...] = PRESSES  # of kvpress
    masks: Path = real_model.Options.rows  # rows of the benchmark real_model, whose masks are used
    # What chose them; the first is compared. `razor` stands for DuoAttention's quick scorer, whose
    # texts kvpress would fetch.
    methods: tuple[str, ...] = ("bosch", "razor")
    answers: Literal["expected", "own-words"] = "own-words"  # by which the masks were chosen
    hybrids: tuple[Path, ...] = ()  # folders of more hybrids
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)  # of the dense KV bytes
    lengths: tuple[int, ...] = (1_200, 2_100)  # tokens of a text with its questions and answers
    contexts: tuple[int, ...] = (20, 10)  # texts of each length, with four questions each
    tasks: tuple[str, ...] = TASKS  # of RULER
    window: int = 128  # of hybrids, in tokens
    more: int = 8  # tokens that an answer may have beyond those of the right one
    seed: int = 0  # of calibration set and texts

    def __post_init__(self) -> None:
        for name in self.presses:
            if name not in KNOWN_PRESSES:
                raise UserError(f"--presses {name}: no such press; {suggest(name, KNOWN_PRESSES)}")
        if self.presses and not self.kvpress_python.is_file():
            made = ".venv-kvpress && .venv-kvpress/bin/pip install torch kvpress==0.5.5"
            problem = f"--kvpress-python {self.kvpress_python} does not exist"
            raise MissingFileError(f"{problem}; make that environment: python3 -m venv {made}")
        for share in self.shares:
            if not 0 < share < 1:
                raise UserError(f"--shares {share:g}: name parts of the dense KV bytes, below 1.")
        if len(self.contexts) != len(self.lengths):
            raise UserError("--contexts: name a number of texts for each of --lengths.")


@dataclass(frozen=True)
class Side:
    name: str
    share: float = 1.0
    known: bool | None = None  # whether a press sees the question; None: no press


SIDE_KEYS = {"side", "share", "known"}  # of a row
# name (by its content), task, ids, questions: each ids, prefix, answer, answer_ids
Text = dict[str, Any]


def measure(options: Options) -> Iterator[Row]:
    duel = Duel(options)
    lengths = zip(options.lengths, options.contexts, strict=True)
    texts = {length: duel.texts(length, contexts) for length, contexts in lengths}
    for length in texts:
        duel.run(length, texts[length])
    for length in texts:
        yield from duel.compare(length, texts[length])


class Duel:
    def __init__(self, options: Options) -> None:
        self.options, self.device = options, options.start()
        self.bench = Bench(
            real_model.Options(folder=options.folder, answers="expected"), self.device
        )
        self.folders = {f"{path.parent.name}/{path.name}": path for path in options.hybrids}
        config = read_config(self.bench.path)
        self.num_groups = int(config.num_hidden_layers * config.num_key_value_heads)
        # A key and a value in float32, of one token in one group.
        self.entry_bytes = 2 * head_size(config) * torch.float32.itemsize
        options.rows.parent.mkdir(parents=True, exist_ok=True)

    @cached_property
    def sink(self) -> Sink:
        """As it was when the masks were chosen."""
        haystacks = self.bench.questions(self.options.seed).haystacks
        return measure_static_sink(self.bench.judged, [haystack.ids_T for haystack in haystacks])

    def texts(self, length: int, contexts: int) -> list[Text]:
        """Tasks in turn, and only long texts. One text serves all its questions."""
        asked: dict[str, Any] = shared_fields(CalibrationConfig, self.bench.config.calibration)
        asked |= {"examples": 3 * QUESTIONS * contexts, "length": length}
        asked |= {"tasks": self.options.tasks, "seed": self.options.seed + JUDGING_SEED}
        settings = calibration.CalibrationSettings(**asked)
        material, tokenizer = calibration.gather_material(settings), self.bench.tokenizer
        numbered, count = [], defaultdict[str, int](int)
        for context in calibration.build_contexts(settings, material, tokenizer):
            task, example = calibration.task_with_keys(context.task, settings), context.example
            assert example is not None
            first, questions = needles.write_question(task, example.queries, example.outputs), []
            ids = tokenizer(example.input.removesuffix(first.input))["input_ids"]
            for each in (first, *needles.ask_other_keys(task, example)):
                (answer,), parts = each.outputs, [ids]
                for part in (each.input, each.answer_prefix, f" {answer}"):
                    parts.append(calibration.encode_after(parts[-1], part, tokenizer))
                names = ("ids", "prefix", "answer_ids")
                questions.append(dict(zip(names, parts[1:], strict=True)) | {"answer": answer})
            if len(ids) >= LONG_ENOUGH * length:
                text = {"name": fingerprint(example.prompt)[:8], "task": task.name, "ids": ids}
                # Sorted by their number within the task, so that tasks come in turn and any first
                # texts hold all of them alike.
                numbered.append((count[task.name], task.name, text | {"questions": questions}))
                count[task.name] += 1
        found = [text for *_, text in sorted(numbered, key=lambda each: each[:2])][:contexts]
        if len(found) < contexts:
            problem = f"--contexts: of {length} tokens only {len(found)} texts are long enough"
            raise UserError(f"{problem}, not {contexts}; ask for fewer.")
        return found

    def mask(self, method: str, share: float, texts: Sequence[Text]) -> GroupMask | None:
        """The recorded one with the most full groups that fits."""
        options = self.options
        made = {"method": method, "window": options.window, "sink": "static", "seed": options.seed}
        if not options.masks.is_file():
            problem = f"--masks {options.masks} does not exist"
            made_by = f"real_model --folder {options.folder} --rows {options.masks}"
            raise MissingFileError(f"{problem}; `python -m benchmarks {made_by}` makes it.")
        rows = [
            row
            for row in read_rows(options.masks)
            if made.items() <= row.items()
            and not any(map(row.get, UNUSUAL))
            # Rows that do not say were chosen by the expected answers.
            and row.get("answers", "expected") == options.answers
        ]
        masks = [GroupMask.from_rows(row["z"], options.window) for row in rows]
        fit = [mask for mask in masks if held(1 - mask.ratio, options.window, texts) <= share]
        return max(fit, key=lambda mask: mask.num_full, default=None)

    def sides(self, texts: Sequence[Text]) -> list[Side]:
        """The dense model, hybrids, presses."""
        options, found = self.options, [Side(DENSE)]
        for name in self.folders:
            num_full, window = self.groups(Side(name), texts)
            share = held(num_full / self.num_groups, window, texts)
            found.append(Side(name, round(share, 3)))
        for share in options.shares:
            fit = [name for name in options.methods if self.mask(name, share, texts) is not None]
            found += [Side(name, share) for name in fit]
            if not fit:
                least, about = held(0, options.window, texts), f"{mean_tokens(texts):,.0f} tokens"
                problem = f"{about}: no mask of {options.masks} fits in a share of {share:g}"
                say_once(f"{problem}; windows of {options.window} alone hold {least:.3f}")
        shares = sorted({side.share for side in found[1:]}, reverse=True)
        for known in (False, True):
            names = [n for n in options.presses if not (known and n == AGNOSTIC)]
            found += [Side(name, share, known) for share in shares for name in names]
        return found

    def groups(self, side: Side, texts: Sequence[Text]) -> tuple[int, int]:
        """How many are full on a side without a press, and the window of the others."""
        if side.name in self.folders:
            bosch = read_config(self.folders[side.name]).bosch
            return sum(bosch["num_full"]), bosch["window"]
        mask = None if side.name == DENSE else self.mask(side.name, side.share, texts)
        return (self.num_groups, 1) if mask is None else (mask.num_full, mask.window_tokens)

    def sizes(self, num_full: int, window: int, text: Text) -> Row:
        """A row's bytes, without the model: caches are given as many tokens as in `answer`."""
        full, windowed = (entries_of(text, each) for each in (None, window))
        row: Row = {}
        for name, of_full, of_windowed in zip(SIZES, full, windowed, strict=True):
            entries = num_full * of_full + (self.num_groups - num_full) * of_windowed
            row[name] = round(entries * self.entry_bytes)
        return row

    def count_again(self, length: int, texts: Sequence[Text], sides: Sequence[Side]) -> None:
        """Write rows that were made when entries in use were counted with what is allocated. They
        may have another share. Where a side had other groups on the window, its bytes in use tell.
        """
        done, known = self.done(length), SIDE_KEYS | {"length", "text", "task"}
        older = [r for r in self.rows(length) if r["known"] is None and "scores" in r]
        for side in sides:
            of_side = [row for row in older if row["side"] == side.name]
            missing = [text for text in texts if (text["name"], side) not in done]
            if side.known is not None or not of_side or not missing:
                continue
            num_full, window = self.groups(side, texts)
            for text in missing:
                sizes = self.sizes(num_full, window, text)
                for row in of_side:
                    if (row["text"], row["kv_bytes"]) == (text["name"], sizes["kv_bytes"]):
                        more = {name: value for name, value in row.items() if name not in known}
                        self.write(length, text, side, more | sizes)
                        break

    def run(self, length: int, texts: Sequence[Text]) -> None:
        """All that is missing."""
        sides, jobs = self.sides(texts), list[Any]()
        self.count_again(length, texts, sides)
        done = self.done(length)
        for side in sides:
            missing = [text for text in texts if (text["name"], side) not in done]
            if side.known is None and missing:
                say(f"{length:,} tokens: {side.name}, {side.share:g}: {len(missing)} texts")
                model, mask = self.bench.judged, self.mask(side.name, side.share, texts)
                if side.name in self.folders:
                    model = load_model(self.folders[side.name], torch.float32, str(self.device))
                elif side.name != DENSE and mask is not None:
                    model = deploy(model, mask.z, mask.window_tokens, self.sink)
                for text in missing:
                    self.write(length, text, side, self.answer(model, text))
        presses = [side for side in sides if side.known is not None]
        # Each as shipped, at the smallest share.
        smallest = {side.name: side for side in presses if side.known is False}
        timed = [Side(DENSE, 1, False), *smallest.values()] if presses else []
        if timed := [side for side in timed if ("speed", side) not in done]:
            jobs.append((texts[0], timed, {"shipped": [asdict(side) for side in timed]}))
        for text in texts:
            if lacking := [side for side in presses if (text["name"], side) not in done]:
                jobs.append((text, lacking, {"sides": [asdict(side) for side in lacking]}))
        for (text, asked, job), found in self.ask_kvpress(jobs) if jobs else ():
            for side, row in zip(asked, found, strict=True):
                if "shipped" not in job:
                    sizes = {"allocated_bytes": row["allocated_bytes"]}
                    row = judge(self.bench, text, row["tokens"], sizes)
                self.write(length, text, side, row)

    def rows(self, length: int) -> list[Row]:
        return [row for row in read_rows(self.options.rows) if row["length"] == length]

    def done(self, length: int) -> dict[tuple[str, Side], Row]:
        """By text; `speed` for presses as shipped. Without rows that `count_again` replaces."""
        rows = self.rows(length)
        rows = [r for r in rows if r["known"] is not None or "allocated_bytes" in r]
        sides = [Side(row["side"], row["share"], row["known"]) for row in rows]
        names = [row["text"] if "scores" in row else "speed" for row in rows]
        return dict(zip(zip(names, sides, strict=True), rows, strict=True))

    def write(self, length: int, text: Text, side: Side, more: Row) -> None:
        row: Row = {"length": length, "text": text["name"], "task": text["task"]}
        row |= {"side": side.name, "share": side.share, "known": side.known} | more
        append_row(self.options.rows, row)

    @torch.inference_mode()
    def answer(self, model: Any, text: Text) -> Row:
        """An answer ends as soon as it is right."""

        def forward(cache: Any, ids: list[int]) -> int:
            ids_BT = torch.tensor([ids], device=self.device)
            logits = model(ids_BT, use_cache=True, **{CACHE: cache}, logits_to_keep=1).logits
            return int(logits[0, -1].argmax())

        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # of glibc alone
            trim(0)  # what is free counts as free
        memory, whole, begin = PeakMemory(self.device), new_cache(model.config), now(self.device)
        before = memory.read() or 0
        forward(whole, text["ids"])
        row: Row = {"prefill": round(len(text["ids"]) / (now(self.device) - begin))}
        row["peak_bytes"] = (memory.read() or 0) - before
        ends = end_tokens(model.generation_config.eos_token_id, self.bench.tokenizer)
        sizes: dict[str, list[int]] = {name: [] for name in SIZES}
        seconds, steps, answers = 0.0, 0, []
        for question in text["questions"]:
            cache, right = copy_cache(whole, len(text["ids"])), question["answer_ids"]
            tokens = [forward(cache, question["ids"] + question["prefix"])]
            for name, size in zip(SIZES, (kv_bytes(cache), allocated_bytes(cache)), strict=True):
                sizes[name].append(size)
            begin = now(self.device)
            # The right tokens need no more decoding; an answer that is worded otherwise gets a few
            # more.
            while tokens != right and len(tokens) < len(right) + self.options.more:
                if tokens[-1] in ends:
                    break
                tokens.append(forward(cache, tokens[-1:]))
                steps += 1
            seconds += now(self.device) - begin
            answers.append(tokens)
        row["decode"] = round(steps / max(seconds, 1e-9), 1)
        return judge(self.bench, text, answers, sizes) | row

    def ask_kvpress(self, jobs: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Each job, a text with more, with what kvpress found."""
        with tempfile.TemporaryDirectory() as temporary:
            # Without the chat template, whose beginning KVzip would take to be in the text.
            (model := Path(temporary) / "model").mkdir()
            for file in self.bench.path.resolve().iterdir():
                if file.suffix in (".json", ".safetensors"):
                    (model / file.name).symlink_to(file)
            asked: Row = {"threads": self.options.threads, "more": self.options.more}
            asked |= {"model": str(model), "texts": [text | more for text, _, more in jobs]}
            (job := Path(temporary) / "job.json").write_text(json.dumps(asked))
            command = [str(self.options.kvpress_python), "-I", str(SIDE_PROGRAM), str(job)]
            # Line by line: what was answered before a kill is in the rows.
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    number, found = json.loads(line)
                    yield jobs[number], found
        if process.returncode:
            raise UserError(f"kvpress ended with {process.returncode}; its message is above.")

    def compare(self, length: int, texts: Sequence[Text]) -> Iterator[Row]:
        """Rows of the table, and a sentence for each share."""
        done, sides = self.done(length), self.sides(texts)
        # Sides are compared on the same texts only, or the difference would be of texts.
        common = [t["name"] for t in texts if all((t["name"], side) in done for side in sides)]
        if not common:
            say(f"{length:,} tokens: no text has answers of all sides yet")
            return
        timed = {side.name: row for (name, side), row in done.items() if name == "speed"}
        # Of transformers' own cache of the dense model, at the end of the prompts.
        dense_bytes = sum(
            self.num_groups * mean_tokens([text]) * self.entry_bytes
            for text in texts
            if text["name"] in common
        )
        verdicts: dict[Side, dict[str, list[str]]] = {}
        for side in sides:
            rows = [done[name, side] for name in common]
            ours = next(s for s in sides if s.known is None and s.share == side.share)
            speeds = [timed[side.name]] if side.known is not None else rows
            row = {name: median(each[name] for each in speeds) for name in SPEED}
            row |= {"length": length, "question": QUESTION[side.known], "against": ""}
            name = f"{side.name}, {length:,} tokens, share {side.share:g}"
            row |= asdict(side) | {"name": name, "side": side.name}
            row |= {"value": 100 * mean(score for each in rows for score in each["scores"])}
            # Presses' rows may be older: their cache has no spare room.
            names = ["allocated_bytes" if "allocated_bytes" in r else "kv_bytes" for r in rows]
            used = sum(each[name] for each, name in zip(rows, names, strict=True))
            row |= {"held": used / dense_bytes, "unit": "% right"}
            row["peak_bytes"] /= 1e6
            if side != ours:
                points, low, high = difference([done[name, ours] for name in common], rows)
                row["against"] = f"{points:+.1f} [{low:+.1f}, {high:+.1f}]"
                place = "above" if low > 0 else "below" if high < 0 else "not told apart from"
                places = verdicts.setdefault(ours, {})
                places.setdefault(place, []).append(f"{side.name} {row['question']}".strip())
            yield row
        for ours, places in verdicts.items():
            parts = "; ".join(f"{place} {', '.join(names)}" for place, names in places.items())
            about = f"{length:,} tokens, {QUESTIONS * len(common)} questions"
            say(f"At {ours.share:g} of the KV bytes ({about}) {ours.name} is {parts}.")


def mean_tokens(texts: Sequence[Text]) -> float:
    """Of the prompts."""
    parts = [(t["ids"], q["ids"], q["prefix"]) for t in texts for q in t["questions"]]
    return mean(sum(map(len, each)) for each in parts)


def held(full: float, window: int, texts: Sequence[Text]) -> float:
    """Share of the dense KV bytes that a hybrid allocates, by its share of full groups."""
    of_full, of_windowed = (
        mean(entries_of(text, each)[1] for text in texts) for each in (None, window)
    )
    return (full * of_full + (1 - full) * of_windowed) / mean_tokens(texts)


def entries_of(text: Text, window: int | None) -> tuple[float, float]:
    """Of one group of our cache at the end of a prompt: in use, and allocated. Means over the
    questions. None: a full group."""
    whole, found = DynamicCache(), list[tuple[int, int]]()
    whole.layers = [GrowingLayer() if window is None else RollingLayer(window)]
    read_blanks(whole, len(text["ids"]))
    for question in text["questions"]:
        cache = copy_cache(whole, len(text["ids"]))
        read_blanks(cache, len(question["ids"] + question["prefix"]))
        # A key and a value of a byte each.
        found.append((kv_bytes(cache) // 2, allocated_bytes(cache) // 2))
    in_use, allocated = map(mean, zip(*found, strict=True))
    return in_use, allocated


def read_blanks(cache: Cache, num_tokens: int) -> None:
    blank = torch.zeros(1, 1, num_tokens, 1, dtype=torch.int8)
    cache.update(blank, blank, 0)


def judge(
    bench: Bench, text: Text, tokens: Sequence[list[int]], sizes: Mapping[str, list[int]]
) -> Row:
    """`sizes`: bytes at each question."""
    answers = [bench.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    pairs = zip(answers, text["questions"], strict=True)
    scores = [string_match_all(answer, [question["answer"]]) for answer, question in pairs]
    means = {name: round(mean(found)) for name, found in sizes.items()}
    return {"scores": scores, "answers": answers} | means


def difference(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[float, float, float]:
    """In points, with a 95 % interval: texts of a task are drawn, each with its questions."""
    cells: list[Any] = [defaultdict(dict), defaultdict(dict)]
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        for cell, row in zip(cells, pair, strict=True):
            cell[row["task"], row["length"]][number] = 100 * mean(row["scores"])
    weights = {name: len(found) / len(ours) for name, found in cells[0].items()}
    means = [mean(100 * mean(row["scores"]) for row in rows) for rows in (ours, theirs)]
    drawn = resample_examples(cells, None, weights, "rivals")
    if drawn is None:  # a task with one text
        return means[0] - means[1], -np.inf, np.inf
    low, high = np.percentile(drawn[0][:, 0] - drawn[0][:, 1], [2.5, 97.5])
    points = means[0] - means[1]
    if low < high:
        return points, float(low), float(high)
    # As shown_difference in _measure.py: none of n may still be 3 in n.
    bound = min(100, 300 / min(map(len, cells[0].values()))) / len(cells[0])
    return points, points - bound, points + bound
