"""The stage `mask`: a method chooses the groups that get the sliding window (bosch/methods).

It writes mask.json, its picture and, for rankings, scores.json, and resumes where it stopped. How
calibration sets and packed tokens are read, and how a mask is learned, is passed in: this layer
knows nothing of data and training.
"""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bosch.calibration import Calibration
from bosch.config import Config, MaskConfig, TrainConfig
from bosch.masks.mask import find_constants
from bosch.method import Inputs, Learning
from bosch.methods import _settings as methods
from bosch.methods._choose import deciding, make_mask, write_selection
from bosch.model import (
    describe_source,
    fetch_model,
    find_tokenizer,
    load_for_search,
    read_model_info,
    read_own_windows,
    read_shape,
)
from bosch.plugins import KINDS, own_backend_files, own_files
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file
from bosch.run.memory import has_gpu
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage
from bosch.sink import Sink

# Of methods that have come to choose other masks. Rankings that runs share are told apart by
# `CHANGED` (methods/_examples.py).
VERSIONS = {"bosch": 4, "bosch_multi": 2, "fisher": 2, "global_swap": 2}
OF_SINKS = ("proxy", "qada")  # one more where there are sinks
OF_BUCKETS = ("bosch_paper", "global_swap")  # one more where buckets have come to be rounded
ReadSet = Callable[[Path, str], Calibration]  # `read_set` of data/calibration_stage.py
MakeLearning = Callable[[Config, Path, Artifact], Learning]  # of training/learner.py


def check(config: Config, settings: object) -> None:
    """Refuse, before work begins, what the method sees beforehand not to fit, and a named attention
    backend that cannot run here. `settings` of the method."""
    import torch

    from bosch.attention.dispatch import check_backend

    mask, on_gpu = config.mask, has_gpu()
    device, usual = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(mask.precision, usual)
    check_backend(
        "mask.attention",
        mask.attention,
        torch.device(device),
        dtype,
        has_sink=config.sink != "none",
    )
    # Optional: hardly any method knows before it begins.
    method = methods.load_method(config.method)
    getattr(method, "check_choice", lambda settings, config: None)(settings, config)


def stage(
    config: Config,
    read_set: ReadSet,
    make_learning: MakeLearning,
    calibration: Stage | Artifact | None = None,
    tokens: Stage | Artifact | None = None,
    settings: object = None,
) -> Stage:
    """`tokens`: for a method that learns from them. `settings`: the method's; None: as MaskConfig's
    fields of that name say."""
    traits, mask = methods.load_method(config.method).traits, config.mask
    # The work of a method that says so is divided among the ranks; else the others wait.
    is_shared = traits.searches or traits.measures or traits.learns_from_tokens
    settings = settings or methods.default_settings(config.method, mask)
    methods.check_settings(config.method, settings)
    if mask.min_full_per_layer:
        size = read_shape(config.model)[:2]  # layers, groups
        methods.check_min_full(config.method, settings, mask.min_full_per_layer, config.ratio, size)
    assert config.sink != "auto"  # whoever reads the settings resolves it
    decides: dict[str, Any] = {
        "method": config.method,
        "model": describe_source(config.model),
        "ratio": config.ratio,
        "window": config.window,
        "seed": config.seed,
        "settings": deciding(settings),
    }
    for name, value in decides["settings"].items():
        if isinstance(value, Path) and value.is_file():  # its content decides, not its path
            decides["settings"][name] = {"xxh3": hash_file(value)}
            if (constants := find_constants(value)).is_file():
                decides["settings"][name]["sinks"] = hash_file(constants)
    # What a search starts from are methods too, which global_swap calls rankings and bosch starts.
    rankings = (*getattr(settings, "rankings", ()), *getattr(settings, "starts", ()))
    own = own_files(
        *((methods.METHODS, name) for name in (config.method, *rankings)),
        (KINDS["optimizers"], getattr(settings, "optimizer", "")),
    )
    if own := own | own_backend_files(mask.attention):
        decides["plugins"] = own
    inputs: dict[str, Stage | Artifact] = {}
    if methods.asks_calibration(config, settings):
        if calibration is None:
            remedy = "pass --calibration DIR, which bosch calibrate makes"
            if traits.reads_calibration:
                raise UserError(f"--method {config.method} needs calibration examples: {remedy}.")
            raise UserError(f"--sink static needs calibration examples: {remedy}, or --sink none.")
        inputs["calibration"] = calibration
    if traits.learns_from_tokens:
        assert tokens is not None  # the programs see to it
        inputs["tokens"] = tokens
        # What decides a learned mask besides the method's settings.
        decides["learning"] = {
            "train": learning_settings(config),
            "tokens": config.data.tokens,
            "document_mask": config.data.document_mask,
        }
    # Only where they are not the usual, so that stages of earlier runs, which had no such settings,
    # are reused.
    if mask.attention != "auto":
        decides["attention"] = mask.attention
    if mask.precision != "auto":
        decides["precision"] = mask.precision
    if config.sink != "none":
        decides["sink"] = config.sink
    if mask.min_full_per_layer:
        decides["min_full_per_layer"] = mask.min_full_per_layer

    version = VERSIONS.get(config.method, 1)
    if config.method in OF_BUCKETS:
        buckets = getattr(settings, "ratio_buckets", MaskConfig.ratio_buckets)
        sizes = [share * read_shape(config.model).num_groups for share in buckets]
        whole = {round(size) for size in sizes if math.isclose(size, round(size), abs_tol=1e-9)}
        version += whole != {round(size) for size in sizes}
    version += config.method in OF_SINKS and config.sink != "none"
    return Stage(
        "mask",
        run=partial(
            write_mask,
            config=config,
            settings=settings,
            read_set=read_set,
            make_learning=make_learning,
        ),
        settings=decides,
        inputs=inputs,
        version=version,
        ranks="all" if is_shared else "first",
        check=partial(check, config, settings),
    )


