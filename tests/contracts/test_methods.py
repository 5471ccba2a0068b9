"""The same tests for every file of bosch/methods: it meets the ratio exactly, gives the same result
for the same seed, leaves the model as it was, and writes the same files after a kill."""

import copy
import dataclasses
import gc
import hashlib
import inspect
import random
import shutil
import time
import weakref
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bosch.assets import asset_folder
from bosch.calibration import Calibration
from bosch.masks.mask import MaskFile, num_windowed, read_mask
from bosch.method import Inputs
from bosch.methods import _choose
from bosch.methods._examples import FILE
from bosch.methods._settings import load_method, unit_of
from bosch.plugins import list_plugins
from bosch.recipes.presets import smoke
from tests.attention_matrices import inputs_of, toy_calibration

METHODS = list_plugins("bosch.methods")
LEARNED = [name for name in METHODS if load_method(name).traits.learns_from_tokens]
TRAINING_FREE = [name for name in METHODS if name not in LEARNED]
# Those that write each example's result: a killed one resumes from them.
NOTING = [
    name
    for name in TRAINING_FREE
    if load_method(name).traits.reads_calibration and not load_method(name).traits.searches
    if name != "razor"  # reads texts of its own
]
RATIOS = [0.5, 0.75, *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in (0.25, 0.875))]


@pytest.fixture(scope="module")
def model() -> Any:
    """The model of the preset `smoke`, with random weights."""
    config = AutoConfig.from_pretrained(asset_folder(smoke().model))
    config._attn_implementation = "bosch"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    """As many examples and tokens as in that preset. The tokens are random; the answers are the
    model's, because a search refuses a set on which the model is never right."""
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
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def inputs(name: str, model: Any, calibration: Any, tmp_path_factory: Any) -> Inputs:
    """Inputs of one method. Its results stay in the folder: only the first test computes them."""
    folder = tmp_path_factory.mktemp(name)
    settings = necessary_settings(name, model, folder)
    parts = (load_method(name), model, calibration, folder / "mask", settings)
    # So small that the search sees what windows lose.
    return inputs_of(*parts, window_tokens=4)


def necessary_settings(name: str, model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Settings without a usable default, and a limit for searches."""
    if load_method(name).traits.searches:
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
    """The same inputs with an empty folder beside the first."""
    folder = inputs.folder.with_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return dataclasses.replace(inputs, folder=folder)


def files_of(inputs: Inputs) -> dict[str, bytes]:
    """mask.json, and scores.json where there is one."""
    paths = [inputs.folder / name for name in ("mask.json", "scores.json")]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_either_ranks_or_selects_and_has_frozen_settings(name: str) -> None:
    method = load_method(name)  # checks its traits, and that it has one of the two functions
    function = getattr(method, "score_groups", None) or method.select
    assert tuple(inspect.signature(function).parameters) == ("inputs",)
    assert unit_of(name) == load_method(name).traits.unit
    assert hash(method.Settings()) == hash(method.Settings())  # only a frozen one has a hash


def test_only_a_method_that_reads_the_calibration_set_loads_it(name: str, inputs: Inputs) -> None:
    def refuse() -> Calibration:
        raise LookupError("the calibration set was loaded")

    without = dataclasses.replace(in_folder(inputs, "without"), load_calibration=refuse)
    loads = (
        pytest.raises(LookupError) if load_method(name).traits.reads_calibration else nullcontext()
    )
    with loads:
        _choose.make_mask(name, without)


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_ratio_is_met_in_the_methods_unit(name: str, inputs: Inputs, ratio: float) -> None:
    layers, groups = inputs.num_layers, inputs.num_groups
    unit = unit_of(name)
    if load_method(name).traits.searches and ratio != inputs.ratio:  # its costs are of one ratio
        inputs = in_folder(inputs, f"{ratio:g}")
    inputs = dataclasses.replace(inputs, ratio=ratio)
    record = write(name, inputs)
    assert record.mask.unit == unit
    assert record.mask.window_tokens == inputs.window_tokens
    if unit == "layer":
        assert record.mask.num_windowed == num_windowed(ratio, layers, 1) * groups
    else:
        assert record.mask.num_windowed == num_windowed(ratio, layers, groups)
    assert read_mask(inputs.folder / "mask.json", inputs.model_info) == record


def test_the_same_seed_gives_the_same_files_and_the_model_is_left_as_it_was(
    name: str, inputs: Inputs, model: PreTrainedModel
) -> None:
    write(name, inputs)
    untouched = copy.deepcopy(model)  # the other one has been through all methods before
    untouched.requires_grad_(True)
    before = state_of(untouched)
    again = dataclasses.replace(in_folder(inputs, "again"), load_model=lambda: untouched)
    write(name, again)
    assert files_of(again) == files_of(inputs)
    assert state_of(untouched) == before


def test_the_model_leaves_no_cycle(name: str, inputs: Inputs, model: PreTrainedModel) -> None:
    """A cycle would keep it, and all states that a search caches, into the next stage."""
    loaded: list[weakref.ref[PreTrainedModel]] = []

    def load() -> PreTrainedModel:
        made = copy.deepcopy(model)
        loaded.append(weakref.ref(made))
        return made

    import_module("bosch.search.finish")  # first, since frames of imports can stay in cycles
    # A finished search is only replayed.
    folder = inputs if load_method(name).traits.searches else in_folder(inputs, "freed")
    gc.disable()
    try:
        _choose.make_mask(name, dataclasses.replace(folder, load_model=load))
        assert [made for made in loaded if made() is not None] == []
    finally:
        gc.enable()
    assert loaded or not load_method(name).traits.reads_calibration


@pytest.mark.parametrize("name", NOTING, indirect=True)
def test_after_a_kill_the_files_are_the_same(name: str, inputs: Inputs) -> None:
    """Killed after every example, in the middle of writing the next one. (For searches see
    tests/faults; the other methods take no time.)"""
    write(name, inputs)
    lines = (inputs.folder / FILE).read_bytes().splitlines(keepends=True)
    for done in range(len(lines) + 1):
        killed = in_folder(inputs, "killed")
        torn = lines[done][: len(lines[done]) // 2] if done < len(lines) else b""
        (killed.folder / FILE).write_bytes(b"".join(lines[:done]) + torn)
        write(name, killed)
        assert files_of(killed) == files_of(inputs)
        assert (killed.folder / FILE).read_bytes().startswith(b"".join(lines[:done]))


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
