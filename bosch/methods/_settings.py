"""Finds a method by name, checks its file, and builds its settings: the method's defaults, then
MaskConfig's fields of the same names, then the command line. Importing this file does not import
torch; loading a method does if the method's file does."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any, get_args

from bosch.command_line import with_options
from bosch.config import Config, MaskConfig, shared_fields, show_value
from bosch.masks.mask import Unit, describe_ratio, num_windowed
from bosch.method import MethodTraits
from bosch.model import read_shape
from bosch.plugins import describe_plugin, list_plugins, load_plugin, suggest
from bosch.run.errors import UserError
from bosch.run.fingerprint import plain
from bosch.sink import Sink

METHODS = "bosch.methods"


def list_methods() -> list[str]:
    """Name and first sentence of each method. No method is imported."""
    names = list_plugins(METHODS)
    width = max(map(len, names))
    return [f"{name:{width}}  {describe_plugin(METHODS, name)}" for name in names]


def load_method(name: str) -> ModuleType:
    """A file of bosch/methods that is a complete method."""
    known = list_plugins(METHODS)
    if name not in known:
        raise UserError(
            f"--method {name}: no such method; {suggest(name, known)} One of yours: --plugins DIR."
        )
    method = load_plugin(METHODS, name)
    for problem in _problems(method):  # the first: others often follow from it
        raise UserError(f"{method.__file__} {problem}; docs/extending.md shows a complete method.")
    return method


def _problems(method: ModuleType) -> Iterator[str]:
    traits, settings = method.traits, method.Settings
    if not isinstance(traits, MethodTraits):
        yield "must define `traits = MethodTraits(...)`"
    for trait, value in vars(traits).items():
        allowed = get_args(Unit) if trait == "unit" else (False, True)
        if value not in allowed:
            yield f"declares {trait}={value!r}, which is not one of {allowed}"
    if not (dataclasses.is_dataclass(settings) and isinstance(settings, type)):
        yield "must define a dataclass `Settings`, which may be empty"
    for option in dataclasses.fields(settings):
        if option.default is option.default_factory:  # both are MISSING
            yield f"gives no default to {option.name} of its Settings"
    if hasattr(method, "score_groups") == hasattr(method, "select"):
        yield "must define either score_groups(inputs) or select(inputs)"
    if hasattr(method, "score_groups") and traits.unit == "layer":
        yield "ranks groups, so it cannot choose layers: define select(inputs) instead"


def unit_of(name: str, settings: object = None) -> Unit:
    """What a method chooses, which for some depends on their settings."""
    unit: Unit = getattr(settings, "unit", load_method(name).traits.unit)
    return unit


def has_choice(name: str, settings: object, ratio: float, shape: tuple[int, int]) -> bool:
    """False where all groups, or layers, have the window, or none has."""
    num_layers, num_groups = shape
    width = 1 if unit_of(name, settings) == "layer" else num_groups
    return 0 < num_windowed(ratio, num_layers, width) < num_layers * width


def check_settings(name: str, settings: object) -> None:
    """Let the method refuse its settings before work begins."""
    # Optional: most methods can work with all that their Settings accept.
    getattr(load_method(name), "check", lambda settings: None)(settings)


def check_min_full(
    name: str, settings: object, least: int, ratio: float, shape: tuple[int, int]
) -> None:
    """Refuse full groups in every layer that a ratio does not leave, or a method cannot keep.
    shape: layers and groups a layer."""
    if not least:
        return
    method, (layers, groups) = load_method(name), shape
    option, full = f"min_full_per_layer {least}", layers * groups - num_windowed(ratio, *shape)
    ranks = hasattr(method, "score_groups") and unit_of(name, settings) == "group"
    if not (ranks or method.traits.keeps_full):
        problem = f"{option}: method {name} cannot keep full groups in every layer"
        raise UserError(f"{problem}; bosch, global_swap and rankings of groups can.")
    if getattr(settings, "optimizer", "") in ("nomad", "one_plus_one"):
        remedy = "use optimizer=guided or swap"
        raise UserError(f"{option}: the optimizer may leave the ratio; {remedy}.")
    if least > groups:
        raise UserError(f"{option}: layers have {groups} groups; choose up to {groups}.")
    if full < least * layers:
        problem = f"{option} needs {least * layers} full groups in {layers} layers"
        # Rounded down: 2/3 as 0.666667 would put a group too many on the window.
        most = f"choose a ratio of up to {(groups - least) * 10**6 // groups / 10**6:g}"
        raise UserError(f"{problem}, but --ratio {ratio:g} leaves {full}; {most}.")


def default_settings(name: str, mask: MaskConfig) -> Any:
    """A method's settings: its defaults, overridden by MaskConfig's fields of the same names and
    then by `mask.options`."""
    settings_class: Any = load_method(name).Settings
    settings = settings_class(**shared_fields(settings_class, mask))
    # --mask.options must not set what has an option of its own: which of both would count?
    return with_options(name, settings, mask.options, set_elsewhere=[*vars(mask)])


def settings_of_others(settings: object) -> list[str]:
    """Those of MaskConfig that these settings of a method lack, so that they change nothing."""
    of_all = {"attention", "precision", "min_full_per_layer", "options"}
    return [
        name for name in vars(MaskConfig()) if name not in of_all and not hasattr(settings, name)
    ]


def resolve_sink(config: Config, settings: object) -> Config:
    """The config with a sink in the place of `auto`. Called once, where a command reads its
    settings: what follows has to do with none, static and tokens=S only. `settings`: the
    method's, as elsewhere here."""
    return replace(config, sink=auto_sink(config, settings)) if config.sink == "auto" else config


