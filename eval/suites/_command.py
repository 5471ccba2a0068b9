"""The command lines of suites: `python -m eval.suites.<suite> <command> ...`, and the one that
scores predictions made anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bosch.run.errors import exit_on_user_error
from eval.rows import Row, read_rows, write_rows


@dataclass(frozen=True)
class Score:
    """Score rows of predictions."""

    in_file: Annotated[Path, tyro.conf.arg(name="in")]  # JSONL
    out: Path  # JSONL: the same rows, each with its scores
    debug: bool = False  # show tracebacks


def run_command(
    suite: str,
    name: str,
    kind: type,
    run: Callable[[Any], None],
    args: Sequence[str] | None,
    description: str | None = None,
) -> None:
    """One subcommand of a suite, its options those of a dataclass with `debug` among them."""
    command: Any = tyro.extras.subcommand_cli_from_dict(
        {name: kind}, prog=f"python -m eval.suites.{suite}", description=description, args=args
    )
    exit_on_user_error(lambda: run(command), command.debug)


def score_command(
    suite: str,
    description: str,
    score_row: Callable[[Row, str], dict[str, float]],
    describe: Callable[[Sequence[Row]], list[str]],
    args: Sequence[str] | None,
) -> None:
    """score_row: the scores that a row gets, and where it stands for errors. describe: lines on all
    scored rows."""

    def run(command: Score) -> None:
        scored = [
            row | score_row(row, f"{command.in_file}, row {number}")
            for number, row in enumerate(read_rows(command.in_file), 1)
        ]
        write_rows(command.out, scored)
        for line in [*describe(scored), f"wrote {command.out}: {len(scored)} rows"]:
            print(line)

    run_command(suite, "score", Score, run, args, description)
