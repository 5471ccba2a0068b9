"""Runs the chain for every method, ratio and seed, one after another, then compares the runs.

    python recipes/sweep.py --methods bosch,fisher,interleave,bosch_layer --ratios .5,.75 --seeds 3
    python recipes/sweep.py --methods bosch,razor --ratios .25,.5,.75,.875 --zero-shot

Options that are not the sweep's own go to recipes/recover.py as they are (--eval.samples 50). Runs
share calibration, tokens and the dense model's evaluation through runs/shared. A run that is done
is passed over, one that fails does not stop the others: run the same command again for the rest.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from bosch.command_line import parse_command
from bosch.config import Config, fill_in
from bosch.methods._settings import default_settings
from bosch.model import find_model, read_model_info
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.manifest import MANIFEST
from bosch.run.progress import say
from eval.report.runs import is_run
from recipes import compare_runs, presets

RECOVER = Path(__file__).with_name("recover.py")
# The sweep decides these for each run; what they would do to many runs nobody means.
NOT_FOR_SWEEPS = ("--method", "--ratio", "--seed", "--run-dir", "--fresh", "--from", "--dry-run")
TAIL_BYTES = 4_000  # of what a failed chain wrote last


@dataclass(frozen=True)
class Options:
    """Run the chain for every method, ratio and seed, then compare."""

    methods: str  # files of bosch/methods, with commas between them
    ratios: str = "0.75"  # shares of KV groups on the sliding window, with commas between them
    seeds: int = 1  # how many: 0, 1, ...
    preset: str | None = None  # tiny, smoke or paper
    model: str | None = None  # a Hugging Face folder or hub id
    zero_shot: tyro.conf.FlagCreatePairsOff[bool] = False  # stop before training (tables 1 and 2)
    baseline: str | None = None  # of the comparison: a method, at its first ratio and seed
    out: Path | None = None  # of the comparison; None: runs/comparison
    command: str | None = None
    """what starts a chain; None: accelerate launch recipes/recover.py, or python where it would
    start one process"""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error


@dataclass(frozen=True)
class Chain:
    """One run of the sweep."""

    path: Path
    arguments: list[str]  # of recover.py
    config: Config  # what they come to

    @property
    def is_complete(self) -> bool:
        ends = ["report"] if "--zero-shot" in self.arguments else ["report", "train"]
        return all((self.path / end / MANIFEST).is_file() for end in ends)


def main(arguments: Sequence[str]) -> None:
    options, rest = tyro.cli(
        Options,
        args=arguments,
        prog="sweep.py",
        description=__doc__,
        return_unknown_args=True,
    )
    progress.set_up()
    chains = plan_chains(options, rest)
    failures = run_chains(chains, start_command(options))
    compare_chains(chains, options)
    if failures:
        say(f"{len(failures)} of {len(chains)} runs failed; the same command tries them again:")
        for path, reason in failures.items():
            say(f"  {path}: {reason}")
        raise SystemExit(1)


def plan_chains(options: Options, rest: Sequence[str]) -> list[Chain]:
    """All runs, a seed after the other, so that the first comparison is early complete. Whatever is
    wrong with the options is told before the first run starts."""
    for option in NOT_FOR_SWEEPS:
        if any(word.split("=")[0] == option for word in rest):
            raise ValueError(f"{option} is for one run; a sweep has many.")
    if options.seeds < 1:
        raise ValueError(f"--seeds is {options.seeds}; it is how many, at least 1.")
    if options.baseline and options.baseline not in split(options.methods):
        raise ValueError(f"--baseline {options.baseline} is none of the methods: {options.methods}")
    named = {"--preset": options.preset, "--model": options.model}
    shared = [word for name, value in named.items() if value for word in (name, value)] + [*rest]
    chains = []
    for seed in range(options.seeds):
        for ratio, method in itertools.product(split(options.ratios), split(options.methods)):
            words = ["--method", method, "--ratio", ratio, "--seed", str(seed), *shared]
            command = parse_command(words, tuple(presets.PRESETS), presets.choose)
            default_settings(method, command.config.mask)  # are all options its own?
            words += ["--zero-shot"] * options.zero_shot
            chains.append(Chain(command.run_path, words, command.config))
    return chains


def split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def start_command(options: Options) -> list[str]:
    if options.command is not None:
        return shlex.split(options.command)
    import torch
    from accelerate.commands.config import config_args

    configured = Path(config_args.default_config_file).is_file()
    if torch.accelerator.device_count() < 2 and not configured:
        return [sys.executable, str(RECOVER)]  # without the launcher's warnings above every run
    return [str(Path(sys.executable).with_name("accelerate")), "launch", str(RECOVER)]


def run_chains(chains: Sequence[Chain], start: Sequence[str]) -> dict[Path, str]:
    """Run what is not done yet; the runs that failed, and why."""
    failures = {}
    for number, chain in enumerate(chains, 1):
        place = f"[{number}/{len(chains)}] {chain.path}"
        if is_done(chain):
            say(f"{place}: done before")
            continue
        say(place)
        reason = run_chain([*start, *chain.arguments])
        if reason is None and not chain.is_complete:
            reason = "stopped before its end"  # on request, and saved
        if reason is not None:
            say(f"{place}: failed: {reason}")
            failures[chain.path] = reason
    return failures


def is_done(chain: Chain) -> bool:
    """Whether this very command has finished, with these settings and the model as it is. Of
    anything else recover.py judges itself."""
    if not chain.is_complete:
        return False
    try:
        run = json.loads((chain.path / "run.json").read_bytes())
        mask = json.loads((chain.path / "mask" / "mask.json").read_bytes())
        return run["command"] == chain.arguments and is_made_so(run, mask, chain.config)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_made_so(run: dict[str, Any], mask: dict[str, Any], config: Config) -> bool:
    """Whether a run, by its run.json and mask.json, has these settings and is of the model as it is
    now."""
    folder = find_model(config.model)
    same_model = folder is None or (
        mask["model"]["weight_hash"] == read_model_info(folder).weight_hash
    )
    return same_model and fill_in(run["config"]) == json.loads(json.dumps(asdict(config)))


def run_chain(command: Sequence[str]) -> str | None:
    """Why the chain failed; None if it did not. What it writes is passed on."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    tail = b""
    try:
        # Errors pass through here, so that the last of them can be told again at the end.
        while piece := os.read(process.stderr.fileno(), 65_536):
            sys.stderr.buffer.write(piece)
            sys.stderr.flush()
            tail = (tail + piece)[-TAIL_BYTES:]
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C has reached it too: it saves what it has
        raise
    return None if status == 0 else find_reason(tail.decode(errors="replace"), status)


def find_reason(errors: str, status: int) -> str:
    """The sentence that a user's mistake ends in, else the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return lines[-1] if lines else f"exit status {status}"


def compare_chains(chains: Sequence[Chain], options: Options) -> None:
    paths = [chain.path for chain in chains if is_run(chain.path)]
    if not paths:
        return
    out = options.out or chains[0].path.parent / "comparison"
    first = {chain.arguments[1]: chain.path for chain in reversed(chains)}
    baseline = first.get(options.baseline or "")
    if options.baseline and baseline not in paths:
        say(f"--baseline {options.baseline}: no run of this method to compare with")
        baseline = None
    words = [*map(str, paths), "--out", str(out)]
    compare_runs.main([*words, *(["--baseline", str(baseline)] if baseline else [])])


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
