"""`--hours`: the most that a whole run may take on this machine, its evaluations included.

The time of each stage is estimated before it begins (duration.py). If that is too long, what can be
cut is cut: the tokens down to half, then CUTS in their order, then the tokens down to the fewest
that teach. What the user names is never cut, and a run that does not fit even then is refused.
If the run is slower than that, its training ends early, so that the hours hold.
run.json keeps what was chosen, for a resumed run, and what was promised and taken.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from bosch.config import COUNTED_AS_NEEDLES, FOLLOWS, Config, EvaluationConfig, fill_in, show_value
from bosch.methods._settings import learning_tokens, load_method
from bosch.model_files import read_json_object
from bosch.recipes.duration import (
    REST,
    SEARCHING,
    START_SECONDS,
    describe,
    stage_seconds,
)
from bosch.recipes.presets import RANKED_UP_TO, RANKING
from bosch.run.dist import Ranks, rank_and_world
from bosch.run.errors import UserError
from bosch.run.files import MANIFEST, read_sealed_json
from bosch.run.fingerprint import plain
from bosch.run.progress import describe_seconds
from bosch.run.stage import Stage, flatten, locate
from bosch.training.attention_speed import AttentionSpeed, describe_rule
from bosch.training.parallel import start_world
from bosch.training.train_stage import schedule_of

# Of the hours; the rest is for what an estimate does not foresee. If that is not enough, the
# training ends early.
PROMISED = 0.8
# Beside other work the last evaluation has taken 1.23 times as long as the one before the training.
EVALUATION_ROOM = 1.25
# 19 steps of the preset `small` closed 40 % of the loss' gap, and 75 as much as 150
# (docs/real-model.md).
FEWEST_STEPS = 20
FEW_QUESTIONS, FEWEST_QUESTIONS = 10, 5  # of each task; `brief` asks 10
FEW_MASKS = 6  # that a search tries for each layer, as `small` does
TOKENS = ("data.tokens", "train.max_steps")

Seconds = dict[str, float]  # of each stage, as duration.py names them


@dataclass(frozen=True)
class Promise:
    """What `--hours` has chosen, as run.json keeps it."""

    asked: float  # hours
    seconds: Seconds
    cuts: tuple[str, ...] = ()  # in the order in which they were made
    attention: str = ""  # by which rule its time was computed
    begun: float = field(default_factory=time.time)
    taken: Seconds | None = None  # once the run is complete

    def lines(self) -> list[str]:
        promised = "; ".join(
            [f"promised: {describe(self.seconds)}", *filter(None, [self.attention])]
        )
        if not self.cuts:
            return [f"--hours {self.asked:g}: nothing is cut; {promised}"]
        return [
            f"--hours {self.asked:g}, so that it fits:",
            *(f"  {cut}" for cut in self.cuts),
            promised,
        ]

    def seconds_left(
        self, taken: Callable[[], float], evaluation: Path, num_evaluations: int
    ) -> float:
        """How long the training may still take. The evaluations that follow ask as many questions
        as the one before it (`evaluation`: its folder), and may take a little longer."""
        before = sum(read_sealed_json(evaluation / MANIFEST, "wall_seconds")["wall_seconds"])
        each = EVALUATION_ROOM * before
        return 3600 * self.asked - taken() - num_evaluations * each - START_SECONDS

    def keep(self, run_path: Path, stages: Sequence[Stage], all_seconds: float) -> "Promise":
        """With what a complete run has taken, `all_seconds` by the clock. A later launch changes
        what it has made again."""
        taken = seconds_taken(self.seconds, run_path, stages, self.begun)
        rest = all_seconds - sum(taken.values())
        if self.taken is not None:  # the clock of a later launch has not seen the stages it reuses
            rest = self.taken[REST]
        return replace(self, taken=taken | {REST: rest})

    def describe_taken(self) -> str:
        taken = self.taken or {}
        parts = [
            f"{name} {describe_seconds(taken[name])} of {describe_seconds(seconds)}"
            for name, seconds in self.seconds.items()
        ]
        promised, all_taken = (sum(found.values()) / 3600 for found in (self.seconds, taken))
        return (
            f"--hours {self.asked:g}: {promised:.2g} hours were promised, {all_taken:.2g} taken: "
            + ", ".join(parts)
        )


# --------------------------------------------------------------------------- what can be cut


def without_middle(config: Config) -> Config:
    """Evaluated before and after the training, and not between."""
    first, *_, last = [*config.eval.checkpoints, config.eval.checkpoints[-1]]
    shares = (first,) if first == last else (first, last)
    return replace(config, eval=replace(config.eval, checkpoints=shares))


def with_questions(count: int) -> Callable[[Config], Config]:
    """At most so many questions of each task."""

    def cut(config: Config) -> Config:
        now = config.eval
        samples = now.samples
        if {*now.suites} - {*COUNTED_AS_NEEDLES, "longbench"}:  # these have counts of their own
            samples = min(samples or count, count)
        rows, needles = now.longbench_rows, min(now.niah_samples, count)
        if "longbench" in now.suites:
            rows = min(rows or count, count)
        fewer = replace(now, samples=samples, longbench_rows=rows, niah_samples=needles)
        return replace(config, eval=fewer)

    return cut


def with_few_masks(config: Config) -> Config:
    mask = replace(config.mask, kappa=min(config.mask.kappa, FEW_MASKS))
    return replace(config, mask=mask) if load_method(config.method).traits.searches else config


def by_ranking(config: Config) -> Config:
    """By a ranking in place of a search, where it keeps as much."""
    if config.ratio > RANKED_UP_TO or not load_method(config.method).traits.searches:
        return config
    if config.mask.options:  # a ranking knows nothing of these
        return config
    return replace(config, method=RANKING)


QUESTIONS = ("eval.samples", "eval.niah_samples", "eval.longbench_rows")
SEARCH = ("mask.kappa", "mask.options", "method")
# What is cut, in this order, and the options that keep it if the user names one.
CUTS: tuple[tuple[Callable[[Config], Config], tuple[str, ...]], ...] = (
    (without_middle, ("eval.checkpoints",)),
    (with_questions(FEW_QUESTIONS), QUESTIONS),
    (with_few_masks, SEARCH),
    (by_ranking, SEARCH),
    (with_questions(FEWEST_QUESTIONS), QUESTIONS),
)
CHOSEN = ("data.tokens", "eval.checkpoints", *QUESTIONS, "mask.kappa", "method")  # by all of these


def with_steps(config: Config, steps: int) -> Config:
    """With the tokens for so many steps, and before them for a mask that is learned."""
    batch = config.train.batch_sequences * config.data.sequence_length
    share = learning_tokens(config) / config.data.tokens
    tokens = math.ceil(steps / (1 - share)) * batch
    return replace(config, data=replace(config.data, tokens=tokens))


# --------------------------------------------------------------------------------- the choice


def fit(
    config: Config,
    hours: float,
    seconds_of: Callable[[Config], Seconds],
    named: Collection[str] = (),
    zero_shot: bool = False,
) -> tuple[Config, Promise]:
    """The config, cut as far as it must be, and the promise. UserError if it cannot fit.

    named: options that the user names, as `data.tokens`. zero_shot: without a training."""
    own = 0 if zero_shot else schedule_of(config).num_steps
    fewest = own if {*named} & {*TOKENS} else min(own, FEWEST_STEPS)
    tries = list(smaller(config, named))
    # Masks and questions are worth more than the second half of the tokens, which hardly lowered
    # the loss, and less than its first half.
    half = max(fewest, math.ceil(own / 2))
    for candidate, least in [*((each, half) for each in tries), (tries[-1], fewest)]:
        steps = fitting_steps(candidate, own, hours, seconds_of)
        while steps is not None and steps >= least:
            chosen = candidate if steps >= own else with_steps(candidate, steps)
            if fits(found := seconds_of(chosen), hours):
                return chosen, Promise(hours, found, describe_cuts(config, chosen))
            steps -= 1  # time is not wholly in proportion to steps
    last = with_steps(tries[-1], fewest) if fewest < own else tries[-1]
    needed = seconds_of(last)
    if fits(needed, hours):
        return last, Promise(hours, needed, describe_cuts(config, last))
    least_hours = round_up(sum(needed.values()) / PROMISED / 3600)
    kept = sorted({*named} & {*TOKENS, *(name for _, names in CUTS for name in names)})
    because = f", but {' and '.join(map(option, kept))} as you name it" if kept else ""
    problem = f"--hours {hours:g} is too short here. With all cut that can be{because}, the run"
    raise UserError(f"{problem} takes {describe(needed)}; pass at least --hours {least_hours:g}.")


def fits(seconds: Seconds, hours: float) -> bool:
    """A sum that comes out as 998.9999 or 999.0001 is one of 999."""
    return sum(seconds.values()) <= PROMISED * hours * 3600 + 1e-3


def smaller(config: Config, named: Collection[str]) -> Iterator[Config]:
    """The config, and then what each cut makes of it, one after the other."""
    yield config
    # To end when it has recovered, a run has to be evaluated on the way, with enough questions.
    keeps_evaluations = config.train.until == "recovered"
    for cut, options in CUTS:
        if {*named} & {*options} or (keeps_evaluations and options[0].startswith("eval.")):
            continue
        if (less := cut(config)) != config:
            yield (config := less)


def fitting_steps(
    config: Config, own: int, hours: float, seconds_of: Callable[[Config], Seconds]
) -> int | None:
    """Most steps of the training, up to its own, that fit; None: not even without any."""
    total, left = sum(seconds_of(config).values()), PROMISED * hours * 3600
    if own < 2 or total <= left:  # without steps there is nothing to shorten
        return own if total <= left else None
    # By half of the steps, which are evaluated as often. Not all of a training grows with them:
    # answers and lessons of tokens that another run has packed are made for all of these.
    half = own // 2
    of_step = (total - sum(seconds_of(with_steps(config, half)).values())) / (own - half)
    fixed = total - own * of_step
    # A little more, as a whole number of steps may come out as 998.9999.
    return math.floor((left - fixed) / of_step + 1e-6) if left >= fixed else None


def describe_cuts(before: Config, after: Config) -> tuple[str, ...]:
    """A line for each setting that was cut, as an option."""
    old, new = flatten(plain(asdict(before))), flatten(plain(asdict(after)))
    if before.method != after.method:  # a ranking tries no masks
        new["mask.kappa"] = old["mask.kappa"]
    return tuple(
        f"{option(name)} {show_value(new[name])} (it was {show_value(old[name])})"
        for name in CHOSEN
        if new[name] != old[name]
    )


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def round_up(hours: float) -> float:
    """To two digits."""
    scale = 10.0 ** (1 - math.floor(math.log10(hours)))
    return math.ceil(hours * scale) / scale


# ------------------------------------------------------------------------------------ of a run


def with_hours(
    config: Config, hours: float, record: Path, named: Collection[str], zero_shot: bool
) -> tuple[Config, Promise]:
    """The config that fits, and the promise; of a run that has begun, what was chosen then
    (`record`: its run.json). Rank 0 measures: another would come to another number."""

    def choose() -> tuple[Config, Promise]:
        if record.is_file():
            return chosen_then(config, hours, record, named)
        estimated = partial(stage_seconds, zero_shot=zero_shot)
        chosen, promise = fit(config, hours, estimated, named, zero_shot)
        return chosen, replace(promise, attention=describe_rule(AttentionSpeed.here()))

    if rank_and_world()[1] > 1:
        start_world()
    return Ranks.current().from_rank_0(choose)


def chosen_then(
    config: Config, hours: float, record: Path, named: Collection[str]
) -> tuple[Config, Promise]:
    content = read_json_object(record)
    if not (kept := content.get("hours")):
        raise UserError(
            f"--hours {hours:g}: the run in {record.parent} began without. Leave --hours out to go "
            "on with it, or name another --run-dir."
        )
    stored: Any = fill_in(content.get("config") or {})
    evaluation = config.eval
    follows = {each.name: each.metadata.get(FOLLOWS) for each in fields(EvaluationConfig)}
    for option in ("eval.checkpoints", *QUESTIONS):
        general = follows.get(option.removeprefix("eval."))  # an option for several suites
        if option not in named and f"eval.{general}" not in named:
            name = option.removeprefix("eval.")
            value = stored["eval"][name]
            value = tuple(value) if isinstance(value, list) else value
            evaluation = replace(evaluation, **{name: value})  # type: ignore[arg-type]  # of any kind
    config = replace(config, eval=evaluation)
    if not {*named} & {*TOKENS}:
        config = replace(config, data=replace(config.data, tokens=stored["data"]["tokens"]))
    if not {*named} & {*SEARCH}:
        mask = replace(config.mask, kappa=stored["mask"]["kappa"])
        config = replace(config, mask=mask, method=stored["method"])
    return config, Promise(**kept | {"asked": hours, "cuts": tuple(kept["cuts"])})


def seconds_taken(
    promised: Seconds, run_path: Path, stages: Sequence[Stage], begun: float
) -> dict[str, float]:
    """Of each part of the promise but REST, as the manifests of the stages say. `begun`: what other
    runs had made before took nothing."""
    parts: dict[str, tuple[str, ...]] = {"mask": SEARCHING, "train": ("training",)}
    parts |= {name: (name,) for name in ("calibration", "answers", "lessons")}
    taken = {name: 0.0 for name in promised if name != REST}
    for stage in stages:
        manifest = locate(run_path, stage) / MANIFEST
        if not manifest.is_file() or manifest.stat().st_mtime < begun:
            continue
        seconds = sum(read_sealed_json(manifest, "wall_seconds")["wall_seconds"])
        is_evaluation = stage.name.startswith("eval/")
        of_stage = ("evaluation",) if is_evaluation else parts.get(stage.name, ())
        for name in taken.keys() & {*of_stage}:
            taken[name] += seconds
        is_of_checkpoint = is_evaluation and stage.name not in ("eval/dense", "eval/step-000000")
        if is_of_checkpoint and "training" in taken:  # which has waited for it
            taken["training"] -= seconds
    return taken
