"""What commands print: lines, tables, and bars (plain lines in a pipe). Every line is also in the
run's `recover.log`, and goes through the logger `bosch`, as in any library.

    say("mask: 22 of 64 groups")
    with track("search", total=800, unit="evaluations") as bar:
        bar.advance(1, best_score=0.97)
"""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bosch.run.files import refuse_unless_ours
from bosch.run.plain_text import visible

LINE_SECONDS = 60.0  # at least, between two plain lines of one bar
LINE_SHARE = 0.01  # and at least this share of the time so far: a run of days writes few lines
PLAIN_COLUMNS = 120  # width, at least, of a table that does not go to a terminal
MOST_COLUMNS = 1_000  # of any table

logger = logging.getLogger("bosch")
_console: Console | None = None  # a terminal to draw bars on; None: plain lines only
_bars: "list[Bar]" = []  # those shown now, the outermost first


def set_up(rank: int = 0) -> None:
    """Called once by a recipe. Only rank 0 prints."""
    global _console
    close()
    console = Console(soft_wrap=True)
    draws_bars = rank == 0 and console.is_terminal and not console.is_dumb_terminal
    if not draws_bars:  # in a file or pipe they would be one endless line
        disable_bars_of_libraries()
    _console = console if draws_bars else None
    # A library that sets up Python's root logger would print each line a second time.
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(_LineHandler() if rank == 0 else logging.NullHandler())


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk: what failed says so in a sentence, which tracebacks of each line would
        hide."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def log_to(path: Path) -> None:
    """From now on, also append every line to a file, with date and time."""
    if any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        return  # not rank 0, the only one that writes the log
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_unless_ours(path)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)


def close() -> None:
    global _console
    _console = None
    say_once.cache_clear()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def say(*lines: str | Text) -> None:
    """Lines for the user and for recover.log; a Text keeps its colors on a terminal."""
    for line in lines:
        line = visible(line) if isinstance(line, str) else line
        logger.info(str(line), extra={"styled": line})


@functools.cache
def say_once(line: str) -> None:
    """A line that would come again at every evaluation: only the first time."""
    say(line)


def show_table(title: str, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a table with right-aligned columns, as wide as its cells are: one that is too wide for
    a terminal runs over its edge, where a narrower one would cut figures. None is shown as a dash.
    """
    # As Text: rich reads brackets in a str as markup.
    table = Table(title=Text(visible(title), "bold"), title_justify="left", show_edge=False)
    for name in header:
        table.add_column(Text(visible(name)), justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text("–" if cell is None else visible(cell)) for cell in line))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)
    needed = Console(width=MOST_COLUMNS).measure(table).maximum
    console.width = max(console.width, needed)
    console.print(table, end="\n\n")


def show_rows(title: str, rows: Iterable[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    """Print rows as a table, without columns in which there is nothing. Columns: heading -> field
    of a row, with an optional format: `seconds:.1f`."""
    rows, fields = list(rows), {name: each.partition(":") for name, each in columns.items()}
    shown = {
        name: (field, form)
        for name, (field, _, form) in fields.items()
        if any(row[field] not in (None, "") for row in rows)
    }
    lines = [
        [None if row[field] is None else format(row[field], form) for field, form in shown.values()]
        for row in rows
    ]
    show_table(title, list(shown), lines)


class Bar:
    """Work done so far. `advance` is cheap enough to be called for every sample."""

    def __init__(self, title: str, total: int, unit: str, done: int = 0) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, done
        self.figures: dict[str, float | str] = {}
        self.draw: Callable[[], None] = lambda: None  # on a terminal
        # How much work the first n units are: for the time left, where later ones cost more.
        self.work: Callable[[int], float] = float
        self._done_at_start = done  # by an earlier attempt: it does not count for the speed
        # Not the clock of the day, which a machine may set while a run lasts.
        self.begin = self._reported = time.monotonic()
        self.reported_done = -1

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """`count` more are done; `figures` (loss=2.31) are shown next to the bar from now on."""
        self.done += count
        if self.total:  # an estimate that is exceeded grows
            self.total = max(self.total, self.done)
        self.figures |= figures
        self.draw()
        now = time.monotonic()
        if now - self._reported >= max(LINE_SECONDS, LINE_SHARE * (now - self.begin)):
            self.report()

    def skip(self, count: int = 1) -> None:
        """`count` more were done by an earlier attempt: they do not count for the speed."""
        self.done += count
        self._done_at_start += count

    def report(self) -> None:
        self._reported, self.reported_done = time.monotonic(), self.done
        line = f"{self.title}: {self.done:,} {self.unit}"
        if self.total:
            share = f"{100 * self.done / self.total:.0f} %"
            line = f"{self.title}: {self.done:,} of {self.total:,} {self.unit} ({share})"
        # On a terminal the bar already shows this, so the line is for the log file only.
        logger.info(", ".join(filter(None, [line, self.describe_pace()])), extra={"bar": True})

    def describe_pace(self) -> str:
        seconds, done = time.monotonic() - self.begin, self.done - self._done_at_start
        parts = []
        if seconds > 0 and done > 0:
            pace, before = done / seconds, self.work(self.done)
            parts.append(f"{pace:{',.0f' if pace >= 100 else '.3g'}} {self.unit}/s")
            left = (self.work(self.total) - before) / (before - self.work(self._done_at_start))
            total = f"in {describe_seconds(seconds)}"
            parts.append(f"{describe_seconds(left * seconds)} left" if left > 0 else total)
        for name, value in self.figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            parts.append(f"{name.replace('_', ' ')} {shown}")
        return ", ".join(parts)


@contextlib.contextmanager
def track(title: str, total: int, unit: str, done: int = 0) -> Iterator[Bar]:
    """Show the progress of `total` units (0: unknown), `done` of them by an earlier attempt."""
    bar, begin = Bar(title, total, unit, done), time.monotonic()
    _bars.append(bar)
    try:
        with contextlib.ExitStack() as shown:
            if _console is not None:
                count = "{task.completed:,.0f}" + ("/{task.total:,.0f}" if total else "")
                pace = TextColumn("{task.fields[pace]}", style="dim")
                display = Progress(
                    "{task.description}",
                    BarColumn(bar_width=30),
                    count,
                    pace,
                    console=_console,
                    transient=True,
                )
                task = shown.enter_context(display).add_task(title, total=total, pace="")
                bar.draw = lambda: display.update(
                    task, completed=bar.done, total=bar.total, pace=bar.describe_pace()
                )
                bar.draw()
            yield bar
    finally:
        _bars.remove(bar)
        for outer in _bars:  # to which this is other work, as an evaluation to a training
            outer.begin += time.monotonic() - begin
    if bar.reported_done != bar.done:
        bar.report()


def describe_seconds(seconds: float) -> str:
    """A duration for people: 4.2 s, 3 min 20 s, 5 h 7 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def disable_bars_of_libraries() -> None:
    """Those of transformers follow huggingface_hub's, which reads its switch on import."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if hub := sys.modules.get("huggingface_hub.utils"):
        hub.disable_progress_bars()
    if logging_of_transformers := sys.modules.get("transformers.utils.logging"):
        logging_of_transformers.disable_progress_bar()


class _LineHandler(logging.Handler):
    """Lines on standard output; above a bar if one is being drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        if _console is None:
            print(record.getMessage(), file=sys.stdout, flush=True)
        elif not getattr(record, "bar", False):
            line = getattr(record, "styled", record.getMessage())
            _console.print(line, markup=False, highlight=False)
