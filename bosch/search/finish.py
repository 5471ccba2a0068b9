"""The end of a search: its mask, scored once more without accelerations, its record and picture."""

from dataclasses import asdict

from bosch.masks.mask import GroupMask
from bosch.method import Selection
from bosch.run.fingerprint import plain
from bosch.run.group import is_first
from bosch.run.progress import say
from bosch.search.certainty import assess
from bosch.search.objective import Value, Z, rounded
from bosch.search.optimizers._interface import repair
from bosch.search.pictures import draw_search
from bosch.search.search import Search


def finish(search: Search) -> Selection:
    """The last stage's mask, or an earlier one that meets the budget and scores higher. A search
    that was cut short ends with the best mask so far, or else with the current mask, repaired.
    """
    objective, anchors, best = search.objective, search.anchors, search.best
    if search.cut_short:
        search.z = best[1] if best else _repaired(search)
    assert sum(row.count(0) for row in search.z) == search.budget
    final = objective.score_unaccelerated(search.z)
    other = best if best and best[1] != search.z else None
    if other and search.settings.keep_best:
        # Without accelerations too: they round differently.
        earlier = objective.score_unaccelerated(other[1])
        if earlier.value > final.value:
            say(
                f"the last stage's mask scores {final.value:.4g}, an earlier one that meets the "
                f"budget {earlier.value:.4g}: the search ends with the earlier one"
            )
            search.details["last_stage"] = _numbers(final)
            search.z, final = other[1], earlier
    elif other and other[0] > final.value:
        say(
            f"the last stage's mask scores {final.value:.4g}, an earlier one that meets the budget "
            f"{other[0]:.4g}: the search ends with the last one, as in the paper; --method bosch "
            "ends with the best"
        )
    certainty = assess(search)
    trace = {
        "objective": search.settings.objective,
        "dense": _numbers(anchors.dense),
        "fully_windowed": anchors.low,
        "hybrid": _numbers(final),
        "evaluations": objective.evaluations(),
        "cut_short": search.cut_short,
        "reproducible": search.reproducible,
        "steps": [asdict(part) for part in search.solved_parts],
        "certainty": certainty and asdict(certainty),
        **search.details,
    }
    if is_first():
        draw_search(search, certainty, search.inputs.folder / "search.png")
    summary = (
        f"the mask answers {final.accuracy:.1%} of the calibration questions right (dense model "
        f"{anchors.dense.accuracy:.1%}) and gives the right answer a mean probability of "
        f"{final.probability:.3g} (dense model {anchors.dense.probability:.3g}), log-probability "
        f"{final.log_probability:.4g} ({anchors.dense.log_probability:.4g}), after "
        f"{objective.evaluations():,} evaluations"
    )
    return Selection(
        GroupMask.from_rows(search.z, search.inputs.window_tokens, search.unit),
        score_trace=plain(trace),
        drawn=search.drawn,
        notes=(
            f"{summary}; cut short: {search.cut_short}" if search.cut_short else summary,
            *([certainty.line] if certainty else []),
        ),
        cost=asdict(objective.cost) | {"seconds": objective.seconds()},
    )


def _repaired(search: Search) -> Z:
    """The current mask, changed from the bottom up until it meets the budget."""
    groups = search.all_groups()
    return search.mask(groups, repair(search.assignment_in(search.z, groups), search.budget))


def _numbers(value: Value) -> dict[str, float | None]:
    """The three scores, rounded like the values: further digits depend on the kernels."""
    names = ("accuracy", "probability", "log_probability")
    scores = {name: getattr(value, name) for name in names}
    return {name: None if score is None else rounded(score) for name, score in scores.items()}
