"""Searches with every acceleration beside the same searches with none: time and layer-forwards, and
what each acceleration brings.

Both sides must end in the same mask, or the benchmark fails. A layer-forward is one layer over one
text of the calibration set, parts of a layer by their share (bosch/search/layers.py). Seconds are
CPU time where one thread does all the work; static rankings to start from are not in them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks._options import BenchmarkOptions
from benchmarks._search import Searched, Setup, add_row, read_rows, search, set_up
from benchmarks._timing import describe_device, show_table
from bosch.config import Config
from bosch.model import read_model_info
from bosch.run.progress import say
from bosch.search.scorer import Accelerations
from recipes import presets

TARGET = 4.0
PRESET_SECONDS = 180.0
SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "bosch_plus": ("bosch_plus", {}),
    "swap": ("global_swap", {}),  # over all groups, from the best of the static rankings
    "bosch": ("bosch", {}),
    # From the lowest layers on the window: of masks that answer little, few can be ended early.
    "bare_swap": ("global_swap", {"rankings": ()}),
}
WITH_TARGET = ("bosch_plus", "swap")  # for NOMAD no evaluation may end early
SWITCHES = tuple(field.name for field in fields(Accelerations) if field.type in (bool, "bool"))


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    """A shipped model; settings are those of the preset `tiny` but for the following."""
    searches: tuple[str, ...] = ("bosch_plus", "swap", "bosch")
    """bosch_plus, swap (over all groups, from static rankings), bare_swap (from none), bosch."""
    ratios: tuple[float, ...] = (0.75, 0.5)
    examples: int = presets.tiny().calibration.examples
    """Calibration questions, four in a context."""
    kappa: int = presets.tiny().mask.kappa
    """Evaluations a layer."""
    switches: str | None = "bosch_plus"
    """The search whose accelerations are switched off one at a time, at the first ratio."""
    preset: bool = True
    """Whether to time the preset's own method with its own settings, at the first ratio."""
    threads: int = 1
    rows: Path = Path("benchmarks/results/search-cpu.jsonl")
    """A line for each figure; comparisons that are there are not measured again."""
    runs: Path = Path("runs/search")
    """Where calibration sets are kept."""

    def __post_init__(self) -> None:
        for name in (*self.searches, *((self.switches,) if self.switches else ())):
            if name not in SEARCHES:
                raise ValueError(f"--searches {name}: it must be one of {', '.join(SEARCHES)}.")


def measure(options: Options) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    setup = set_up(config_of(options), options.runs)
    about = about_of(setup, options)
    rows: list[dict[str, Any]] = []
    for name, make in plan(setup, options):
        known = [
            row for row in read_rows(options.rows) if (row["part"], row["about"]) == (name, about)
        ]
        if not known:
            known = [{"part": name, "about": about, **row} for row in make()]
            for row in known:
                add_row(options.rows, row)
        rows += known
    return rows


