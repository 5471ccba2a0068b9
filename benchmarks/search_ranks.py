"""Simulate one search on many ranks: how much of their time does work that counts.

    python -m benchmarks search_ranks --ranks 1 8 64 --masks-at-once 1 8 64

`bosch` searches a synthetic model (benchmarks/_synthetic.py), and the texts that it reads of each
mask are noted. Then they are dealt to the ranks as bosch/search/evaluations.py does it, every text
taking the same time. Efficiency is the time of one rank, divided by the ranks' time together.
"""

import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks._options import BenchmarkOptions, Row
from benchmarks._synthetic import Spec, SyntheticModel, choose, inputs_of
from bosch.config import MaskConfig
from bosch.methods._settings import default_settings
from bosch.run.tables import show_rows
from bosch.search.evaluations import MaskObjective

Batch = list[tuple[list[int], int]]  # of masks scored together: the order of texts, how many count


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    ranks: tuple[int, ...] = (1, 8, 64)
    masks_at_once: tuple[int, ...] = (1, 8, 64)  # --masks-at-once of the search
    texts: int = 64  # of the calibration set, a question each
    ratio: float = 0.75  # ratio to search masks for
    kappa: int = 30  # masks tried per layer
    seeds: int = 3  # models


def measure(options: Options) -> Iterator[Row]:
    rows = []
    for masks_at_once in options.masks_at_once:
        searches = [search(options, masks_at_once, seed) for seed in range(options.seeds)]
        for ranks in options.ranks:
            speeds = [speed(batches, ranks, masks_at_once) for _, batches in searches]
            row = {
                "name": f"{ranks} ranks, {masks_at_once} masks at once",
                "value": 100 * statistics.fmean(speeds) / ranks,
                "unit": "% efficiency",
                "ranks": ranks,
                "masks_at_once": masks_at_once,
                "speed": statistics.fmean(speeds),
                "held_out": statistics.fmean(score for score, _ in searches),
            }
            rows.append(row)
            yield row
    columns = {"masks at once": "masks_at_once", "ranks": "ranks", "times as fast": "speed:.1f"}
    columns |= {"efficiency %": "value:.0f", "held-out right %": "held_out:.1f"}
    show_rows(f"32 x 8 groups, {options.texts} texts, ratio {options.ratio:g}", rows, columns)


def search(options: Options, masks_at_once: int, seed: int) -> tuple[float, list[Batch]]:
    """Held-out questions right with the mask, and what its search read."""
    spec = Spec(32, 8, "heavy", True, seed, num_texts=options.texts, num_questions=1)
    model = SyntheticModel(spec)
    settings = default_settings("bosch", MaskConfig(kappa=options.kappa))
    settings = replace(settings, masks_at_once=masks_at_once)
    batches: list[Batch] = []
    run = MaskObjective._run

    def note(self: Any, scorer: Any, masks: Any, order: Any, threshold: float | None) -> Any:
        found = run(self, scorer, masks, order, threshold)
        values = [self._read(texts, order, threshold) for texts, _ in found]
        if values:
            batches.append([(list(order), len(value.texts)) for value in values])
        return found

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(MaskObjective, "_run", note):
        inputs = inputs_of(model, settings, options.ratio, seed, Path(folder))
        z = choose("bosch", inputs, quiet=True).mask.z
    return 100 * model.score(z, held_out=True).accuracy, batches


def speed(batches: Sequence[Batch], ranks: int, masks_at_once: int) -> float:
    """How many times as fast as one rank."""
    counting = sum(count for batch in batches for _, count in batch)
    return counting / sum(rounds(batch, ranks, masks_at_once) for batch in batches)


def rounds(batch: Batch, ranks: int, masks_at_once: int) -> int:
    """The time of a batch: in each round, every rank runs a text of each of its open masks. A mask
    is open until all texts that count have run.
    """
    teams = math.gcd(ranks, masks_at_once)
    size = ranks // teams

    def rank_of(index: int, text: int) -> int:
        team = (index if len(batch) > 1 else text // size) % teams
        return team * size + text % size

    texts = [Counter(rank_of(n, text) for text in order) for n, (order, _) in enumerate(batch)]
    counting = [
        Counter(rank_of(n, text) for text in order[:count])
        for n, (order, count) in enumerate(batch)
    ]
    last = [max(each.values()) for each in counting]  # rounds for which a mask is open
    return sum(
        max(
            sum(own[rank] > number for own, end in zip(texts, last, strict=True) if end > number)
            for rank in range(ranks)
        )
        for number in range(max(last))
    )
