"""Options of a plug-in on the command line: words NAME=VALUE, checked against its Settings."""

import contextlib
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from bosch.command_line import find_setting_error
from bosch.plugins import suggest
from bosch.run.errors import UserError


def with_options(
    plugin: str,
    settings: Any,
    options: Sequence[str],
    flag: str = "--mask.options",
    hint: str = "",
    set_elsewhere: Mapping[str, str] | None = None,
) -> Any:
    """The settings, changed as words like `granularity=layer` say.

    `flag` and `hint` are for errors: what stands before the words, and where the values are listed.
    `set_elsewhere`: settings that have a command-line option of their own.
    """
    known = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for option in options:
        name, _, value = option.partition("=")
        name = name.replace("-", "_")
        head = name.split(".")[0]  # of `accelerations.memory_gb`
        if head not in known or not value:
            raise UserError(
                f"{flag} {option}: write NAME=VALUE with a setting of {plugin}; "
                f"{suggest(name, tuple(known))}"
            )
        if set_elsewhere and name in set_elsewhere:
            raise UserError(
                f"{flag} {option}: {name} has an option of its own, {set_elsewhere[name]}."
            )
        values = value.split(",") if isinstance(known[head], tuple) else [value]
        words = [f"--{name.replace('_', '-')}", *values]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                config = [tyro.conf.FlagConversionOff]
                settings = tyro.cli(type(settings), args=words, default=settings, config=config)
        except SystemExit as stop:
            raise UserError(
                find_setting_error(stop)
                or f"{flag} {option}: {plugin} takes no such value; "
                f"{hint or f'the default is {known[head]!r}'}"
            ) from None
    return settings