def plan(setup: Setup, options: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The comparisons. The two sides of one are measured one behind the other, in one run."""
    for ratio, name in product(options.ratios, options.searches):
        yield f"{name} at {ratio:g}", partial(compare, setup, name, ratio)
    if options.switches:
        name, ratio = options.switches, options.ratios[0]
        yield f"switches of {name} at {ratio:g}", partial(switch_off, setup, name, ratio)
    if options.preset:
        yield "preset", partial(time_preset, options)


def about_of(setup: Setup, options: Options) -> dict[str, Any]:
    """What all rows of one table share."""
    info = read_model_info(setup.folder)
    names = ("examples", "kappa", "threads")
    return {"model": info.weight_hash} | {name: getattr(options, name) for name in names}


def config_of(options: Options) -> Config:
    config = presets.tiny(options.model)
    calibration = replace(config.calibration, examples=options.examples)
    return replace(config, calibration=calibration, mask=replace(config.mask, kappa=options.kappa))


def compare(setup: Setup, name: str, ratio: float) -> list[dict[str, Any]]:
    """Two rows of one search: how many times less work, and less time, all accelerations take."""
    slow = run(setup, name, ratio, Accelerations.none())
    fast = run(setup, name, ratio, Accelerations())
    check_same(slow, fast, f"{name} at {ratio:g}")
    target = {"at_least": TARGET} if name in WITH_TARGET else {}
    shared = {"search": name, "ratio": ratio, "unit": "x", **facts_of(setup, fast)}
    figures = {
        "layer-forwards": (slow.layer_forwards, fast.layer_forwards),
        "seconds": (slow.seconds, fast.seconds),
    }
    return [
        {
            "name": f"{name} at {ratio:g}, {what}: none against all",
            "value": none / every,
            "none": none,
            "all": every,
            **shared,
            **target,
        }
        for what, (none, every) in figures.items()
    ]


def switch_off(setup: Setup, name: str, ratio: float) -> Iterator[dict[str, Any]]:
    """A row for each acceleration: how many times more work the search takes without it."""
    every = run(setup, name, ratio, Accelerations())
    lines = [("all", every.layer_forwards, every.seconds, 1.0, 1.0)]
    for switch in SWITCHES:
        without = run(setup, name, ratio, replace(Accelerations(), **{switch: False}))
        check_same(every, without, f"{name} at {ratio:g} without {switch}")
        more = without.layer_forwards / every.layer_forwards
        longer = without.seconds / every.seconds
        lines.append((f"no {switch}", without.layer_forwards, without.seconds, more, longer))
        yield {
            "name": f"{name} at {ratio:g}, layer-forwards: without {switch} against all",
            "value": more,
            "unit": "x",
            "seconds_ratio": longer,
            "none": without.layer_forwards,
            "all": every.layer_forwards,
            "search": name,
            "ratio": ratio,
            "switch": switch,
            **facts_of(setup, without),
        }
    show_table(
        f"{name} at {ratio:g}, accelerations off one at a time, "
        f"{describe_device(setup.model.device)}",
        ("side", "layer-forwards", "seconds", "x work", "x time"),
        [(s, f"{w:,.0f}", f"{t:.1f}", f"{a:.2f}", f"{b:.2f}") for s, w, t, a, b in lines],
    )


def time_preset(options: Options) -> list[dict[str, Any]]:
    """What `search_mask.py --preset tiny` takes behind the calibration."""
    setup, ratio = set_up(presets.tiny(options.model), options.runs), options.ratios[0]
    found = search(setup, setup.config.method, ratio)
    row = {
        "name": f"{setup.config.method} at {ratio:g}, the preset as it is",
        "value": found.seconds,
        "unit": "s",
        "at_most": PRESET_SECONDS,
        "layer_forwards": found.layer_forwards,
    }
    return [row | facts_of(setup, found)]


def run(setup: Setup, name: str, ratio: float, accelerations: Accelerations) -> Searched:
    method, settings = SEARCHES[name]
    found = search(setup, method, ratio, accelerations=accelerations, **settings)
    sides = [switch for switch in SWITCHES if getattr(accelerations, switch)]
    say(
        f"{name} at {ratio:g} with {', '.join(sides) or 'no acceleration'}: "
        f"{found.evaluations} evaluations, {found.layer_forwards:,.0f} layer-forwards, "
        f"{found.seconds:.1f} s"
    )
    return found


def check_same(one: Searched, other: Searched, what: str) -> None:
    if one.selection.mask != other.selection.mask:
        raise ValueError(
            f"{what}: the accelerations changed the mask. This is a mistake in bosch/search; "
            "nothing was measured."
        )


def facts_of(setup: Setup, found: Searched) -> dict[str, Any]:
    return {
        "evaluations": found.evaluations,
        "texts": len(setup.calibration.haystacks),
        "questions": setup.calibration.num_questions,
        "length": setup.config.calibration.length,
        "kappa": setup.config.mask.kappa,
        "device": describe_device(setup.model.device),
    }
