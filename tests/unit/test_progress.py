"""Lines, bars, and recover.log."""

import subprocess
import sys
from pathlib import Path

import pytest

from bosch.run import progress
from tests.terminal import on_a_terminal

PROGRAM = """
from pathlib import Path
from bosch.run import progress
progress.set_up()
progress.log_to(Path({log!r}))
progress.say("a line [with] brackets")
with progress.track("search", total=3, unit="masks") as bar:
    for score in (0.5, 0.75, 0.875):
        bar.advance(score=score)
        progress.say("within")
progress.say("end")
"""


def test_piped_output_is_plain_lines_and_the_log_has_the_same_with_times(tmp_path: Path) -> None:
    log = tmp_path / "run" / "recover.log"
    progress.set_up()
    progress.log_to(log)
    progress.say("said by an earlier attempt")
    program = PROGRAM.format(log=str(log))
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[0] == "a line [with] brackets"
    assert lines[1:4] == ["within"] * 3  # the bar is silent until a minute has passed
    assert lines[4].startswith("search: 3 of 3 masks (100 %)")
    assert lines[4].endswith("score 0.875")
    logged = [line[20:] for line in log.read_text().splitlines()]
    assert logged == ["said by an earlier attempt", *lines]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: Linux has it")
def test_a_full_disk_gives_no_traceback_for_each_line(tmp_path: Path) -> None:
    log = tmp_path / "recover.log"
    log.write_text("")
    program = PROGRAM.format(log=str(log)).replace(
        "progress.say(",
        "progress.logger.handlers[-1].stream = open('/dev/full', 'w')\nprogress.say(",
        1,
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "end" in run.stdout.splitlines()
    assert "Logging error" not in run.stderr


def test_terminal_gets_a_bar_and_the_log_stays_plain(tmp_path: Path) -> None:
    log = tmp_path / "recover.log"
    _, shown = on_a_terminal("-c", PROGRAM.format(log=str(log)))
    assert "\u2501" in shown  # the line that rich draws a bar with
    assert "3/3" in shown
    assert "\x1b" not in log.read_text()
    assert "search: 3 of 3 masks" in log.read_text()


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress.set_up(rank=1)
    progress.log_to(tmp_path / "recover.log")
    progress.say("nobody hears this")
    with progress.track("search", total=2, unit="masks") as bar:
        bar.advance(2)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "recover.log").exists()


def test_a_table_is_as_wide_as_its_cells_and_has_no_empty_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Output that goes to a file used to cut figures of tables wider than 120 columns."""
    names = [f"figure number {number}" for number in range(12)]
    rows = [dict.fromkeys(names, 1234.5) | {"all": None, "some": each} for each in (None, 7)]
    columns = {name: f"{name}:.1f" for name in names} | {"all": "all", "some": "some"}
    progress.show_rows("wide", rows, columns)
    _, header, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert header.split("┃")[-1].strip() == "some"
    assert [cell.strip() for cell in header.split("┃")][:-1] == names
    assert [cell.strip() for cell in first.split("│")] == ["1234.5"] * 12 + ["–"]
    assert [cell.strip() for cell in second.split("│")] == ["1234.5"] * 12 + ["7"]
