"""From learned gates to a mask, exactly at the budget: the lowest get the window.

ConSA's threshold meets the ratio only as closely as learning has converged: a gate with alpha
between -4 and 0 is still open at times, which counts in the constraint, but is closed in the mask.
"""
# U units, which have one gate each: [layer][group], or [layer][0] for whole layers

from bosch.gates.constraint import Granularity
from bosch.masks.formats import smallest
from bosch.masks.mask import num_windowed

Unit = tuple[int, int]


def lowest(
    table_U: list[list[float]], granularity: Granularity, ratio: float, seed: int
) -> tuple[list[Unit], bool]:
    """The lowest values, as many as the ratio demands, and whether the seed broke a tie."""
    num_layers, num_columns = len(table_U), len(table_U[0])
    budget = num_windowed(ratio, num_layers, num_columns)
    if granularity != "head-per-layer":
        units, tie = smallest(table_U, budget, seed)
        return units, tie is not None
    # Each layer gives equally many. The remainder comes from the layers with the lowest next value,
    # one each, so that the total is the budget.
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
    """Whether the last of the first `count` units has the same value as the next one."""
    if not 0 < count < len(ranked):
        return False
    (layer, column), (next_layer, next_column) = ranked[count - 1 : count + 1]
    return table_U[layer][column] == table_U[next_layer][next_column]
