"""The six calls of `import bosch`, on the embedded models."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bosch
from bosch.assets import asset_folder
from bosch.calibration import Calibration, Haystack, Question
from bosch.masks.mask import GroupMask
from bosch.model import load_tokenizer, read_model_info
from bosch.recipes.python_calls import Mask
from bosch.run.errors import UserError
from bosch.sink import NO_SINK, Sink, SinkConstants
from tests.model_factory import random_tokens, tiny_model

FOLDER = asset_folder("tiny-qwen3-2layer")
MASK = GroupMask.from_rows(["00001111", "00001111"], 8)


def load(folder: Path = FOLDER, attention: str = "bosch") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)


@pytest.fixture(scope="module")
def dense() -> Any:
    return load()


@pytest.fixture(scope="module")
def calibration() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    easy = {"essays": "toy", "tasks": ["niah_single_1"], "examples": 4, "length": 256}
    return bosch.calibrate(tokenizer, questions_per_context=2, **easy)


@pytest.mark.pictures
def test_all_six_calls(dense: Any, calibration: Any, tmp_path: Path) -> None:
    assert calibration.num_questions == 4
    search = {"ratio": 0.5, "window": 16, "folder": tmp_path / "search", "kappa": 3}
    mask = bosch.search_mask(dense, calibration, method="bosch_single", **search)
    assert mask.ratio == 0.5
    assert mask.model.weight_hash is not None
    outcomes = (tmp_path / "search" / "outcomes.jsonl").read_bytes()
    again = bosch.search_mask(dense, calibration, method="bosch_single", **search)
    assert again.mask == mask.mask
    assert (tmp_path / "search" / "outcomes.jsonl").read_bytes() == outcomes

    mask.save(tmp_path / "mask.json")
    assert bosch.load_mask(tmp_path / "mask.json").mask == mask.mask
    dense_bytes = mask.mask.dense_kv_bytes(1024, mask.model.head_dim)
    assert 0.5 < mask.kv_bytes(1024) / dense_bytes < 0.52

    assert mask.plot()._repr_png_().startswith(b"\x89PNG")  # notebooks show it

    hybrid = bosch.materialize(dense, mask)
    ids = torch.arange(100)[None] % 200
    plain = dense(ids).logits
    with bosch.masked(dense, mask), torch.inference_mode():
        logits = dense(ids).logits
    assert torch.equal(dense(ids).logits, plain)
    assert (logits - plain).abs().max() > 0.1
    # In fp32: in bf16 the likeliest two tokens may be one step apart, which another order of
    # additions turns round.
    fp32, hybrid_fp32 = copy.deepcopy(dense).float(), copy.deepcopy(hybrid).float()
    with bosch.masked(fp32, mask), torch.inference_mode():
        logits = fp32(ids).logits
        texts = fp32.generate(ids, max_new_tokens=8, do_sample=False)
    assert (hybrid_fp32(ids).logits - logits).abs().max() < 1e-4
    assert torch.equal(hybrid_fp32.generate(ids, max_new_tokens=8, do_sample=False), texts)

    task = {"niah_tasks": ["niah_single_1"], "niah_essays": "toy", "samples": 3}
    rows = bosch.evaluate(hybrid, lengths=[256], **task)
    with bosch.masked(dense, mask):
        shown = bosch.evaluate(dense, lengths=[256], **task)
    assert [row["value"] for row in shown] == [row["value"] for row in rows]
    assert {row["length"] for row in rows} == {256}
    kept = {"lengths": [256], "folder": tmp_path / "scores", **task}
    assert bosch.evaluate(hybrid, **kept) == bosch.evaluate(hybrid, **kept)
    with bosch.masked(dense, mask), pytest.raises(UserError, match="scores"):
        bosch.evaluate(dense, **kept)  # another model's

    hybrid.save_pretrained(tmp_path / "hybrid")
    assert torch.equal(load(tmp_path / "hybrid")(ids).logits, hybrid(ids).logits)


@pytest.mark.parametrize("sink", ["static", "tokens=2"])
def test_sinks_come_with_the_mask(sink: str, dense: Any, calibration: Any, tmp_path: Path) -> None:
    # In fp32: in bf16 the likeliest two tokens may be one step apart, which another order of
    # additions turns round.
    dense = copy.deepcopy(dense).float()
    ids = torch.arange(60)[None] % 200
    plain = dense(ids).logits
    asked: Any = {"ratio": 0.75, "window": 16, "method": "dcam", "sink": sink}
    searched = bosch.search_mask(dense, calibration, **asked)
    searched.save(tmp_path / "mask.json")
    loaded = bosch.load_mask(tmp_path / "mask.json")
    without = dataclasses.replace(loaded.mask, sink=NO_SINK)
    logits = []
    for mask in (searched, loaded, without):
        with bosch.masked(dense, mask), torch.inference_mode():
            logits.append(dense(ids).logits)
            texts = dense.generate(ids, max_new_tokens=8, do_sample=False)
        hybrid = bosch.materialize(dense, mask)
        assert (hybrid(ids).logits - logits[-1]).abs().max() < 1e-4
        assert torch.equal(hybrid.generate(ids, max_new_tokens=8, do_sample=False), texts)
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-3
    with bosch.masked(dense, without), bosch.masked(dense, loaded), torch.inference_mode():
        assert torch.equal(dense(ids).logits, logits[0])
    assert torch.equal(dense(ids).logits, plain)
    if sink == "static":
        bare = dataclasses.replace(loaded.mask, sink=Sink("static"))
        assert bare == loaded.mask
        with pytest.raises(UserError, match=r"beside its mask\.json"):
            bosch.materialize(dense, bare)
        with pytest.raises(UserError, match=r"beside its mask\.json"), bosch.masked(dense, bare):
            pass
        assert torch.equal(dense(ids).logits, plain)


def test_masks_in_one_folder_keep_their_own_sinks(
    dense: Any, calibration: Any, tmp_path: Path
) -> None:
    asked: Any = {"ratio": 0.75, "window": 16, "method": "dcam"}
    mask = bosch.search_mask(dense, calibration, **asked)
    first = mask.mask.sink.known_constants()
    second = SinkConstants(first.keys_LGD + 1, first.values_LGD)
    other_sink = dataclasses.replace(mask.mask.sink, constants=second)
    other = dataclasses.replace(mask, mask=dataclasses.replace(mask.mask, sink=other_sink))
    names = {"mask.json": first, "r0.75": second, "r0.5": first, "a.json": second, "b.json": first}
    for name, constants in names.items():
        (mask if constants is first else other).save(tmp_path / name)
    for name, constants in names.items():
        found = bosch.load_mask(tmp_path / name).mask.sink.known_constants()
        assert torch.equal(found.keys_LGD, constants.keys_LGD)
    # As earlier versions wrote it beside masks of any name.
    (tmp_path / "a.sinks.safetensors").unlink()
    found = bosch.load_mask(tmp_path / "a.json").mask.sink.known_constants()
    assert torch.equal(found.keys_LGD, first.keys_LGD)


def test_scores_in_a_folder_are_of_the_weights_in_memory(tmp_path: Path) -> None:
    """Those of the model before it was trained are not returned for the trained one."""
    model = load()
    asked: Any = {"lengths": [256], "niah_essays": "toy", "samples": 1, "niah_samples": 2}
    asked |= {"niah_tasks": ["niah_single_1"], "folder": tmp_path / "scores"}
    rows = bosch.evaluate(model, **asked)
    assert {row["n"] for row in rows} == {2}
    weight = model.model.layers[0].mlp.down_proj.weight.data
    before = weight.clone()
    weight += 1
    with pytest.raises(UserError, match="weights: "):
        bosch.evaluate(model, **asked)
    again = bosch.evaluate(model, **asked | {"folder": tmp_path / "trained"})
    assert [row["value"] for row in again] != [row["value"] for row in rows]
    weight.copy_(before)
    assert bosch.evaluate(model, **asked) == rows


def test_scores_in_a_folder_are_of_one_masks_sinks(dense: Any, tmp_path: Path) -> None:
    shape = (2, 8, 16)

    def with_key(key: float) -> Mask:
        constants = SinkConstants(torch.full(shape, key), torch.zeros(shape))
        mask = dataclasses.replace(MASK, sink=Sink("static", constants=constants))
        return Mask(mask, read_model_info(FOLDER), "by hand")

    record, other = with_key(0.0), with_key(1.0)
    asked: Any = {"lengths": [256], "niah_essays": "toy", "samples": 1, "folder": tmp_path}
    asked["niah_tasks"] = ["niah_single_1"]
    with bosch.masked(dense, record):
        rows = bosch.evaluate(dense, **asked)
    with bosch.masked(dense, other), pytest.raises(UserError, match="sinks: "):
        bosch.evaluate(dense, **asked)
    with bosch.masked(dense, record):
        assert bosch.evaluate(dense, **asked) == rows


def test_a_mask_of_a_file_is_a_method_too(dense: Any, calibration: Any, tmp_path: Path) -> None:
    chosen = bosch.search_mask(dense, calibration, ratio=0.5, window=16, method="fisher")
    chosen.save(tmp_path / "mask.json")
    for path in (tmp_path / "mask.json", str(tmp_path / "mask.json")):
        choice = {"ratio": 0.5, "window": 16, "method": "from_file", "path": path}
        assert bosch.search_mask(dense, calibration, **choice).mask == chosen.mask


def test_numbers_of_numpy_are_numbers(dense: Any, calibration: Any, tmp_path: Path) -> None:
    """As of `for seed in np.arange(3)`. JSON does not take them."""
    plain, of_numpy = (
        bosch.search_mask(dense, calibration, method="razor", **numbers)
        for numbers in (
            {"ratio": 0.5, "window": 16, "seed": 1},
            {"ratio": np.float32(0.5), "window": np.int64(16), "seed": np.int64(1)},
        )
    )
    assert of_numpy.mask == plain.mask
    of_numpy.save(tmp_path / "mask.json")


def test_a_model_made_in_memory_takes_no_folders_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It took that of the folder in which the program stands."""
    random = Haystack(random_tokens(1, 40)[0], (Question(range(38, 40), range(0), "own"),))
    masks = []
    for folder in (tmp_path, FOLDER):
        monkeypatch.chdir(folder)
        masks.append(
            bosch.search_mask(
                tiny_model("qwen3"), Calibration([random]), ratio=0.5, window=8, method="razor"
            )
        )
    assert masks[0].mask.z == masks[1].mask.z


