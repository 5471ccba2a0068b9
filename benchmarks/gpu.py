"""The minutes on a GPU that decide something: experiments in the order of what they decide.

Each one runs in a process of its own with a limit of its own, so that what hangs or takes the GPU
down with it costs no other. It has points, which give rows; a row is printed and written as soon as
it is measured, and so is that a point begins and ends. Points that ended well on this device with
this code are skipped, and those that were cut come after the others, so that a call that ended
early, on this machine or another one, goes on. At the end: sentences on what is faster than dense,
what missed its computed speed, and what has become slower than the last time.

    <rows>/nvidia-h200.jsonl    benchmarks/results/gpu, or runs/gpu for a rehearsal on a CPU

`--device cpu` rehearses all of it with small shapes. Without a GPU and without that, this does
nothing and is not an error. `--docs` writes the tables of docs/gpu.md anew, and measures nothing.
"""

import datetime
import hashlib
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks._measure import HIDE, BenchmarkOptions, Row
from benchmarks.experiments._points import Point, free_memory
from bosch.attention import rates
from bosch.plugins import load_plugin
from bosch.run import files
from bosch.run.checkout import ROOT, provenance
from bosch.run.errors import UserError
from bosch.run.progress import describe_seconds, say

PACKAGE = "benchmarks.experiments"
# In the order of what they decide: the cheap theories first, then what is to be built on them.
# Windows before all that reads texts: by their rows `auto` chooses the kernel.
EXPERIMENTS = (
    "plans", "windows", "decoding", "graph", "prefill", "training", "kernels", "stages", "switches",
)  # fmt: skip
ELSEWHERE = ("serving",)  # run by name only, in another environment (serving/gpu_check.sh)
CODE = ("bosch", "training", "eval", "data", "recipes", "benchmarks", "tests", "serving")
PACKAGES = ("torch", "transformers", "flash-attn", "liger-kernel", "torchao", "vllm")
SLOW = 0.9  # of the computed speed, and of the last one measured
BEGINS, ENDS = "begins", "ends"  # of a point
STARTING_SECONDS = 5  # of a process: less than that is not worth starting one
DOCS = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- rows of `make gpu`: begin -->", "<!-- rows of `make gpu`: end -->"


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    device: Literal["cuda", "cpu"] = "cuda"  # cpu: a rehearsal with small shapes
    minutes: float = 9.0  # for all experiments together
    rows: Path | None = None  # folder of the rows; None: benchmarks/results/gpu, on a CPU runs/gpu
    only: tuple[str, ...] = ()  # experiments to run; empty: all
    docs: bool = False  # write the tables of docs/gpu.md from the rows, and measure nothing


