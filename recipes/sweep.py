"""Runs the chain for every method, ratio and seed, and varied setting, then compares the runs.

    python recipes/sweep.py --methods bosch,fisher,interleave,bosch_layer --ratios .5,.75 --seeds 3
    python recipes/sweep.py --methods bosch,razor --ratios .25,.5,.75,.875 --zero-shot
    python recipes/sweep.py --methods bosch,fisher --seeds 3 --baseline bosch --windows 16,32,128 \\
        --lengths 4096,8192 --rows runs/study.jsonl
    python recipes/sweep.py --methods bosch --vary window=32,64 train.peak-learning-rate=1e-3,3e-4

Other options are passed on to `bosch recover` (--model DIR, --zero-shot). Runs share
calibration, tokens and the dense model's evaluation through runs/shared. Finished runs are skipped,
and a run that fails does not stop the others: repeat the command to run the rest. --dry-run lists
the runs, with their settings, what each would reuse, and the hours of all.

--windows and --lengths evaluate each finished run's untrained hybrid again, by the same tests:
under each further window, with the mask that was chosen for the run's own window; and the suites
with text lengths (NIAH) at each further length, for the dense model too. A length beyond the
model's positions uses YaRN. All this runs in one process and is stored in eval/window and
eval/length of the run folder.

--rows FILE stores each finished run as one line: settings, mask, losses, scores by example. A run
in that file, with the current settings and model, is not run again, on whatever machine, and is
part of the report; of a run that is there with other settings these are named.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import parse
from bosch.config import Config, TokenCount, as_option, at_least, show_value, switches
from bosch.eval import eval_stage
from bosch.eval.evaluate import plan_of_run
from bosch.eval.report.compare import SPEED
from bosch.eval.report.runs import (
    READING_FILES,
    RunResults,
    append_run,
    is_run,
    read_archive,
    read_run,
)
from bosch.eval.settings import Label
from bosch.hybrid import model_stage
from bosch.methods._settings import METHODS, brings_sink, learning_tokens
from bosch.model import check_window_fits, find_model, read_model_info, read_shape
from bosch.plugins import list_plugins, own_folders
from bosch.recipes import compare_runs, presets
from bosch.recipes.command import Command, parse_command
from bosch.recipes.sweep_plan import SweepPlan, why_another
from bosch.run.errors import UserError, is_user_error, run_main
from bosch.run.files import MANIFEST
from bosch.run.fingerprint import fingerprint
from bosch.run.folder import RunFolder
from bosch.run.memory import for_launchers
from bosch.run.progress import describe_seconds, say, set_up
from bosch.run.stage import flatten

RECOVER = Path(__file__).with_name("recover.py")
# The sweep sets these itself, or they make sense for one run only (--hours would give each run
# other tokens).
NOT_FOR_SWEEPS = (
    *("--method", "--ratio", "--kv-budget", "--seed", "--hours"),
    *("--run-dir", "--fresh", "--from", "--dry-run", "--rehearse"),
)
# Options whose values are no name for --baseline: a method goes by its own, without the option's.
UNNAMED = set(NOT_FOR_SWEEPS) - {"--ratio"}
TAIL_BYTES = 4_000  # of a chain's stderr, searched for the reason it failed


def split(text: str) -> tuple[str, ...]:
    if not (words := tuple(word.strip() for word in text.split(",") if word.strip())):
        raise UserError(f"{text!r} is empty; name at least one.")
    return words


@dataclass(frozen=True)
class Options:
    methods: tuple[str, ...]  # names of files in bosch/methods
    ratios: tuple[str, ...] = ("0.75",)  # shares of KV groups on the sliding window
    seeds: int = 1  # number of seeds: 0, 1, ...
    # Further settings of `bosch recover`, each with its values: window=32,64 train.clip-norm=0.5,1
    vary: Annotated[tuple[str, ...], "NAME=VALUE,VALUE"] = ()
    # method, ratio=0 of --ratios, or NAME=VALUE of --vary, to compare the others with
    baseline: str | None = None
    windows: tuple[TokenCount, ...] = ()  # further window sizes to evaluate
    lengths: tuple[TokenCount, ...] = ()  # further text lengths to evaluate (NIAH)
    rows: Path | None = None  # .jsonl or .jsonl.gz file of finished runs, which are not run again
    out: Path | None = None  # folder for the report; None: runs/comparison
    # Command that runs one chain; None: recover.py, by accelerate launch if there are several GPUs.
    command: str | None = None
    dry_run: bool = False  # list the runs and what is finished, then stop

    def __post_init__(self) -> None:
        at_least(1, self, "", "seeds")
        for name in ("methods", "ratios"):
            if not getattr(self, name):
                raise UserError(f"--{name} is empty; name at least one.")
        for name in ("windows", "lengths"):
            if any(count < 1 for count in getattr(self, name)):
                problem = f"--{name} {show_value(getattr(self, name))}"
                raise UserError(f"{problem}: give numbers of tokens, each at least 1.")
        if self.out and self.out.is_file():
            raise UserError(f"--out {self.out} is a file; name a folder for the report.")
        if self.rows and not self.rows.name.endswith((".jsonl", ".jsonl.gz")):
            raise UserError(f"--rows {self.rows} must end in .jsonl or .jsonl.gz.")


@dataclass(frozen=True)
class Chain:
    path: Path
    arguments: list[str]  # of `bosch recover`
    command: Command  # what they mean
    windows: Sequence[int]  # further ones to evaluate
    lengths: Sequence[int]
    varied: Sequence[tuple[str, str]] = ()  # settings of --vary, with their values

    @property
    def config(self) -> Config:
        return self.command.config

    @property
    def is_zero_shot(self) -> bool:
        return self.command.zero_shot

    @cached_property
    def made_from(self) -> dict[str, str]:
        """As RunResults has it, of the files as they are now; empty where one is not here."""
        from bosch.recipes.chain import stages_of_run
        from bosch.training.fitting import Fitted

        command = replace(self.command, run_dir=self.path)
        fitted = Fitted(command.config, 1, is_named=False)
        with suppress(UserError):
            stages = stages_of_run(command, RunFolder(self.path, say=say), fitted)
            return {
                stage.name: fingerprint(stage.facts["settings"])
                for stage in stages
                if stage.name in READING_FILES
            }
        return {}

    @property
    def kinds(self) -> list[str]:
        """What --baseline may call it: its method, its ratio and, as --vary has them, settings."""
        # Also those that follow no `--`: a value and the next option, which nobody asks for.
        pairs = itertools.pairwise(self.arguments)
        settings = [f"{name[2:]}={value}" for name, value in pairs if name not in UNNAMED]
        # A switch has no value beside its name.
        settings += [f"{name}={value}" for name, value in self.varied]
        return [self.config.method, *settings]

    @property
    def is_complete(self) -> bool:
        end = "eval/step-000000" if self.is_zero_shot else "train"
        return (self.path / end / MANIFEST).is_file()


def main(arguments: Sequence[str]) -> None:
    rest: list[str] = []  # options of `bosch recover`
    options = parse(Options, arguments, rest=rest)
    if options.baseline:
        options = replace(options, baseline=as_varied("--baseline", options.baseline))
    set_up()
    chains = list_chains(options, rest)
    for model in {chain.config.model: None for chain in chains}:
        model_stage.check(model)
    say(*mixed_sinks(chains))
    archived = archived_runs(chains, options.rows)
    others = other_runs(chains, archived, options.rows)
    if options.dry_run:
        for line in describe_plan(chains, archived, others, options.rows):
            say(line)  # as soon as it is known: each takes a moment
        return
    start, failures = start_command(options.command), {}
    for number, chain in enumerate(chains, 1):
        place = f"[{number}/{len(chains)}] {chain.path}"
        if chain.path in archived:
            say(f"{place}: in {options.rows}")
            continue
        if chain.path in others:
            say(f"{place}: {options.rows} has {others[chain.path]}")
        if reason := finish_chain(chain, start, place):
            say(f"{place}: failed: {reason}")
            failures[chain.path] = reason
        elif options.rows:
            append_run(options.rows, read_run(chain.path))

    archived, baseline = archived_runs(chains, options.rows), options.baseline
    done = [chain for chain in chains if chain.path in archived or has_begun(chain)]
    if baseline and not any(baseline in chain.kinds for chain in done):
        say(f"--baseline {baseline}: there is no such run to compare with")
        baseline = None
    if done:
        out = options.out or chains[0].path.parent / "comparison"
        runs = [archived.get(chain.path, chain.path) for chain in done]
        compare_runs.compare_and_show(runs, out, baseline)
    if failures:
        say(f"{len(failures)} of {len(chains)} runs failed; repeat the command to retry them:")
        for path, reason in failures.items():
            say(f"  {path}: {reason}")
        raise SystemExit(1)


def list_chains(options: Options, rest: Sequence[str]) -> list[Chain]:
    """All runs, seed by seed, so that a first comparison is complete early. Wrong options are
    refused before the first run starts."""
    for word in rest:
        if (option := word.partition("=")[0].replace("_", "-")) in NOT_FOR_SWEEPS:
            raise UserError(f"{option} cannot be set in a sweep; use `bosch recover`.")
    windows, lengths = options.windows, options.lengths
    # Each combination of the varied settings; one, of none, where nothing is varied.
    variants: list[tuple[tuple[str, str], ...]] = [()]
    for text in options.vary:
        name, _, values = text.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not name or not values:
            problem = "write a setting of `bosch recover` as NAME=VALUE,VALUE"
            raise UserError(f"--vary {text}: {problem}.")
        if f"--{name}" in NOT_FOR_SWEEPS:
            raise UserError(f"--vary {text}: --{name} is none of them; see --methods and --ratios.")
        if name in ("zero-shot", "show-settings"):
            raise UserError(f"--vary {text}: --{name} is no setting; pass it, for all runs.")
        given = [canonical("--vary", name, value) for value in split(values)]
        variants = [(*one, (name, value)) for one in variants for value in given]

    chains = list[Chain]()
    for seed, ratio, method, varied in itertools.product(
        range(options.seeds), options.ratios, options.methods, variants
    ):
        words, suffix = ["--method", method, "--ratio", ratio, "--seed", str(seed), *rest], ""
        for name, value in varied:
            words += words_of(name, value)
            fitting = re.sub(r"[^\w.+-]", "_", value)  # in the name of a folder
            suffix += f"-{name.rpartition('.')[2]}-{fitting}"
        command = parse_command(words)
        path = Path(f"{command.run_path}{suffix}")
        if varied and (twin := next((chain for chain in chains if chain.path == path), None)):
            both = [value for kind in (twin.varied, varied) for _, value in kind]
            problem = f"--vary: {', '.join(both)}: two runs would have the folder {path}"
            raise UserError(f"{problem}; sweep one of them apart.")
        if suffix:  # again, as a run that goes on has settings from its folder
            words += ["--run-dir", str(path)]
            command = parse_command(words)
        config = command.config
        for window in windows:
            check_window_fits(window, config.model)
        presets.check_lengths(config)
        suites = plan_of_run(config).suites if lengths else ()
        if lengths and not any(hasattr(suite.settings, "lengths") for suite in suites):
            problem = "no suite has text lengths; --eval.suites niah has"
            raise UserError(f"--lengths {lengths[0]}: {problem}.")
        further = windows if config.ratio else []  # the dense control has no window
        chains.append(Chain(path, words, command, further, lengths, varied))
    if (baseline := options.baseline) and not any(baseline in chain.kinds for chain in chains):
        known = ", ".join(options.methods)
        known += "".join(f", ratio={ratio}" for ratio in options.ratios)
        raise UserError(f"--baseline {baseline} is none of {known} or the values of --vary.")
    return chains


def is_switch(name: str) -> bool:
    return name.replace("-", "_") in switches()


def as_varied(option: str, text: str) -> str:
    """NAME=VALUE as the runs have it, which `option` may write as --vary may; another word as it
    is."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        return text
    name = name.replace("_", "-")
    return f"{name}={canonical(option, name, value)}"


