"""Choose the groups that go on the sliding window, by any method: the stage `mask`.

    python recipes/search_mask.py --list
    python recipes/search_mask.py --method interleave --ratio 0.5
    python recipes/search_mask.py --method fisher --ratio 0.75 --calibration DIR --loss-tokens all

Writes mask.json, its picture and, for rankings, scores.json into the folder `mask` of a run. Run
the same command again and it goes on where it stopped.
"""

import argparse
import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagConversionOff

from bosch.command_line import Command, Controls, find_setting_error
from bosch.config import Config, MaskConfig, TokenCount
from bosch.masks.mask import describe_ratio, num_windowed
from bosch.model import describe_model, read_model_info
from bosch.plugins import describe_plugin, list_plugins, load_plugin, suggest
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder
from bosch.run.plan import follow_reference, refuse_blocked
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage
from recipes import learn_gates, presets
from recipes.materialize_model import fetch_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bosch.calibration import Calibration

METHODS = "bosch.methods"


# --------------------------------------------------------------------------------------- the stage


def build(
    config: Config,
    calibration: Stage | Artifact | None = None,
    tokens: Stage | Artifact | None = None,
) -> Stage:
    """The stage `mask` of a config. Fields of MaskConfig reach the method's settings by name."""
    return make_stage(config, default_settings(config.method, config.mask), calibration, tokens)


def learns_from_tokens(method: str) -> bool:
    """Whether the tokens have to be there before the mask."""
    from bosch.methods import _choose

    load_method(method)
    return _choose.learns_from_tokens(method)


def learning_tokens(config: Config) -> int:
    """Of the token budget, what is set aside for learning the mask: training gets the rest."""
    if not learns_from_tokens(config.method):
        return 0
    layers, groups = presets.read_shape(config.model).groups
    if num_windowed(config.ratio, layers, groups) in (0, layers * groups):
        return 0  # nothing to choose
    settings = default_settings(config.method, config.mask)
    return int(getattr(settings, "token_share", 0.0) * config.data.tokens)


def describe_budget(config: Config, settings: Any = None) -> str:
    """What the ratio comes to in the method's own unit."""
    from bosch.methods import _choose

    unit = _choose.unit_of(config.method, settings or default_settings(config.method, config.mask))
    return describe_ratio(config.ratio, *presets.read_shape(config.model).groups, unit)


def make_stage(
    config: Config,
    settings: Any,
    calibration: Stage | Artifact | None,
    tokens: Stage | Artifact | None = None,
) -> Stage:
    """The stage `mask` with the method's settings as they are given."""
    from bosch.methods import _choose

    _choose.check_settings(config.method, settings)
    inputs: dict[str, Stage | Artifact] = {}
    if _choose.reads_calibration(config.method):
        if calibration is None:
            raise ValueError(
                f"--method {config.method} judges groups on calibration examples: pass "
                "--calibration DIR, the folder that recipes/calibrate.py made."
            )
        inputs["calibration"] = calibration
    learns = _choose.learns_from_tokens(config.method)
    if learns:
        if tokens is None:
            raise ValueError(f"--method {config.method} learns from tokens: pass --tokens DIR.")
        inputs["tokens"] = tokens
    folder = presets.find_model(config.model)
    decides = {
        "method": config.method,
        "model": config.model if folder is None else describe_model(folder),
        "ratio": config.ratio,
        "window": config.window,
        "seed": config.seed,
        "settings": {n: _by_content(value) for n, value in _choose.deciding(settings).items()},
        **({"learning": learn_gates.facts(config)} if learns else {}),
    }
    return Stage(
        "mask",
        run=partial(run_method, config=config, settings=settings),
        settings=decides,
        inputs=inputs,
        ranks="all" if learns or _choose.searches(config.method) else "first",
    )


