"""How a report's tables format numbers."""

import math
from collections.abc import Callable

from bosch.eval.report.statistics import NEVER, Estimate

MISSING = "–"
show_points = "{:.1f}".format
show_change = "{:+.1f}".format  # points
show_share = "{:.0%}".format


def show_tokens(count: float) -> str:
    """`1.25M`."""
    if count == NEVER:
        return "not reached"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def show_estimate(estimate: Estimate | None, write: Callable[[float], str]) -> str:
    """`62% [41%, 80%]`."""
    if estimate is None or estimate.value is None:
        return MISSING
    text = write(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    low, high = write(estimate.low), write(estimate.high)
    return text if low == high == text else f"{text} [{low}, {high}]"


def show_difference(estimate: Estimate | None, survives: bool = False) -> str:
    """`+8.1 [+3.1, +12.8]* (3)`: significant, three seeds; ** where it survives a correction."""
    text = show_estimate(estimate, show_change)
    if estimate is None or estimate.value is None:
        return text
    seeds = "1 seed" if estimate.num_seeds == 1 else str(estimate.num_seeds)
    stars = ("**" if survives else "*") if estimate.excludes_zero else ""
    return f"{text}{stars} ({seeds})"


def show_score(value: float, stderr: float) -> str:
    return f"{value:.1f}" if math.isnan(stderr) else f"{value:.1f} ± {stderr:.1f}"


def show_count(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else MISSING


def show_seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 3600 else f"{value / 3600:.1f} h"
