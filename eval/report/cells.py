"""How numbers are written in the cells of a report's tables."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from bosch.eval.report.statistics import NEVER, Estimate

MISSING = "–"


def show_points(value: float) -> str:
    return f"{value:.1f}"


def show_change(points: float) -> str:
    return f"{points:+.1f}"


def show_share(share: float) -> str:
    return f"{share:.0%}"


def show_tokens(count: float) -> str:
    """`1.25M`."""
    if count == NEVER:
        return "not reached"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def show_estimate(found: Estimate | None, write: Callable[[float], str]) -> str:
    """`62% [41%, 80%]`."""
    if found is None or found.value is None:
        return MISSING
    text = write(found.value)
    if found.low is None or found.high is None:
        return text
    low, high = write(found.low), write(found.high)
    return text if low == high == text else f"{text} [{low}, {high}]"


def show_advantage(found: Estimate | None) -> str:
    """`+8.1 [+3.1, +12.8]* (3)`: an interval without zero, over three seeds."""
    text = show_estimate(found, show_change)
    if found is None or found.value is None:
        return text
    seeds = "1 seed" if found.num_seeds == 1 else str(found.num_seeds)
    return f"{text}{'*' * found.excludes_zero} ({seeds})"


def show_score(value: float, stderr: float) -> str:
    return f"{value:.1f}" if math.isnan(stderr) else f"{value:.1f} ± {stderr:.1f}"


def show_row(row: Mapping[str, Any] | None) -> str:
    """A row of results; None: there is none."""
    if row is None:
        return MISSING
    return show_score(row["value"], math.nan if row["stderr"] is None else row["stderr"])


def show_count(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else MISSING


def show_seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 3600 else f"{value / 3600:.1f} h"
