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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks._options import BenchmarkOptions
from bosch.run.progress import say
from data.loader import Loader, open_tokens
from data.pack import PackConfig, pack_documents
from data.sources.files import FileSource
from data.sources.source import WeightedSource
from data.tokenizer_files import describe_tokenizer
from data.toy_world.documents import write_document

END = "<|end|>"
# How Qwen cuts text into words; Llama 3 differs in keeping up to three digits together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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
    """A model's folder or id; without it a BPE of 8,000 tokens is trained on the text."""
    corpus: Path | None = None
    """A .jsonl file to take the documents from; without it they are the toy world's."""
    against_datasets: bool = True


def measure(options: Options) -> list[dict[str, Any]]:
    documents = read_corpus(options)
    tokenizer = (
        AutoTokenizer.from_pretrained(options.tokenizer)
        if options.tokenizer
        else train_bpe(documents)
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        corpus = place / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        rows = measure_packing(documents, corpus, tokenizer, place, options)
        rows.append(measure_memory(documents, tokenizer, place, options))
        rows.append(measure_loader(place / "packed", tokenizer))
    return rows


def read_corpus(options: Options) -> list[str]:
    """About the wanted number of bytes. The toy world is told again and again: it is written slower
    than it is read."""
    if options.corpus:
        told = (json.loads(line)["text"] for line in options.corpus.open())
    else:
        told = (write_document(0, number) for number in range(8_000))
    documents: list[str] = []
    size = 0
    for text in told:
        documents.append(text)
        size += len(text)
        if size > options.megabytes * 1e6:
            break
    repeats = max(1, round(options.megabytes * 1e6 / size))
    return documents * repeats


def train_bpe(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents[:2000], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def measure_packing(
    documents: list[str], corpus: Path, tokenizer: Any, place: Path, options: Options
) -> list[dict[str, Any]]:
    text = describe_tokenizer(tokenizer)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(options.cores)
    bare = text.load()
    bare.encode_batch(documents[:100], add_special_tokens=False)  # starts its threads
    counted: dict[str, int] = {}

    def encode() -> None:
        batches = (documents[i : i + 1000] for i in range(0, len(documents), 1000))
        encoded = (bare.encode_batch(batch, add_special_tokens=False) for batch in batches)
        counted["encode_batch"] = sum(len(encoding) for batch in encoded for encoding in batch)

    def pack() -> None:
        clear(place / "packed")
        (place / "packed").mkdir()
        config = PackConfig(seq_len=options.seq_len, held_out_sequences=1, workers=options.cores)
        pack_documents([WeightedSource(FileSource(corpus), 1.0)], text, config, place / "packed")

    ways: dict[str, Callable[[], None]] = {"encode_batch": encode, "packing": pack}
    if options.against_datasets:
        ways["datasets"] = lambda: map_with_datasets(corpus, tokenizer, place / "mapped", options)
    clock: dict[str, float] = {}
    processor: dict[str, float] = {}
    for number in range(options.rounds):
        for name, way in ways.items():
            begin, begin_cpu = time.perf_counter(), cpu_seconds()
            way()
            clock[name] = min(clock.get(name, math.inf), time.perf_counter() - begin)
            processor[name] = min(processor.get(name, math.inf), cpu_seconds() - begin_cpu)
            say(f"round {number + 1}: {name} done")
    tokens = counted["encode_batch"]
    rows: list[dict[str, Any]] = []
    for name in ways:
        rows.append(
            {
                "name": f"{name}: tokens a CPU second",
                "value": tokens / processor[name],
                "unit": "tokens/s",
            }
        )
        rows.append(
            {"name": f"{name}: tokens a second", "value": tokens / clock[name], "unit": "tokens/s"}
        )
    for name, least in (("encode_batch", 0.85), ("datasets", 1.5)):
        if name in ways:
            ratio, on_clock = processor[name] / processor["packing"], clock[name] / clock["packing"]
            rows.append(
                {
                    "name": f"packing against {name}, CPU",
                    "value": ratio,
                    "unit": "x",
                    "at_least": least,
                }
            )
            rows.append({"name": f"packing against {name}, clock", "value": on_clock, "unit": "x"})
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
    clear(cache)
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

    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # its processes are forked, and are the parallelism
    )
    rows = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(cache)
    )
    rows = rows.map(tokenize, batched=True, num_proc=options.cores, remove_columns=["text"])
    rows.map(group_texts, batched=True, num_proc=options.cores)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def measure_memory(
    documents: list[str], tokenizer: Any, place: Path, options: Options
) -> dict[str, Any]:
    """Of all processes together, above what this one held before (the documents and the libraries
    of the rivals)."""
    one = place / "one_document.txt"
    with one.open("w") as file:
        size = 0
        for document in forever(documents):
            size += file.write(document)
            if size > options.memory_megabytes * 1e6:
                break
    folder = place / "one"
    folder.mkdir()
    text = describe_tokenizer(tokenizer)
    config = PackConfig(seq_len=options.seq_len, held_out_sequences=1, workers=options.cores)
    before = resident_bytes()
    with PeakMemory() as peak:
        pack_documents([WeightedSource(FileSource(one), 1.0)], text, config, folder)
    value = (peak.bytes - before) / 1e6
    return {
        "name": f"peak memory of packing {size / 1e6:,.0f} MB",
        "value": value,
        "unit": "MB",
        "at_most": 1500,
    }


def forever(documents: list[str]) -> Iterator[str]:
    while True:
        yield from documents


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


def measure_loader(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """CPU time of whole batches, every part of them, once the file is in memory."""
    loader = Loader(open_tokens(folder, describe_tokenizer(tokenizer).hash), batch_sequences=8)
    tokens = 0
    for step in range(loader.num_steps):
        loader.batch(step)
    begin = time.process_time()
    while time.process_time() - begin < 3:
        for step in range(loader.num_steps):
            tokens += loader.batch(step).ids_BT.numel()
    value = tokens / (time.process_time() - begin)
    return {"name": "loader on one core", "value": value, "unit": "tokens/s", "at_least": 20e6}


def clear(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
