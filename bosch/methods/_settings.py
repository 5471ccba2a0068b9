"""From a method's name to its settings: its own defaults, what MaskConfig has under the same names,
and the words of a command line on top. Importing this file loads no torch."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from bosch import plugin_options
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
    hint = f"search_mask.py --method {method} --help says which"
    dials = {field.name: f"--mask.{field.name}" for field in dataclasses.fields(MaskConfig)}
    return plugin_options.with_options(method, settings, options, "--mask.options", hint, dials)


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
