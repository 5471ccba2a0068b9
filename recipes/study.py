"""The study: the paper's tables and figures in miniature, on the embedded model: docs/study.md; and
learned masks beside searched ones: docs/consa.md.

    python recipes/study.py                          # hours on 2 cores; run it again to go on
    python recipes/study.py --only recovery          # one part
    python recipes/study.py --only page              # the pages from what there is

Chains of recover.py, one process each, `--workers` side by side. Each finished run leaves a small
file in --archive: what has one is not run again, on this machine or another, as long as model and
settings are the same.
"""

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import tyro

from bosch import progress
from bosch.command_line import parse_command
from bosch.config import at_least
from bosch.errors import exit_on_user_error
from bosch.manifest import MANIFEST
from bosch.mask import check_ratio
from bosch.methods import _choose
from bosch.plugins import list_plugins
from bosch.progress import describe_seconds, say
from eval.run_archive import SUFFIX, pack_run, unpack_run
from eval.study import AS_PUBLISHED
from recipes import presets, search_mask, study_parts
from recipes.sweep import RECOVER, find_reason, is_made_so

Part = Literal["recovery", "learned", "zero_shot", "windows", "long", "replacement", "page"]
PARTS: tuple[Part, ...] = get_args(Part)
ZERO_SHOT = "--zero-shot"
LEARNED = (
    "consa",
    "consa granularity=head-per-layer",
    "consa granularity=layer",
    "l1_gates",
    "bosch",
    "bosch_plus",
    "fisher",
    "random_groups",
)


@dataclass(frozen=True)
class Options:
    """Run the study, or go on with it."""

    only: tuple[Part, ...] = PARTS  # parts to run
    ratios: tuple[float, ...] = study_parts.RATIOS  # of the zero-shot tables
    seeds: int = 3  # calibration sets, each with another seed
    samples: int = 20  # test examples of each task and length
    methods: tuple[str, ...] = ()  # of the zero-shot tables; none: all that need no file
    trained: tuple[str, ...] = ("bosch", "bosch_plus", "bosch_layer", "fisher", "interleave")
    trained_ratio: float = 0.75  # at which those are trained
    learned: tuple[str, ...] = LEARNED  # compared with each other in docs/consa.md
    learned_ratios: tuple[float, ...] = (0.75, 0.5)  # at which those are trained
    workers: int = 2  # chains side by side, a thread each
    runs: Path = Path("runs/study")
    archive: Path = Path("benchmarks/study")
    page: Path = Path("docs/study.md")
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error

    def __post_init__(self) -> None:
        at_least(1, self, "", "seeds", "samples", "workers")
        for ratio in (*self.ratios, self.trained_ratio, *self.learned_ratios):
            check_ratio(ratio)


@dataclass(frozen=True)
class Chain:
    """One run: a method, a ratio, a seed. A trained one has the zero-shot scores too."""

    method: str  # and its options behind it
    ratio: float
    seed: int
    trained: bool

    @property
    def name(self) -> str:
        return study_parts.run_name(self.method, self.ratio, self.seed)

    def arguments(self, options: Options) -> list[str]:
        """Of recover.py."""
        method, *given = self.method.split()
        words = ["--method", method, "--ratio", f"{self.ratio:g}", "--seed", str(self.seed)]
        words += ["--mask.options", *given] if given else []
        words += ["--eval.samples", str(options.samples)]
        words += ["--run-dir", str(options.runs / self.name)]
        return words if self.trained else [*words, ZERO_SHOT]


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="study.py", description=__doc__)
    progress.set_up()
    for name in (*options.methods, *options.trained, *options.learned):
        presets.check_method(name.split()[0])
    failures = run_chains(plan_chains(options), options)
    setting = study_parts.Setting(
        options.runs,
        options.archive,
        options.samples,
        options.trained,
        options.trained_ratio,
        options.learned,
        options.learned_ratios,
        options.seeds,
    )
    for part, run in study_parts.PARTS.items():
        if part in options.only:
            try:
                run(setting)
            except (FileNotFoundError, ValueError) as error:  # the page tells what is missing
                say(f"{part}: {error}")
                failures[part] = str(error)
    if "page" in options.only:
        study_parts.write_page(setting, options.page, arguments, describe_left(options))
    if failures:
        say(f"{len(failures)} runs or parts failed; the same command tries them again:")
        for name, reason in failures.items():
            say(f"  {name}: {reason}")
        raise SystemExit(1)