def test_a_heuristic_needs_no_examples_where_a_ranking_ran(
    dense: Any, calibration: Any, tmp_path: Path
) -> None:
    given = {"ratio": 0.5, "window": 16, "folder": tmp_path, "sink": "none"}
    bosch.search_mask(dense, calibration, method="dcam", **given)
    assert bosch.search_mask(dense, method="interleave", **given).mask.num_windowed == 8


def test_another_searchs_files_are_not_used(dense: Any, calibration: Any, tmp_path: Path) -> None:
    def search(method: str, window: int, folder: Path | None = tmp_path) -> Any:
        choice = {"ratio": 0.5, "window": window, "folder": folder}
        return bosch.search_mask(dense, calibration, method=method, **choice).mask

    for method, window in (("fisher", 16), ("fisher", 16), ("fisher", 32), ("dcam", 16)):
        assert search(method, window) == search(method, window, folder=None)


def test_a_folder_of_a_search_is_of_the_weights_in_memory(calibration: Any, tmp_path: Path) -> None:
    model = load()
    asked: Any = {"ratio": 0.5, "window": 16, "method": "fisher", "folder": tmp_path}
    first = bosch.search_mask(model, calibration, **asked)
    assert bosch.search_mask(model, calibration, **asked).mask == first.mask
    model.model.layers[0].self_attn.q_proj.weight.data += 1
    with pytest.raises(UserError, match="other weights"):
        bosch.search_mask(model, calibration, **asked)


