"""From learned gates to a mask, exactly at the budget: the lowest go on the window.

ConSA's threshold meets the ratio only as nearly as learning has settled: a gate whose alpha is
between -4 and 0 is still open at times, which counts in the constraint, and yet is closed for good.
"""
# U units: what has a gate of its own, [layer][group], or [layer][0] for whole layers

from bosch.gates.constraint import Granularity
from bosch.masks.formats import smallest
from bosch.masks.mask import num_windowed

Unit = tuple[int, int]


def lowest(
    table_U: list[list[float]], granularity: Granularity, ratio: float, seed: int
) -> tuple[list[Unit], bool]:
    """The lowest values, as many as the ratio means, and whether the seed drew among equal ones."""
    num_layers, num_columns = len(table_U), len(table_U[0])
    budget = num_windowed(ratio, num_layers, num_columns)
    if granularity != "head-per-layer":
        units, tie = smallest(table_U, budget, seed)
        return units, tie is not None
    # Each layer gives as many as any other. What does not divide comes from the layers whose next
    # value is the lowest, one each, so that the total is the budget.
    ranked, _ = smallest(table_U, num_layers * num_columns, seed)
    rows = [[unit for unit in ranked if unit[0] == layer] for layer in range(num_layers)]
    counts, drawn = [budget // num_layers] * num_layers, False
    if rest := budget % num_layers:
        next_ones = {row[counts[0]] for row in rows}
        order = [unit for unit in ranked if unit in next_ones]
        drawn = _is_tie(table_U, order, rest)
        for layer, _ in order[:rest]:
            counts[layer] += 1
    drawn |= any(_is_tie(table_U, row, count) for row, count in zip(rows, counts, strict=True))
    return [unit for row, count in zip(rows, counts, strict=True) for unit in row[:count]], drawn


def _is_tie(table_U: list[list[float]], ranked: list[Unit], count: int) -> bool:
    """Whether the last of so many has the value of the one behind it."""
    if not 0 < count < len(ranked):
        return False
    (layer, column), (next_layer, next_column) = ranked[count - 1 : count + 1]
    return table_U[layer][column] == table_U[next_layer][next_column]