def canonical(option: str, name: str, value: str) -> str:
    """A varied value, of those that mean the same one."""
    if not is_switch(name):
        return value
    if value.lower() not in ("true", "false"):
        raise UserError(f"{option} {name}={value}: it is True or False.")
    return value.capitalize()


def words_of(name: str, value: str) -> list[str]:
    """A varied setting as it is typed."""
    if is_switch(name):
        return [as_option(name.replace("-", "_"), value == "True")]
    return [f"--{name}", value]


def mixed_sinks(chains: Sequence[Chain]) -> Iterator[str]:
    """A line if runs have different sinks that the user did not vary: what looks like a difference
    between methods might be one between sinks."""
    if any(name == "sink" for chain in chains for name, _ in chain.varied):
        return
    methods = dict[str, list[str]]()  # by sink
    for config in (chain.config for chain in chains if chain.config.ratio):
        methods.setdefault(config.sink, []).append(config.method)
    if len(methods) < 2:
        return
    shown = [f"{sink} with {', '.join(dict.fromkeys(of))}" for sink, of in methods.items()]
    # A mask of a file was chosen with its sink in sight, so the others take that one.
    own = [sink for sink, of in methods.items() if any(map(brings_sink, of))]
    remedy = f"--sink {(own or [*methods])[0]} gives them all the same"
    yield f"warning: the runs have different sinks ({'; '.join(shown)}); {remedy}"