def test_a_text_that_was_edited_is_read_again(tmp_path: Path) -> None:
    """In the same process."""
    tokenizer, text = load_tokenizer("tiny-qwen3"), tmp_path / "text.txt"
    found = []
    for word in ("meadow", "harbour"):
        text.write_text("\n\n".join(f"The {word} lies behind house {n}." for n in range(9_999)))
        asked: Any = {"examples": 1, "length": 512, "tasks": ("niah_single_2",)}
        made = bosch.calibrate(tokenizer, essays=f"text:{text}", **asked)
        found.append(tokenizer.decode(made.haystacks[0].ids_T))
    assert "meadow" in found[0]
    assert "harbour" in found[1]


def test_a_model_in_memory_is_known_by_its_weights() -> None:
    model = tiny_model("qwen3")
    model.set_attn_implementation("bosch")
    model.config.name_or_path = ""
    asked: Any = {"ratio": 0.5, "window": 8, "method": "interleave", "sink": "none"}
    masks = [bosch.search_mask(model, **asked) for _ in range(2)]
    model.lm_head.weight.data[0, 0] += 1
    masks.append(bosch.search_mask(model, **asked))
    first, second, changed = (mask.model.weight_hash for mask in masks)
    assert first == second != changed


LONG = Haystack(
    torch.zeros(5_000, dtype=torch.int64), (Question(range(4_999, 5_000), range(0), "own"),)
)


