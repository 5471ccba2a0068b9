"""How far the ranking `razor` depends on the random text that it reads.

    python launch/fetch_real_model.py runs/real
    python -m benchmarks razor --model runs/real/model --rows rows.jsonl

Ranks the groups by several seeds, which draw the tokens, by one text and by several, and says for
each ratio how many different masks the seeds choose and how many full groups these have in common.
With `--lengths 904 912` texts of several lengths are read, whose first blocks are a quarter as
long. A row, the scores of one seed, is written when it is done; the same command goes on with those
that are missing.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._measure import DeviceOptions, Row, append_row, read_rows
from bosch.calibration import Calibration, Haystack
from bosch.method import Inputs
from bosch.methods import razor
from bosch.model import load_for_search, load_tokenizer, read_model_info
from bosch.random_texts import REPEATS, block_lengths
from bosch.run.progress import say
from bosch.sink import NO_SINK

RATIOS = (0.5, 0.75, 0.875, 0.95)
TITLE = "{model}, razor: different masks of {seeds} seeds, full groups of all; {place}"
COLUMNS = {name: name for name in ("texts", "tokens", "blocks", *map(str, RATIOS))}
COLUMNS |= {"seconds a seed": "seconds:.0f"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    model: Path = Path("runs/real/model")
    rows: Path = Path("runs/razor.jsonl")  # gets the rows
    texts: tuple[int, ...] = (1, 8)  # that a ranking reads
    lengths: tuple[int, ...] = (1_016,)  # tokens of a text
    seeds: int = 3


def measure(options: Options) -> Iterator[Row]:
    options.start()
    done = read_rows(options.rows)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    ranking = Ranking(options.model)
    for num_texts, length in itertools.product(options.texts, options.lengths):
        found = []
        for seed in range(options.seeds):
            key: Row = {"texts": num_texts, "tokens": length, "seed": seed}
            key["blocks"] = block_lengths(length // REPEATS, num_texts)
            row = next((each for each in done if key.items() <= each.items()), None)
            if row is None:
                say(f"{num_texts} texts of {length} tokens, seed {seed}")
                began = time.monotonic()
                scores = ranking.scores(num_texts, length, seed)
                row = key | {"seconds": round(time.monotonic() - began, 1), "scores": scores}
                append_row(options.rows, row)
            found.append(row)
        yield summary(found)


class Ranking:
    """The method on a model, which is loaded when it is needed first."""

    def __init__(self, path: Path) -> None:
        self.path, self.info = path, read_model_info(path)
        self.tokenizer = load_tokenizer(str(path))

    @cached_property
    def model(self) -> Any:
        return load_for_search(self.path, precision="fp32")

    def scores(self, num_texts: int, length: int, seed: int) -> list[list[float]]:
        # Of the calibration set, as of the rest here, only the length counts.
        text = Calibration([Haystack(torch.zeros(length, dtype=torch.long), ())])
        inputs = Inputs(
            model_info=self.info,
            load_model=lambda: self.model,
            load_calibration=lambda: text,
            window_tokens=1,
            ratio=0.5,
            seed=seed,
            settings=razor.Settings(razor_texts=num_texts),
            folder=self.path,
            load_tokenizer=lambda: self.tokenizer,
            sink=NO_SINK,
        )
        return [[round(value, 4) for value in row] for row in razor.score_groups(inputs).groups]


def summary(rows: Sequence[Row]) -> Row:
    found: Row = {"name": f"{rows[0]['texts']} texts of {rows[0]['tokens']}", "unit": "s"}
    found |= {name: rows[0][name] for name in ("texts", "tokens")}
    first, last = rows[0]["blocks"][0], rows[0]["blocks"][-1]
    found["blocks"] = f"{first} to {last}"
    found["value"] = found["seconds"] = float(np.mean([row["seconds"] for row in rows]))
    for ratio in RATIOS:
        masks = [full_groups(row["scores"], ratio) for row in rows]
        shared = len(frozenset.intersection(*masks))
        found[str(ratio)] = f"{len(set(masks))}, {shared} of {len(masks[0])}"
    return found


def full_groups(scores: Sequence[Sequence[float]], ratio: float) -> frozenset[int]:
    flat = np.array(scores).ravel()
    num_full = flat.size - int(np.ceil(ratio * flat.size))
    return frozenset(np.argsort(-flat, kind="stable")[:num_full].tolist())
