"""The end of a search: its mask, scored once more with no acceleration, its record and picture."""

from dataclasses import asdict

from bosch.masks.mask import GroupMask
from bosch.method import Selection
from bosch.run.fingerprint import plain
from bosch.run.group import is_first
from bosch.run.progress import say
from bosch.search.objective import Rows, Value, rounded
from bosch.search.optimizers._interface import mend
from bosch.search.pictures import draw_search
from bosch.search.search import Search


def finish(search: Search) -> Selection:
    """The last stage's mask, or an earlier one that meets the budget and scores more. Of a search
    that was cut short the best so far, else the present mask, mended.
    """
    objective, anchors, best = search.objective, search.anchors, search.best
    if search.cut_short:
        search.z = best[1] if best else _mended(search)
    assert sum(row.count(0) for row in search.z) == search.budget
    final = objective.score_plainly(search.z)
    if search.settings.keep_best and best and best[1] != search.z:
        earlier = objective.score_plainly(best[1])  # alike: accelerations may round otherwise
        if earlier.value > final.value:
            say(
                f"the last stage ended at {final.value:.4g}; an earlier mask that meets the "
                f"budget has {earlier.value:.4g} and is kept"
            )
            search.details["last_stage"] = _numbers(final)
            search.z, final = best[1], earlier
    trace = {
        "objective": search.settings.objective,
        "dense": _numbers(anchors.dense),
        "fully_windowed": anchors.low,
        "hybrid": _numbers(final),
        "evaluations": objective.evaluations(),
        "cut_short": search.cut_short,
        "reproducible": search.reproducible,
        "steps": [asdict(step) for step in search.steps],
        **search.details,
    }
    if is_first():
        draw_search(search, search.inputs.folder / "search.png")
    told = (
        f"S {final.accuracy:.4g} (dense {anchors.dense.accuracy:.4g}), answer probability "
        f"{final.probability:.3g} (dense {anchors.dense.probability:.3g}), "
        f"{objective.evaluations():,} evaluations"
    )
    return Selection(
        GroupMask.from_rows(search.z, search.inputs.window_tokens, search.unit),
        score_trace=plain(trace),
        drawn=search.drawn,
        notes=(f"{told}, cut short: {search.cut_short}" if search.cut_short else told,),
        cost=asdict(objective.cost) | {"seconds": objective.seconds()},
    )


def _mended(search: Search) -> Rows:
    """The present mask with as many groups changed as the budget needs, from the bottom."""
    groups = search.all_groups()
    return search.mask(groups, mend(search.bits(groups, search.z), search.budget))


def _numbers(value: Value) -> dict[str, float | None]:
    """To the digits that values are compared by: the others are the kernels'."""
    told = {name: getattr(value, name) for name in ("accuracy", "probability", "log_probability")}
    return {name: None if part is None else rounded(part) for name, part in told.items()}