def search(calibration: Any = None, **settings: Any) -> Any:
    return bosch.search_mask(load(), calibration, ratio=0.5, window=8, **settings)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bosch.search_mask(load(attention="sdpa"), ratio=0.5, window=8), "'sdpa' bosch"),
        (lambda: bosch.search_mask(load(), ratio=0.5, window=8), "bosch.calibrate"),
        (lambda: bosch.search_mask(load(), ratio=0.5, window=8, kapa=3), "kapa kappa"),
        (lambda: bosch.search_mask(load(), ratio="0.5", window=8), "ratio '0.5' number"),
        (lambda: bosch.search_mask(load(), ratio=0.5, window=10**9), "window positions"),
        (lambda: search(min_full_per_layer=-1), "min_full_per_layer"),
        (lambda: search(min_full_per_layer=1.5), "min_full_per_layer 1.5 whole"),
        (lambda: search(method="interleave"), 'static examples sink="none"'),
        (lambda: search(Calibration([]), method="razor"), "no texts"),
        (lambda: search(Calibration([LONG]), method="dcam"), "5,000 2,048 positions"),
        (lambda: bosch.evaluate(load(), lengths=["256"]), "niah_lengths '256' number"),
        (lambda: bosch.evaluate(load(), ["niha"]), "niha niah"),
        (lambda: bosch.evaluate(load(), lengths=[128, 256], samples=1), "niah 128 missing"),
        (lambda: bosch.materialize(load(), GroupMask.from_rows(["01"], 8)), "1 layers 2 groups"),
        (lambda: bosch.masked(load(attention="eager"), MASK).__enter__(), "'eager'"),
    ],
)
def test_mistakes_are_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words.split()), message


def test_a_model_on_several_devices_is_not_materialized() -> None:
    """Its layers were brought to the device by hooks, which the new model would lack."""
    model = load()
    model.model.layers[1].to("meta")  # as accelerate leaves one on the disk
    with pytest.raises(UserError, match=r"several devices \(cpu, meta\): load it on one"):
        bosch.materialize(model, MASK)


def test_import_is_light_and_names_all_six() -> None:
    program = "import bosch, bosch.run.stage, sys; print(*bosch.CALLS); "
    program += "assert set(bosch.CALLS) <= set(dir(bosch)); "
    program += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"bosch.{name}(" in str(bosch.__doc__) for name in done.stdout.split())
