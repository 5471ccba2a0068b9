"""The command `bosch`, and `python -m bosch`: a word for each program of the package.

    bosch recover --ratio 0.75
    accelerate launch -m bosch recover --ratio 0.75

A program is imported when it is chosen, so `bosch --help` is quick.
"""

import importlib
import sys
from collections.abc import Sequence

import bosch
from bosch.command_line import choose_word
from bosch.programs import PROGRAMS
from bosch.run.errors import exit_on_user_error


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> None:
        if words == ["--version"]:
            print(f"bosch {bosch.__version__}")
            return
        about = {word: text for word, (_, text) in PROGRAMS.items()}
        word, rest = choose_word("bosch", about, words)
        sys.argv = [f"bosch {word}", *rest]  # by which a program knows how it was called
        importlib.import_module(PROGRAMS[word][0]).main(rest)

    exit_on_user_error(run, debug="--debug" in words)


if __name__ == "__main__":
    main()
