"""From a command line to settings: tyro makes the options from dataclasses; here is what all
commands share, and the command line of recover.py, whose preset is chosen first."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from bosch.plugins import suggest
from bosch.run.errors import UserError

T = TypeVar("T")
ChooseConfig = Callable[[str | None, str | None], tuple[Config, list[str]]]

# What few users set: recover.py's --help leaves these out, --help-all shows them.
RARELY_SET: Mapping[type[Any], str] = {
    CalibrationConfig: "tasks",
    MaskConfig: "alpha gamma ratio_buckets max_variables max_layers razor_recent_share",
    PackingConfig: "held_out_sequences min_document_tokens workers",
    TrainConfig: "floor_share betas weight_decay clip_norm spike keep_checkpoints "
    "async_checkpoints reshard_after_forward sync_every_micro_batch compile",
    JudgingConfig: "niah_tasks niah_essays longbench_categories gsm8k_tasks batch prefill_chunk",
}


# ---------------------------------------------------------------------------------- any command


def parse(
    command: type[T], arguments: Sequence[str], default: T | None = None, short: Any = None
) -> T:
    """The options of a recipe, described by its docstring. `short`: other names of options."""
    recipe = sys.modules[command.__module__]
    names = [word.partition("=") for word in arguments]
    words = ["".join([(short or {}).get(name, name), *rest]) for name, *rest in names]
    prog, told = Path(str(recipe.__file__)).name, recipe.__doc__
    parsed, _ = _run_tyro(command, words, default=default, prog=prog, description=told)
    return parsed


def peek(arguments: Sequence[str], *names: str) -> dict[str, str | None]:
    """What a few options say, for the defaults of the others depend on them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}")
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}.") from error
    return vars(found)


def _run_tyro(
    command: type[T], arguments: Sequence[str], unknown: bool = False, **options: Any
) -> tuple[T, list[str]]:
    """The settings, and with `unknown` the words that belong to no option."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if unknown:
                found: tuple[T, list[str]] = tyro.cli(
                    command, args=list(arguments), return_unknown_args=True, **options
                )
                return found
            return tyro.cli(command, args=list(arguments), **options), []
    except SystemExit as stop:
        # Tyro puts our checks' sentences in a box; unwrapped they read like every other error.
        if (sentence := find_setting_error(stop)) is not None:
            raise UserError(sentence) from None
        sys.stderr.write(errors.getvalue())
        raise


def find_setting_error(stop: SystemExit) -> str | None:
    """The sentence of a check of ours, as in a config's __post_init__, found in what led to tyro's
    exit; None for other exits."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, UserError):
            return str(error)
        error = error.__context__
    return None


def as_typed(program: str) -> str:
    """What starts a program of this environment from the working folder: its name where the
    environment is active, else its path."""
    path = Path(sys.executable).with_name(program)
    active = shutil.which(program)
    return program if active and Path(active) == path else as_near(path)


def as_near(path: Path) -> str:
    """A path as one types it: from the working folder on, if it lies in there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# ----------------------------------------------------------------------------------- recover.py


@dataclass(frozen=True)
class Controls:
    """Where the run is kept, and what becomes of stages that are there already."""

    # Where defaults come from: tiny (the embedded model), smoke (seconds, for tests) or paper.
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    # Folder of the run; None: runs/<model>-<method>-r<ratio>.
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    # Make this stage (--dry-run names all) and what depends on it anew; old ones are set aside.
    fresh: Annotated[str | None, tyro.conf.arg(metavar="STAGE")] = None
    # Make this stage and all later ones anew.
    start: Annotated[str | None, tyro.conf.arg(name="from", metavar="STAGE")] = None
    # Stop before training: choose the groups and judge the untrained hybrid.
    zero_shot: tyro.conf.FlagCreatePairsOff[bool] = False
    # Print all settings and what each stage would do, and do nothing.
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error
    help_all: tyro.conf.FlagCreatePairsOff[bool] = False  # like --help, with rarely used options


@dataclass(frozen=True)
class Command:
    """Turn a model into a hybrid of full and windowed attention, and recover its quality.

    Run the same command again and it goes on where it stopped. --help-all shows all options.
    """

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    controls: Annotated[Controls, tyro.conf.arg(name="")] = field(default_factory=Controls)
    chosen_by: tyro.conf.Suppress[tuple[str, ...]] = ()  # lines on the origin of the settings

    @property
    def run_path(self) -> Path:
        """The run's folder: as asked, else named after what tells runs apart."""
        options = [re.sub(r"[^\w=.,-]", "_", option) for option in self.config.mask.options]
        method = "-".join([self.config.method, *options])
        name = f"{Path(self.config.model).name}-{method}-r{self.config.ratio:g}"
        seed = f"-s{self.config.seed}" if self.config.seed != Config.seed else ""
        return self.controls.run_dir or Path("runs") / (name + seed)


def parse_command(
    arguments: Sequence[str], presets: Sequence[str], choose: ChooseConfig
) -> Command:
    """The command of these arguments. UserError for whatever the user got wrong."""
    preset, model = peek(arguments, "preset", "model").values()
    if preset is not None and preset not in presets:
        raise UserError(f"--preset {preset}: no such preset; {suggest(preset, presets)}")
    config, told = choose(preset, model)
    words = ["--help" if word == "--help-all" else word for word in arguments]
    is_short = {"--help", "-h"} & set(arguments)
    with leaving_out(RARELY_SET) if is_short else contextlib.nullcontext():
        command, unknown = _run_tyro(
            Command,
            words,
            unknown=True,
            default=Command(config, Controls(preset)),
            prog=Path(sys.argv[0]).name,
        )
    if unknown:
        raise UserError(_describe_unknown(unknown))
    return dataclasses.replace(command, chosen_by=tuple(told))


@contextlib.contextmanager
def leaving_out(rarely_set: Mapping[type[Any], str]) -> Iterator[None]:
    """Meanwhile tyro does not see these fields: --help, which ends the process, is short."""
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


def option_names() -> list[str]:
    """Every long option, as `--calibration.length`."""
    controls = [control.name for control in dataclasses.fields(Controls)]
    names = ["help", *("from" if name == "start" else name for name in controls)]
    for dial in dataclasses.fields(Config):
        if dataclasses.is_dataclass(dial.default_factory):
            section = dataclasses.fields(dial.default_factory)
            names += [f"{dial.name}.{inner.name}" for inner in section]
        else:
            names.append(dial.name)
    return ["--" + name.replace("_", "-") for name in names]


def _describe_unknown(unknown: Sequence[str]) -> str:
    name = re.sub(r"=.*", "", unknown[0]).replace("_", "-")
    if not name.startswith("--"):
        return f"{unknown[0]!r} belongs to no option; see --help."
    options = option_names()
    # `--length` for `--calibration.length`: with the section left out, the end of the name says
    # what was meant.
    meant = [option for option in options if option.endswith(f".{name.lstrip('-')}")]
    nearest = difflib.get_close_matches(name, meant or options, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{unknown[0]}: no such option; {hint}--help-all shows all."
