"""Training in processes that tests can kill: the real loop on a tiny model, a process per rank."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bosch.run.fingerprint import hash_file
from tests.fork_server import PATIENCE, launch_environment
from tests.fork_server import start as start_process
from tests.kill_points import watch_operations

LAST_STEP = 6


@dataclass
class Attempt:
    ranks: list[BaseProcess]
    logs: list[Path]

    def wait(self, seconds: float = PATIENCE) -> list[int | None]:
        """Exit codes; -9 for a rank that was killed. Ranks still running after that are killed."""
        for rank in self.ranks:
            rank.join(seconds)
        codes = [rank.exitcode for rank in self.ranks]
        self.kill()
        return codes

    def wait_for_end(self, rank: int, seconds: float = PATIENCE) -> int | None:
        """The rank's exit code, without killing the others."""
        self.ranks[rank].join(seconds)
        return self.ranks[rank].exitcode

    def kill(self) -> None:
        """Kill all ranks, as a launcher does when one has died."""
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def launch(folder: Path, world: int = 1, **options: Any) -> Attempt:
    """Start all ranks of a run. Options: see `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    return start_ranks(main, folder, world, options)


def start_ranks(
    program: Callable[[Path, Path, dict[str, str], dict[str, Any]], None],
    folder: Path,
    world: int,
    options: dict[str, Any],
) -> Attempt:
    """Start one process per rank, each with a log next to the folder and the environment that a
    launcher would set."""
    number = len(list(folder.parent.glob(f"{folder.name}-log-*")))
    ranks, logs = [], []
    for rank, environment in enumerate(launch_environment(world)):
        logs.append(folder.with_name(f"{folder.name}-log-{number + rank}"))
        logs[-1].touch()
        ranks.append(start_process(program, folder, logs[-1], environment, options))
    return Attempt(ranks, logs)


def run(folder: Path, world: int = 1, **options: Any) -> str:
    """A complete run. Returns its output."""
    attempt = launch(folder, world, **options)
    assert attempt.wait() == [0] * world, attempt.output()
    return attempt.output()


def results(folder: Path) -> dict[str, Any]:
    """The results of a finished run: the weights of each export, and the curve."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    exports = sorted(folder.glob("step-*/model.safetensors"))
    names = ("step", "tokens", "loss", "grad_norm", "validation_loss")
    return {
        "weights": {path.parent.name: hash_file(path) for path in exports},
        "lessons": [hash_file(path) for path in sorted(folder.glob("lessons/*.npy"))],
        "curve": [[row.get(name) for name in names] for row in rows],
    }


def last_checkpoint(folder: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))


def launch_by_accelerate(folder: Path, arguments: list[str], **options: Any) -> tuple[int, str]:
    """Exit code and output of `accelerate launch`, once all processes that it started have ended,
    since they hold the other end of the pipe."""
    module = ["--module", "tests.faults.training_program", str(folder), json.dumps(options)]
    program = str(Path(sys.executable).with_name("accelerate"))
    command = [program, "launch", "--main_process_port", "0", *arguments, *module]
    both: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], **both)
    return done.returncode, done.stdout


def main(folder: Path, log: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
    """at: before its n-th operation on a file below the folder, rank `victim` sends a signal
    (`sends`: SIGKILL) to itself, or to its launcher (to: parent). bug_at: after this many steps
    rank `victim` raises a KeyError. settings: of TrainConfig. epochs: of the tokens. node_ranks: on
    each of several machines that this one pretends to be. With stored_shares the teacher's lessons
    are written first, into the folder."""
    enter(log, environment)
    train(folder, int(environment["RANK"]), options)


def enter(log: Path, environment: dict[str, str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)


def train(folder: Path, rank: int, options: dict[str, Any]) -> None:
    import torch

    from bosch.run import progress
    from bosch.training import loop, teacher
    from tests.plain_training import NUM_SEQUENCES, SEQ_LEN, SETTINGS, tokens_in_memory

    torch.set_num_threads(1)
    if "node_ranks" in options:
        os.environ["LOCAL_WORLD_SIZE"] = str(options["node_ranks"])
    progress.set_up(rank)
    is_victim = rank == options.get("victim", 0)
    when = {name: options[name] for name in ("at", "sends", "to") if name in options}
    operations = watch_operations(folder, **(when if is_victim else {}))
    if is_victim and "bug_at" in options:

        def fail(_: object, done: int, *others: object) -> float:
            if done == options["bug_at"]:
                raise KeyError("planted bug")
            return 1e-3

        loop.learning_rate = fail
    epochs: int = options.get("epochs", 1)
    settings = {"max_steps": LAST_STEP, "checkpoint_steps": 2, "keep_checkpoints": 1}
    settings |= options.get("settings", {})
    model, tokens, stored = folder.parent / "model", tokens_in_memory(epochs=epochs), None
    if "stored_shares" in settings:
        stored = folder / "lessons"
        stored.mkdir(exist_ok=True)
        teacher.FILE_TOKENS = 10 * SEQ_LEN
        teacher.write_lessons(stored, model, tokens, replace(SETTINGS, **settings), True)
    job = loop.TrainJob(
        replace(SETTINGS, **settings),
        model,
        tokens,
        folder,
        NUM_SEQUENCES * SEQ_LEN * epochs,
        evaluated_shares=(0.5, 1.0),
        lessons=stored,
    )
    print(f"ended: {loop.train(job)}; operations: {operations[0]}", flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(os.environ.get("RANK", 0)), json.loads(sys.argv[2]))
