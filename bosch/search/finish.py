"""The two ends of a search: its planned cost, and its mask, scored once more without accelerations,
with the record and the picture."""

from collections.abc import Mapping
from dataclasses import asdict

from bosch.masks.mask import GroupMask
from bosch.method import Selection
from bosch.run.dist import Ranks
from bosch.run.fingerprint import plain
from bosch.run.progress import describe_seconds, say
from bosch.search.objective import Value, rounded
from bosch.search.pictures import draw_search
from bosch.search.search import Search


def announce(search: Search, planned: Mapping[str, int]) -> None:
    """Print the planned cost before the search starts: the most evaluations of each part."""
    total, cost = sum(planned.values()), search.evaluator.cost
    parts = ", ".join(f"{name} {count:,}" for name, count in planned.items())
    most = total * len(search.evaluator.questions) * search.num_layers
    line = f"plan: at most {total:,} evaluations ({parts}), {most:,} layer-forwards"
    if cost.computed:
        seconds = cost.evaluation_seconds / cost.computed
        line += (
            f"; at most {describe_seconds(total * seconds)} ({seconds:.2g} s per evaluation so "
            "far; most need fewer layers and haystacks)"
        )
    say(line)
    for name in ("max_evaluations", "max_hours"):
        if (value := getattr(search.settings, name)) is not None:
            say(f"it stops with the best mask so far at --{name.replace('_', '-')} {value:g}")


def finish(search: Search) -> Selection:
    """The last stage's mask, or an earlier one that meets the ratio and scores higher. A search
    that was cut short ends with the best mask so far, or else with the current mask, repaired."""
    # What is reported is measured once more by a plain pass: if an acceleration were wrong, the
    # search might be misled, but its report would not.
    evaluator, dense, best = search.evaluator, search.anchors.dense, search.best
    if search.cut_short and best:
        search.z = best[1]
    elif search.cut_short:
        search.meet_ratio(search.fallback)
        how = "before a mask at the ratio was scored: it is by what is known so far"
        say(f"{search.cut_short} {how}")
    final = evaluator.score_unaccelerated(search.z)
    if best and best[1] != search.z:
        # Both as they are in a plain pass: accelerated values round differently, and that must not
        # decide between two masks.
        earlier = evaluator.score_unaccelerated(best[1]) if search.settings.keep_best else None
        score = earlier.value if earlier else best[0]
        if score > final.value:
            last = "the last one, as in the paper; keep_best=True ends with the best"
            say(
                f"the last stage's mask scores {final.value:.4g}, an earlier one that meets the "
                f"ratio {score:.4g}: the search ends with {'the earlier one' if earlier else last}"
            )
            if earlier:
                search.details["last_stage"] = _numbers(final)
                search.z, final = best[1], earlier
    evaluations = len(evaluator.values)
    if Ranks.current().rank == 0:
        draw_search(search, search.inputs.folder / "search.png")
    haystacks = search.inputs.calibration_of_search.haystacks
    of_what = "calibration questions"
    if any(haystack.is_random for haystack in haystacks):
        of_what += ", random texts included,"
    summary = (
        f"the mask answers {final.accuracy:.1%} of the {of_what} right (dense model "
        f"{dense.accuracy:.1%}) and gives the right answer a mean probability of "
        f"{final.probability:.3g} (dense model {dense.probability:.3g}), log-probability "
        f"{final.log_probability:.4g} ({dense.log_probability:.4g}), after "
        f"{evaluations:,} evaluations"
    )
    trace = {
        "objective": search.settings.objective,
        "dense": _numbers(dense),
        "fully_windowed": search.anchors.low,
        "hybrid": _numbers(final),
        "evaluations": evaluations,
        "cut_short": search.cut_short,
        "reproducible": search.reproducible,
        "steps": search.steps,
        **search.details,
    }
    return Selection(
        GroupMask.from_rows(search.z, search.inputs.window_tokens, search.unit),
        score_trace=plain(trace),
        drawn=search.drawn,
        notes=(f"{summary}; cut short: {search.cut_short}" if search.cut_short else summary,),
        cost=asdict(evaluator.cost) | {"seconds": evaluator.seconds()},
    )


def _numbers(value: Value) -> dict[str, float]:
    """The three scores, rounded like the values: further digits depend on the kernels."""
    names = ("accuracy", "probability", "log_probability")
    return {name: rounded(getattr(value, name)) for name in names}
