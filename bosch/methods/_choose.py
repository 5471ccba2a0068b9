"""From a method's name to the files of the stage `mask`: runs the method, turns scores into the
exact mask, writes mask.json, scores.json and time.json.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from bosch.masks.formats import smallest
from bosch.masks.mask import MaskFile, Unit, write_mask
from bosch.method import Inputs, Scores, Selection
from bosch.methods._examples import measured_seconds
from bosch.plugins import load_plugin
from bosch.run.errors import UserError
from bosch.run.fingerprint import plain
from bosch.run.manifest import provenance, write_atomically

PACKAGE = "bosch.methods"


def make_mask(name: str, inputs: Inputs) -> Selection:
    """The mask a method chooses, at exactly the ratio asked."""
    method = load_plugin(PACKAGE, name)
    if learns_from_tokens(name):
        if inputs.learning is None:
            raise UserError(
                f"--method {name} learns from tokens, and none were handed to it; run it through "
                "recipes/recover.py, which prepares them first."
            )
        everything = [(i, g) for i in range(inputs.num_layers) for g in range(inputs.num_groups)]
        if inputs.budget in (0, len(everything)):
            mask = inputs.mask_of(everything[: inputs.budget])
            return Selection(mask, notes=("there is nothing to choose at this ratio",))
    if hasattr(method, "score_groups"):
        return choose_most_local(method.score_groups(inputs), inputs)
    selection: Selection = method.select(inputs)
    return selection


def choose_most_local(scores: Scores, inputs: Inputs) -> Selection:
    """The most local groups, as many as the budget has. Among equal scores the seed draws."""
    sign = -1 if scores.larger_is == "local" else 1
    table = [[sign * value for value in row] for row in scores.groups]
    windowed, tie = smallest(table, inputs.budget, inputs.seed)
    notes: tuple[str, ...] = ()
    if tie:
        tie["value"] *= sign
        notes = (
            f"{tie['num_tied']} groups share the score {tie['value']:g} at the border; seed "
            f"{inputs.seed} chose the {tie['num_windowed']} of them that go on the window",
        )
    mask = inputs.mask_of(windowed)
    drawn = scores.drawn or tie is not None
    return Selection(mask, scores, details={"tie": tie}, drawn=drawn, notes=notes)


def write_selection(name: str, inputs: Inputs, selection: Selection, began: float) -> MaskFile:
    """Write what a method chose into the context's folder. `began`: time.monotonic() then."""
    settings, folder, scores = deciding(inputs.settings), inputs.folder, selection.scores
    record = MaskFile(
        mask=selection.mask,
        model=selection.model or inputs.model_info,
        method=name,
        ratio_asked=inputs.ratio,
        settings=_plain(settings | dict(selection.details)),
        seed=inputs.seed if selection.drawn else None,
        score_trace=selection.score_trace,
        provenance=provenance(),
    )
    if scores is not None:  # for analyses, and for searches that start from it
        content = {
            "method": name,
            "settings": _plain(settings),
            "window_tokens": inputs.window_tokens,
            "model": dataclasses.asdict(inputs.model_info),
            "larger_is": scores.larger_is,
            "groups": scores.groups,
            "heads": scores.heads,
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(folder / "scores.json", text)
    seconds = measured_seconds(folder) or time.monotonic() - began
    cost = {"method": name, "seconds": round(seconds, 3), **(selection.cost or {})}
    write_atomically(folder / "time.json", json.dumps(cost) + "\n")
    write_mask(folder / "mask.json", record)
    return record


def deciding(settings: Any) -> dict[str, Any]:
    """The fields of a method's settings that decide its mask: those of speed alone are left out."""
    names = plain(settings).keys()
    return {name: value for name, value in dataclasses.asdict(settings).items() if name in names}


def learns_from_tokens(name: str) -> bool:
    return bool(getattr(load_plugin(PACKAGE, name), "learns_from_tokens", False))


def searches(name: str) -> bool:
    return bool(getattr(load_plugin(PACKAGE, name), "searches", False))


def reads_calibration(name: str) -> bool:
    return bool(getattr(load_plugin(PACKAGE, name), "reads_calibration", True))


def check_settings(name: str, settings: Any) -> None:
    """What a method has to say against its settings, before work begins."""
    getattr(load_plugin(PACKAGE, name), "check", lambda settings: None)(settings)


def unit_of(name: str, settings: Any = None) -> Unit:
    """What a method chooses: groups, or whole layers. Some leave it to their settings."""
    own: Unit = getattr(load_plugin(PACKAGE, name), "unit", "group")
    unit: Unit = getattr(settings, "unit", own)
    return unit


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it. Of a path the name: where a mask was made does not change its file."""
    named = {name: v.name if isinstance(v, Path) else v for name, v in settings.items()}
    content: dict[str, Any] = plain(named)
    return content