def plan_chains(options: Options) -> list[Chain]:
    """A seed after the other, so that there is early something of everything. What is trained is
    not run zero-shot before."""
    chains: list[Chain] = []
    for seed in range(options.seeds):
        if "recovery" in options.only:
            chains += [Chain(m, options.trained_ratio, seed, True) for m in options.trained]
            chains.append(Chain("bosch", 0.0, seed, True))  # the control: dense, trained
        if "learned" in options.only:
            both = product(options.learned_ratios, options.learned)
            chains += [Chain(method, ratio, seed, True) for ratio, method in both]
        if "zero_shot" in options.only:
            methods = options.methods or zero_shot_methods()
            chains += [
                Chain(method, ratio, seed, False)
                for ratio, method in product(options.ratios, methods)
                if Chain(method, ratio, seed, True) not in chains
            ]
    return list(dict.fromkeys(chains))


def describe_left(options: Options) -> list[str]:
    """What the archive lacks of the whole study."""
    whole = Options(archive=options.archive, runs=options.runs)
    left: dict[str, list[Chain]] = {}
    for chain in plan_chains(whole):
        what = "recovery" if chain.trained else "before training"
        left.setdefault(f"Ratio {chain.ratio:g}, {what}", []).append(chain)
    told = []
    for title, chains in left.items():
        missing = [chain for chain in chains if not is_archived(chain, whole)]
        if missing:
            told.append(f"{title}: {len(missing)} of {len(chains)} runs")
    return told


def zero_shot_methods() -> list[str]:
    """All that need no file of the user, and BOSCH with the mask that the paper takes."""
    config = presets.tiny()
    found = [AS_PUBLISHED]
    for name in list_plugins(search_mask.METHODS):
        with contextlib.suppress(ValueError, FileNotFoundError):
            _choose.check_settings(name, search_mask.default_settings(name, config.mask))
            found.append(name)
    return found


def run_chains(chains: Sequence[Chain], options: Options) -> dict[str, str]:
    """Run those that are not in the archive; the ones that failed, and why."""
    waiting = [chain for chain in chains if not is_archived(chain, options)]
    if chains:
        say(f"{len(chains) - len(waiting)} of {len(chains)} runs are in {options.archive}")
    failures: dict[str, str] = {}
    if not waiting:
        return failures
    with (
        progress.track("study", len(waiting), "runs") as bar,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        running = [pool.submit(run_chain, chain, options) for chain in waiting]
        try:
            for future in as_completed(running):
                chain, reason, seconds = future.result()
                if reason is not None:
                    failures[chain.name] = reason
                say(f"{chain.name}: {reason or 'done'} in {describe_seconds(seconds)}")
                bar.advance()
        except KeyboardInterrupt:  # which the chains that run have got as well
            pool.shutdown(cancel_futures=True)
            raise
    return failures


def run_chain(chain: Chain, options: Options) -> tuple[Chain, str | None, float]:
    """Run and archive one; why it failed, and its seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(RECOVER), *chain.arguments(options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,  # recover.log has it
        stderr=subprocess.PIPE,
        text=True,
    )
    reason = None if done.returncode == 0 else find_reason(done.stderr, done.returncode)
    last = "train" if chain.trained else "report"
    if reason is None and not (options.runs / chain.name / last / MANIFEST).is_file():
        reason = "stopped before its end"  # on request, and saved
    if reason is None:
        pack_run(options.runs / chain.name, options.archive / f"{chain.name}{SUFFIX}")
    return chain, reason, time.monotonic() - began


def unpack_archived(chain: Chain, options: Options, out: Path) -> Path | None:
    """The folder of an archived run, in `out`."""
    if not is_archived(chain, options):
        return None
    folder = out / chain.name
    shutil.rmtree(folder, ignore_errors=True)
    unpack_run(options.archive / f"{chain.name}{SUFFIX}", folder)
    return folder


def is_archived(chain: Chain, options: Options) -> bool:
    """Whether a run with the same settings, or one that was trained as well, is there, and of the
    model as it is now."""
    path = options.archive / f"{chain.name}{SUFFIX}"
    if not path.is_file():
        return False
    files = json.loads(gzip.decompress(path.read_bytes()))
    run, mask = json.loads(files["run.json"]), json.loads(files["mask/mask.json"])
    asked = parse_command(chain.arguments(options), tuple(presets.PRESETS), presets.choose)
    reaches = ZERO_SHOT not in run["command"] or not chain.trained
    return reaches and is_made_so(run, mask, asked.config)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
