"""Damages one file of a run and starts the run again, thousands of times.

    make fuzz        or: python -m tests.fuzz.fuzz_chain --count 2000 --base runs/fuzz
                     (again to go on; after a change of the code it begins again)

The run is the smoke chain on a model folder of its own, finished or stopped in the middle of a
stage. A damage is a function of its number alone. What may come of it:

    refused     exit code 2, one sentence, which names the file (or its folder)
    told        other results, and a line of the run names the file
    same        the run ends in the same results
    silent      other results, and nobody said so                                       a failure
    unnamed     exit code 2, but the sentence does not name the file                    a failure
    traceback   any other end                                                           a failure
"""

import argparse
import collections
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from bosch.assets import asset_folder
from bosch.run.checkout import provenance
from bosch.run.files import append_line, drop_torn_line, read_lines
from bosch.run.fingerprint import fingerprint, hash_file
from tests.smoke_chain import CHAIN, operations_of, results, start

# No word that a sentence has by itself: its files count as named where the folder is.
MODEL = "dense-under-test"
ARGUMENTS = (*CHAIN, "--model", MODEL)
RUN = Path("runs") / f"{MODEL}-bosch-r0.75"
FAILURES = ("silent", "unnamed", "traceback")
FINISHED = "finished"
# Of the operations on a stage's files: while it works, and while its results wait for the manifest.
MOMENTS = (0.35, 0.6)
REPOSITORY = Path(__file__).parents[2]
# Damaged less often than others: there are many of them, or nobody reads them again.
RARE = re.compile(r"\.png$|/tb/|\.lock|recover\.log|\.no_result|README")


# --- the states that are damaged ---


def make_states(base: Path) -> list[str]:
    """Folders of a finished run and of runs stopped in each stage. Made once for this code."""
    base.parent.mkdir(parents=True, exist_ok=True)
    with base.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, code = base / "states.json", code_fingerprint()
        made = json.loads(done.read_text()) if done.exists() else {}
        if made.get("code") == code:
            return list(made["names"])
        shutil.rmtree(base, ignore_errors=True)
        places = operations_of(run_undisturbed(base / FINISHED, {}))
        copies = {
            numbers[int(moment * len(numbers))]: f"{stage.replace('/', '-')}-{moment}"
            for stage, numbers in places.items()
            for moment in MOMENTS
        }
        again = base / "again"
        run_undisturbed(again, {number: str(base / name) for number, name in copies.items()})
        shutil.rmtree(again)
        done.write_text(json.dumps({"code": code, "names": list(copies.values())}))
        return list(copies.values())


def run_undisturbed(folder: Path, copies: Mapping[int, str]) -> str:
    """The output of a run in a new folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(asset_folder("tiny-qwen3-2layer"), folder / MODEL, ignore=ignored)
    code, output = start(folder, arguments=ARGUMENTS, copies=copies)
    assert code == 0, output
    return output


def code_fingerprint() -> str:
    """Of this program and of the code that it tests, whose commit and versions masks record."""
    folders = [REPOSITORY / name for name in ("bosch", "data", "eval", "training", "recipes")]
    paths = [Path(__file__).resolve(), *(path for each in folders for path in each.rglob("*.py"))]
    files = {str(path.relative_to(REPOSITORY)): hash_file(path) for path in paths}
    return fingerprint([files, provenance()])


# --- damage ---


@dataclass(frozen=True)
class Outcome:
    number: int
    state: str
    file: str
    damage: str
    outcome: str
    output: str = ""  # the last lines, of failures


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice([0, draw.randrange(len(content)), len(content) - 1])]


def cut_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join([*lines, draw.choice(lines)])


def change_value(content: bytes, draw: random.Random) -> bytes:
    """Another type, a huge number or deep nesting in place of a value of a JSON text or line."""
    lines = content.decode().splitlines() if b"}\n{" in content else [content.decode()]
    number = draw.randrange(len(lines))
    value = json.loads(lines[number])
    places = list(_places(value))
    if not places:
        return content + b"]"
    holder, key = draw.choice(places)
    old = holder[key]
    choices: list[Any] = [None, [], {}, -1, 10**30, "", "x" * 50, True, "DEEP", "1e999"]
    new = draw.choice([other for other in choices if other != old])
    holder[key] = new
    text = json.dumps(value, indent=1 if len(lines) == 1 else None)
    text = text.replace('"DEEP"', "[" * 5_000 + "]" * 5_000).replace('"1e999"', "1e999")
    lines[number] = text
    return ("\n".join(lines) + "\n").encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


# In the place of a file.
OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to(os.devnull),
}


# Of the process that runs again; the sentence on a wrong launch names RANK.
ENVIRONMENTS = (
    {"WORLD_SIZE": "abc"},
    {"RANK": "5", "WORLD_SIZE": "2"},
    {"RANK": "-1"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
)


def damage_one(folder: Path, draw: random.Random, others: list[Path]) -> tuple[Path, str]:
    """Damage one file of a state. Its path in the folder, and what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not (folder / RUN / "mask").exists():  # no stage that is there has recorded the model
        files = [path for path in files if path.parent.name != MODEL]
    groups: dict[str, list[Path]] = {}
    for path in files:
        name = re.sub(r"-[0-9a-f]{16}|\d+", "", path.relative_to(folder).as_posix())
        groups.setdefault(name, []).append(path)
    names = sorted(groups)
    weights = [0.15 if RARE.search(name) else 1.0 for name in names]
    path = draw.choice(groups[draw.choices(names, weights)[0]])
    content = path.read_bytes()
    inside = path.relative_to(folder)
    elsewhere = [other / inside for other in others if (other / inside).is_file()]
    swapped = [other for other in files if other.suffix == path.suffix and other != path]
    sources = [each for each in (elsewhere, swapped) if each]
    if sources and draw.random() < 0.12:  # an old version, or the content of another file
        source = draw.choice(draw.choice(sources))
        path.write_bytes(source.read_bytes())
        return inside, f"content of {source.name} of another place"
    if draw.random() < 0.1:
        kind = draw.choice(list(OTHER_KINDS))
        path.unlink()
        OTHER_KINDS[kind](path)
        return inside, f"{kind} in its place"
    known: list[Callable[[bytes, random.Random], bytes]] = [flip, flip, truncate]
    if path.suffix in (".json", ".jsonl"):
        known += [change_value, change_value]
    if path.suffix == ".jsonl":
        known += [cut_line, repeat_line]
    damage = draw.choice(known)
    with contextlib.suppress(ValueError, RecursionError):  # a file that is no JSON already
        path.write_bytes(damage(content, draw))
    return inside, damage.__name__


