"""Lines, bars, and recover.log."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from bosch.run import progress
from bosch.run.progress import Bar

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


def test_bars_of_libraries_that_are_loaded_already_are_off_in_piped_output() -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    progress.set_up()
    assert not logging.is_progress_bar_enabled()


def read_terminal(descriptor: int) -> str:
    """All that was written: a read gives a part, and after the last there is an error."""
    parts = []
    with open(descriptor, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while part := terminal.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def test_terminal_gets_a_bar_and_the_log_stays_plain(tmp_path: Path) -> None:
    log = tmp_path / "recover.log"
    ours, theirs = pty.openpty()
    program = PROGRAM.format(log=str(log))
    environment = os.environ | {"TERM": "xterm"}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    shown = read_terminal(ours)
    assert "\u2501" in shown  # the line that rich draws a bar with
    assert "3/3" in shown
    assert "\x1b" not in log.read_text()
    assert "search: 3 of 3 masks" in log.read_text()


def test_other_ranks_are_silent_and_write_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.set_up(rank=1)
    progress.log_to(tmp_path / "recover.log")
    progress.say("nobody hears this")
    with progress.track("search", total=2, unit="masks") as bar:
        bar.advance(2)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "recover.log").exists()


def test_plain_lines_come_once_a_minute_and_more_rarely_in_a_run_of_days(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress.set_up()
    now = 0.0
    bar = Bar("pack", total=100, unit="files", clock=lambda: now)
    for second in range(6, 246, 6):
        now = float(second)
        bar.advance()
    left = {10: "9 min 0 s", 20: "8 min 0 s", 30: "7 min 0 s", 40: "6 min 0 s"}
    assert capsys.readouterr().out.splitlines() == [
        f"pack: {n} of 100 files ({n} %), 0.167 files/s, {text} left" for n, text in left.items()
    ]
    now = 0.0
    bar = Bar("train", total=40_000, unit="steps", clock=lambda: now)
    for step in range(34_560):  # four days of ten seconds
        now = 10.0 * step
        bar.advance()
    # Worked by hand: 100 lines in the first 6,000 s, then about 100 * ln(345,600 / 6,000) = 405.
    assert 450 < len(capsys.readouterr().out.splitlines()) < 550


def test_pace_counts_only_this_attempt_and_a_plan_grows_with_what_goes_beyond_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress.set_up()
    now = 0.0
    bar = Bar("train", total=100, unit="steps", done=80, clock=lambda: now)
    now = 4.0
    bar.skip(10)
    assert bar.describe_pace() == ""
    bar.advance(2)
    assert bar.describe_pace() == "0.5 steps/s, 16.0 s left"
    bar = Bar("search", total=4, unit="masks", clock=lambda: 0.0)
    for _ in range(5):
        bar.advance()
    bar.report()
    assert capsys.readouterr().out == "search: 5 of 5 masks (100 %)\n"


def test_the_pace_leaves_out_work_in_between_and_the_whole_run_counts_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress.set_up()
    now = 0.0
    bar = Bar("train", total=100, unit="steps", clock=lambda: now)
    now = 10.0
    bar.advance(10)
    now = 310.0  # an evaluation of five minutes
    bar.leave_out(300.0)
    assert bar.describe_pace() == "1 steps/s, 1 min 30 s left"
    monkeypatch.setattr(progress, "time_after", lambda: (600.0, False))  # two more of them
    assert bar.describe_pace() == "1 steps/s, 1 min 30 s left, the whole run 11 min 30 s"
    monkeypatch.setattr(progress, "time_after", lambda: (600.0, True))
    assert bar.describe_pace().endswith(", the whole run at least 11 min 30 s")


def test_a_bar_inside_another_stops_its_clock() -> None:
    progress.set_up()
    with progress.track("train", total=4, unit="steps") as outer:
        begin = outer._begin
        with progress.track("evaluate", total=1, unit="examples") as inner:
            inner.advance()
        assert outer._begin > begin
