"""Model folders: what they say of a model, and damage in each of their files."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from filelock import FileLock, Timeout

from bosch.assets import asset_folder
from bosch.model import (
    ModelInfo,
    describe_model,
    fetch_model,
    find_tokenizer,
    load_model,
    load_tokenizer,
    read_model_info,
)
from bosch.run.errors import MissingFileError, UserError
from tests.masks import MODEL, make_model

TINY = asset_folder()
SMALLEST = asset_folder("tiny-qwen3-2layer")


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    for config, groups, head_dim in (
        # As the config classes of transformers have it.
        ({"model_type": "llama", "hidden_size": 64}, 16, 4),
        ({"model_type": "qwen3", "num_key_value_heads": None, "head_dim": 8}, 16, 8),
        ({"model_type": "qwen3_moe"}, 4, 128),
        ({"model_type": "mistral", "hidden_size": 64}, 8, 4),
        ({"model_type": "unheard_of", "num_key_value_heads": 2, "head_dim": 8}, 2, 8),
    ):
        content = {"num_hidden_layers": 3, "num_attention_heads": 16} | config
        (tmp_path / "config.json").write_text(json.dumps(content))
        info = read_model_info(tmp_path)
        assert (info.num_layers, info.num_groups, info.head_dim) == (3, groups, head_dim)
    info = read_model_info(TINY)
    assert (info.id, info.num_layers, info.num_groups) == ("tiny-qwen3", 8, 8)
    assert info.num_query_heads == 16


def test_models_are_told_apart_by_weights_and_described_by_their_config(tmp_path: Path) -> None:
    ours = replace(MODEL, revision=None, weight_hash="a" * 32)
    assert ours.is_same_model(replace(ours, id="a copy under another name"))
    assert not ours.is_same_model(replace(ours, weight_hash="b" * 32))
    assert ours.is_same_model(MODEL)
    folder = make_model(tmp_path / "model")
    before, path = describe_model(folder), folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert describe_model(folder) == before
    path.write_text(json.dumps(config | {"sliding_window": 16}))
    assert describe_model(folder) != before
    assert read_model_info(folder) == ModelInfo(**{k: before[k] for k in before if k != "config"})


def test_ranks_of_a_machine_download_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        (lock,) = tmp_path.glob("*.lock")
        with pytest.raises(Timeout):  # another rank has to wait
            FileLock(lock).acquire(timeout=0)
        return str(tmp_path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "model.safetensors").touch()
    assert fetch_model("owner/model") == tmp_path
    # After a --dry-run, on a machine without a network.
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingFileError, match=r"only a part of it.*hf download owner/model"):
        fetch_model("owner/model")


def test_a_hub_snapshot_is_known_by_its_path_and_others_by_their_weights(tmp_path: Path) -> None:
    snapshot = make_model(tmp_path / "models--org--small" / "snapshots" / "0123456789abcdef")
    info = read_model_info(snapshot)
    assert info == MODEL  # of org/small, at 0123456789abcdef, without a hash

    copy = make_model(tmp_path / "small")  # of the same model, by hf download --local-dir
    (copy / "model.safetensors").write_bytes(b"one")
    assert info.is_same_model(read_model_info(copy))
    assert not info.is_same_model(replace(info, id="another/small"))

    plain = make_model(tmp_path / "plain")
    assert read_model_info(plain).weight_hash is None
    assert not info.is_same_model(read_model_info(plain))
    (plain / "model.safetensors").write_bytes(b"one")
    first = read_model_info(plain)
    assert (first.id, first.revision) == ("plain", None)
    (plain / "model.safetensors").write_bytes(b"two")
    assert not first.is_same_model(read_model_info(plain))


def load(folder: Path) -> Any:
    return load_model(folder, "auto", "cpu")


def test_damaged_files_are_one_sentence_that_names_the_model(tmp_path: Path) -> None:
    cut = (SMALLEST / "model.safetensors").read_bytes()[:-100]
    damages = {"config.json": b"{", "model.safetensors": cut, "tokenizer.json": b"{}"}
    for file, content in (damages | {"model.safetensors.index.json": b"{"}).items():
        folder = shutil.copytree(SMALLEST, tmp_path / file)
        if file.endswith("index.json"):
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / file).write_bytes(content)
        with pytest.raises(UserError, match=str(folder)) as error:
            load_tokenizer(folder) if file == "tokenizer.json" else load(folder)
        assert len(str(error.value).splitlines()) == 1
    assert find_tokenizer(tmp_path / "tokenizer.json") is None