def attack(number: int, base: Path, states: list[str], wanted: dict[str, Any]) -> Outcome:
    """One damage, and the same command again. states: of unfinished runs."""
    draw = random.Random(number)
    state = FINISHED if draw.random() < 0.2 else draw.choice(states)
    with tempfile.TemporaryDirectory(dir=base, prefix="attack-") as place:
        folder = Path(place) / "work"
        shutil.copytree(base / state, folder, symlinks=True)
        others = [base / name for name in (FINISHED, *states) if name != state]
        variables: Mapping[str, str] = {}
        if draw.random() < 0.05:
            variables = draw.choice(ENVIRONMENTS)
            path, damage = Path("RANK"), f"started with {dict(variables)}"
        else:
            path, damage = damage_one(folder, draw, others)
        code, output = start(folder, arguments=ARGUMENTS, copies={}, variables=variables)
        outcome, differing = judge(folder, path, code, output, wanted)
    lines = [line for line in output.splitlines() if not line.startswith("operations ")]
    tail = "\n".join([*differing, *lines[-15:]]) if outcome in FAILURES else ""
    return Outcome(number, state, path.as_posix(), damage, outcome, tail)


def judge(
    folder: Path, path: Path, code: int, output: str, wanted: dict[str, Any]
) -> tuple[str, list[str]]:
    """What came of it, and which results differ."""
    if code == 2:
        sentence = " ".join(output.rpartition("error: ")[2].split())
        is_named = path.name in sentence or path.parent.as_posix() in sentence
        is_named = is_named or path.as_posix() in output  # "damaged, moved to", before the error
        is_sentence = "error: " in output and "Traceback" not in output
        return ("refused" if is_sentence and is_named else "unnamed"), []
    if code != 0:
        return "traceback", []
    try:
        found = results(folder / RUN)
    except (OSError, ValueError) as error:
        return "silent", [str(error)]
    differing = [name for name in found | wanted if found.get(name) != wanted.get(name)]
    if not differing:
        return "same", []
    return ("told" if path.name in output else "silent"), [f"differing: {differing}"]


# --- the program ---


def fuzz(base: Path, numbers: Sequence[int], workers: int = 1) -> list[Outcome]:
    """Outcomes of these damages, those that an earlier call has noted among them."""
    states = make_states(base / "states")
    wanted = results(base / "states" / FINISHED / RUN)
    rows = base / f"{code_fingerprint()[:12]}.jsonl"  # those of other code are not mixed in
    noted = [Outcome(**line.content) for line in read_lines(rows) if line.content]
    known = {outcome.number: outcome for outcome in noted}
    drop_torn_line(rows)
    todo = [number for number in numbers if number not in known]
    pool = ThreadPoolExecutor(workers)  # each attack is a process
    try:
        attacks = [pool.submit(attack, one, base / "states", states, wanted) for one in todo]
        for outcome in (each.result() for each in attacks):
            known[outcome.number] = outcome
            with rows.open("ab") as file:
                append_line(file, asdict(outcome))
    finally:
        pool.shutdown(cancel_futures=True)
    return [known[number] for number in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first damage")
    parser.add_argument("--workers", type=int, default=1, help="damages at a time")
    parser.add_argument(
        "--base", type=Path, default=Path("runs/fuzz"), help="folder of runs and outcomes"
    )
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    outcomes = fuzz(options.base.absolute(), numbers, options.workers)
    made_by = {"date": str(date.today())} | provenance()
    counts = collections.Counter(one.outcome for one in outcomes)
    print(f"damages {numbers[0]} to {numbers[-1]}; {json.dumps(made_by)}\n\n{dict(counts)}")
    failed = [one for one in outcomes if one.outcome in FAILURES]
    for one in failed:
        print(f"\n{one.outcome}: number {one.number}, {one.state}, {one.damage} of {one.file}")
        print(one.output)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
