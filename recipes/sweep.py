"""Runs the chain for every method, ratio and seed, one after another, then compares the runs.

    python recipes/sweep.py --methods bosch,fisher,interleave,bosch_layer --ratios .5,.75 --seeds 3
    python recipes/sweep.py --methods bosch,razor --ratios .25,.5,.75,.875 --zero-shot
    python recipes/sweep.py --methods bosch,fisher --seeds 3 --baseline bosch --windows 16,32,128 \\
        --lengths 4096,8192 --rows runs/study.jsonl

Options that are not the sweep's own go to recipes/recover.py as they are (--eval.samples 50). Runs
share calibration, tokens and the dense model's evaluation through runs/shared. A run that is done
is passed over, one that fails does not stop the others: run the same command again for the rest.

--windows and --lengths judge each finished run's hybrid once more, as it was before training, by
the run's own tests: its mask, chosen for the run's window, under each further window; and NIAH in
texts of each further length (there the dense model too), YaRN stretching the positions by as much
as a length needs. This is done in one process, into eval/window and eval/length of the run folder.

--rows FILE keeps each finished run as a line: settings, mask, losses, scores by example. A run that
has its line there, with the settings and the model as they are now, is not run again, on whatever
machine, and is in the report.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tyro

from bosch.command_line import called_as, parse_command, read_options
from bosch.config import Config, fill_in
from bosch.eval.judging import judging_of
from bosch.eval.report.archive import append_run, read_archive
from bosch.eval.report.runs import RunResults, is_run, read_run
from bosch.eval.settings import Label
from bosch.methods._settings import default_settings, learning_tokens
from bosch.model import find_model, read_model_info, read_shape
from bosch.recipes import compare_runs, evaluate_model, presets
from bosch.run import progress
from bosch.run.errors import UserError, exit_on_user_error, is_user_error
from bosch.run.folder import RunFolder
from bosch.run.manifest import MANIFEST
from bosch.run.progress import say

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
    baseline: str | None = None
    """a method: the report has what every other has over it, at each ratio, with intervals"""
    windows: str = ""  # further ones that masks are judged under, with commas between them
    lengths: str = ""  # further ones of NIAH's texts, in tokens, with commas between them
    rows: Path | None = None  # .jsonl file of finished runs; those in it are not run again
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
    windows: Sequence[int] = ()  # further ones to be judged under
    lengths: Sequence[int] = ()

    @property
    def is_zero_shot(self) -> bool:
        return "--zero-shot" in self.arguments

    @property
    def is_complete(self) -> bool:
        ends = ["report"] if self.is_zero_shot else ["report", "train"]
        return all((self.path / end / MANIFEST).is_file() for end in ends)


def main(arguments: Sequence[str]) -> None:
    options, rest = read_options(
        Options, arguments, passes_on=True, prog=called_as("sweep.py"), description=__doc__
    )
    progress.set_up()
    chains = plan_chains(options, rest)
    failures = run_chains(chains, start_command(options), options.rows)
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
            raise UserError(f"{option} is for one run; a sweep has many.")
    if options.seeds < 1:
        raise UserError(f"--seeds is {options.seeds}; it is how many, at least 1.")
    if options.baseline and options.baseline not in split(options.methods):
        raise UserError(f"--baseline {options.baseline} is none of the methods: {options.methods}")
    named = {"--preset": options.preset, "--model": options.model}
    shared = [word for name, value in named.items() if value for word in (name, value)] + [*rest]
    windows = split_numbers("--windows", options.windows)
    lengths = split_numbers("--lengths", options.lengths)
    chains = []
    for seed in range(options.seeds):
        for ratio, method in itertools.product(split(options.ratios), split(options.methods)):
            words = ["--method", method, "--ratio", ratio, "--seed", str(seed), *shared]
            command = parse_command(words, tuple(presets.PRESETS), presets.choose)
            default_settings(method, command.config.mask)  # are all options its own?
            words += ["--zero-shot"] * options.zero_shot
            other = windows if command.config.ratio else []  # the dense control has no window
            chains.append(Chain(command.run_path, words, command.config, other, lengths))
    return chains


def split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def split_numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in split(text)]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise UserError(f"{option} {text}: say numbers of tokens, with commas between them.")
    return numbers


def start_command(options: Options) -> list[str]:
    if options.command is not None:
        return shlex.split(options.command)
    import torch
    from accelerate.commands.config import config_args

    configured = Path(config_args.default_config_file).is_file()
    if torch.accelerator.device_count() < 2 and not configured:
        return [sys.executable, str(RECOVER)]  # without the launcher's warnings above every run
    return [str(Path(sys.executable).with_name("accelerate")), "launch", str(RECOVER)]


def run_chains(
    chains: Sequence[Chain], start: Sequence[str], archive: Path | None
) -> dict[Path, str]:
    """Run what is not done yet; the runs that failed, and why."""
    failures = {}
    known = read_archive(archive) if archive and archive.is_file() else []
    for number, chain in enumerate(chains, 1):
        place = f"[{number}/{len(chains)}] {chain.path}"
        if find_row(chain, known):
            say(f"{place}: in {archive}")
            continue
        if reason := finish_chain(chain, start, place):
            say(f"{place}: failed: {reason}")
            failures[chain.path] = reason
        elif archive:
            append_run(archive, read_run(chain.path))
    return failures


def finish_chain(chain: Chain, start: Sequence[str], place: str) -> str | None:
    """Run the chain if it is not done, and what is judged besides; why that failed."""
    if is_done(chain):
        say(f"{place}: done before")
    else:
        say(place)
        if reason := run_chain([*start, *chain.arguments]):
            return reason
        if not chain.is_complete:
            return "stopped before its end"  # on request, and saved
    if not chain.windows and not chain.lengths:
        return None
    try:
        # In a process of its own, with which the memory of its device goes.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(judge_further, chain).result()
    except Exception as error:  # whatever it is, it ends this run alone
        if not is_user_error(error):
            traceback.print_exception(error)
        return str(error)
    return None


def judge_further(chain: Chain) -> None:
    """Under other windows and in longer texts than the run's own."""
    config, positions = chain.config, read_shape(chain.config.model).positions
    own = judging_of(config)
    needles = own.suites[0]
    judgings = {f"eval/window/{n}": replace(own, window_tokens=n) for n in chain.windows}
    for length in chain.lengths:
        run = replace(needles, settings=replace(needles.settings, lengths=(length,)))
        yarn = length / positions if length > positions else None
        judgings[f"eval/length/{length}"] = replace(own, suites=(run,), yarn=yarn)
    label = Label(chain.path.name, 0, learning_tokens(config))
    model, shared = str(chain.path / "model"), chain.path.parent / "shared"
    progress.set_up()
    with RunFolder(chain.path, say=say) as folder:
        for name, judging in judgings.items():
            folder.complete(evaluate_model.make_stage(name, model, judging, label, shared))
            if "length" in name:  # a window is nothing to the dense model
                dense = Label(Path(config.model).name)
                stage = evaluate_model.make_stage(f"{name}-dense", config.model, judging, dense)
                folder.complete(stage)