def auto_sink(config: Config, settings: object) -> str:
    """What `--sink auto` means: static with every method, so that comparisons are of methods alone;
    but a method that brings a sink of its own has that."""
    brings = brings_sink(config.method)
    return str(brings(settings, config.window)) if brings else "static"


def usual_path(config: Config, settings: object) -> Path:
    """The run folder without --run-dir, named after model, method, ratio and seed, and the sink if
    it is another than `auto` means."""
    options = [re.sub(r"[^\w=.,-]", "_", option) for option in config.mask.options]
    method = "-".join([config.method, *options])
    # What is usual is left out, so that folders of runs from before there was a choice keep theirs.
    sink = "" if config.sink == auto_sink(config, settings) else f"-{config.sink}"
    seed = f"-s{config.seed}" if config.seed != Config.seed else ""
    return Path("runs") / f"{Path(config.model).name}-{method}-r{config.ratio:g}{sink}{seed}"


def asks_calibration(config: Config, settings: object) -> bool:
    """Whether the mask is chosen by the calibration set, or its static sinks are measured there."""
    if load_method(config.method).traits.reads_calibration:
        return True
    has_constants: Callable[[object], bool] | None
    has_constants = getattr(load_method(config.method), "has_constants", None)
    return config.sink == "static" and not (has_constants and has_constants(settings))


def brings_sink(name: str) -> Callable[[object, int], Sink] | None:
    found: Callable[[object, int], Sink] | None = getattr(load_method(name), "own_sink", None)
    return found


def learning_tokens(config: Config) -> int:
    """Tokens of the budget reserved for learning the mask; training gets the rest."""
    if not load_method(config.method).traits.learns_from_tokens:
        return 0
    shape, settings = read_shape(config.model), default_settings(config.method, config.mask)
    if not has_choice(config.method, settings, config.ratio, (shape.num_layers, shape.num_groups)):
        return 0  # all tokens are left to the training
    return int(getattr(settings, "token_share", 0.0) * config.data.tokens)


def describe_choice(config: Config, settings: object) -> tuple[str, str]:
    """What the ratio means in the method's unit, groups or layers, and the sink."""
    shape, sink = read_shape(config.model), config.sink
    unit = unit_of(config.method, settings)
    if sink == "none":
        sink += (
            ": windows alone cost pretrained models much (SmolLM2-135M, untrained, each group on a "
            "window of 128: 1.11 of loss, with --sink static .27)"
        )
    return describe_ratio(config.ratio, shape.num_layers, shape.num_groups, unit), f"sink {sink}"


def describe_settings(method: str, settings: object) -> list[str]:
    """Lines on the method's settings as they are used; none if it has none."""
    words = ", ".join(f"{name} {show_value(value)}" for name, value in plain(settings).items())
    return wrap(f"{method}: {words}", width=100, subsequent_indent=13 * " ") if words else []
