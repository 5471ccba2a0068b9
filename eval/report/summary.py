"""One run's story for the terminal: its mask, what that costs on the calibration set and saves in
the cache, and its scores on the way back."""

from collections.abc import Iterator

from rich.text import Text

from bosch.masks.picture import mask_rows, mask_title
from eval.report.cells import MISSING, show_estimate, show_share
from eval.report.compare import Comparison, recoveries
from eval.report.measures import SUITES
from eval.report.tables import align, calibration_score, course_table, kv_saved


def summarize(comparison: Comparison) -> Iterator[str | Text]:
    """Of the comparison's only run."""
    (run,) = comparison.runs
    if run.mask is not None:
        yield f"mask: {mask_title(run.mask)}; ## full, :: window, share windowed"
        yield from mask_rows(run.mask)
        yield f"KV bytes saved: {kv_saved(run)}"
        if (score := calibration_score(run)) != MISSING:
            yield f"S, calibration examples answered right (dense): {score}"
    yield from align(course_table(comparison, run))
    for found in recoveries(comparison):
        suite, share = SUITES[found.measure.suite], found.gap_share
        if share.value is not None and not found.has_clear_gap:
            yield f"{suite}: step 0 is not surely below the dense model: no gap to close"
        else:
            yield f"{suite}: gap to the dense model closed {show_estimate(share, show_share)}"
