"""Searches with every acceleration beside the same searches with none: layer-forwards and time, and
what each acceleration brings.

All sides must end in the same mask, or the benchmark fails. A layer-forward is one layer over one
text of the calibration set, parts of a layer by their share (bosch/search/layers.py). Seconds are
those of the evaluations, on the clock; static rankings to start from are not in them.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks._options import BenchmarkOptions
from bosch.config import Config
from bosch.masks.mask import read_mask
from bosch.methods._settings import default_settings
from bosch.recipes import calibrate, presets, search_mask
from bosch.run.errors import UserError
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact
from bosch.run.tables import show_rows
from bosch.search.settings import Accelerations

TARGET = 4.0  # times less work with all than with none
WITH_TARGET = ("bosch_plus", "global_swap")  # for NOMAD no evaluation may end early
NONE, ALL = "none", "all"
SWITCHES = tuple(field.name for field in fields(Accelerations) if field.type in (bool, "bool"))


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    """A shipped model; settings are those of the preset `tiny` but for the following."""
    methods: tuple[str, ...] = ("bosch_plus", "global_swap", "bosch")
    ratios: tuple[float, ...] = (0.75, 0.5)
    examples: int = presets.tiny().calibration.examples
    """Calibration questions, four in a context."""
    kappa: int = presets.tiny().mask.kappa
    """Evaluations a layer."""
    switches: bool = False
    """Switch the accelerations off one at a time, too."""
    threads: int = 1
    runs: Path = Path("runs/search")
    """Where the calibration set and static rankings are kept."""


def measure(options: Options) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    config = presets.tiny(options.model)
    config = replace(
        config,
        calibration=replace(config.calibration, examples=options.examples),
        mask=replace(config.mask, kappa=options.kappa),
    )
    stage = calibrate.build(config)
    folder = options.runs / f"set-{stage.fingerprint[:12]}"
    with RunFolder(folder, say=lambda line: None) as run:
        calibration = run.complete(stage)
    sides = {ALL: Accelerations(), NONE: Accelerations.none()}
    if options.switches:
        sides |= {f"no {name}": replace(Accelerations(), **{name: False}) for name in SWITCHES}
    rows = []
    for ratio, method in product(options.ratios, options.methods):
        every: dict[str, Any] = {}
        for side, accelerations in sides.items():
            asked = replace(config, method=method, ratio=ratio)
            found = search(asked, accelerations, calibration, folder / "rankings")
            every = every or found
            if found["z"] != every["z"]:
                raise UserError(
                    f"{method} at {ratio:g}: the mask is another with {side} of the accelerations "
                    "than with all. This is a mistake in bosch/search; nothing was measured."
                )
            row = {
                "name": f"{method} at {ratio:g}, layer-forwards: {side} against all",
                "value": found["layer_forwards"] / every["layer_forwards"],
                "unit": "x",
                "side": side,
                **found,
                "times_as_long": found["seconds"] / every["seconds"],
            }
            if side == NONE and method in WITH_TARGET:
                row["at_least"] = TARGET
            rows.append(row)
            yield row
    show_rows(
        f"{options.model}, {options.examples} questions, kappa {options.kappa}",
        rows,
        {
            "method": "method",
            "ratio": "ratio",
            "accelerations": "side",
            "evaluations": "evaluations",
            "layer-forwards": "layer_forwards:,.0f",
            "seconds": "seconds:.1f",
            "times the work": "value:.2f",
            "times the time": "times_as_long:.2f",
        },
    )


def search(
    config: Config, accelerations: Accelerations, calibration: Artifact, rankings: Path
) -> dict[str, Any]:
    """What one search took. It begins with nothing but static rankings: no memo is read."""
    settings = default_settings(config.method, config.mask)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "mask"
        folder.mkdir()
        if rankings.is_dir():
            shutil.copytree(rankings, folder / "rankings")
        settings = replace(settings, accelerations=accelerations)
        search_mask.run_method(folder, config, settings, calibration)
        if (folder / "rankings").is_dir():
            shutil.copytree(folder / "rankings", rankings, dirs_exist_ok=True)
        record, cost = (
            read_mask(folder / "mask.json"),
            json.loads((folder / "time.json").read_text()),
        )
    return {
        "method": config.method,
        "ratio": config.ratio,
        "evaluations": dict(record.score_trace or {})["evaluations"],
        "layer_forwards": cost["layer_forwards"],
        "seconds": cost["evaluation_seconds"],
        "z": record.mask.row_texts(),
    }
