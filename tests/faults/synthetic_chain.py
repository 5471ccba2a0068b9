"""A chain of three small stages as a program, which the kill tests kill and run again.

    python synthetic_chain.py RUN_FOLDER '{"kill_at": 17, "ratio": 0.5}'

`kill_at` n: the process kills itself just before the n-th operation on a file below the folder of
all runs (kill_points.py).
"""

import atexit
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bosch.run.dist import rank_and_world
from bosch.run.files import write_atomically
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact, Stage
from tests.kill_points import POINT, watch_operations


def write_words(folder: Path) -> None:
    """Several files, each complete or absent."""
    for number in range(4):
        part = folder / "parts" / f"part-{number}.txt"
        part.parent.mkdir(exist_ok=True)
        if not part.exists():
            write_atomically(part, f"part {number}\n" * (number + 1))


def write_journal(folder: Path, words: Artifact, ratio: float) -> None:
    """One file that grows line by line; an incomplete last line is dropped on a restart."""
    journal = folder / "journal.jsonl"
    text = journal.read_text() if journal.exists() else ""
    whole_lines = text[: text.rfind("\n") + 1]
    with journal.open("a") as file:
        file.truncate(len(whole_lines))
        for number in range(whole_lines.count("\n"), 5):
            line = json.dumps({"number": number, "ratio": ratio, "words": words.fingerprint}) + "\n"
            file.write(line[:7])
            file.flush()
            sys.audit(POINT, str(journal))
            file.write(line[7:])
            file.flush()
            os.fsync(file.fileno())
            print(f"line {number}", flush=True)


def write_rank_files(folder: Path, journal: Artifact) -> None:
    """Every rank writes its own file, as a sharded evaluation does."""
    rank, world = rank_and_world()
    num_lines = len((journal.folder / "journal.jsonl").read_text().splitlines())
    write_atomically(folder / f"rank-{rank}.txt", f"{rank} of {world}: {num_lines} lines\n")


def stages(run: RunFolder, ratio: float = 0.75) -> list[Stage]:
    words = Stage("words", run=write_words, settings={"parts": 4}, shared=True)
    journal = Stage(
        "journal",
        run=lambda folder, words: write_journal(folder, words, ratio),
        settings={"ratio": ratio},
        inputs={"words": words},
    )
    judged = Stage("judged/half", run=write_rank_files, inputs={"journal": journal}, ranks="all")

    def write_and_judge(folder: Path, journal: Artifact) -> None:
        """Like training, which has its checkpoints evaluated: a stage inside a stage."""
        run.complete(judged)
        write_rank_files(folder, journal)

    shards = Stage("shards", run=write_and_judge, inputs={"journal": journal}, ranks="all")
    return [words, journal, shards, judged]


def main() -> None:
    run_path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    seen = watch_operations(run_path.parent, at=options.get("kill_at"))
    if "count" in options:
        atexit.register(lambda: print(f"operations {seen[0]}"))
    rank, world = rank_and_world()

    say = partial(print, flush=True)
    with RunFolder(run_path, rank, world, say) as run:
        if "hold" in options:  # keeps the folder until standard input closes
            say("held")
            sys.stdin.read()
        chain = stages(run, options.get("ratio", 0.75))
        run.agree(chain)
        for stage in chain:
            if options.get("die_before") == [rank, stage.name]:
                os.kill(os.getpid(), signal.SIGKILL)
            run.complete(stage)
    say("finished")


if __name__ == "__main__":
    main()
