"""How a user's mistake ends a command: one sentence on stderr and exit code 2, with a traceback
only under --debug. Every command line runs in `run_main` or `exit_on_user_error`.

Our own checks raise UserError, and so does code that calls a library on a user's file. Every other
exception is a bug, ours or a plug-in's: it keeps its traceback, and the process exits with 1.
"""

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bosch.run.memory import use_expandable_segments, use_no_more_threads
from bosch.run.plain_text import visible

T = TypeVar("T")

# Errors of the machine, wherever they happen: no permission, a full disk or quota, a name that is
# too long, or that of a file in the place of a folder.
REFUSED = "EEXIST ENOTDIR EACCES EPERM EROFS ENOSPC EDQUOT ENAMETOOLONG".split()
FULL = (errno.ENOSPC, errno.EDQUOT)
FREE_SPACE = "Free some space and run the same command again: it goes on."


class UserError(ValueError):
    """Settings, inputs or a machine that cannot work. Its text is one sentence with the remedy."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder is missing that the user named, or that a complete folder would hold."""


class CombinedError(UserError):
    def __init__(self, errors: Sequence[Exception]) -> None:
        self.errors = errors
        sentences = map(as_sentence, errors)
        self.lines = [f"{len(errors)} things are missing or cannot be used:", *sentences]
        super().__init__(" ".join(self.lines))


@dataclass
class Refusals:
    """Collects what several checks refuse, so that all of it is said at once:

        refusals = Refusals()
        with refusals:
            check_model(model)
        with refusals:
            check_data(data)
        refusals.raise_all()

    Of sentences that begin alike only the first counts: one mistake may be seen by several."""

    errors: dict[str, Exception] = field(default_factory=dict)  # by how they begin

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or not is_user_error(error):
            return False  # no error, or a bug, which is raised
        for each in getattr(error, "errors", [error]):  # a CombinedError holds several
            beginning = re.split("[.:;] ", str(each).replace("--eval.", "--"))[0]
            self.errors.setdefault(beginning, each)
        return True

    def raise_all(self) -> None:
        errors = list(self.errors.values())
        if errors:
            raise CombinedError(errors) if len(errors) > 1 else errors[0]


def as_sentence(error: BaseException) -> str:
    """Of the machine's errors without the number."""
    if isinstance(error, UserError) or not isinstance(error, OSError):
        return str(error)
    cause = (error.strerror or "").lower()
    # Of a file that is open already, the system does not say which.
    problem = f"{error.filename}: {cause}" if error.filename else cause
    if error.errno in FULL:
        return f"{problem}. {FREE_SPACE}"
    if not error.filename:
        return str(error)
    remedy = "Name another place"
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy += ", or change its permissions"
    return f"{problem}. {remedy}."


def is_user_error(error: BaseException) -> bool:
    """Whether an exception is reported as one sentence."""
    number = error.errno if isinstance(error, OSError) else None
    return isinstance(error, UserError) or errno.errorcode.get(number or 0) in REFUSED


def exit_on_user_error(function: Callable[[], T], debug: bool) -> T:
    """What `function` returns. A user's mistake ends the process; with `debug` it is raised."""
    # Here, since each program begins here, before it imports torch; a library must not decide it.
    use_expandable_segments()
    use_no_more_threads()
    # A terminal or pipe may not be able to show our signs. Output that was closed before the start
    # (`>&-`) is None.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")
    if debug:
        return function()
    try:
        return function()
    except BrokenPipeError:  # the reader of our output has left: `bosch recover --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None  # as a shell reports it
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None  # as a shell reports it
    except Exception as error:
        lines = getattr(error, "lines", [as_sentence(error)])
        if is_out_of_memory(error):
            lines = [f"this machine, or a limit set on it, has too little memory: {error}"]
        elif not is_user_error(error):
            raise
        print("error: " + "\n- ".join(map(visible, lines)), file=sys.stderr)
        raise SystemExit(2) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Of the machine: torch and safetensors have no class for it. A GPU's keeps its traceback."""
    if not isinstance(error, OSError | RuntimeError):
        return isinstance(error, MemoryError)
    return bool(re.search("(?i)can(not|'t) (allocate memory|start new thread)", str(error)))


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """What the file of a program does when it is started itself."""
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
