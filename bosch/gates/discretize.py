"""From learned gates to a mask: by threshold, as ConSA has it, and exactly at the budget.

The threshold meets the ratio only as nearly as learning has settled: a gate whose alpha is between
-4 and 0 is still open at times, which counts in the constraint, and yet is closed for good. So the
mask is made of the lowest values, and the threshold's count is told beside it.
"""
# U units: what has a gate of its own, [layer][group], or [layer][0] for whole layers

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bosch.gates.constraint import Granularity
from bosch.masks.mask import num_windowed, num_windowed_layers

Unit = tuple[int, int]
Table = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Closed:
    """The units that go on the window."""

    units: tuple[Unit, ...]
    drawn: bool = False  # whether the seed chose among equal values


def below_threshold(table_U: Table, threshold: float) -> Closed:
    """Those at or below it, however many."""
    return Closed(tuple(unit for unit, value in _values(table_U) if value <= threshold))


def lowest(table_U: Table, granularity: Granularity, ratio: float, seed: int) -> Closed:
    """The lowest values, as many as the ratio means. Among equal ones the seed draws."""
    num_layers, num_columns = len(table_U), len(table_U[0])
    values = _values(table_U)
    random.Random(seed).shuffle(values)
    values.sort(key=lambda item: item[1])  # stable: equal values stay shuffled
    if granularity == "layer":
        return _first(values, num_windowed_layers(ratio, num_layers))
    budget = num_windowed(ratio, num_layers, num_columns)
    if granularity == "head-all-layers":
        return _first(values, budget)
    # Each layer gives as many as any other. What does not divide comes from the layers whose next
    # value is the lowest, one each, so that the total is the budget.
    each, rest = divmod(budget, num_layers)
    rows = [[item for item in values if item[0][0] == layer] for layer in range(num_layers)]
    parts = [_first(row, each) for row in rows]
    if rest:
        next_ones = {row[each] for row in rows}
        more = _first([item for item in values if item in next_ones], rest)
        extended = {layer for layer, _ in more.units}
        parts = [_first(row, each + (layer in extended)) for layer, row in enumerate(rows)]
        parts.append(Closed((), more.drawn))
    units = tuple(unit for part in parts for unit in part.units)
    return Closed(units, any(part.drawn for part in parts))


def _values(table_U: Table) -> list[tuple[Unit, float]]:
    return [
        ((layer, column), value)
        for layer, row in enumerate(table_U)
        for column, value in enumerate(row)
    ]


def _first(ranked: list[tuple[Unit, float]], count: int) -> Closed:
    drawn = 0 < count < len(ranked) and ranked[count - 1][1] == ranked[count][1]
    return Closed(tuple(unit for unit, _ in ranked[:count]), drawn)