def find_row(chain: Chain, known: Sequence[RunResults]) -> RunResults | None:
    """A finished run with these settings, of the model as it is now, that has come as far."""
    wanted = [{"window": n} for n in chain.windows] + [{"text_tokens": n} for n in chain.lengths]
    for run in known:
        has_all = all(any(one.items() <= row.items() for row in run.variants) for one in wanted)
        reaches = chain.is_zero_shot or "train" in run.stage_seconds
        if not has_all or not reaches or run.mask is None:
            continue
        if is_made_so(run.config, run.mask.model.weight_hash, chain.config):
            return run
    return None


def is_done(chain: Chain) -> bool:
    """Whether this very command has finished, with these settings and the model as it is. Of
    anything else recover.py judges itself."""
    if not chain.is_complete:
        return False
    try:
        run = json.loads((chain.path / "run.json").read_bytes())
        mask = json.loads((chain.path / "mask" / "mask.json").read_bytes())
        weights = mask["model"]["weight_hash"]
        return run["command"] == chain.arguments and is_made_so(
            fill_in(run["config"]), weights, chain.config
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_made_so(made: Mapping[str, Any], weight_hash: str | None, config: Config) -> bool:
    """Whether a run has these settings, and is of the model as it is now."""
    if made != json.loads(json.dumps(asdict(config))):
        return False
    folder = find_model(config.model)
    return folder is None or weight_hash == read_model_info(folder).weight_hash


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
    known = read_archive(options.rows) if options.rows and options.rows.is_file() else []
    runs: list[Path | RunResults] = []
    methods = set()
    for chain in chains:
        run = find_row(chain, known) or chain.path
        if isinstance(run, RunResults) or is_run(run):
            runs.append(run)
            methods.add(chain.config.method)
    baseline = options.baseline
    if baseline and baseline not in methods:
        say(f"--baseline {baseline}: no run of this method to compare with")
        baseline = None
    if runs:
        out = options.out or chains[0].path.parent / "comparison"
        compare_runs.compare_and_show(runs, out, baseline)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
