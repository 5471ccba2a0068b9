"""From a command line to settings. tyro makes options from dataclasses; this file holds what all
commands share, and the command line of recover.py, where the preset decides the defaults."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import tyro

from bosch.config import (
    CalibrationConfig,
    Config,
    JudgingConfig,
    MaskConfig,
    PackingConfig,
    TrainConfig,
)
from bosch.plugins import first_sentence, suggest
from bosch.run.checkout import find_checkout
from bosch.run.errors import UserError, exit_on_user_error

T = TypeVar("T")
RULE = re.compile(r"[╰ ]?[─-]{9}")  # a line across a box of tyro's
# How sys.argv begins in a program that the command `bosch` has started (bosch/__main__.py).
CONSOLE = ("bosch ", "python -m bosch ")
Commands = Mapping[str, tuple[type, Callable[[Any], None]]]  # word -> its options, what runs it
ChooseConfig = Callable[[str | None, str | None], tuple[Config, list[str]]]

# Rarely set: recover.py --help leaves these out, --help-all shows them.
RARELY_SET: Mapping[type, str] = {
    CalibrationConfig: "tasks punkt",
    MaskConfig: "alpha gamma ratio_buckets max_variables max_layers razor_recent_share",
    PackingConfig: "held_out_sequences min_document_tokens workers",
    TrainConfig: "floor_share betas weight_decay clip_norm spike keep_checkpoints "
    "distill_weight temperature top_k layer_weight teacher trained lora_rank max_steps "
    "checkpoint_steps reshard_after_forward sync_every_micro_batch compile "
    "deterministic",
    JudgingConfig: "niah_tasks niah_essays longbench_categories gsm8k_tasks precision attention "
    "batch prefill_chunk",
}


# ---------------------------------------------------------------------------------- any command


def parse(
    command: type[T],
    arguments: Sequence[str],
    default: T | None = None,
    short: Mapping[str, str] | None = None,
) -> T:
    """The options of a recipe, whose docstring is the help. `short`: short forms of options."""
    recipe = sys.modules[command.__module__]
    names = [word.partition("=") for word in arguments]
    words = ["".join([(short or {}).get(name, name), *rest]) for name, *rest in names]
    prog = called_as(Path(str(recipe.__file__)).name)
    parsed, _ = read_options(command, words, default=default, prog=prog, description=recipe.__doc__)
    return parsed


def called_as(program: str) -> str:
    """What a usage line calls a program: `bosch recover` where that started it, else `program`."""
    return sys.argv[0] if sys.argv[0].startswith(CONSOLE) else program


def peek(arguments: Sequence[str], *names: str) -> dict[str, str | None]:
    """The values of a few options, on which the defaults of the others depend."""
    refuse_empty(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}")
    try:
        values, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}.") from error
    return vars(values)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse options without text, as of a shell variable that is not set: as a path, it would be
    the current folder."""
    option = "an argument"
    for word in arguments:
        name, equals, value = word.partition("=")
        option = name if name.startswith("--") else option
        if not value and (equals if name.startswith("--") else not word):
            raise UserError(f"{option} is empty; give a value, or leave it out.")


