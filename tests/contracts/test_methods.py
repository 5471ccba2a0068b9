"""Every file of bosch/methods is asked the same: the exact ratio, the same answer for the same
seed, the model left as it was, and after a kill the same files.
"""

import dataclasses
import hashlib
import inspect
import random
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bosch.assets import asset_folder
from bosch.calibration import Calibration
from bosch.masks.mask import MaskFile, Unit, num_windowed, num_windowed_layers, read_mask
from bosch.method import Inputs
from bosch.methods import _choose
from bosch.methods._examples import NOTES
from bosch.plugins import list_plugins, load_plugin
from bosch.recipes.presets import smoke
from tests.attention_matrices import context_of, toy_calibration

PACKAGE = "bosch.methods"
METHODS = list_plugins(PACKAGE)
LEARNED = [name for name in METHODS if _choose.learns_from_tokens(name)]
TRAINING_FREE = [name for name in METHODS if name not in LEARNED]
# Those that note each example: a killed one goes on from its notes.
NOTING = [
    name for name in TRAINING_FREE if _choose.reads_calibration(name) and not _choose.searches(name)
]
SLOW_RATIOS = (0.25, 0.875, "one windowed", "one left")
RATIOS = [0.5, 0.75, *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in SLOW_RATIOS)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The model of the preset `smoke`, with random weights."""
    config = AutoConfig.from_pretrained(asset_folder(smoke().model))
    config._attn_implementation = "bosch"
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return made


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    """As many examples and tokens as that preset has, of random tokens; its answers are those the
    model gives, since no search takes a set of which the model knows nothing.
    """
    settings = smoke().calibration
    count = settings.examples // settings.questions_per_context
    calibration = toy_calibration(settings.length, count, vocab=2048)
    for haystack in calibration.haystacks:
        for question in haystack.questions:
            for place in question.answer:
                with torch.no_grad():
                    logits_TV = model(haystack.ids_T[None, :place], use_cache=False).logits[0]
                haystack.ids_T[place] = logits_TV[-1].argmax()
    return calibration


@pytest.fixture(scope="module", params=TRAINING_FREE)
def name(request: pytest.FixtureRequest) -> str:
    method: str = request.param
    return method


@pytest.fixture(scope="module")
def inputs(
    name: str,
    model: PreTrainedModel,
    calibration: Calibration,
    tmp_path_factory: pytest.TempPathFactory,
) -> Inputs:
    """Of one method. Its notes stay in the folder: only the first test computes statistics."""
    folder = tmp_path_factory.mktemp(name)
    settings = own_settings(name, model, folder)
    parts = (load_plugin(PACKAGE, name), model, calibration, folder / "mask", settings)
    return context_of(*parts, window_tokens=smoke().window)


def own_settings(name: str, model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """What a method cannot do without, and how long a search may take."""
    if _choose.searches(name):
        return {"kappa": smoke().mask.kappa}
    if name != "from_file":
        return {}
    draw = random.Random(0)
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    rows = ["\t".join(f"{draw.random():.3f}" for _ in range(shape[1])) for _ in range(shape[0])]
    path = folder / "full_attention_heads.tsv"
    path.write_text("\n".join(rows) + "\n")
    return {"path": path}


def write(name: str, inputs: Inputs) -> MaskFile:
    selection = _choose.make_mask(name, inputs)
    return _choose.write_selection(name, inputs, selection, time.monotonic())


def in_folder(inputs: Inputs, name: str) -> Inputs:
    """The same beside it, in a folder that is empty."""
    folder = inputs.folder.with_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return dataclasses.replace(inputs, folder=folder)


def files_of(inputs: Inputs) -> dict[str, bytes]:
    """mask.json, and scores.json where there is one."""
    paths = [inputs.folder / name for name in ("mask.json", "scores.json")]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


# --- what a method is made of ---


@pytest.mark.parametrize("name", METHODS)
def test_a_method_either_ranks_or_selects(name: str) -> None:
    method = load_plugin(PACKAGE, name)
    ways = [way for way in ("score_groups", "select") if hasattr(method, way)]
    assert len(ways) == 1
    assert tuple(inspect.signature(getattr(method, ways[0])).parameters) == ("context",)
    assert _choose.unit_of(name) in get_args(Unit)
    for flag in ("learns_from_tokens", "reads_calibration", "searches"):
        assert getattr(method, flag, False) in (False, True)


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_frozen_and_have_defaults(name: str) -> None:
    settings, again = (load_plugin(PACKAGE, name).Settings() for _ in range(2))
    assert dataclasses.is_dataclass(settings)
    assert hash(settings) == hash(again)  # only a frozen one has a hash


def test_a_method_that_reads_no_calibration_set_does_not_ask_for_it(
    name: str, inputs: Inputs
) -> None:
    def refuse() -> Calibration:
        raise LookupError("the calibration set was asked for")

    without = dataclasses.replace(in_folder(inputs, "without"), load_calibration=refuse)
    asks = pytest.raises(LookupError) if _choose.reads_calibration(name) else nullcontext()
    with asks:
        _choose.make_mask(name, without)


@pytest.mark.parametrize("name", LEARNED)
def test_a_method_that_learns_says_that_it_needs_tokens(
    name: str, model: PreTrainedModel, calibration: Calibration, tmp_path: Path
) -> None:
    inputs = context_of(load_plugin(PACKAGE, name), model, calibration, tmp_path)
    with pytest.raises(ValueError, match=f"--method {name} learns from tokens"):
        _choose.make_mask(name, inputs)


# --- what it does ---


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_ratio_is_met_exactly_in_the_methods_own_unit(
    name: str, inputs: Inputs, ratio: float | str
) -> None:
    layers, groups = inputs.num_layers, inputs.num_groups
    unit = _choose.unit_of(name)
    count = layers if unit == "layer" else layers * groups
    if isinstance(ratio, str):
        ratio = {"one windowed": 1, "one left": count - 1}[ratio] / count
    inputs = dataclasses.replace(inputs, ratio=ratio)
    if _choose.searches(name):  # its journal is of one ratio
        inputs = in_folder(inputs, f"{ratio:g}")
    record = write(name, inputs)
    assert record.mask.unit == unit
    assert record.mask.window_tokens == inputs.window_tokens
    if unit == "layer":
        assert record.mask.num_windowed == num_windowed_layers(ratio, layers) * groups
    else:
        assert record.mask.num_windowed == num_windowed(ratio, layers, groups)
    assert read_mask(inputs.folder / "mask.json", inputs.model_info) == record


def test_the_same_seed_gives_the_same_files(name: str, inputs: Inputs) -> None:
    write(name, inputs)
    again = in_folder(inputs, "again")
    write(name, again)
    assert files_of(again) == files_of(inputs)


def test_the_model_is_left_as_it_was(name: str, inputs: Inputs) -> None:
    before = state_of(inputs.model)
    write(name, in_folder(inputs, inputs.folder.name))
    assert state_of(inputs.model) == before


@pytest.mark.parametrize("name", NOTING, indirect=True)
def test_after_a_kill_the_files_are_the_same(name: str, inputs: Inputs) -> None:
    """Killed behind every example, and in the middle of noting the next one. (Searches have a
    journal: test_search_methods.py; the others are done in a moment.)"""
    write(name, inputs)
    lines = (inputs.folder / NOTES).read_bytes().splitlines(keepends=True)
    for done in range(len(lines) + 1):
        killed = in_folder(inputs, "killed")
        torn = lines[done][: len(lines[done]) // 2] if done < len(lines) else b""
        (killed.folder / NOTES).write_bytes(b"".join(lines[:done]) + torn)
        write(name, killed)
        assert files_of(killed) == files_of(inputs)
        assert (killed.folder / NOTES).read_bytes().startswith(b"".join(lines[:done]))


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a method might change."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    modules = {
        (name, key): len(value) if key.endswith("_hooks") else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) or key.endswith("_hooks")
    }
    return {
        "weights": digest.hexdigest(),
        "modules": modules,
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
    }
