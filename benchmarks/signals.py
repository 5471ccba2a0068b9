"""Which calibration questions order masks as other formats do.

    python -m benchmarks signals --folder runs/real --judged benchmarks/results/real-formats.jsonl

Takes masks that `real_model --formats` has judged, and answers under each of them the questions of
several calibration sets: needles, and the tasks made of the text itself. A signal is what a search
could maximize. `order` is the rank correlation with own formats, over the masks of one ratio: at 1
the search that maximizes the signal would choose the mask that answers best in other formats.
`gain` is how much more of the needles a mask has than that of `--baseline`, on the set of needles
that chose it and on the other sets, whose questions it has not seen.
`--kinds random` answers texts of random tokens instead (bosch/random_texts.py), eight a set.
A row is written when it is done; the same command goes on with those that are missing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks import real_model
from benchmarks._measure import DeviceOptions, Row, append_row, read_rows
from bosch.calibration import Calibration
from bosch.data.calibration import CalibrationSettings, random_haystacks
from bosch.hybrid.sinks import attach_sink
from bosch.masks.analysis import spearman
from bosch.masks.mask import GroupMask
from bosch.method import Inputs
from bosch.methods._settings import default_settings, load_method
from bosch.model import read_model_info
from bosch.search.score import Evaluator
from bosch.search.settings import SearchSettings
from bosch.sink import Sink

OWN_TEXT = ("copy", "look_up", "continue")
PARTS = ("accuracy", "probability", "log_probability")  # of a mask's answers
KINDS = ("needles", "own text")
RANDOM, RANDOM_TEXTS = "random", 8
SIGNALS = [f"{kind}{suffix}" for kind in (*KINDS, "both", RANDOM) for suffix in ("", ", log")]
TITLE = "{folder}, calibration sets {seeds}, {place}"
COLUMNS = {"ratio": "ratio", "mask": "name", "own formats": "formats:.1f"}
COLUMNS |= {name: f"{name}:.3f" for name in SIGNALS}  # those of the other kinds are empty
COLUMNS |= {"gain, its set": "gain_own:+.3f", "other sets": "gain_other:+.3f"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    folder: Path = Path("runs/real")  # made by launch/fetch_real_model.py
    judged: tuple[Path, ...] = (Path("benchmarks/results/real-formats.jsonl"),)  # has the masks
    rows: Path = Path("runs/signals.jsonl")  # gets the rows
    ratios: tuple[float, ...] = (0.75, 0.875)
    seeds: tuple[int, ...] = (0, 1, 2)  # of the calibration sets, whose mean counts
    kinds: tuple[str, ...] = KINDS  # of questions: needles, own text, random
    baseline: str = "razor"  # whose mask, that of most seeds, the gains of the others are over


def measure(options: Options) -> Iterator[Row]:
    device, done = options.start(), read_rows(options.rows)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    asked = Asked(options, device)
    for ratio in options.ratios:
        rows, judged = [], judged_masks(options.judged, ratio)
        for (z, window), masks in judged.items():
            key = {"ratio": ratio, "window": window, "seeds": list(options.seeds), "z": list(z)}
            found = [
                row
                for row in done
                if all(row.get(name) == key[name] for name in key) and {*options.kinds} <= {*row}
            ]
            if not found:
                found = [key | {"formats": masks[0]["formats"]} | asked.under(z, window)]
                append_row(options.rows, found[0])
            rows.append(found[0] | {"name": name_of(masks)})
        base = baseline_of(options.baseline, rows, list(judged.values()))
        gains = [
            gains_over(base, row, masks, options.seeds)
            for row, masks in zip(rows, judged.values(), strict=True)
        ]
        rows = [row | signals_of(row) for row in rows]
        yield from (row | gain for row, gain in zip(rows, gains, strict=True))
        if len(rows) > 1:
            formats = [row["formats"] for row in rows]
            orders = {
                name: spearman(np.array([row[name] for row in rows]), np.array(formats))
                for name in SIGNALS
                if name in rows[0]
            }
            none = {"gain_own": None, "gain_other": None}
            yield {"ratio": ratio, "name": "order", "formats": 1.0, **orders, **none}


def judged_masks(
    files: Sequence[Path], ratio: float
) -> dict[tuple[tuple[str, ...], int], list[Row]]:
    """The rows with own formats, by their mask and window."""
    masks: dict[tuple[tuple[str, ...], int], list[Row]] = {}
    for row in (row for file in files for row in read_rows(file)):
        if row["ratio"] == ratio and "formats" in row:
            masks.setdefault((tuple(row["z"]), row["window"]), []).append(row)
    return masks


def name_of(masks: Sequence[Row]) -> str:
    """The methods that chose a mask, by which calibration sets, and what was unusual."""
    names = []
    for row in masks:
        words = [row["method"], str(row["seed"]), *(row.get("options") or ())]
        words += ["by other tasks"] if row.get("tasks") else []
        names.append(" ".join(words))
    return ", ".join(dict.fromkeys(names))


def signals_of(row: Row) -> dict[str, float]:
    """The objective of the search, accuracy+probability, and the log-probability; means over the
    calibration sets, of needles, of the tasks of the text itself, and of both."""
    signals: dict[str, float] = {}
    for name in (kind for kind in (*KINDS, RANDOM) if kind in row):
        accuracy, probability, log = (fmean(part) for part in zip(*row[name], strict=True))
        signals |= {name: (accuracy + probability) / 2, f"{name}, log": log}
    for suffix in ("", ", log") if {*KINDS} <= {*row} else ():
        signals[f"both{suffix}"] = fmean(signals[f"{name}{suffix}"] for name in KINDS)
    return signals


def baseline_of(method: str, rows: Sequence[Row], judged: Sequence[Sequence[Row]]) -> Row | None:
    """The row of the mask that most seeds of a method chose. None: this ratio has none of it."""
    load_method(method)  # refuses a name that no method has
    counts = [sum(mask["method"] == method for mask in masks) for masks in judged]
    return rows[counts.index(max(counts))] if any(counts) else None


def gains_over(
    base: Row | None, row: Row, masks: Sequence[Row], seeds: Sequence[int]
) -> dict[str, float | None]:
    """The mean gain over the baseline by the objective of the search, on the sets of needles that
    chose a mask and on the others. None: no set or every one did, or other tasks too."""
    gains: dict[str, float | None] = {"gain_own": None, "gain_other": None}
    traits = [load_method(mask["method"]).traits for mask in masks]
    by_questions = all(each.searches or each.measures for each in traits) and "needles" in row
    if base is None or row is base or not by_questions or any(m.get("tasks") for m in masks):
        return gains
    by_set = zip(row["needles"], base["needles"], strict=True)
    found = [(ours[0] + ours[1] - theirs[0] - theirs[1]) / 2 for ours, theirs in by_set]
    chose = {mask["seed"] for mask in masks}
    for name, is_own in (("gain_own", True), ("gain_other", False)):
        if some := [g for g, seed in zip(found, seeds, strict=True) if (seed in chose) == is_own]:
            gains[name] = fmean(some)
    return gains


class Asked:
    """The model and the calibration sets. They are loaded when a row is missing."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options = options
        usual = real_model.Options(folder=options.folder, threads=options.threads)
        self.needles = real_model.Bench(usual, device)
        self.own_text = real_model.Bench(replace(usual, tasks=OWN_TEXT), device)

    @cached_property
    def sets(self) -> dict[str, list[Calibration]]:
        # One copy of the model that answers in its own words, for both.
        self.own_text.judged = self.needles.judged
        make: dict[str, Callable[[int], Calibration]] = {
            "needles": self.needles.questions,
            "own text": self.own_text.questions,
            RANDOM: self.random_texts,
        }
        return {
            kind: [make[kind](seed) for seed in self.options.seeds] for kind in self.options.kinds
        }

    def random_texts(self, seed: int) -> Calibration:
        settings = CalibrationSettings(random_texts=RANDOM_TEXTS, seed=seed)
        length = self.needles.config.calibration.length
        return Calibration(random_haystacks(settings, self.needles.tokenizer, length))

    def under(self, z: Sequence[str], window: int) -> Row:
        """Accuracy, probability and log-probability under a mask, for each set. With the sink of
        the first set of needles, whichever set chose the mask."""
        model, needles = self.needles.model, self.needles.questions(self.options.seeds[0])
        inputs = Inputs(
            model_info=read_model_info(self.needles.path),
            load_model=lambda: model,
            load_calibration=lambda: needles,
            window_tokens=window,
            ratio=0.5,  # of no consequence: the mask is given
            seed=0,
            settings=default_settings("razor", self.needles.config.mask),
            folder=self.options.folder,
            load_tokenizer=lambda: self.needles.tokenizer,
            sink=Sink.parse("static"),
        )
        attach_sink(model, inputs.measured_sink(model))
        mask = GroupMask.from_rows([[int(bit) for bit in row] for row in z], window)
        row: Row = {}
        for name, sets in self.sets.items():
            row[name] = []
            for calibration in sets:
                (value,) = Evaluator(model, calibration, window, SearchSettings()).score([mask.z])
                row[name].append([round(getattr(value, part), 4) for part in PARTS])
        return row
