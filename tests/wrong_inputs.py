"""Files and folders that are wrong in one way each, for the lines of tests/wrong_lines.py."""

import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bosch.__main__ import start
from bosch.assets import asset_folder
from bosch.hybrid.materialize import materialize
from bosch.hybrid.shards import INDEX, SINGLE
from bosch.masks.mask import GroupMask, MaskFile, write_mask
from bosch.model import read_model_info
from bosch.run.lock import FolderLock
from tests.masks import small_record
from tests.wrong_lines import SMALL

DEEP = "[" * 100_000 + "]" * 100_000  # deeper than Python reads
NESTED = "[" * 500 + "]" * 500  # deeper than Python copies
TOKENS = "--source toy --tokens 2048 --sequence-length 256 --held-out-sequences 1 --workers 1"
CALIBRATION = "--length 256 --examples 2 --questions-per-context 2"
HELD: list[FolderLock] = []  # until this process ends


def make_inputs(folder: Path) -> None:
    """A working folder with inputs that are wrong in one way each, and one good mask."""
    for name, content in {
        "notes.txt": "These are notes.\n",
        "broken.json": '{"z": [[1, 0',
        "nan.tsv": "\t".join(["nan"] * 8) + "\n" + "\t".join("1" * 8) + "\n",
        "other.jsonl": '{"words": "x"}',
        "deep.json": '{"z": ' + DEEP + "}",
        "broken_tokens/manifest.json": "{",
        "broken_tokens/tokens.json": "{",
        "broken_run/mask/started.json": "{",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "notes.npz").write_bytes(b"\x93NUMPY\xff\xfe\x00")
    (folder / "empty").mkdir()
    make_models(folder)
    make_masks(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bosch"])
        patch.chdir(folder)
        start("bosch", shlex.split(f"tokens --model good {TOKENS} --out tokens"))
        start("bosch", shlex.split(f"calibrate --model good {CALIBRATION} --out calibration"))
    HELD.append(FolderLock(folder / "in_use").__enter__())


def make_models(folder: Path) -> None:
    """Those of MODELS but the hybrid, and a few that only other programs are given."""
    asset = asset_folder(SMALL)
    config = json.loads((asset / "config.json").read_text())

    def copy(name: str, **changes: object) -> Path:
        shutil.copytree(asset, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | changes))
        return folder / name

    copy("good")
    (copy("broken_json") / "config.json").write_text('{"model_type": ')
    (copy("deep_config") / "config.json").write_text('{"a": ' + DEEP + "}")
    full = ["full_attention"]
    copy("neg_layers", num_hidden_layers=-2)
    copy("one_layer", num_hidden_layers=1, layer_types=full)
    copy("odd_heads", num_attention_heads=12)
    copy("odd_type", model_type="qwen9")
    copy("small_vocab", vocab_size=100)
    copy("no_positions", max_position_embeddings=None)
    copy("quantized", quantization_config={"quant_method": "gptq", "bits": 4})
    windows = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}
    copy("own_window", layer_types=["sliding_attention", *full], **windows)

    whole, weights = (asset / SINGLE).read_bytes(), load_file(asset / SINGLE)
    (copy("no_weights") / SINGLE).unlink()
    (copy("cut_weights") / SINGLE).write_bytes(whole[: len(whole) // 2])
    for name, tensors in {
        "misshapen": {n: t[:1].clone() if "q_proj" in n else t for n, t in weights.items()},
        "few_weights": {n: t for n, t in weights.items() if "layers.1." not in n},
        "nan_weights": {n: t * float("nan") for n, t in weights.items()},
    }.items():
        save_file(tensors, copy(name) / SINGLE, {"format": "pt"})
    shard = copy("lost_shard") / SINGLE
    shard.rename(shard.with_name("a.safetensors"))
    places = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(weights)}
    shard.with_name(INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    (copy("tok_empty") / "tokenizer.json").write_text("")
    path = copy("tok_no_end") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    (copy("gen_eos") / "generation_config.json").write_text('{"eos_token_id": "end"}')


def make_masks(folder: Path) -> None:
    """One of the model `good`, its hybrid, and masks that are wrong for it in one way each."""
    info = read_model_info(folder / "good")
    good = MaskFile(GroupMask.from_rows(["11110000"] * 2, 32), info, "bosch", 0.5)
    three_layers = GroupMask.from_rows(["11110000"] * 3, 32)
    three = replace(good, mask=three_layers, model=replace(info, num_layers=3))
    for name, record in {"mask": small_record(), "good_mask": good, "three_mask": three}.items():
        write_mask(folder / f"{name}.json", record)
    content = json.loads((folder / "good_mask.json").read_text())
    content["settings"] = {"a": json.loads(NESTED)}
    (folder / "nested_mask.json").write_text(json.dumps(content))
    materialize(folder / "good", good, folder / "hybrid")


def check(status: object, output: str, errors: str, line: str, words: str) -> None:
    assert status == 2, output + errors
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    assert "Traceback" not in errors
    for word in words.split():
        assert word in errors, f"{line}: {errors}"
