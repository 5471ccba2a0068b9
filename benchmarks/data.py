"""Compare packing with the bare tokenizer and with datasets.map.

All alternatives tokenize the same toy documents with the same tokenizer on the same cores, in
turns. Each figure is the best of its rounds. The targets are for the CPU time of all processes,
which other work on the machine hardly affects. Wall-clock time is shown too, but a busy machine
distorts it."""

import json
import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks._options import BenchmarkOptions, Row
from bosch.data.pack import PackConfig, pack_documents
from bosch.data.sources.files import FileSource
from bosch.data.sources.source import WeightedSource
from bosch.data.tokenizer_files import TokenizerText, describe_tokenizer
from bosch.data.toy_world.documents import write_document
from bosch.data.toy_world.tokenizer import train_tokenizer
from bosch.run.progress import say
from bosch.run.tables import show_rows

AT_LEAST = {"encode_batch": 0.85, "datasets.map": 1.5}  # their CPU time relative to packing's


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    megabytes: int = 64  # amount of text to pack
    rounds: int = 3  # how often each alternative is timed
    # Number of processes or threads.
    cores: int = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    seq_len: int = 32_768  # tokens in a sequence


def measure(options: Options) -> list[Row]:
    documents = read_corpus(options)
    tokenizer = train_tokenizer(8000, 2000, seed=0)
    text = describe_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return measure_packing(documents, tokenizer, text, place, options)


def read_corpus(options: Options) -> list[str]:
    """About `megabytes` of toy documents. Beyond 8,000 documents they are repeated, since writing
    them takes longer than packing them."""
    documents: list[str] = []
    size = 0
    while size < options.megabytes * 1e6 and len(documents) < 8_000:
        documents.append(write_document(0, len(documents)))
        size += len(documents[-1])
    return documents * max(1, round(options.megabytes * 1e6 / size))


def measure_packing(
    documents: list[str],
    tokenizer: PreTrainedTokenizerBase,
    text: TokenizerText,
    place: Path,
    options: Options,
) -> list[Row]:
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
        config = PackConfig(
            sequence_length=options.seq_len, held_out_sequences=1, workers=options.cores
        )
        pack_documents([WeightedSource(FileSource(corpus), 1.0)], text, config, place / "packed")

    tokens = encode()  # also starts the tokenizer's threads
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
    rows: list[Row] = []
    for name in ways:
        row = {
            "name": f"packing against {name}, CPU",
            "value": processor[name] / processor["packing"],
            "unit": "x",
            "side": name,
            "clock": clock[name] / clock["packing"],
            "tokens_per_cpu_second": tokens / processor[name],
            "tokens_per_second": tokens / clock[name],
        }
        rows.append(row | ({"at_least": AT_LEAST[name]} if name in AT_LEAST else {}))
    show_rows(
        f"{tokens:,} tokens on {options.cores} cores",
        rows,
        {
            "": "side",
            "tokens/CPU second": "tokens_per_cpu_second:,.0f",
            "tokens/s": "tokens_per_second:,.0f",
            "CPU time / packing": "value:.2f",
            "wall time / packing": "clock:.2f",
        },
    )
    return rows


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def map_with_datasets(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, options: Options
) -> None:
    """Do what transformers' language modeling examples do, with two `datasets.map`: tokenize; then
    join and cut every column, and copy the ids as labels."""
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

    # datasets runs several processes itself.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(cache)
    )
    rows = rows.map(tokenize, batched=True, num_proc=options.cores, remove_columns=["text"])
    rows.map(group_texts, batched=True, num_proc=options.cores)