def describe_plan(
    chains: Sequence[Chain],
    archived: Mapping[Path, RunResults],
    others: Mapping[Path, str],
    rows: Path | None,
) -> Iterator[str]:
    """A line for each run: its folder, its settings, and what would be done. Then the hours."""
    plan = SweepPlan()
    for number, chain in enumerate(chains, 1):
        config = chain.config
        settings = [config.method, f"ratio {config.ratio:g}", f"seed {config.seed}"]
        settings += [f"sink {config.sink}", f"window {config.window}"]
        settings += [f"{name} {value}" for name, value in chain.varied]
        if chain.path in archived:
            state = f"in {rows}"
        elif not is_finished(chain):
            state = plan.describe(number, replace(chain.command, run_dir=chain.path))
            if chain.path in others:
                state += f"; {rows} has {others[chain.path]}"
        elif has_further(read_run(chain.path), chain):
            state = "finished"
        else:
            state = "finished, but for --windows and --lengths"
        yield f"[{number}/{len(chains)}] {chain.path}: {', '.join(settings)}: {state}"
    further = ", without --windows and --lengths" if chains[0].windows or chains[0].lengths else ""
    yield f"in all about {describe_seconds(plan.seconds)} on this machine{further}"


def start_command(text: str | None) -> list[str]:
    if text is not None:
        command = shlex.split(text)
        if not command or shutil.which(command[0]) is None:
            raise UserError(f"--command {text!r} does not start with a program.")
        return command
    import torch
    from accelerate.commands.config import config_args

    configured = Path(config_args.default_config_file).is_file()
    if torch.accelerator.device_count() < 2 and not configured:
        return [sys.executable, str(RECOVER)]  # without the launcher and its warnings
    return [str(Path(sys.executable).with_name("accelerate")), "launch", str(RECOVER)]