def measure(options: Options) -> Iterator[Row]:
    if options.docs:
        write_docs()
        return
    if options.device == "cpu" and torch.cuda.is_available():
        raise UserError(HIDE)
    if options.device == "cuda" and not torch.cuda.is_available():
        say("gpu: no CUDA device, so nothing is measured or written; --device cpu rehearses it")
        raise SystemExit(0)
    known = (*EXPERIMENTS, *ELSEWHERE)
    if others := set(options.only).difference(known):
        raise UserError(f"--only {min(others)}: the experiments are {', '.join(known)}.")
    path = rows_of_device(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    # An experiment that was ended by its limit may have been writing.
    files.drop_torn_line(path)
    deadline, ended = time.monotonic() + 60 * options.minutes, dict[str, str]()
    for name in options.only or EXPERIMENTS:
        if not points_left(name, options.device, path):
            say(f"gpu: {name} has all its rows of this code")
            if name == "windows":
                keep_rates(path, options.device)
            continue
        left = deadline - time.monotonic()
        # The limits are for GPUs. A rehearsal, perhaps beside other programs, is there to be seen
        # to its end.
        limit = 60 * load_plugin(PACKAGE, name).MINUTES if options.device == "cuda" else left
        limit = min(limit, left)
        if limit < STARTING_SECONDS:
            ended[name] = "no minutes were left"
            continue
        begin, before = time.monotonic(), len(read_rows(path))
        # In a process of its own: an illegal access ends the CUDA context, and with it the process,
        # but not the experiments after it.
        reason = run_in_process(name, options.device, path, limit)
        if reason is not None:
            ended[name] = reason
        yield from (row for row in read_rows(path)[before:] if "name" in row)
        if name == "windows":
            keep_rates(path, options.device)
        took = describe_seconds(time.monotonic() - begin)
        say(f"gpu: {name} {'took' if reason is None else f'{reason} after'} {took}")
    for sentence in conclude(path, options.device, ended):
        say(sentence)
    if any(map(is_failure, known_rows(path).values())):
        raise SystemExit(1)


def rows_of_device(options: Options) -> Path:
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    usual = Path("runs/gpu") if options.device == "cpu" else ROOT / "benchmarks/results/gpu"
    return (options.rows or usual) / f"{slug}.jsonl"


# --------------------------------------------------------------------------- an experiment


def run_in_process(name: str, device: str, path: Path, limit: float) -> str | None:
    """None, or why the experiment did not come to its end."""
    process = multiprocessing.get_context("spawn").Process(
        target=run_experiment, args=(name, device, path)
    )
    process.start()
    try:
        process.join(limit)
        if process.exitcode is None:
            return "was ended by its limit"
        return None if process.exitcode == 0 else f"ended with status {process.exitcode}"
    finally:
        if process.exitcode is None:  # also after Ctrl-C
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it has no group yet
                os.killpg(process.pid, signal.SIGKILL)  # with the tests that it started
            process.kill()
            process.join()


def run_experiment(name: str, device: str, path: Path) -> None:
    """In a process of its own: measure the points that have not ended well yet."""
    os.setsid()  # so that it can be ended together with the processes that it starts
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    for point in points_left(name, device, path):
        # By its attempt: the rows of a point that was cut are not those of one that ended.
        facts = {"experiment": name, "point": point.name, "attempt": time.time_ns(), **describe()}
        begin = time.monotonic()
        write_row(path, {"event": BEGINS, **facts})
        try:
            for row in point.measure():
                write_row(path, {**rounded(row), **facts})
                print(f"gpu: {describe_row(row)}", flush=True)
        except UserError as error:  # perhaps of this machine or environment alone: tried again
            write_row(path, {"name": point.name, "skipped": str(error), **facts})
            print(f"gpu: {point.name} skipped: {error}", flush=True)
        except Exception as error:  # whatever it is, the next point may run
            traceback.print_exc()
            first_line = str(error).partition("\n")[0][:300]
            failed = {"name": point.name, "failed": f"{type(error).__name__}: {first_line}"}
            trace = traceback.format_exc(limit=-4)[-2000:]
            write_row(path, {**failed, **facts, "traceback": trace})
            print(f"gpu: {describe_row(failed)}", flush=True)
        seconds = round(time.monotonic() - begin, 1)
        write_row(path, {"event": ENDS, "seconds": seconds, **facts})
        free_memory()


def write_row(path: Path, row: Row) -> None:
    with open(path, "ab") as file:
        file.write(f"{json.dumps(row)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def end_with_parent() -> None:
    """A parent that was killed ends nobody, and the next call would measure beside this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def points_left(name: str, device: str, path: Path) -> list[Point]:
    rows = rows_of_this_code(path)
    ended = {row["point"]: row["attempt"] for row in rows if row.get("event") == ENDS}
    newest = [row for row in rows if row.get("attempt") == ended.get(row["point"], -1)]
    done = set(ended) - {row["point"] for row in newest if is_failure(row) or is_skip(row)}
    begun = Counter(row["point"] for row in rows if row.get("event") == BEGINS)
    points = load_plugin(PACKAGE, name).points(torch.device(device))
    # One that takes longer than its experiment may would else keep those behind it waiting forever.
    return sorted(
        (point for point in points if point.name not in done), key=lambda point: begun[point.name]
    )


def describe() -> Row:
    """What identifies a row beside its name: it is that of this code."""
    facts: Any = provenance()
    versions = {name: facts["packages"].get(name) for name in ("torch", "transformers")}
    return {
        "code": code_fingerprint(),
        "commit": facts["commit"],
        "date": datetime.date.today().isoformat(),
        **versions,
    }


@cache
def code_fingerprint() -> str:
    """Of all code that decides a measurement, and of the packages it runs on. Not the commit: that
    of the rows is another one."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update(f"{package} {version(package)}".encode())
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def rounded(row: Row) -> Row:
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for name, value in row.items()
    }


def is_failure(row: Row) -> bool:
    """Of a point that raised an error, or of tests of which some failed."""
    return bool(row.get("failed") or row.get("wrong"))


def is_skip(row: Row) -> bool:
    """Of a point that was refused as a whole; a switch that is refused is a row like others."""
    return "skipped" in row and "value" not in row


def describe_row(row: Row) -> str:
    if "failed" in row:
        return f"{row['name']} failed: {row['failed']}"
    if row.get("skipped"):
        return f"{row['name']} skipped: {row['skipped']}"
    if row.get("value") is None and "operators_per_layer" in row:  # the other is known on GPUs only
        return f"{row['name']}: {row['operators_per_layer']:.0f} operators a layer"
    value = "unknown" if row.get("value") is None else f"{row['value']:,.4g} {row['unit']}"
    beside = f" (dense {row['dense']:,.4g})" if row.get("dense") else ""
    return f"{row['name']}: {value}{beside}"


# --------------------------------------------------------------------------- what was measured


def read_rows(path: Path) -> list[Row]:
    return [row for _, row in files.read_lines(path) if row is not None]


def rows_of_this_code(path: Path) -> list[Row]:
    code = code_fingerprint()
    return [row for row in read_rows(path) if row.get("code") == code]


def known_rows(path: Path) -> dict[str, Row]:
    """The last row of each name that this code made, without failures of a point that ended well
    since."""
    rows = rows_of_this_code(path)
    ended = {row["point"]: row["attempt"] for row in rows if row.get("event") == ENDS}
    found = dict[str, Row]()
    for row in rows:
        is_old = row.get("attempt", 0) < ended.get(row.get("point"), 0)
        if "name" in row and not (is_old and (is_failure(row) or is_skip(row))):
            found[row["name"]] = row
    return found


def conclude(path: Path, device: str, ended: Mapping[str, str]) -> list[str]:
    """What the rows say, sentence by sentence."""
    # From the file, not from this call: a plan of nine minutes is measured in several calls.
    known, sentences = known_rows(path), list[str]()
    measured = [row for row in known.values() if "failed" not in row and "value" in row]
    for name in (*EXPERIMENTS, *ELSEWHERE):
        rows = [row for row in measured if row["experiment"] == name]
        sentences += load_plugin(PACKAGE, name).conclude(rows) if rows else []
    missed = [
        f"{row['name']} {row['value']:,.3g} of {row['computed']:,.3g} {row['unit']} "
        f"({row['value'] / row['computed']:.2f})"
        for row in measured
        if row.get("computed") and row["value"] is not None
        if row["value"] < SLOW * row["computed"]
    ]
    if device == "cuda":
        sentences.append(f"below the computed speed: {'; '.join(missed) or 'nothing'}")
        sentences.append(f"slower than the last time: {'; '.join(slower(path)) or 'nothing'}")
    else:
        sentences.append("computed speeds, and slower than the last time: not asked on a CPU")
    failed = [
        f"{row['name']} ({row.get('failed') or ', '.join(row['wrong'])})"
        for row in known.values()
        if is_failure(row)
    ]
    sentences.append(f"failed: {'; '.join(failed) or 'nothing'}")
    if skipped := [row for row in known.values() if is_skip(row)]:
        reasons = "; ".join(f"{row['name']} ({row['skipped']})" for row in skipped)
        sentences.append(f"not possible here: {reasons}")
    if ended:
        reasons = "; ".join(f"{name} {reason}" for name, reason in ended.items())
        sentences.append(f"not measured to the end: {reasons}. The same command goes on")
    return sentences


def keep_rates(path: Path, device: str) -> None:
    """For `auto`, which backend computes windows, and for the time of a run: in the package, or of
    a rehearsal beside the rows."""
    windows = load_plugin(PACKAGE, "windows")
    rows = [row for row in known_rows(path).values() if row["experiment"] == "windows"]
    if found := windows.rates(rows):
        file = rates.FILE if device == "cuda" else path.with_name("rates.json")
        name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
        rates.write_rates(file, name, found)
        say(f"gpu: {len(found)} rates of attention are in {file}")


def slower(path: Path) -> list[str]:
    """What this code does slower than the code that was measured here before."""
    code, before = code_fingerprint(), dict[str, Row]()
    for row in read_rows(path):
        if row.get("code") != code and row.get("value") is not None:
            before[row["name"]] = row
    found = []
    for name, row in known_rows(path).items():
        old = before.get(name)
        # Rows in another unit are of another measurement that kept its name.
        if old is None or row.get("value") is None or row.get("unit") != old.get("unit"):
            continue
        if is_failure(row):
            continue
        if row["value"] < row.get("tolerance", SLOW) * old["value"]:
            speeds = f"{row['value']:,.3g} of {old['value']:,.3g} {row['unit']}"
            found.append(f"{name} {speeds} ({old['date']}, commit {str(old['commit'])[:8]})")
    return found


# --------------------------------------------------------------------------- docs/gpu.md


def write_docs(path: Path = DOCS) -> None:
    before, _, rest = path.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    files.write_atomically(path, before + BEGIN + "\n" + tables() + END + after)
    say(f"gpu: the tables of {path.name} are those of the rows")


def tables() -> str:
    """A table for each device: the last row of each name."""
    parts = []
    for path in sorted((ROOT / "benchmarks/results/gpu").glob("*.jsonl")):
        rows = [row for row in read_rows(path) if not is_failure(row)]
        last = {row["name"]: row for row in rows if row.get("value") is not None}
        lines = ["| what | measured | dense | computed | commit |", "|---|---|---|---|---|"]
        for row in last.values():
            value = f"{shown(row['value'])} {row['unit']}"
            others = [row.get("dense"), row.get("computed")]
            dense, computed = ("" if other is None else shown(other) for other in others)
            commit = str(row["commit"])[:8]
            lines.append(f"| {row['name']} | {value} | {dense} | {computed} | {commit} |")
        dates = sorted({row["date"] for row in last.values()})
        title = f"**{path.stem}**, {' and '.join(dates)} ([rows](../{path.relative_to(ROOT)})):"
        parts.append("\n".join(["", title, "", *lines, ""]))
    return "\n".join(parts)


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