def run_method(
    folder: Path,
    config: Config,
    settings: Any,
    calibration: Artifact | None = None,
    tokens: Artifact | None = None,
) -> None:
    """Choose the mask and write it into `folder`; what an earlier attempt noted there is used."""
    from bosch.masks.picture import draw_mask, mask_title
    from bosch.method import Context
    from bosch.methods import _choose

    model_folder = fetch_model(config.model)
    context = Context(
        model_info=read_model_info(model_folder),
        load_model=partial(load_model, model_folder),
        load_calibration=partial(load_calibration, calibration),
        window_tokens=config.window,
        ratio=config.ratio,
        seed=config.seed,
        settings=settings,
        folder=folder,
        load_tokenizer=partial(load_tokenizer, model_folder),
        learning=learn_gates.make_learning(config, model_folder, tokens) if tokens else None,
    )
    began = time.monotonic()
    selection = _choose.make_mask(config.method, context)
    if rank_and_world()[0] != 0:
        return  # it has done its share of a search, or of the training
    record = _choose.write_selection(config.method, context, selection, began)
    draw_mask(record, folder / "mask.png")
    learn_gates.remove_checkpoints(folder)
    for line in selection.notes:
        say(line)
    say(mask_title(record))


def default_settings(method: str, mask: MaskConfig) -> Any:
    """A method's settings: MaskConfig's value where it has a field of that name, else the method's
    own default, and on top of them what `mask.options` say.
    """
    settings_class: Any = load_method(method).Settings
    names = [field.name for field in dataclasses.fields(settings_class)]
    given = {name: value for name, value in vars(mask).items() if name in names}
    return with_options(method, settings_class(**given), mask.options)


def with_options(method: str, settings: Any, options: Sequence[str]) -> Any:
    """The settings, changed as words like `granularity=layer` say."""
    known = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for option in options:
        name, _, value = option.partition("=")
        name = name.replace("-", "_")
        head = name.split(".")[0]  # of `accelerations.memory_gb`
        if head not in known or not value:
            raise ValueError(
                f"--mask.options {option}: write NAME=VALUE with a setting of {method}; "
                f"{suggest(name, tuple(known))}"
            )
        if name in {field.name for field in dataclasses.fields(MaskConfig)}:
            raise ValueError(f"--mask.options {option}: --mask.{name} sets it for all methods.")
        values = value.split(",") if isinstance(known[head], tuple) else [value]
        words = [f"--{name.replace('_', '-')}", *values]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                settings = tyro.cli(
                    type(settings), args=words, default=settings, config=[FlagConversionOff]
                )
        except SystemExit as stop:
            raise ValueError(
                find_setting_error(stop)
                or f"--mask.options {option}: {method} takes no such value; "
                f"search_mask.py --method {method} --help says which"
            ) from None
    return settings


def load_method(name: str) -> ModuleType:
    presets.check_method(name)
    method = load_plugin(METHODS, name)
    if not dataclasses.is_dataclass(getattr(method, "Settings", None)):
        missing = "dataclass Settings (it may be empty)"
    elif not hasattr(method, "rank") and not hasattr(method, "select"):
        missing = "rank(context) and no select(context)"
    else:
        return method
    raise ValueError(
        f"--method {name}: {method.__file__} has no {missing}. bosch/method.py shows "
        "how a method is written."
    )