def finish_chain(chain: Chain, start: Sequence[str], place: str) -> str | None:
    """Run the chain and the further evaluations unless they are finished. Returns why one of them
    failed; None if none did."""
    # Whatever else is found in the folder is left to `bosch recover`.
    if is_finished(chain):
        say(f"{place}: already finished")
    else:
        say(place)
        # stderr passes through here, so that the last error can be repeated at the end.
        words = [*start, *chain.arguments]
        if folders := own_folders():
            words += ["--plugins", *folders]  # on other machines there is no variable
        process = subprocess.Popen(words, stderr=subprocess.PIPE, env=for_launchers(os.environ))
        assert process.stderr is not None
        tail = b""
        try:
            while piece := os.read(process.stderr.fileno(), 65_536):
                sys.stderr.buffer.write(piece)
                sys.stderr.flush()
                tail = (tail + piece)[-TAIL_BYTES:]
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C reached it too: it saves its state
            raise
        if status:  # the sentence of a user's mistake, or the last line
            lines = [*filter(None, map(str.strip, tail.decode(errors="replace").splitlines()))]
            errors = [word.removeprefix("error: ") for word in lines if word.startswith("error: ")]
            if errors:
                return errors[-1]
            return lines[-1] if lines else f"exit status {status}"
        if not chain.is_complete:
            return "stopped before the end"  # on request, with its state saved
    if not chain.windows and not chain.lengths:
        return None
    try:
        # In a separate process, which releases the memory of its device when it ends. First it
        # looks for methods of the user's own: what it is sent may be of one.
        context = get_context("spawn")
        with ProcessPoolExecutor(1, context, list_plugins, (METHODS,)) as pool:
            pool.submit(evaluate_further, chain).result()
    except Exception as error:  # a bug fails this run and not the others
        if is_user_error(error):
            return str(error)
        traceback.print_exception(error)
        return repr(error)
    return None


def evaluate_further(chain: Chain) -> None:
    """Under other windows and at other text lengths than the run's own."""
    config, positions = chain.config, read_shape(chain.config.model).positions
    plan = plan_of_run(config)
    plans = {f"eval/window/{n}": replace(plan, window_tokens=n) for n in chain.windows}
    for length in chain.lengths:
        suites = tuple(
            replace(suite, settings=replace(suite.settings, lengths=(length,)))
            for suite in plan.suites
            if hasattr(suite.settings, "lengths")
        )
        yarn = length / positions if length > positions else None
        plans[f"eval/length/{length}"] = replace(plan, suites=suites, yarn=yarn)
    label = Label(chain.path.name, 0, learning_tokens(config))
    model, shared = str(chain.path / "model"), chain.path.parent / "shared"
    set_up()
    with RunFolder(chain.path, say=say) as folder:
        for name, plan in plans.items():
            folder.complete(eval_stage.stage(name, model, plan, label, shared))
            if "length" in name:  # the dense model has no window
                dense = Label(Path(config.model).name)
                stage = eval_stage.stage(f"{name}-dense", config.model, plan, dense)
                folder.complete(stage)


