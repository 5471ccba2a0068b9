"""What a hybrid's folder carries for others: model card, picture, mask, and code of its own."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bosch_vllm import FAMILIES as ARCHITECTURES
from transformers import AutoModelForCausalLM
from transformers import dynamic_module_utils as remote_files

from bosch.hybrid.conversion import deploy, hybrid_config
from bosch.hybrid.export import full_groups, mask_record, put_scores, why_not_served
from bosch.hybrid.materialize import export_hybrid, materialize, read_config
from bosch.hybrid.remote_code import ENTRY, remote_code
from bosch.plugins import load_plugin
from bosch.recipes import materialize_model
from bosch.run.files import seal_folder, verify_folder, write_sealed_json
from bosch.run.fingerprint import hash_file
from bosch.sink import NO_SINK, Sink
from tests.hybrid_folders import WINDOW, plain_folder, record_for
from tests.model_factory import FAMILIES, MIXED, family_parameters, tiny_model, undeploy

# Loads a folder where `bosch` cannot be imported, and generates with it.
ALONE = """
import sys

class NoBosch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bosch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoBosch())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    print("refused:", str(error).splitlines()[0])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.arange(5, 60)[None]
out = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print("tokenizer:", tokenizer("ab")["input_ids"])
print("tokens:", out.sequences[0, -8:].tolist())
cache = out["cache" if "cache" in out else "past_key_values"]  # before transformers 5.24
print("window entries:", cache.layers[1].keys[0].shape[2])
"""


def generated(model: Any) -> list[int]:
    ids = torch.arange(5, 60)[None]
    return model.generate(ids, max_new_tokens=8, do_sample=False)[0, -8:].tolist()


@pytest.mark.ecosystem(
    "files: a hybrid's folder with `trust_remote_code=True`",
    "works",
    "Without the package; without the argument it is refused by transformers.",
)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_works_where_the_package_is_not(family: str, tmp_path: Path) -> None:
    dense, hybrid = plain_folder(tmp_path / "dense", family), tmp_path / "hybrid"
    materialize(dense, record_for(dense), hybrid)
    expected = generated(AutoModelForCausalLM.from_pretrained(hybrid))
    modules = tmp_path / "modules"
    modules.mkdir()
    # Not in the repository's folder, and with a cache of code that nobody shares.
    environment = os.environ | {"HF_MODULES_CACHE": str(modules)}
    command = [sys.executable, "-c", ALONE, str(hybrid)]
    done = subprocess.run(command, cwd=modules, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = (f"tokens: {expected}\n", f"window entries: {WINDOW - 1}\n")
    for said in (*numbers, "refused: ", "tokenizer: [68, 69]\n"):
        assert said in done.stdout


def test_checkpoint_code_lives_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    dense, hybrid = plain_folder(tmp_path / "dense"), tmp_path / "hybrid"
    materialize(dense, record_for(dense), hybrid)
    ours = AutoModelForCausalLM.from_pretrained(hybrid)
    entry = f"{ENTRY.removesuffix('.py')}.BoschQwen3Config"
    config = remote_files.get_class_from_dynamic_module(entry, hybrid).from_pretrained(hybrid)
    theirs = AutoModelForCausalLM.from_pretrained(hybrid, config=config, trust_remote_code=True)
    assert type(theirs) is not type(ours)
    assert generated(theirs) == generated(ours)
    assert generated(ours) == generated(theirs)
    assert inspect.signature(theirs.forward) == inspect.signature(undeploy(ours).forward)


@pytest.mark.parametrize("family", family_parameters())
def test_code_demands_nothing_but_torch_and_transformers(family: str, tmp_path: Path) -> None:
    files = remote_code(f"bosch.families.{family}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in files:
        demanded = set(remote_files.get_imports(tmp_path / name)) - sys.stdlib_module_names
        assert demanded <= {"torch", "transformers"}, name
    # transformers copies the files it finds by following relative imports: those are all of them.
    paths = remote_files.get_relative_import_files(tmp_path / ENTRY)
    followed = {Path(path).name for path in paths}
    assert followed | {ENTRY} == files.keys()


@pytest.mark.pictures
def test_card_tells_mask_cache_and_how_to_load(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense", max_position_embeddings=40_960)
    materialize(dense, record_for(dense), tmp_path / "hybrid")
    card = (tmp_path / "hybrid" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in (
        "| license | unknown: no card of the base model was found that names one |",
        "<!-- scores -->\nThis model has not been evaluated.\n<!-- end of scores -->\n",
        "\nbosch serve --model path/to/this/folder\n",
        "| groups on the window | 7 of 12 |",
        "| window | 16 tokens, the token itself included |",
        "trust_remote_code=True",
        # By hand, for 4,096 tokens: (5 * 4096 + 7 * 15) entries, of 12 * 4096; each has a key and a
        # value of 16 numbers of 4 bytes.
        "| 4,096 | 2.63 MB | 6.29 MB | 0.419 |",
        "| 40,960 | 26.2 MB | 62.9 MB | 0.417 |",
    ):
        assert line in card
    assert (tmp_path / "hybrid" / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in card
    assert mask_record(read_config(tmp_path / "hybrid")) == record_for(dense)

    export_hybrid(tmp_path / "hybrid", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == card


def test_scores_are_put_into_a_card_and_nothing_else_of_it_changes(tmp_path: Path) -> None:
    dense, hybrid = plain_folder(tmp_path / "dense"), tmp_path / "hybrid"
    (dense / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    materialize(dense, record_for(dense), hybrid)
    card = hybrid / "README.md"
    assert "\nlicense: apache-2.0\n" in card.read_text()
    assert "| license | apache-2.0 |" in card.read_text()
    before = card.read_text() + "Words of its owner.\n"
    card.write_text(before)
    seal_folder(hybrid, {"fingerprint": ""})
    put_scores(hybrid, ["| NIAH | 88.0 |"])
    assert card.read_text() == before.replace(
        "This model has not been evaluated.", "| NIAH | 88.0 |"
    )
    verify_folder(hybrid)
    # Of an earlier version: the manifest has the card's checksum.
    facts = {"files": {"README.md": {"bytes": card.stat().st_size, "xxh3": hash_file(card)}}}
    write_sealed_json(hybrid / "manifest.json", facts)
    put_scores(hybrid)
    verify_folder(hybrid)
    assert "88.0" in card.read_text()


def test_a_card_says_what_vllm_does_not_serve(tmp_path: Path) -> None:
    for name in FAMILIES:
        family: Any = load_plugin("bosch.families", name)
        in_plugin = ARCHITECTURES[family.model_class.__name__]
        assert getattr(family, "served_by_vllm", False) == bool(in_plugin), name
    for family, z, sink, reason in (
        ("qwen3", MIXED, NO_SINK, None),
        ("qwen3", MIXED, Sink.parse("tokens=2"), "first tokens"),
        ("qwen3", [[1] * len(row) for row in MIXED], NO_SINK, "no group on the window"),
        ("olmo2", MIXED, NO_SINK, "its family is olmo2"),
        ("olmoe", MIXED, NO_SINK, "ignores clip_qkv"),
    ):
        plain = read_config(plain_folder(tmp_path / f"{family}-{reason}", family))
        config = hybrid_config(plain, z, WINDOW, sink)
        found = why_not_served(config)
        assert found is None if reason is None else reason in (found or "")


def test_checkpoint_saved_in_training_is_exported_with_its_weights(tmp_path: Path) -> None:
    model = deploy(tiny_model("qwen3"), MIXED, WINDOW)  # without a word on where its mask is from
    model.save_pretrained(tmp_path / "step")
    materialize_model.main(["--model", str(tmp_path / "step"), "--out", str(tmp_path / "out")])
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "step" / name).read_bytes()
    config = read_config(tmp_path / "out")
    assert full_groups(config) == [list(row) for row in MIXED]
    assert config.auto_map["AutoConfig"] == "modeling_bosch.BoschQwen3Config"
    assert "| chosen by | unknown |" in (tmp_path / "out" / "README.md").read_text()
