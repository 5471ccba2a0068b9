"""From a method's name to its settings: its own defaults, what MaskConfig has under the same names,
and the words of a command line on top. Importing this file loads no torch."""

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import tyro

from bosch.command_line import find_setting_error
from bosch.config import Config, MaskConfig, shared_fields
from bosch.masks.mask import describe_ratio, num_windowed
from bosch.model import read_shape
from bosch.plugins import describe_plugin, list_plugins, load_plugin, suggest
from bosch.run.errors import UserError

METHODS = "bosch.methods"


def list_methods() -> list[str]:
    """Name and first sentence of each method, read from the folder."""
    names = list_plugins(METHODS)
    width = max(map(len, names))
    return [f"{name:{width}}  {describe_plugin(METHODS, name)}" for name in names]


def load_method(name: str) -> ModuleType:
    """A file of bosch/methods that is a whole method."""
    known = list_plugins(METHODS)
    if name not in known:
        raise UserError(f"--method {name}: no such method; {suggest(name, known)}")
    method = load_plugin(METHODS, name)
    if not dataclasses.is_dataclass(getattr(method, "Settings", None)):
        missing = "dataclass Settings (it may be empty)"
    elif not hasattr(method, "score_groups") and not hasattr(method, "select"):
        missing = "score_groups(inputs) and no select(inputs)"
    else:
        return method
    raise UserError(
        f"--method {name}: {method.__file__} has no {missing}. bosch/method.py shows "
        "how a method is written."
    )


def default_settings(name: str, mask: MaskConfig) -> Any:
    """A method's settings: MaskConfig's value where it has a field of that name, else the method's
    own default, and on top of them what `mask.options` say.
    """
    settings_class: Any = load_method(name).Settings
    return with_options(name, settings_class(**shared_fields(settings_class, mask)), mask.options)


def with_options(method: str, settings: Any, options: Sequence[str]) -> Any:
    """The settings, changed as words like `granularity=layer` say."""
    known = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for option in options:
        name, _, value = option.partition("=")
        name = name.replace("-", "_")
        head = name.split(".")[0]  # of `accelerations.memory_gb`
        if head not in known or not value:
            raise UserError(
                f"--mask.options {option}: write NAME=VALUE with a setting of {method}; "
                f"{suggest(name, tuple(known))}"
            )
        if name in {field.name for field in dataclasses.fields(MaskConfig)}:
            raise UserError(f"--mask.options {option}: --mask.{name} sets it for all methods.")
        values = value.split(",") if isinstance(known[head], tuple) else [value]
        words = [f"--{name.replace('_', '-')}", *values]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                config = [tyro.conf.FlagConversionOff]
                settings = tyro.cli(type(settings), args=words, default=settings, config=config)
        except SystemExit as stop:
            raise UserError(
                find_setting_error(stop)
                or f"--mask.options {option}: {method} takes no such value; "
                f"search_mask.py --method {method} --help says which"
            ) from None
    return settings


def learns_from_tokens(method: str) -> bool:
    """Whether the tokens have to be there before the mask."""
    from bosch.methods import _choose  # loads torch

    load_method(method)
    return _choose.learns_from_tokens(method)


def learning_tokens(config: Config) -> int:
    """Of the token budget, what is set aside for learning the mask: training gets the rest."""
    if not learns_from_tokens(config.method):
        return 0
    shape = read_shape(config.model)
    layers, groups = shape.num_layers, shape.num_groups
    if num_windowed(config.ratio, layers, groups) in (0, layers * groups):
        return 0  # nothing to choose
    settings = default_settings(config.method, config.mask)
    return int(getattr(settings, "token_share", 0.0) * config.data.tokens)


def describe_budget(config: Config, settings: Any = None) -> str:
    """What the ratio comes to in the method's own unit."""
    from bosch.methods import _choose  # loads torch

    shape = read_shape(config.model)
    unit = _choose.unit_of(config.method, settings or default_settings(config.method, config.mask))
    return describe_ratio(config.ratio, shape.num_layers, shape.num_groups, unit)