def write_mask(
    folder: Path,
    config: Config,
    settings: object,
    read_set: ReadSet,
    make_learning: MakeLearning,
    calibration: Artifact | None = None,
    tokens: Artifact | None = None,
) -> None:
    """What the stage does, in its folder."""
    from bosch.masks.picture import draw_mask, mask_title  # matplotlib, which takes a second

    def load_calibration() -> Calibration:
        assert calibration is not None  # `stage` has seen to it
        return read_set(calibration.folder, config.model)

    traits, (rank, world) = methods.load_method(config.method).traits, rank_and_world()
    is_shared = traits.searches or traits.measures or traits.learns_from_tokens
    if world > 1 and traits.reads_calibration and not is_shared:
        say(f"{config.method} runs in one of the {world} processes; the others wait")
    model, mask = fetch_model(config.model), config.mask
    inputs = Inputs(
        model_info=read_model_info(model),
        load_model=partial(load_for_search, model, mask.attention, mask.precision),
        load_calibration=load_calibration,
        window_tokens=config.window,
        ratio=config.ratio,
        seed=config.seed,
        settings=settings,
        folder=folder,
        load_tokenizer=partial(find_tokenizer, model),
        learning=make_learning(config, model, tokens) if tokens else None,
        sink=Sink.parse(config.sink),
        min_full_per_layer=mask.min_full_per_layer,
        own_windows=read_own_windows(model),
    )
    began = time.monotonic()
    selection = make_mask(config.method, inputs)
    if rank != 0:
        return  # this rank has done its share of a search or of the training
    record = write_selection(config.method, inputs, selection, began)
    draw_mask(record, folder / "mask.png")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the results are stored beside them
    say(*selection.notes, mask_title(record))


def learning_settings(config: Config) -> TrainConfig:
    """The training settings of a method that learns its mask, which trains all weights: with the
    attention backend that is named for the mask, and a rate for all weights."""
    train = config.train
    if config.mask.attention != "auto":
        train = replace(train, attention=config.mask.attention)
    if train.trained.startswith("lora"):
        # A rate for narrow matrices beside frozen weights (8e-4 in the preset `small`) ruins a
        # pretrained model if all weights get it, and the gates learn on what is left of it.
        train = replace(train, peak_learning_rate=TrainConfig.peak_learning_rate)
    return train
