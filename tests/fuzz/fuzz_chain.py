"""Damages one file of a run and starts the run again, thousands of times.

    python -m tests.fuzz.fuzz_chain --count 2000 --out fuzz.jsonl      (again to go on)

The run is the smoke chain on a model folder of its own, finished or killed in the middle of a
stage. A damage is a function of its number alone. What may come of it:

    refused     exit code 2, one sentence, which names the file (or a folder it lies in)
    told        other results, and a line of the run names the file
    same        the run ends in the same results
    silent      other results, and nobody said so                                       a failure
    unnamed     exit code 2, but the sentence does not name the file                    a failure
    traceback   any other end                                                           a failure
"""

import argparse
import collections
import contextlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.smoke_chain import CHAIN, operations_of, results, start

ARGUMENTS = (*CHAIN, "--model", "model")
RUN = Path("runs") / "model-bosch-r0.75"
FAILURES = ("silent", "unnamed", "traceback")
KILLED_IN = ("calibration", "mask", "model", "tokens", "train", "eval-dense", "report")
KILLED_IN += ("eval/step-000000", "eval/step-000008")
# Where no difference matters: texts for people, locks, the time that things took.
NOT_COMPARED = re.compile(r"recover\.log|\.lock_guard|run\.json|time\.json|\.wall_seconds|manifest")
# Damaged less often than others: there are many of them, or nobody reads them again.
RARE = re.compile(r"\.png$|/tb/|\.lock|recover\.log|\.no_result|README")


# --- the states that are damaged ---


def make_states(base: Path) -> list[str]:
    """Folders of a finished run and of runs killed in each stage. Made once."""
    done = base / "states.json"
    if done.exists():
        return list(json.loads(done.read_text()))
    from bosch.assets import asset_folder

    shutil.rmtree(base, ignore_errors=True)
    for name in ("finished", *KILLED_IN):
        folder = base / name.replace("/", "-")
        shutil.copytree(asset_folder("tiny-qwen3-2layer"), folder / "model")
        shutil.rmtree(folder / "model" / "__pycache__", ignore_errors=True)
    code, output = start(base / "finished", arguments=ARGUMENTS)
    assert code == 0, output
    places = operations_of(output)
    for name in KILLED_IN:
        point = places[name][int(0.7 * len(places[name]))]
        code, output = start(base / name.replace("/", "-"), point, arguments=ARGUMENTS)
        assert code == -signal.SIGKILL, output
    names = ["finished", *(name.replace("/", "-") for name in KILLED_IN)]
    done.write_text(json.dumps(names))
    return names


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


Damage = Callable[[bytes, random.Random], bytes]
OF_ANY: tuple[Damage, ...] = (flip, flip, truncate)
OF_JSON: tuple[Damage, ...] = (change_value, change_value)
OF_LINES: tuple[Damage, ...] = (cut_line, repeat_line)


def damage_one(folder: Path, draw: random.Random, others: list[Path]) -> tuple[Path, str]:
    """Damage one file of a state. Its path in the folder, and what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not (folder / RUN / "mask").exists():  # no stage that is there has recorded the model
        files = [path for path in files if path.parent.name != "model"]
    groups: dict[str, list[Path]] = {}
    for path in files:
        name = re.sub(r"-[0-9a-f]{16}|\d+", "", path.relative_to(folder).as_posix())
        groups.setdefault(name, []).append(path)
    names = sorted(groups)
    weights = [0.15 if RARE.search(name) else 1.0 for name in names]
    (name,) = draw.choices(names, weights)
    path = draw.choice(groups[name])
    content = path.read_bytes()
    inside = path.relative_to(folder)
    if draw.random() < 0.12:  # an old version, or the file of another run
        elsewhere = [other / inside for other in others if (other / inside).is_file()]
        swapped = [p for p in files if p.suffix == path.suffix and p != path] or elsewhere
        source = draw.choice(elsewhere if elsewhere and draw.random() < 0.5 else swapped)
        path.write_bytes(source.read_bytes())
        return inside, f"content of {source.name} of another place"
    known = [*OF_ANY]
    if path.suffix in (".json", ".jsonl"):
        known += OF_JSON
    if path.suffix == ".jsonl":
        known += OF_LINES
    damage = draw.choice(known)
    with contextlib.suppress(ValueError, RecursionError):  # a file that is no JSON already
        path.write_bytes(damage(content, draw))
    return inside, damage.__name__


def attack(number: int, base: Path, states: list[str], wanted: dict[str, Any]) -> Outcome:
    """One damage, and the same command again."""
    draw = random.Random(number)
    state = draw.choice(["finished", *states])
    with tempfile.TemporaryDirectory(dir=base, prefix="attack-") as place:
        folder = Path(place) / "work"
        shutil.copytree(base / state, folder, symlinks=True)
        others = [base / name for name in states if name != state]
        path, damage = damage_one(folder, draw, others)
        code, output = start(folder, arguments=ARGUMENTS)
        outcome, differing = judge(folder, path, code, output, wanted)
    lines = [line for line in output.splitlines() if not line.startswith("operations ")]
    tail = "\n".join([*differing, *lines[-15:]]) if outcome in FAILURES else ""
    return Outcome(number, state, path.as_posix(), damage, outcome, tail)


def judge(
    folder: Path, path: Path, code: int, output: str, wanted: dict[str, Any]
) -> tuple[str, list[str]]:
    """What came of it, and which results differ."""
    parts = {path.parent.name, path.parent.parent.name} - {"", "runs", "shared", "eval", RUN.name}
    is_named = path.name in output or any(
        re.search(rf"\b{re.escape(part)}[ :/.]", output) for part in parts
    )
    if code == 2:
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


def fuzz(base: Path, numbers: range, out: Path) -> list[Outcome]:
    """Outcomes of these damages, those that `out` holds already among them."""
    states = make_states(base / "states")
    wanted = results(base / "states" / "finished" / RUN)
    lines = out.read_text().splitlines() if out.exists() else []
    known = {outcome.number: outcome for outcome in (Outcome(**json.loads(x)) for x in lines)}
    for number in numbers:
        if number not in known:
            known[number] = attack(number, base / "states", states, wanted)
            with out.open("a") as file:
                file.write(json.dumps(asdict(known[number])) + "\n")
    return [known[number] for number in numbers]


def table(outcomes: list[Outcome]) -> str:
    """Counts by kind of file and outcome."""
    names = ("refused", "same", "told", *FAILURES)
    rows = collections.defaultdict(collections.Counter)
    for one in outcomes:
        kind = re.sub(r"-[0-9a-f]{16}|^runs/|model-bosch-r0.75/", "", one.file)
        rows[re.sub(r"\d+", "N", kind)][one.outcome] += 1
        rows["all"][one.outcome] += 1
    width = max(map(len, rows))
    lines = [f"{'file':{width}} " + " ".join(f"{name:>9}" for name in names)]
    for kind, counts in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
        lines.append(f"{kind:{width}} " + " ".join(f"{counts[name]:9}" for name in names))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first damage")
    parser.add_argument("--out", type=Path, default=Path("fuzz.jsonl"), help="a line a damage")
    parser.add_argument("--base", type=Path, default=Path(tempfile.gettempdir()) / "bosch-fuzz")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    outcomes = fuzz(options.base, numbers, options.out)
    print(table(outcomes))
    failed = [one for one in outcomes if one.outcome in FAILURES]
    for one in failed:
        print(f"\n{one.outcome}: number {one.number}, {one.state}, {one.damage} of {one.file}")
        print(one.output)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