def archived_runs(chains: Sequence[Chain], archive: Path | None) -> dict[Path, RunResults]:
    """For each chain the finished run with its settings and model, and all its evaluations."""
    found: dict[Path, RunResults] = {}
    runs = read_archive(archive) if archive and archive.is_file() else []
    for run, chain in itertools.product(runs, chains):
        reaches = chain.is_zero_shot or "train" in run.stage_seconds
        if chain.path in found or not (reaches and has_further(run, chain)):
            continue
        if is_same_run(run, chain.config) and not has_other_files(run, chain):
            found[chain.path] = run
    return found


def other_runs(
    chains: Sequence[Chain], archived: Mapping[Path, RunResults], archive: Path | None
) -> dict[Path, str]:
    """For a chain that the archive does not have, how the most similar run there differs."""
    found = {}
    runs = read_archive(archive) if archive and archive.is_file() else []
    for chain in chains:
        if chain.path in archived:
            continue
        wanted = [getattr(chain.config, name) for name in ("method", "ratio", "seed")]
        alike = [
            (differing_settings(run, chain.config), run)
            for run in runs
            if [run.config.get(name) for name in ("method", "ratio", "seed")] == wanted
        ]
        if alike:
            differing, run = min(alike, key=lambda pair: len(pair[0]))
            reaches = chain.is_zero_shot or "train" in run.stage_seconds
            if differing or not is_same_run(run, chain.config):
                found[chain.path] = why_another(run, differing)
            elif has_other_files(run, chain):
                found[chain.path] = f"{run.name}, made from files that have changed since"
            elif not reaches:
                found[chain.path] = f"{run.name} without training"
            else:
                found[chain.path] = f"{run.name} without these --windows and --lengths"
    return found


def has_further(run: RunResults, chain: Chain) -> bool:
    """Whether it was evaluated under all further windows and lengths."""
    wanted = [{"window": n} for n in chain.windows]
    wanted += [{"text_tokens": n} for n in chain.lengths]
    return all(any(one.items() <= row.items() for row in run.variants) for one in wanted)


def is_finished(chain: Chain) -> bool:
    run = read_run(chain.path) if chain.is_complete else None
    return bool(run and is_same_run(run, chain.config) and not has_other_files(run, chain))


def has_other_files(run: RunResults, chain: Chain) -> bool:
    """Whether a text, a file of questions or a plug-in has changed since, under the same name."""
    return any(chain.made_from.get(stage, made) != made for stage, made in run.made_from.items())


def has_begun(chain: Chain) -> bool:
    """Whether its folder holds this run, and not one of other settings."""
    return is_run(chain.path) and has_settings(read_run(chain.path), chain.config)


def has_settings(run: RunResults, config: Config) -> bool:
    """Whether all that decides a run's results is as in `config`."""
    return not differing_settings(run, config)


def differing_settings(run: RunResults, config: Config) -> dict[str, tuple[object, object]]:
    """Of what decides results: the run's value and that of `config`."""

    def deciding(stored: Mapping[str, Any]) -> dict[str, object]:
        # The dense control has no windows, so that nothing comes of its sink.
        left_out = SPEED if config.ratio else SPEED | {"sink"}
        return {name: value for name, value in flatten(stored).items() if name not in left_out}

    theirs, ours = deciding(run.config), deciding(json.loads(json.dumps(asdict(config))))
    return {
        name: (theirs.get(name, "not there"), ours.get(name, "not there"))
        for name in sorted(theirs.keys() | ours.keys())
        if (name in theirs, theirs.get(name)) != (name in ours, ours.get(name))
    }


def is_same_run(run: RunResults, config: Config) -> bool:
    """Whether a run is the one that `config` describes, with the same weights."""
    if run.mask is None or run.mask.method != config.method or not has_settings(run, config):
        return False
    # A mask that was learned with weights of its own names those.
    folder = None if "weights=learned" in config.mask.options else find_model(config.model)
    return folder is None or run.mask.model.weight_hash == read_model_info(folder).weight_hash


if __name__ == "__main__":
    run_main(main)
