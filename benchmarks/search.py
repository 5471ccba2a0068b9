"""Compare mask searches with all accelerations and with none: layer-forwards and time.

All sides must find the same mask, or the benchmark fails. A layer-forward is one layer over one
text of the calibration set; parts of a layer count by their share (bosch/search/layers.py). Seconds
are the wall-clock time of the evaluations, without the static rankings to start from.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from benchmarks._measure import BenchmarkOptions, Row
from bosch.config import Config
from bosch.masks.mask import read_mask
from bosch.methods._settings import default_settings
from bosch.recipes import calibrate, presets, search_mask
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact
from bosch.search.settings import Accelerations

TARGET = 4.0  # how many times less work with all accelerations than with none
WITH_TARGET = ("bosch", "global_swap")  # NOMAD cannot end evaluations early
# Layer-forwards that `bosch` may take: an eighth of those of `global_swap` without accelerations.
MOST = {("bosch", 0.75): 4_100, ("bosch", 0.5): 4_300}
NONE, ALL = "none", "all"
COLUMNS = {"method": "method", "ratio": "ratio", "sink": "sink", "accelerations": "side"}
COLUMNS |= {"evaluations": "evaluations", "layer-forwards": "layer_forwards:,.0f"}
COLUMNS |= {"seconds": "seconds:.1f", "work / all": "times_the_work:.2f"}
COLUMNS |= {"time / all": "times_as_long:.2f"}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    # An embedded model. All other settings are those of the preset `tiny`.
    model: str = presets.TINY_MODEL
    methods: tuple[str, ...] = ("bosch", "global_swap", "bosch_paper")  # searches to compare
    ratios: tuple[float, ...] = (0.75, 0.5)  # ratios to search masks for
    examples: int = presets.tiny().calibration.examples  # calibration questions, four per context
    kappa: int = presets.tiny().mask.kappa  # masks tried per layer
    sinks: tuple[str, ...] = ("auto",)  # what windows see: none, static or tokens=S, each in turn
    threads: int = 1  # CPU threads that torch uses
    runs: Path = Path("runs/search")  # folder for the calibration set and static rankings

    @property
    def title(self) -> str:
        return f"{self.model}, {self.examples} questions, kappa {self.kappa}"


GPU_OPTIONS = CPU_OPTIONS = Options(methods=("bosch",), ratios=(0.75,), examples=8, kappa=6)


def measure(options: Options) -> Iterator[Row]:
    torch.set_num_threads(options.threads)
    usual = presets.tiny(options.model)
    calibrated = replace(usual.calibration, examples=options.examples)
    mask = replace(usual.mask, kappa=options.kappa, precision="fp32")
    config = replace(usual, calibration=calibrated, mask=mask)
    stage = calibrate.build(config)
    folder = options.runs / f"set-{stage.fingerprint[:12]}"
    with RunFolder(folder, say=lambda line: None) as run:
        calibration = run.complete(stage)
    for ratio, method, sink in product(options.ratios, options.methods, options.sinks):
        job = replace(config, method=method, ratio=ratio, sink=sink)
        title = f"{method} at {ratio:g}" + (f", sink {sink}" if sink != "auto" else "")
        with_all = search(job, Accelerations(), calibration, folder / "rankings")
        with_none = search(job, Accelerations.none(), calibration, folder / "rankings")
        # An acceleration that changes the mask is a bug in bosch/search.
        assert with_all["z"] == with_none["z"], f"{title}: the accelerations change the mask"
        for side, result in ((ALL, with_all), (NONE, with_none)):
            times = result["layer_forwards"] / with_all["layer_forwards"]
            name = f"{title}, layer-forwards: {side} against all"
            row = {"name": name, "value": times, "unit": "x", "side": side, **result}
            row |= {"times_the_work": times}
            row |= {"times_as_long": result["seconds"] / with_all["seconds"]}
            if side == NONE and method in WITH_TARGET:
                row["at_least"] = TARGET
            elif side == ALL and (most := MOST.get((method, ratio))):
                row |= {"name": f"{title}, {most:,} layer-forwards against its own"}
                row |= {"value": most / result["layer_forwards"], "at_least": 1.0}
            yield row


def search(
    config: Config, accelerations: Accelerations, calibration: Artifact, rankings: Path
) -> Row:
    """The cost of one search. It starts without a memo, but with the static rankings if saved."""
    settings = default_settings(config.method, config.mask)
    settings = replace(settings, accelerations=accelerations)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if rankings.is_dir():
            shutil.copytree(rankings, folder / "rankings")
        search_mask.run_method(folder, config, settings, calibration)
        if (folder / "rankings").is_dir():
            shutil.copytree(folder / "rankings", rankings, dirs_exist_ok=True)
        record = read_mask(folder / "mask.json")
        cost = json.loads((folder / "time.json").read_text())
    row: Row = {"method": config.method, "ratio": config.ratio, "sink": config.sink}
    row["evaluations"] = dict(record.score_trace or {})["evaluations"]
    row["layer_forwards"], row["seconds"] = cost["layer_forwards"], cost["evaluation_seconds"]
    return row | {"z": record.mask.row_texts()}