def read_options(
    command: type[T], arguments: Sequence[str], passes_on: bool = False, **tyro_options: Any
) -> tuple[T, list[str]]:
    """The settings, and with `passes_on` the words that belong to no option. UserError for whatever
    the user got wrong."""
    refuse_empty(arguments)
    prog, description = tyro_options.get("prog", ""), tyro_options.get("description")
    if description and prog.startswith(CONSOLE):
        tyro_options["description"] = _examples_for(prog, description)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            settings, unknown = tyro.cli(
                command, args=list(arguments), return_unknown_args=True, **tyro_options
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        sentence = _sentence_in_box(printed.getvalue(), find_setting_error(stop))
        # A misspelled option leaves the right one missing.
        if "missing" in sentence and not passes_on:
            _check_known([word for word in arguments if word[:2] == "--"], command, tyro_options)
        raise UserError(sentence) from None
    if not passes_on:
        _check_known(unknown, command, tyro_options)
    return settings, unknown


def _examples_for(prog: str, description: str) -> str:
    """A recipe's docstring with its examples as the command `bosch` would run them."""
    module = f"-m {prog.removeprefix('python -m ')}"
    launched = re.sub(r"(accelerate launch.*?) recipes/\w+\.py", rf"\1 {module}", description)
    return re.sub(r"python recipes/\w+\.py", prog, launched)


def _check_known(words: Sequence[str], command: type, tyro_options: Mapping[str, object]) -> None:
    if not words:
        return
    options = option_names(command, **tyro_options)
    for word in words:
        if word.partition("=")[0].replace("_", "-") not in options:
            raise UserError(describe_unknown(word, options))


def find_setting_error(stop: SystemExit) -> str | None:
    """The sentence of a check of ours that led to tyro's exit, as one in a config's __post_init__;
    None if there was none."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, UserError):
            return str(error)
        error = error.__context__
    return None


def _sentence_in_box(box: str, sentence: str | None) -> str:
    """What tyro says in a box, as one sentence. `sentence`: of the check of ours that failed."""
    box = re.sub(r"\x1b\[[\d;]*m", "", box)  # colors, on a terminal
    # Below the title, without the frame, up to the line that leads to --help or to a helptext.
    lines = [re.sub(r"^[│ ] |\s*│?$", "", line) for line in box.splitlines()[1:]]
    if lines and RULE.match(lines[0]):
        del lines[0]
    body = list(itertools.takewhile(lambda line: not RULE.match(line), lines))
    text = " ".join(line.strip() for line in body)
    if option := re.match(r"Error parsing (--[\w.-]+)[^:]*: ", text):
        # Of a type like `int | None` it says why each part failed; the last one is ours.
        reason = sentence or re.sub(r"^no type matching .*[\]>]: ", "", text[option.end() :])
        reason = re.sub(r"could not convert .*: (.*)", r"\1 is not a number.", reason)
        reason = re.sub(r"invalid literal for int.*: (.*)", r"\1 is not a whole number.", reason)
        return f"{option[1]}: {reason}"
    if sentence is not None:
        return sentence
    if text.startswith("Missing from"):
        # An option stands 4 columns in, and 8 columns in what it is for.
        names = [line.split()[0] for line in body if re.match(r" {4}\S", line)]
        return f"{' and '.join(names)}: missing; --help describes what is needed."
    if lacking := re.match(r"Missing value for argument '(.*)'. Expected (\d+)", text):
        return f"{lacking[1]}: {lacking[2]} value{'s' * (lacking[2] != '1')} expected."
    if choice := re.match(r"invalid choice ('.*') for argument '(.*)'. Expected one of (.*)", text):
        return f"{choice[2]}: {choice[1]} is not one of {choice[3]}"
    return re.sub(r"\. ([A-Z])", lambda match: f"; {match[1].lower()}", text)


def describe_unknown(word: str, options: Sequence[str], all_by: str = "--help") -> str:
    name = re.sub(r"=.*", "", word).replace("_", "-")
    if not name.startswith("-"):
        return f"{word!r} belongs to no option; see --help."
    options = [option for option in options if option != "--help"]
    # `--length` for `--calibration.length`: with the section left out, the end of the name says
    # what was meant.
    meant = [option for option in options if option.endswith(f".{name.lstrip('-')}")]
    nearest = difflib.get_close_matches(name, meant or options, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{word}: no such option; {hint}{all_by} shows all."


def option_names(command: type, **tyro_options: Any) -> list[str]:
    """Every long option of a command, as `--calibration.length`."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(command, args=["--help"], **tyro_options)
    # An option begins a line of its box; what it does stands two blanks behind it, or below.
    lines = re.findall(r"^\W ((?:-h, )?--.*?)(?:  |$)", shown.getvalue(), re.MULTILINE)
    return [name for line in lines for name in re.findall(r"--[a-z][\w.-]*", line)]


def choose_word(
    prog: str, about: Mapping[str, str], arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """The subcommand that a command line begins with, and the words behind it. Without any, or with
    --help, prints what there is and ends the process. `about`: a line on each."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, about))
        lines = [f"  {word:{width}}  {text}" for word, text in about.items()]
        print(f"usage: {prog} COMMAND [OPTIONS]", "", *lines, "", sep="\n")
        print(f"{prog} COMMAND --help shows the options of a command.")
        raise SystemExit(0)
    word, *rest = arguments
    if word.startswith("-"):
        raise UserError(f"{prog} {word}: a command comes first, one of {', '.join(about)}.")
    if word not in about:
        raise UserError(f"{prog} {word}: no such command; {suggest(word, tuple(about))}")
    return word, rest


def run_subcommand(
    prog: str,
    commands: Commands,
    arguments: Sequence[str] | None = None,
    description: str | None = None,
) -> None:
    """Run what the first word names with the settings that the others come to. `arguments`: None
    for those of this process."""
    words = sys.argv[1:] if arguments is None else arguments

    def run() -> None:
        about = {word: first_sentence(kind.__doc__ or "") for word, (kind, _) in commands.items()}
        word, rest = choose_word(called_as(prog), about, words)
        kind, function = commands[word]
        name = f"{called_as(prog)} {word}"
        function(read_options(kind, rest, prog=name, description=description)[0])

    exit_on_user_error(run, debug="--debug" in words)


def next_command(word: str, recipe: ModuleType) -> str:
    """How to start another program: `bosch compare`, or the recipe's file in a checkout."""
    if sys.argv[0].startswith("python -m bosch "):
        return f"{as_typed('python')} -m bosch {word}"
    if sys.argv[0].startswith(CONSOLE) or find_checkout() is None:
        return f"{as_typed('bosch')} {word}"
    return f"{as_typed('python')} {as_near(Path(str(recipe.__file__)).resolve())}"


def as_typed(program: str) -> str:
    """How to start a program of this environment: by name if the environment is active, else by
    path."""
    path = Path(sys.executable).with_name(program)
    active = shutil.which(program)
    return program if active and Path(active) == path else as_near(path)


def as_near(path: Path) -> str:
    """A path relative to the working folder if it is inside, else as it is."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# ----------------------------------------------------------------------------------- recover.py


@dataclass(frozen=True)
class Controls:
    """Where the run is stored, and which stages to redo."""

    # Where defaults come from: tiny (the embedded model), smoke (seconds, for tests) or paper.
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    # In place of --ratio: the smallest whose KV cache fits, as 4GiB@128k.
    kv_budget: Annotated[str | None, tyro.conf.arg(metavar="BYTES@TOKENS")] = None
    # Folder of the run; None: runs/<model>-<method>-r<ratio>.
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    # Redo this stage (--dry-run lists all) and those that depend on it; old results are set aside.
    fresh: Annotated[str | None, tyro.conf.arg(metavar="STAGE")] = None
    # Redo this stage and all later ones.
    start: Annotated[str | None, tyro.conf.arg(name="from", metavar="STAGE")] = None
    # Stop before training: choose the groups and evaluate the untrained hybrid.
    zero_shot: tyro.conf.FlagCreatePairsOff[bool] = False
    # Print all settings and what each stage would do, then stop.
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    # Say what memory a training step would take on this many GPUs, then stop.
    rehearse: Annotated[int | None, tyro.conf.arg(metavar="GPUS")] = None
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error
    help_all: tyro.conf.FlagCreatePairsOff[bool] = False  # show all options, with rarely used ones

    def __post_init__(self) -> None:
        if self.fresh is not None and self.start is not None:
            raise UserError(
                f"--fresh {self.fresh} and --from {self.start} contradict each other; pass one."
            )


@dataclass(frozen=True)
class Command:
    """Turn a model into a hybrid of full and windowed attention, and recover its quality.

    Run the same command again to resume where it stopped. --help-all shows all options.
    """

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    controls: Annotated[Controls, tyro.conf.arg(name="")] = field(default_factory=Controls)
    chosen_by: tyro.conf.Suppress[tuple[str, ...]] = ()  # lines on where the settings come from

    @property
    def run_path(self) -> Path:
        """--run-dir, else a folder named after model, method, ratio and seed."""
        options = [re.sub(r"[^\w=.,-]", "_", option) for option in self.config.mask.options]
        method = "-".join([self.config.method, *options])
        name = f"{Path(self.config.model).name}-{method}-r{self.config.ratio:g}"
        seed = f"-s{self.config.seed}" if self.config.seed != Config.seed else ""
        return self.controls.run_dir or Path("runs") / (name + seed)


def parse_command(arguments: Sequence[str], choose: ChooseConfig) -> Command:
    """The command of these arguments. UserError for whatever the user got wrong."""
    preset, model = peek(arguments, "preset", "model").values()
    config, origin = choose(preset, model)
    words = ["--help" if word == "--help-all" else word for word in arguments]
    is_short = {"--help", "-h"} & set(arguments)
    with leaving_out(RARELY_SET) if is_short else contextlib.nullcontext():
        command, unknown = read_options(
            Command,
            words,
            passes_on=True,
            default=Command(config, Controls(preset)),
            prog=called_as("recover.py"),
        )
    if unknown:
        raise UserError(describe_unknown(unknown[0], option_names(Command), "--help-all"))
    return dataclasses.replace(command, chosen_by=tuple(origin))


@contextlib.contextmanager
def leaving_out(rarely_set: Mapping[type, str]) -> Iterator[None]:
    """Hide these fields from tyro meanwhile, for a short --help."""
    suppress: Any = tyro.conf.Suppress
    before = {settings: dict(settings.__annotations__) for settings in rarely_set}
    for settings, names in rarely_set.items():
        for name in names.split():
            settings.__annotations__[name] = suppress[before[settings][name]]
    try:
        yield
    finally:
        for settings, annotations in before.items():
            settings.__annotations__.update(annotations)
