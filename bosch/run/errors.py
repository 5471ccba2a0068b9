"""How a mistake of the user reaches the user: one sentence on stderr and exit code 2, no traceback
unless --debug. Every command line runs in `exit_on_user_error(lambda: ..., debug)`.
"""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EXIT_CODE = 2
INTERRUPTED = 130  # what a shell reports of a process that Ctrl-C ended
UNHEARD = 141  # and of one that wrote to a closed pipe


class UserError(Exception):
    """A mistake that is neither a wrong value nor a missing file: a package that is not installed,
    a device that is not there, a run folder that another process holds."""


# What a user can cause. Every other exception is our own mistake and keeps its traceback.
USER_ERRORS = (
    UserError,
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def exit_on_user_error(function: Callable[[], T], debug: bool) -> T:
    """What `function` returns. A user's mistake ends the process; with `debug` it is raised."""
    if debug:
        return function()
    try:
        return function()
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    except BrokenPipeError:  # whoever read our output has left: `recover.py --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNHEARD) from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
