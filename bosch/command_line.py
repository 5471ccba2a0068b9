"""From a command line to a config: the preset is chosen first, then single settings override it
(tyro does the rest)."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from bosch.config import Config
from bosch.plugins import suggest

ChooseConfig = Callable[[str | None, str | None], tuple[Config, list[str]]]


@dataclass(frozen=True)
class Controls:
    """Where the run is kept, and what becomes of stages that are there already."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None  # tiny, smoke or paper
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """None: runs/<model>-<method>-r<ratio>, with --mask.options behind the method, and -s<seed> if
    that is not 0"""
    fresh: Annotated[str | None, tyro.conf.arg(metavar="STAGE")] = None
    """make this stage (--dry-run names all) and what depends on it anew; old ones are set aside"""
    start: Annotated[str | None, tyro.conf.arg(name="from", metavar="STAGE")] = None
    """make this stage and all later ones anew"""
    zero_shot: tyro.conf.FlagCreatePairsOff[bool] = False
    """stop before training: the mask, the hybrid, and how it does at step 0"""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """print all settings and what each stage would do, and do nothing"""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error


@dataclass(frozen=True)
class Command:
    """Turn a model into a hybrid of full and windowed attention, and recover its quality.

    Run the same command again and it goes on where it stopped.
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
    """The command of these arguments. ValueError for whatever the user got wrong."""
    preset, model = _find_preset_and_model(arguments)
    if preset is not None and preset not in presets:
        raise ValueError(f"--preset {preset}: no such preset; {suggest(preset, presets)}")
    config, told = choose(preset, model)
    default = Command(config, Controls(preset))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            command, unknown = tyro.cli(
                Command,
                prog=Path(sys.argv[0]).name,
                args=list(arguments),
                default=default,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        # Tyro puts our checks' sentences in a box; unwrapped they read like every other error.
        if (sentence := find_setting_error(stop)) is not None:
            raise ValueError(sentence) from None
        sys.stderr.write(errors.getvalue())
        raise
    if unknown:
        raise ValueError(_describe_unknown(unknown))
    return dataclasses.replace(command, chosen_by=tuple(told))


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


def option_names() -> list[str]:
    """Every long option, as `--calibration.length`."""
    names = ["--help", "--preset", "--run-dir", "--fresh", "--from"]
    names += ["--zero-shot", "--dry-run", "--debug"]
    for dial in dataclasses.fields(Config):
        if dataclasses.is_dataclass(dial.default_factory):
            names += [
                f"--{dial.name}.{inner.name.replace('_', '-')}"
                for inner in dataclasses.fields(dial.default_factory)
            ]
        else:
            names.append(f"--{dial.name}")
    return names


def _find_preset_and_model(arguments: Sequence[str]) -> tuple[str | None, str | None]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset")
    parser.add_argument("--model")
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}.") from error
    return found.preset, found.model


def _describe_unknown(unknown: Sequence[str]) -> str:
    name = re.sub(r"=.*", "", unknown[0]).replace("_", "-")
    if not name.startswith("--"):
        return f"{unknown[0]!r} belongs to no option; see --help."
    options = option_names()
    # `--length` for `--calibration.length`: with the section left out, the end of the name says
    # what was meant.
    meant = [option for option in options if option.endswith(f".{name.lstrip('-')}")]
    return f"{unknown[0]}: no such option; {suggest_option(name, meant or options)}"


def suggest_option(name: str, options: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}? --help shows all." if nearest else "--help shows all."


def find_setting_error(stop: SystemExit) -> str | None:
    """The sentence of a check in a config's __post_init__, found in what led to tyro's exit; None
    for other exits."""
    error: BaseException | None = stop
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, ValueError) and any(f.name == "__post_init__" for f in frames):
            return str(error)
        error = error.__context__
    return None
