"""Packing beside the bare tokenizer and beside datasets.map, its peak memory, and the loader's
speed on one core.

All alternatives read the same documents with the same tokenizer on the same cores, in turns; a
figure is the best of its rounds. The targets are for CPU time, of all processes together: other
work on the machine hardly changes it. Beside it stands the time on the clock, which on a machine
with other work says little."""

import json
import math
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks._options import BenchmarkOptions
from bosch.run.progress import say
from bosch.run.tables import show_table
from data.loader import Loader, open_tokens
from data.pack import PackConfig, pack_documents
from data.sources.files import FileSource
from data.sources.source import WeightedSource
from data.tokenizer_files import TokenizerText, describe_tokenizer
from data.toy_world.documents import write_document
from data.toy_world.tokenizer import train_tokenizer

AT_LEAST = {"encode_batch": 0.85, "datasets.map": 1.5}  # times its CPU time beside packing's


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    megabytes: int = 64
    """Text that is packed."""
    memory_megabytes: int = 64
    """One document of this size is packed for the peak memory; the promise is about 2000."""
    rounds: int = 3
    cores: int = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    seq_len: int = 32_768
    tokenizer: str | None = None
    """A model's folder or id; without it a BPE of 8,000 tokens is trained on toy texts."""
    corpus: Path | None = None
    """A .jsonl file to take the documents from; without it they are the toy world's."""

    @property
    def packing(self) -> PackConfig:
        return PackConfig(self.seq_len, held_out_sequences=1, workers=self.cores)


def measure(options: Options) -> list[dict[str, Any]]:
    documents = read_corpus(options)
    tokenizer = (
        AutoTokenizer.from_pretrained(options.tokenizer)
        if options.tokenizer
        else train_tokenizer(8000, 2000, seed=0)
    )
    text = describe_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = measure_packing(documents, tokenizer, text, place, options)
        rows.append(measure_memory(documents, text, place, options))
        rows.append(measure_loader(place / "packed", text))
    return rows


def read_corpus(options: Options) -> list[str]:
    """About the wanted number of bytes. The toy world is told again and again: it is written slower
    than it is read."""
    if options.corpus:
        told = [json.loads(line)["text"] for line in options.corpus.open()]
    else:
        told = [write_document(0, number) for number in range(8_000)]
    size = sum(map(len, told)) / len(told)
    return list(islice(cycle(told), max(1, round(options.megabytes * 1e6 / size))))


def measure_packing(
    documents: list[str], tokenizer: Any, text: TokenizerText, place: Path, options: Options
) -> list[dict[str, Any]]:
    os.environ["RAYON_NUM_THREADS"] = str(options.cores)
    corpus = place / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    bare = text.load()

    def encode() -> int:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        batches = (documents[i : i + 1000] for i in range(0, len(documents), 1000))
        encoded = (bare.encode_batch(batch, add_special_tokens=False) for batch in batches)
        return sum(len(encoding) for batch in encoded for encoding in batch)

    def pack() -> None:
        shutil.rmtree(place / "packed", ignore_errors=True)
        (place / "packed").mkdir()
        source = WeightedSource(FileSource(corpus), 1.0)
        pack_documents([source], text, options.packing, place / "packed")

    tokens = encode()  # starts its threads
    mapped = partial(map_with_datasets, corpus, tokenizer, place / "mapped", options)
    ways: dict[str, Callable[[], object]] = {
        "packing": pack,
        "encode_batch": encode,
        "datasets.map": mapped,
    }
    clock, processor = dict.fromkeys(ways, math.inf), dict.fromkeys(ways, math.inf)
    for number in range(options.rounds):
        for name, way in ways.items():
            begin, begin_cpu = time.perf_counter(), cpu_seconds()
            way()
            clock[name] = min(clock[name], time.perf_counter() - begin)
            processor[name] = min(processor[name], cpu_seconds() - begin_cpu)
            say(f"round {number + 1}: {name} done")
    rows: list[dict[str, Any]] = []
    for name in ways:
        row = {
            "name": f"packing against {name}, CPU",
            "value": processor[name] / processor["packing"],
            "unit": "x",
            "clock": clock[name] / clock["packing"],
            "tokens_per_cpu_second": tokens / processor[name],
            "tokens_per_second": tokens / clock[name],
        }
        rows.append(row | ({"at_least": AT_LEAST[name]} if name in AT_LEAST else {}))
    show_table(
        f"{tokens:,} tokens on {options.cores} cores",
        ("", "tokens/CPU second", "tokens/s", "packing faster, CPU", "on the clock"),
        [
            (
                name,
                f"{row['tokens_per_cpu_second']:,.0f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['value']:.2f}x",
                f"{row['clock']:.2f}x",
            )
            for name, row in zip(ways, rows, strict=True)
        ],
    )
    return rows


def cpu_seconds() -> float:
    """Of this process and of all children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def map_with_datasets(corpus: Path, tokenizer: Any, cache: Path, options: Options) -> None:
    """What the language modeling examples of transformers do: tokenize, then join and cut every
    column and copy the ids as labels, each a `datasets.map`."""
    import datasets

    datasets.disable_progress_bars()
    shutil.rmtree(cache, ignore_errors=True)
    length = options.seq_len

    def tokenize(rows: dict[str, list[Any]]) -> Any:
        return tokenizer(rows["text"])

    def group_texts(rows: dict[str, list[Any]]) -> Any:
        joined = {name: list(chain(*values)) for name, values in rows.items()}
        total = len(joined["input_ids"]) // length * length
        cut = {
            name: [ids[i : i + length] for i in range(0, total, length)]
            for name, ids in joined.items()
        }
        return cut | {"labels": cut["input_ids"].copy()}

    # Its processes are forked, and are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(cache)
    )
    rows = rows.map(tokenize, batched=True, num_proc=options.cores, remove_columns=["text"])
    rows.map(group_texts, batched=True, num_proc=options.cores)


def measure_memory(
    documents: list[str], text: TokenizerText, place: Path, options: Options
) -> dict[str, Any]:
    """Of all processes together, above what this one held before (the documents and the libraries
    of the rivals)."""
    one, size = place / "one_document.txt", 0
    with one.open("w") as file:
        for document in cycle(documents):
            size += file.write(document)
            if size > options.memory_megabytes * 1e6:
                break
    (place / "one").mkdir()
    before = resident_bytes()
    with PeakMemory() as peak:
        source = WeightedSource(FileSource(one), 1.0)
        pack_documents([source], text, options.packing, place / "one")
    name = f"peak memory of packing {size / 1e6:,.0f} MB"
    return {"name": name, "value": (peak.bytes - before) / 1e6, "unit": "MB", "at_most": 1500}


class PeakMemory:
    """The most that this process and its children held at any of the moments looked at."""

    def __enter__(self) -> "PeakMemory":
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process and its children, as Linux tells it."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    total = 0
    for process in [str(own), *children]:
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def measure_loader(folder: Path, text: TokenizerText) -> dict[str, Any]:
    """CPU time of whole batches, every part of them, once the file is in memory."""
    loader = Loader(open_tokens(folder, text.hash), batch_sequences=8)
    tokens = 0
    for step in range(loader.num_steps):
        loader.batch(step)
    begin = time.process_time()
    while time.process_time() - begin < 3:
        tokens += sum(loader.batch(step).ids_BT.numel() for step in range(loader.num_steps))
    value = tokens / (time.process_time() - begin)
    return {"name": "loader on one core", "value": value, "unit": "tokens/s", "at_least": 20e6}
