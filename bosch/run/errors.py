"""How a mistake of the user reaches the user: one sentence on stderr and exit code 2, no traceback
unless --debug. Every command line runs in `exit_on_user_error(lambda: ..., debug)`.

What this project checks itself raises UserError, and so does what reads a file or a model for what
its library says of it. Every other exception is a bug, of ours or of a plug-in: it keeps its
traceback, and the process exits with 1.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EXIT_CODE = 2
INTERRUPTED = 130  # what a shell reports of a process that Ctrl-C ended
UNHEARD = 141  # and of one that wrote to a closed pipe

# What a machine refuses, wherever it happens: a full disk or quota, a folder that is not ours.
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


class UserError(ValueError):
    """Settings, inputs or a machine that cannot work. Its text is one sentence with the remedy."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the user named, or that a complete one would hold, is not there."""


def is_user_error(error: BaseException) -> bool:
    """Whether an exception is told as one sentence."""
    is_refused = isinstance(error, OSError) and error.errno in REFUSED
    return isinstance(error, UserError) or is_refused


def exit_on_user_error(function: Callable[[], T], debug: bool) -> T:
    """What `function` returns. A user's mistake ends the process; with `debug` it is raised."""
    if debug:
        return function()
    try:
        return function()
    except BrokenPipeError:  # whoever read our output has left: `recover.py --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNHEARD) from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
