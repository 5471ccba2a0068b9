"""`bosch SUITE score --in rows.jsonl --out scored.jsonl`: scores predictions from elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bosch.command_line import run_subcommand
from bosch.eval.rows import Row, read_rows, write_rows
from bosch.run.errors import UserError


@dataclass(frozen=True)
class Score:
    """Score rows of predictions."""

    in_file: Annotated[Path, tyro.conf.arg(name="in")]  # JSONL
    out: Path  # JSONL: the same rows with their scores
    debug: bool = False  # show tracebacks


def score_command(
    suite: str,
    description: str,
    score_row: Callable[[Row, str], dict[str, float]],
    describe: Callable[[Sequence[Row]], list[str]],
    args: Sequence[str] | None,
) -> None:
    """score_row: the scores of a row, whose place is for errors. describe: lines on all rows."""

    def run(command: Score) -> None:
        scored = [
            row | score_row(row, f"{command.in_file}, row {number}")
            for number, row in enumerate(read_rows(command.in_file), 1)
        ]
        if not scored:
            raise UserError(f"{command.in_file} has no rows; name a file of predictions.")
        write_rows(command.out, scored)
        for line in [*describe(scored), f"wrote {command.out}: {len(scored)} rows"]:
            print(line)

    prog = f"python -m bosch.eval.suites.{suite}"
    run_subcommand(prog, {"score": (Score, run)}, args, description)
