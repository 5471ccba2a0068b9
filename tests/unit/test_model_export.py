"""The exported folder of a step: the twin of the one training began with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.config import TrainConfig
from bosch.hybrid.materialize import materialize
from bosch.hybrid.shards import weight_files
from bosch.run.dist import Ranks
from bosch.run.files import verify_folder
from bosch.run.stage import Artifact
from bosch.training.export import export_model
from bosch.training.model_start import start_model
from bosch.training.parallel import start_world
from tests.damage import flip_bit
from tests.hybrid_folders import files_of, plain_folder, record_for
from tests.model_factory import family_parameters, random_tokens

SETTINGS = TrainConfig(precision="fp32", kernels="torch", activation_checkpointing=True)


def hybrid_folder(tmp_path: Path, **options: Any) -> Path:
    source = plain_folder(tmp_path / "plain", **options)
    materialize(source, record_for(source), tmp_path / "model")
    return tmp_path / "model"


def started(folder: Path) -> Any:
    start_world()
    return start_model(folder, SETTINGS, torch.device("cpu"))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(folder).items() if name != "manifest.json"}


@pytest.mark.parametrize("family", family_parameters())
def test_an_untrained_model_is_exported_as_the_same_bytes(family: str, tmp_path: Path) -> None:
    """With the code that came with it."""
    source = hybrid_folder(tmp_path, family=family, dtype=torch.bfloat16, shard_size="60kB")
    assert len(weight_files(source)) > 1
    export_model(started(source), source, tmp_path / "step-000001", Ranks.current())
    assert contents(tmp_path / "step-000001") == contents(source)
    assert "modeling_bosch.py" in contents(source)
    for folder in (source, tmp_path / "step-000001"):  # all may be read by the same people
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_tables_of_old_checkpoints_stay_as_they_are(tmp_path: Path) -> None:
    """transformers ignores them, as Llama 2's: such a folder was refused after the search."""
    source = plain_folder(tmp_path / "plain")
    (file,) = weight_files(source)
    tensors = load_file(source / file)
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.rand(4) for n in range(2)}
    save_file(tensors | old, source / file, {"format": "pt"})
    materialize(source, record_for(source), tmp_path / "model")
    export_model(
        started(tmp_path / "model"), tmp_path / "model", tmp_path / "step", Ranks.current()
    )
    exported = load_file(tmp_path / "step" / file)
    assert all(torch.equal(exported[name], tensor) for name, tensor in old.items())


@pytest.mark.parametrize("tied", [True, False])
def test_trained_weights_load_as_an_ordinary_model(tied: bool, tmp_path: Path) -> None:
    source = hybrid_folder(tmp_path, tie_word_embeddings=tied)
    model = started(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    export_model(model, source, tmp_path / "step-000001", Ranks.current())
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "step-000001")
    ids = random_tokens(1, 40)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, model(ids, use_cache=False).logits)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    before = AutoModelForCausalLM.from_pretrained(source)
    assert ours.config.bosch == before.config.bosch
    assert ours.generation_config.to_dict() == before.generation_config.to_dict()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step-000001")
    assert tokenizer("abc").input_ids == AutoTokenizer.from_pretrained(source)("abc").input_ids


def test_a_half_written_or_damaged_export_is_made_anew_and_others_left(
    tmp_path: Path,
) -> None:
    source, folder = hybrid_folder(tmp_path), tmp_path / "step-000001"
    model = started(source)
    for leftover in (folder, tmp_path / ".step-000001.tmp"):
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
        (leftover / "odd").write_bytes(b"x")
    export_model(model, source, folder, Ranks.current())
    assert contents(folder) == contents(source)
    assert not (tmp_path / ".step-000001.tmp").exists()
    manifest = verify_folder(folder)
    assert set(manifest["files"]) == set(contents(folder)) - {"README.md"}  # its scores come later
    assert Artifact.load(folder).fingerprint == manifest["fingerprint"]
    for name in ("model.safetensors", "config.json", "manifest.json"):
        flip_bit(folder / name, (folder / name).stat().st_size // 2)
        export_model(model, source, folder, Ranks.current())
        verify_folder(folder)
        assert contents(folder) == contents(source)
    before = (folder / "manifest.json").read_bytes()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    export_model(model, source, folder, Ranks.current())
    assert (folder / "manifest.json").read_bytes() == before
