"""Choose the groups that get the sliding window, by any method: the stage `mask`.

    python recipes/search_mask.py --list
    python recipes/search_mask.py --method interleave --ratio 0.5 --calibration DIR
    python recipes/search_mask.py --method fisher --ratio 0.75 --calibration DIR --loss-tokens all

Writes mask.json, its picture and, for rankings, scores.json into the folder `mask` of a run. Run
the same command again and it resumes where it stopped.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bosch import model as models
from bosch.calibration import Calibration
from bosch.command_line import parse, peek
from bosch.config import FLAT, Config, Dials, TrainConfig, shared_fields
from bosch.data.calibration_stage import read_set
from bosch.masks.kv_budget import with_kv_budget
from bosch.masks.mask import SINKS
from bosch.method import Inputs, Learning, MethodTraits
from bosch.methods import _settings as methods
from bosch.methods._choose import deciding, make_mask, write_selection
from bosch.recipes import presets
from bosch.run.errors import UserError, run_main
from bosch.run.files import read_sealed_json
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder
from bosch.run.progress import log_to, say, set_up
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage, follow_reference, refuse_blocked

VERSIONS = {"bosch": 3, "fisher": 2}  # of methods that have come to choose other masks


def build(
    config: Config,
    calibration: Stage | Artifact | None = None,
    tokens: Stage | Artifact | None = None,
    settings: object = None,
) -> Stage:
    """The stage `mask` of a config. `settings`: of the method; None: as MaskConfig's fields of that
    name say."""
    traits, mask = methods.traits_of(config.method), config.mask
    settings = settings or methods.default_settings(config.method, mask)
    methods.check_settings(config.method, settings)
    assert config.sink != "auto"  # whoever reads the settings resolves it
    measures_sinks = config.sink == "static" and not methods.brings_sink(config.method)
    decides: dict[str, Any] = {
        "method": config.method,
        "model": models.describe_source(config.model),
        "ratio": config.ratio,
        "window": config.window,
        "seed": config.seed,
        "settings": deciding(settings),
    }
    for name, value in decides["settings"].items():
        if isinstance(value, Path) and value.is_file():  # its content decides, not its path
            decides["settings"][name] = {"xxh3": hash_file(value)}
            if (sinks := value.with_name(SINKS)).is_file():
                decides["settings"][name]["sinks"] = hash_file(sinks)
    inputs: dict[str, Stage | Artifact] = {}
    if traits.reads_calibration or measures_sinks:
        if calibration is None:
            remedy = "pass --calibration DIR, which calibrate.py makes"
            if traits.reads_calibration:
                raise UserError(f"--method {config.method} needs calibration examples: {remedy}.")
            raise UserError(f"--sink static needs calibration examples: {remedy}, or --sink none.")
        inputs["calibration"] = calibration
    if traits.learns_from_tokens:
        assert tokens is not None  # main and recover.py see to it
        inputs["tokens"] = tokens
        # What decides a learned mask besides the method's settings.
        decides["learning"] = {
            "train": learning_settings(config),
            "tokens": config.data.tokens,
            "document_mask": config.data.document_mask,
        }
    further = {"attention": mask.attention, "precision": mask.precision, "sink": config.sink}
    usual = {"attention": "auto", "precision": "auto", "sink": "none"}
    decides |= {name: value for name, value in further.items() if value != usual[name]}
    return Stage(
        "mask",
        run=partial(run_method, config=config, settings=settings),
        settings=decides,
        inputs=inputs,
        version=VERSIONS.get(config.method, 1),
        ranks="all" if runs_everywhere(traits) else "first",
    )


def run_method(
    folder: Path,
    config: Config,
    settings: object,
    calibration: Artifact | None = None,
    tokens: Artifact | None = None,
) -> None:
    from bosch.masks.picture import draw_mask, mask_title

    def load_calibration() -> Calibration:
        assert calibration is not None  # build has seen to it
        return read_set(calibration.folder, config.model)

    traits, (rank, world) = methods.traits_of(config.method), rank_and_world()
    if world > 1 and traits.reads_calibration and not runs_everywhere(traits):
        say(f"{config.method} runs in one of the {world} processes; the others wait")
    model, mask = models.fetch_model(config.model), config.mask
    inputs = Inputs(
        model_info=models.read_model_info(model),
        load_model=partial(models.load_for_search, model, mask.attention, mask.precision),
        load_calibration=load_calibration,
        window_tokens=config.window,
        ratio=config.ratio,
        seed=config.seed,
        settings=settings,
        folder=folder,
        load_tokenizer=partial(models.find_tokenizer, model),
        learning=make_learning(config, model, tokens) if tokens else None,
        sink=config.sink,
    )
    began = time.monotonic()
    selection = make_mask(config.method, inputs)
    if rank != 0:
        return  # this rank has done its share of a search or of the training
    record = write_selection(config.method, inputs, selection, began)
    draw_mask(record, folder / "mask.png")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the results are stored beside them
    say(*selection.notes, mask_title(record))


def runs_everywhere(traits: MethodTraits) -> bool:
    return traits.searches or traits.measures or traits.learns_from_tokens


def make_learning(config: Config, model: Path, tokens: Artifact) -> Learning:
    """Packed tokens and the training loop, for a method that learns its mask. recover.py does not
    train on these tokens again: both share one budget."""
    from bosch.data.loader import open_tokens  # imports torch
    from bosch.data.tokenizer_files import read_tokenizer
    from bosch.training.learner import LearnerTraining

    opened = open_tokens(tokens.folder, read_tokenizer(model).hash)
    loop = LearnerTraining(learning_settings(config), model, opened, config.data.document_mask)

    def train(*arguments: Any, **named: Any) -> None:
        if stopped_by := loop(*arguments, **named):
            say(f"mask: stopped by {stopped_by} and saved; run the same command again to resume")
            raise SystemExit(0)

    return Learning(train, config.data.tokens, opened.seq_len)


def learning_settings(config: Config) -> TrainConfig:
    """The training settings of a method that learns its mask, which trains all weights: with the
    attention backend that is named for the mask, and a rate for all weights."""
    train = config.train
    if config.mask.attention != "auto":
        train = replace(train, attention=config.mask.attention)
    if train.trained == "lora":
        # A rate for narrow matrices beside frozen weights (8e-4 in the preset `small`) ruins a
        # pretrained model if all weights get it, and the gates learn on what is left of it.
        train = replace(train, peak_learning_rate=TrainConfig.peak_learning_rate)
    return train


def check_attention(config: Config) -> None:
    """Refuse, before work begins, a named attention backend that cannot run here."""
    import torch

    from bosch.attention.dispatch import check_backend

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    check_backend("mask.attention", config.mask.attention, torch.device(device), dtype)


@dataclass(frozen=True)
class Options:
    dials: Annotated[Dials, FLAT]
    settings: Annotated[Any, FLAT]  # the method's
    kv_budget: str | None = None  # in place of --ratio: 4GiB@128k, the smallest ratio that fits
    attention: str = "auto"  # attention backend: auto, or a file of bosch/attention/backends
    # Source of the defaults: tiny, small, brief, large, paper or smoke.
    preset: str | None = None
    calibration: Path | None = None  # folder of the calibration set; None: the run's, if any
    # Packed tokens, for methods that learn; None: pack the preset's.
    tokens_from: Path | None = None
    run_dir: Path | None = None  # None: runs/<model>-<method>-r<ratio>
    list: bool = False  # print all methods and exit
    fresh: bool = False  # make a new mask, set the old one aside


def main(arguments: Sequence[str]) -> None:
    if "--list" in arguments:
        print("\n".join(methods.list_methods()))
        return
    rank, world = rank_and_world()
    set_up(rank)
    # The method is read first, because its settings are options of the command line too.
    preset, model, method = peek(arguments, "preset", "model", "method").values()
    config, origin = presets.choose(preset, model)
    config = replace(config, method=method or config.method)
    usual = {
        "dials": Dials(**shared_fields(Dials, config)),
        "settings": methods.default_settings(config.method, config.mask),
        "attention": config.mask.attention,
        "preset": preset,
    }
    options = parse(Options, arguments, usual)
    settings, mask = options.settings, replace(config.mask, attention=options.attention)
    config = replace(config, mask=mask, **vars(options.dials))
    config = methods.resolve_sink(config, settings)
    if options.kv_budget is not None:
        config, line = with_kv_budget(config, options.kv_budget, arguments, settings)
        origin = [*origin, line]
    presets.check_model(config.model)
    if config.ratio:
        models.check_window_fits(config.window, config.model)
    check_attention(config)
    run_path = options.run_dir or methods.usual_path(config, settings)
    calibration = find_calibration(options.calibration, run_path)
    tokens: Stage | Artifact | None = None
    if methods.traits_of(config.method).learns_from_tokens:
        from bosch.data import tokens_stage  # imports torch

        if (folder := options.tokens_from) is not None:  # all that it holds
            from bosch.data.token_files import SUMMARY

            summary = read_sealed_json(follow_reference(folder) / SUMMARY)
            length = summary["seq_len"]
            sizes = {"sequence_length": length, "tokens": length * summary["num_sequences"]}
            config = replace(config, data=replace(config.data, tokens_from=str(folder), **sizes))
        tokens = tokens_stage.stage_or_reused(config)
    stage = build(config, calibration, tokens, settings)
    stages = [tokens, stage] if isinstance(tokens, Stage) else [stage]
    with RunFolder(run_path, rank, world, say) as run:
        log_to(run_path / "recover.log")
        say(f"run folder {run_path}", *methods.describe_choice(config, settings), *origin)
        say(*methods.describe_settings(config, settings))
        if rank == 0:
            refuse_blocked(run.plan(stages, "mask" if options.fresh else None))
            run.set_aside([stage] if options.fresh else [])
        for each in stages:
            run.complete(each)
    if rank == 0:
        say(f"mask: {run_path / 'mask' / 'mask.json'}")


def find_calibration(given: Path | None, run_path: Path) -> Artifact | None:
    """The calibration set that was named, else the run's, which may be a reference to another."""
    folder = given or run_path / "calibration"
    return Artifact.load(folder) if given or folder.is_dir() else None


if __name__ == "__main__":
    run_main(main)
