"""Choose the groups that go on the sliding window, by any method: the stage `mask`.

    python recipes/search_mask.py --list
    python recipes/search_mask.py --method interleave --ratio 0.5
    python recipes/search_mask.py --method fisher --ratio 0.75 --calibration DIR --loss-tokens all

Writes mask.json, its picture and, for rankings, scores.json into the folder `mask` of a run. Run
the same command again and it goes on where it stopped.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bosch.calibration import Calibration, read_calibration
from bosch.command_line import Command, Controls, parse, peek
from bosch.config import Config, TokenCount, TrainConfig
from bosch.data import packed
from bosch.methods._settings import default_settings, describe_budget, list_methods
from bosch.model import (
    describe_source,
    fetch_model,
    find_tokenizer,
    load_for_search,
    read_model_info,
)
from bosch.recipes import presets
from bosch.run import progress
from bosch.run.errors import UserError, exit_on_user_error
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder
from bosch.run.manifest import read_sealed_json
from bosch.run.plan import follow_reference, refuse_blocked
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage

if TYPE_CHECKING:
    from bosch.method import Learning


# --------------------------------------------------------------------------------------- the stage


def build(
    config: Config,
    calibration: Stage | Artifact | None = None,
    tokens: Stage | Artifact | None = None,
) -> Stage:
    """The stage `mask` of a config. Fields of MaskConfig reach the method's settings by name."""
    return make_stage(config, default_settings(config.method, config.mask), calibration, tokens)


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
            raise UserError(
                f"--method {config.method} judges groups on calibration examples: pass "
                "--calibration DIR, the folder that recipes/calibrate.py made."
            )
        inputs["calibration"] = calibration
    learns = _choose.learns_from_tokens(config.method)
    if learns:
        if tokens is None:
            raise UserError(f"--method {config.method} learns from tokens: pass --tokens DIR.")
        inputs["tokens"] = tokens
    # What decides a learned mask beside the settings of its method.
    learning = {
        "train": learning_settings(config),
        "tokens": config.data.tokens,
        "document_mask": config.data.document_mask,
    }
    decides = {
        "method": config.method,
        "model": describe_source(config.model),
        "ratio": config.ratio,
        "window": config.window,
        "seed": config.seed,
        "settings": {n: _by_content(value) for n, value in _choose.deciding(settings).items()},
        **({"attention": config.mask.attention} if config.mask.attention != "auto" else {}),
        **({"learning": learning} if learns else {}),
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
    from bosch.method import Inputs
    from bosch.methods import _choose

    def load_calibration() -> Calibration:
        assert calibration is not None  # make_stage has seen to it
        return read_calibration(calibration.folder)

    model_folder = fetch_model(config.model)
    inputs = Inputs(
        model_info=read_model_info(model_folder),
        load_model=partial(load_for_search, model_folder, config.mask.attention),
        load_calibration=load_calibration,
        window_tokens=config.window,
        ratio=config.ratio,
        seed=config.seed,
        settings=settings,
        folder=folder,
        load_tokenizer=partial(find_tokenizer, model_folder),
        learning=make_learning(config, model_folder, tokens) if tokens else None,
    )
    began = time.monotonic()
    selection = _choose.make_mask(config.method, inputs)
    if rank_and_world()[0] != 0:
        return  # it has done its share of a search, or of the training
    record = _choose.write_selection(config.method, inputs, selection, began)
    draw_mask(record, folder / "mask.png")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # what was learned lies beside it
    for line in selection.notes:
        say(line)
    say(mask_title(record))


def make_learning(config: Config, model: Path, tokens: Artifact) -> "Learning":
    """What a method that learns its mask is handed: packed tokens, and the training loop to learn
    on them. recover.py does not train on these tokens again: the budget is that of both."""
    from bosch.data.loader import open_tokens
    from bosch.data.tokenizer_files import read_tokenizer
    from bosch.method import Learning
    from bosch.training.learner import LoopFit

    opened = open_tokens(tokens.folder, read_tokenizer(model).hash)
    loop = LoopFit(learning_settings(config), model, opened, config.data.document_mask)

    def fit(*arguments: Any, **named: Any) -> None:
        if stopped_by := loop(*arguments, **named):
            say(f"mask: stopped by {stopped_by}, and saved; the same command goes on from here")
            raise SystemExit(0)

    return Learning(fit, config.data.tokens, opened.seq_len)


def learning_settings(config: Config) -> TrainConfig:
    """The training's settings, with the attention backend that is named for the mask."""
    if config.mask.attention == "auto":
        return config.train
    return replace(config.train, attention=config.mask.attention)


def check_attention(config: Config) -> None:
    """Refuse, before work begins, an attention backend that was named and cannot run here."""
    if config.mask.attention == "auto":
        return
    import torch

    from bosch.hybrid.dispatch import check_backend

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    check_backend("mask.attention", config.mask.attention, torch.device(device), dtype)


def _by_content(value: Any) -> Any:
    """A file counts by what is in it, not by where it lies."""
    return {"xxh3": hash_file(value)} if isinstance(value, Path) and value.is_file() else value


# -------------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Options:
    """Choose the groups that go on the sliding window."""

    method: str  # a file of bosch/methods; --list shows them
    model: str  # a Hugging Face folder or hub id
    ratio: float  # share of KV groups that get the sliding window
    window: TokenCount  # window size in tokens, including the current token
    seed: int  # of all random choices
    attention: str = "auto"  # attention backend: auto, or a file of bosch/backends
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
    options, settings, config, told = read_options(arguments)
    rank, world = rank_and_world()
    progress.set_up(rank)
    presets.check_model(config.model)
    check_attention(config)
    run_path = Command(config, Controls(run_dir=options.run_dir)).run_path
    calibration = find_calibration(options.calibration, run_path)
    config, tokens = find_tokens(config, options.tokens)
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


def read_options(arguments: Sequence[str]) -> tuple[Options, Any, Config, list[str]]:
    """Options, the method's settings, the config they come to, and lines on where it is from.

    The method is looked for first: its settings are options of the command line too.
    """
    preset, model, method = peek(arguments, "preset", "model", "method").values()
    config, told = presets.choose(preset, model)
    settings = default_settings(method or config.method, config.mask)
    defaults = {name: getattr(config, name) for name in ("model", "ratio", "window", "seed")}
    defaults["attention"] = config.mask.attention
    options = Options(method=method or config.method, preset=preset, **defaults)
    flat = tyro.conf.arg(name="")
    both: Any = dataclasses.make_dataclass(
        "SearchMask",
        [
            ("options", Annotated[Options, flat], field(default=options)),
            ("settings", Annotated[type(settings), flat], field(default=settings)),
        ],
    )
    both.__module__ = __name__
    command = parse(both, arguments)
    options, settings = command.options, command.settings
    changed = {name: getattr(options, name) for name in ("method", *defaults)}
    mask = replace(config.mask, attention=changed.pop("attention"))
    return options, settings, replace(config, mask=mask, **changed), told


def find_tokens(config: Config, folder: Path | None) -> tuple[Config, Stage | Artifact | None]:
    """The tokens a method learns from, None if it learns from none: those of the folder, all of
    them, else the stage that packs the config's.
    """
    from bosch.methods import _choose

    if not _choose.learns_from_tokens(config.method):
        return config, None
    if folder is not None:
        from bosch.data.token_files import SUMMARY

        summary = read_sealed_json(follow_reference(folder) / SUMMARY)
        length = summary["seq_len"]
        num_tokens = length * summary["num_sequences"]
        data = replace(
            config.data, tokens_from=str(folder), sequence_length=length, tokens=num_tokens
        )
        config = replace(config, data=data)
    return config, packed.build(config)


def find_calibration(given: Path | None, run_path: Path) -> Artifact | None:
    """The set that was named, else the one of the run, which its folder may only refer to."""
    folder = given or run_path / "calibration"
    if given is None and not folder.is_dir():
        return None
    return Artifact.load(follow_reference(folder))


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