def load_model(folder: Path) -> "PreTrainedModel":
    """The dense model, ready for search mode: on a GPU in its own number format, on the CPU in
    float32.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no safetensors, so the model has no weights.")
    on_gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="bosch", dtype="auto" if on_gpu else torch.float32
    )
    loaded: PreTrainedModel = model.to("cuda" if on_gpu else "cpu").eval()
    return loaded


def load_tokenizer(folder: Path) -> Any:
    """None where the folder has none."""
    from transformers import AutoConfig

    from bosch.hybrid import tokenizer

    return tokenizer.load(folder, AutoConfig.from_pretrained(folder))


def load_calibration(calibration: Artifact | None) -> "Calibration":
    from bosch.calibration import read_calibration

    assert calibration is not None  # make_stage has seen to it
    return read_calibration(calibration.folder)


def _by_content(value: Any) -> Any:
    """A file counts by what is in it, not by where it lies."""
    return {"xxh3": hash_file(value)} if isinstance(value, Path) and value.is_file() else value


# -------------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Options:
    """Choose the groups that go on the sliding window."""

    method: str  # a file of bosch/methods; --list shows them
    model: str  # a Hugging Face folder or hub id
    ratio: float  # share of KV groups on the sliding window
    window: TokenCount  # tokens a windowed group sees, the own one included
    seed: int  # of everything random
    preset: str | None = None  # tiny, smoke or paper: where defaults are from
    calibration: Path | None = None  # the calibration set; None: the run's own, if it has one
    tokens: Path | None = None  # packed tokens, for methods that learn; None: as the preset has it
    run_dir: Path | None = None  # None: runs/<model>-<method>-r<ratio>
    list: tyro.conf.FlagCreatePairsOff[bool] = False  # print the methods, a line each
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False  # make the mask anew, set the old one aside
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error


def main(arguments: Sequence[str]) -> None:
    if "--list" in arguments:
        print("\n".join(list_methods()))
        return
    options, settings, config, told = parse(arguments)
    rank, world = rank_and_world()
    progress.set_up(rank)
    presets.check_model(config.model)
    run_path = Command(config, Controls(run_dir=options.run_dir)).run_path
    calibration = find_calibration(options.calibration, run_path)
    config, tokens = learn_gates.find_tokens(config, options.tokens)
    stage = make_stage(config, settings, calibration, tokens)
    stages = [tokens, stage] if isinstance(tokens, Stage) else [stage]
    with RunFolder(run_path, rank, world, say) as run:
        progress.log_to(run_path / "recover.log")
        for line in [f"run folder {run_path}", describe_budget(config, settings), *told]:
            say(line)
        if rank == 0:
            fresh = "mask" if options.fresh else None
            refuse_blocked(run.plan(stages, fresh))
            run.set_aside([stage] if options.fresh else [])
        for each in stages:
            run.complete(each)
    if rank == 0:
        say(f"mask in {run_path / 'mask' / 'mask.json'}")


def list_methods() -> list[str]:
    """Name and first sentence of each method, read from the folder."""
    names = list_plugins(METHODS)
    width = max(map(len, names))
    return [f"{name:{width}}  {describe_plugin(METHODS, name)}" for name in names]


def parse(arguments: Sequence[str]) -> tuple[Options, Any, Config, list[str]]:
    """Options, the method's settings, the config they come to, and lines on where it is from.

    The method is looked for first: its settings are options of the command line too.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--preset", "--model", "--method"):
        first.add_argument(option)
    try:
        found, _ = first.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}.") from error
    config, told = presets.choose(found.preset, found.model)
    method = found.method or config.method
    settings = default_settings(method, config.mask)
    defaults = {name: getattr(config, name) for name in ("model", "ratio", "window", "seed")}
    options = Options(method=method, preset=found.preset, **defaults)
    flat = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "SearchMask",
        [
            ("options", Annotated[Options, flat], field(default=options)),
            ("settings", Annotated[type(settings), flat], field(default=settings)),
        ],
    )
    both.__doc__ = Options.__doc__
    command: Any = tyro.cli(both, prog=Path(sys.argv[0]).name, args=list(arguments))
    options, settings = command.options, command.settings
    changed = {name: getattr(options, name) for name in ("method", *defaults)}
    return options, settings, dataclasses.replace(config, **changed), told


def find_calibration(given: Path | None, run_path: Path) -> Artifact | None:
    """The set that was named, else the one of the run, which its folder may only refer to."""
    folder = given or run_path / "calibration"
    if given is None and not folder.is_dir():
        return None
    return Artifact.load(follow_reference(folder))


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
