"""Runs a method, turns scores into the exact mask, and writes the files of the stage `mask`:
mask.json, scores.json and time.json."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bosch.masks.formats import smallest
from bosch.masks.mask import GroupMask, MaskFile, write_mask
from bosch.method import Inputs, Scores, Selection
from bosch.methods._examples import FILE, identify
from bosch.methods._settings import check_min_full, has_choice, load_method, unit_of
from bosch.run.checkout import provenance
from bosch.run.errors import UserError
from bosch.run.files import read_lines, write_atomically
from bosch.run.fingerprint import plain


def make_mask(name: str, inputs: Inputs) -> Selection:
    """The mask a method chooses, at exactly the requested ratio."""
    method, shape = load_method(name), (inputs.num_layers, inputs.num_groups)
    check_min_full(name, inputs.settings, inputs.min_full_per_layer, inputs.ratio, shape)
    traits = method.traits
    if traits.learns_from_tokens and inputs.learning is None:
        problem = f"--method {name} learns from tokens but got none"
        raise UserError(f"{problem}; run bosch recover, which prepares them first.")
    # Neither a search nor a training for hours can change a mask of all groups, or of none.
    takes_long = traits.learns_from_tokens or traits.searches
    if takes_long and not has_choice(name, inputs.settings, inputs.ratio, shape):
        rows = [[int(inputs.ratio == 0)] * inputs.num_groups] * inputs.num_layers
        unit = unit_of(name, inputs.settings)
        mask = GroupMask.from_rows(rows, inputs.window_tokens, unit)
        return Selection(mask, notes=(f"all {unit}s are alike at this ratio; nothing to choose",))
    rank = getattr(method, "score_groups", None)
    return choose_most_local(rank(inputs), inputs) if rank else method.select(inputs)


def choose_most_local(scores: Scores, inputs: Inputs) -> Selection:
    """Window the most local groups, up to the budget. The seed breaks ties between equal scores."""
    sign = -1 if scores.larger_is == "local" else 1  # so that small is local
    table = [[sign * value for value in row] for row in scores.groups]
    least_full = inputs.min_full_per_layer
    windowed, tie = smallest(table, inputs.num_windowed, inputs.seed, least_full)
    notes = []
    if tie:
        tie["value"] *= sign
        notes.append(
            f"{tie['num_tied']} groups are tied at the cutoff score {tie['value']:g}; seed "
            f"{inputs.seed} chose the {tie['num_windowed']} of them that get the window"
        )
    # Which of a layer's groups stay full may be drawn too, where their scores are equal.
    drawn = scores.drawn or tie is not None or least_full > 0
    mask = inputs.mask_of(windowed)
    return Selection(mask, scores, details={"tie": tie}, drawn=drawn, notes=tuple(notes))


def write_selection(name: str, inputs: Inputs, selection: Selection, began: float) -> MaskFile:
    """Write what a method chose into the stage's folder. `began`: time.monotonic() at the start."""
    settings, folder, scores = deciding(inputs.settings), inputs.folder, selection.scores
    sink = inputs.sink
    details = dict(selection.details)
    if least := inputs.min_full_per_layer:
        details["min_full_per_layer"] = least
    if sink.kind == "static":
        from bosch.hybrid.sinks import write_constants  # imports torch

        sink = selection.mask.sink
        if sink.constants is None:  # none came with the mask: those of the search
            model: Any = inputs.model
            sink = model.window_sink
        write_constants(folder / "mask.json", sink)
    record = MaskFile(
        mask=replace(selection.mask, sink=sink, own_windows=inputs.own_windows),
        model=selection.model or inputs.model_info,
        method=name,
        ratio_asked=inputs.ratio,
        settings=_plain(settings | details),
        seed=inputs.seed if selection.drawn else None,
        score_trace=selection.score_trace,
        provenance=provenance(),
    )
    if scores is not None:  # for analyses
        content = {
            "method": name,
            "settings": _plain(settings),
            "window_tokens": inputs.window_tokens,
            "model": asdict(inputs.model_info),
            "larger_is": scores.larger_is,
            "groups": scores.groups,
            "heads": scores.heads,
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(folder / "scores.json", text)
    seconds = time.monotonic() - began
    # Those of earlier attempts count too.
    if load_method(name).traits.measures and (path := folder / FILE).is_file():
        lines = [line for _, line in read_lines(path, identify(inputs, name)) if line]
        if lines:  # none: another method has left the file
            seconds = sum(line["seconds"] for line in lines)
    cost = {"method": name, "seconds": round(seconds, 3), **(selection.cost or {})}
    write_atomically(folder / "time.json", json.dumps(cost) + "\n")
    # Last, as it is what a reader of an unfinished folder would take for the result.
    write_mask(folder / "mask.json", record)
    return record


def deciding(settings: Any) -> dict[str, Any]:
    """The settings that decide a method's mask, without those that only affect its speed."""
    names = plain(settings).keys()
    return {name: value for name, value in asdict(settings).items() if name in names}


def _plain(settings: dict[str, Any]) -> Any:
    """Settings for JSON. Of a path only the name: the file must not depend on where it was made."""
    named = {name: v.name if isinstance(v, Path) else v for name, v in settings.items()}
    return plain(named)
