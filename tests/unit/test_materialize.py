"""From a model and a mask to a hybrid's folder and back: families, resuming, check, refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bosch.attention.cache import CACHE
from bosch.data.tokenizer_files import describe_tokenizer
from bosch.hybrid.conversion import deploy, hybrid_config
from bosch.hybrid.materialize import (
    CHECK_TOLERANCE,
    as_layer_types,
    compare_logits,
    materialize,
    read_config,
    unmaterialize,
)
from bosch.hybrid.models import families_with, family_of
from bosch.hybrid.remote_code import remote_code
from bosch.hybrid.shards import PROGRESS, rewrite_weights
from bosch.hybrid.sinks import measure_static_sink
from bosch.recipes import materialize_model
from bosch.run.errors import UserError
from bosch.sink import Sink, SinkConstants
from tests import odd_tokenizers
from tests.hybrid_folders import WINDOW, files_of, mask_file, plain_folder, record_for
from tests.model_factory import (
    MIXED,
    family_parameters,
    logits,
    random_tokens,
    tiny_model,
    undeploy,
)
from tests.sampled import sampled

WHOLE = [[1] * 4, [0] * 4, [1] * 4]
every_family = pytest.mark.parametrize("family", family_parameters())


def test_a_folder_saved_without_its_head_gets_sinks_too(tmp_path: Path) -> None:
    """Its weights lack `model.` in front, which transformers puts there."""
    plain, hybrid = tmp_path / "plain", tmp_path / "hybrid"
    plain_folder(plain, "qwen3", tie_word_embeddings=True)
    usual = load_file(plain / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in usual.items()}
    save_file(short, plain / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="bosch")
    sink = measure_static_sink(model, list(random_tokens(3, 5)))
    record = record_for(plain)
    record = replace(record, mask=replace(record.mask, sink=sink))
    materialize(plain, record, hybrid)
    assert AutoModelForCausalLM.from_pretrained(hybrid).window_sink.kind == "static"


@pytest.mark.parametrize("family", sampled(families_with("layer_types_suffice"), slice(2, 5)))
def test_whole_layers_become_layer_types_that_any_engine_knows(family: str, tmp_path: Path) -> None:
    """Stock transformers generates the same tokens, and its cache holds the window."""
    dense, hybrid, out = (tmp_path / name for name in ("dense", "hybrid", "stock"))
    plain_folder(dense, family)
    materialize(dense, record_for(dense, WHOLE), hybrid)
    materialize_model.main(["--model", str(hybrid), "--out", str(out), "--layer-types"])
    config = json.loads((out / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert (config["layer_types"], config["sliding_window"]) == (kinds, WINDOW)
    assert config["architectures"] == [family_of(read_config(dense)).plain_model_class.__name__]
    assert not {"bosch", "auto_map"} & config.keys()
    ids, answers = random_tokens(1, 3 * WINDOW), []
    for folder in (hybrid, out):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        done = model.generate(ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
        answers.append(done.sequences.tolist())
    assert answers[0] == answers[1]
    cache = getattr(done, CACHE)
    held = [layer.keys.shape[2] for layer in cache.layers]
    assert held[0] == held[2] == 3 * WINDOW + 19
    assert held[1] <= WINDOW


def test_layer_types_of_a_model_with_windows_of_its_own(tmp_path: Path) -> None:
    """Longer than the texts on which both forms are compared."""
    dense, hybrid, out = (tmp_path / name for name in ("dense", "hybrid", "stock"))
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    plain_folder(dense, "olmo3", layer_types=kinds, sliding_window=64)
    materialize(dense, record_for(dense, [[0] * 4, [1] * 4], window_tokens=64), hybrid)
    as_layer_types(hybrid, out)
    found = json.loads((out / "config.json").read_text())
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    assert (found["layer_types"], found["sliding_window"]) == (kinds, 64)


def test_what_layer_types_cannot_say_is_refused(tmp_path: Path) -> None:
    for family, z, named in (
        ("qwen3", MIXED, r"layer 0 has \d of 4 groups full, which no layer type"),
        ("llama", WHOLE, "the family llama has no layer_types"),
        ("cohere2", WHOLE, "in the family cohere2 layers of windows have other positions"),
    ):
        dense, hybrid = tmp_path / family, tmp_path / f"{family}-hybrid"
        plain_folder(dense, family)
        materialize(dense, record_for(dense, z), hybrid)
        with pytest.raises(UserError, match=named):
            as_layer_types(hybrid, tmp_path / "out")
    zeros = SinkConstants(torch.zeros(3, 4, 16), torch.zeros(3, 4, 16))
    static = Sink("static", constants=zeros)
    whole: Any = deploy(tiny_model("qwen3"), WHOLE, WINDOW, static)
    whole.save_pretrained(tmp_path / "static")
    with pytest.raises(UserError, match="has the sink static, which layer types have not"):
        as_layer_types(tmp_path / "static", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@every_family
def test_a_hybrid_computes_search_mode_and_goes_back_exactly(family: str, tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense", family)
    materialize(dense, record_for(dense), tmp_path / "hybrid")

    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    assert type(hybrid) is family_of(hybrid.config).model_class
    assert hybrid.config._attn_implementation == "bosch"
    plain = AutoModelForCausalLM.from_pretrained(dense, attn_implementation="bosch")
    ids = random_tokens(2, 5 * WINDOW)
    searched = logits(plain, ids, bosch_mask=MIXED, bosch_window=WINDOW)
    torch.testing.assert_close(logits(hybrid, ids), searched, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(plain, ids), searched, atol=1e-2)
    with pytest.raises(UserError, match=f"{type(plain).__name__} would compute this hybrid"):
        hybrid.config.update({"architectures": [type(plain).__name__]})  # as vLLM's --hf-overrides
    hybrid.config.architectures = ["MySubclass"]

    unmaterialize(tmp_path / "hybrid", tmp_path / "again")
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (dense / name).read_bytes()
    assert (tmp_path / "hybrid" / name).read_bytes() != (dense / name).read_bytes()
    assert (tmp_path / "again" / "config.json").read_bytes() == (dense / "config.json").read_bytes()

    # The plain family refuses the folder, even with its model_type put back.
    plain_class, config = type(plain), tmp_path / "hybrid" / "config.json"
    content = json.loads(config.read_text())
    for model_type in (content["model_type"], family):
        content |= {"model_type": model_type, "architectures": [plain_class.__name__]}
        config.write_text(json.dumps(content))
        with pytest.raises(StrictDataclassFieldValidationError, match="bosch_hybrid"):
            plain_class.from_pretrained(tmp_path / "hybrid")
    for auto_class in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(StrictDataclassFieldValidationError, match="bosch_hybrid"):
            auto_class.from_pretrained(tmp_path / "hybrid")


@pytest.mark.parametrize(
    ("family", "declared", "tokenizer"),
    [
        ("mistral", "LlamaTokenizer", odd_tokenizers.blank_first()),
        ("qwen2", "LlamaTokenizerFast", odd_tokenizers.byte_level()),
    ],
)
def test_hybrid_loads_the_tokenizer_that_its_model_loads_whatever_class_is_declared(
    family: str, declared: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    dense = plain_folder(tmp_path / "dense", family)
    odd_tokenizers.save(tokenizer, dense, declared)
    materialize(dense, record_for(dense), tmp_path / "hybrid")
    unmaterialize(tmp_path / "hybrid", tmp_path / "again")
    own = describe_tokenizer(AutoTokenizer.from_pretrained(dense))
    for made in ("hybrid", "again"):
        loaded = AutoTokenizer.from_pretrained(tmp_path / made)
        assert describe_tokenizer(loaded).hash == own.hash
        ids = AutoTokenizer.from_pretrained(dense)(" 1234 x").input_ids
        assert loaded(" 1234 x").input_ids == ids


def test_folder_keeps_type_tokenizer_and_settings_but_no_other_weights(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense", dtype=torch.bfloat16)
    (dense / "LICENSE").write_text("free")
    (dense / "consolidated.safetensors").write_bytes(b"the same weights in another order")
    (dense / "pytorch_model.bin").write_bytes(b"and once more")
    materialize(dense, record_for(dense), tmp_path / "hybrid")

    copied = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    ours = {"config.json", "model.safetensors", "README.md", "mask.png"}
    ours |= remote_code("bosch.families.qwen3").keys()
    found = files_of(tmp_path / "hybrid")
    assert found.keys() == copied | ours
    assert all(found[name] == (dense / name).read_bytes() for name in copied)
    assert not (tmp_path / "hybrid" / PROGRESS).exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "hybrid")("ab")["input_ids"] == [68, 69]

    config = json.loads(found["config.json"])
    assert (config["model_type"], config["dtype"]) == ("bosch_qwen3", "bfloat16")
    bosch = config["bosch"]
    assert (bosch["window"], bosch["num_full"]) == (WINDOW, [sum(row) for row in MIXED])
    assert bosch["permutation"] == [[0, 2, 1, 3], [0, 1, 2, 3], [1, 2, 3, 0]]  # full groups first
    assert bosch["mask"]["model"]["weight_hash"] == record_for(dense).model.weight_hash
    assert str(tmp_path) not in found["config.json"].decode()


def test_tied_embeddings_and_missing_head_dim_work(tmp_path: Path) -> None:
    # 64 / 8 heads: what a config.json without head_dim means.
    dense = plain_folder(tmp_path / "dense", "llama", tie_word_embeddings=True, head_dim=8)
    content = json.loads((dense / "config.json").read_text())
    del content["head_dim"]
    (dense / "config.json").write_text(json.dumps(content))
    materialize(dense, record_for(dense), tmp_path / "hybrid")
    assert "lm_head.weight" not in load_file(tmp_path / "hybrid" / "model.safetensors")


def interrupted_after_the_weights(dense: Path, out: Path) -> None:
    """The files of a run that was killed after writing the weights."""
    config = hybrid_config(read_config(dense), MIXED, WINDOW)
    out.mkdir()
    rewrite_weights(dense, out, config, config.bosch["permutation"])


def test_folder_that_computes_something_else_is_not_published(tmp_path: Path) -> None:
    dense, out = plain_folder(tmp_path / "dense"), tmp_path / "hybrid"
    interrupted_after_the_weights(dense, out)
    weights = load_file(dense / "model.safetensors")
    name = "model.layers.2.self_attn.v_proj.weight"
    weights[name] = weights[name].flip(0)  # the source changes under a stopped run
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(UserError, match=rf"{out}.*{dense}.*1e-05"):
        materialize(dense, record_for(dense), out)
    assert not (out / "config.json").exists()
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(out)
    materialize(dense, record_for(dense), out)  # writes all weights anew
    assert (out / "config.json").is_file()


@every_family
def test_check_sees_two_groups_that_changed_places(family: str, tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense", family, dtype=torch.bfloat16, initializer_range=0.02)
    materialize(dense, record_for(dense), tmp_path / "hybrid")
    plain, hybrid = read_config(dense), read_config(tmp_path / "hybrid")
    assert compare_logits(dense, plain, tmp_path / "hybrid", hybrid) <= CHECK_TOLERANCE / 10
    # A full and a windowed group of the last layer.
    hybrid.bosch["permutation"][2] = [0, 2, 3, 1]
    assert compare_logits(dense, plain, tmp_path / "hybrid", hybrid) > 10 * CHECK_TOLERANCE


def test_complete_files_are_kept_and_damaged_ones_written_again(tmp_path: Path) -> None:
    dense, out = plain_folder(tmp_path / "dense", shard_size="50KB"), tmp_path / "hybrid"
    interrupted_after_the_weights(dense, out)
    names = sorted(path.name for path in out.glob("*.safetensors"))
    before = {name: (out / name).stat().st_ino for name in names}
    (out / names[0]).unlink()
    content = bytearray((out / names[1]).read_bytes())
    content[-1] ^= 1
    (out / names[1]).write_bytes(content)

    materialize(dense, record_for(dense), out)
    unchanged = [(out / name).stat().st_ino == before[name] for name in names[1:]]
    assert unchanged == [False, *[True] * (len(names) - 2)]
    materialize(dense, record_for(dense), tmp_path / "undisturbed")
    assert files_of(out) == files_of(tmp_path / "undisturbed")

    other, reused = record_for(dense, z=tuple(reversed(MIXED))), tmp_path / "of another mask"
    interrupted_after_the_weights(dense, reused)
    for folder in (reused, tmp_path / "other"):
        materialize(dense, other, folder)
    assert files_of(folder) == files_of(reused)

    assert sorted(path.name for path in dense.glob("*.safetensors")) == names
    unmaterialize(out, tmp_path / "again")
    index = "model.safetensors.index.json"
    for name in [index, *names]:
        assert (tmp_path / "again" / name).read_bytes() == (dense / name).read_bytes()
    assert (out / index).read_bytes() == (dense / index).read_bytes()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_full_layers_beside_an_idle_native_window_stay_full(family: str, tmp_path: Path) -> None:
    """From a config without layer types these families would derive sliding layers."""
    native = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    full = {"layer_types": ["full_attention"] * 3}
    dense, hybrid, back = (tmp_path / name for name in ("dense", "hybrid", "back"))
    plain_folder(dense, family, **native, **full)
    materialize(dense, record_for(dense), hybrid)
    loaded = AutoModelForCausalLM.from_pretrained(hybrid)
    assert undeploy(loaded).config.layer_types == full["layer_types"]
    unmaterialize(hybrid, back)
    assert (back / "config.json").read_bytes() == (dense / "config.json").read_bytes()


def status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.slow
def test_one_file_of_weights_is_in_memory_at_a_time(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    sizes |= {"num_hidden_layers": 14, "head_dim": 64}
    dense, out = plain_folder(tmp_path / "dense", shard_size="60MB", **sizes), tmp_path / "out"
    assert sum(path.stat().st_size for path in dense.glob("*.safetensors")) > 230e6
    config = hybrid_config(read_config(dense), [[1, 0, 1, 0]] * 14, WINDOW)
    out.mkdir()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = status_bytes("VmRSS")
    rewrite_weights(dense, out, config, config.bosch["permutation"])
    # One file as it is mapped, and its attention once more.
    assert status_bytes("VmHWM") - before < 100e6


def test_recipe_makes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, other = plain_folder(tmp_path / "dense"), plain_folder(tmp_path / "other", seed=1)
    mask = mask_file(tmp_path / "mask.json", dense)
    arguments = ["--model", str(dense), "--mask", str(mask), "--out", str(tmp_path / "hybrid")]
    materialize_model.main(arguments)
    assert "check: logits differ from search mode by" in capsys.readouterr().out
    assert (tmp_path / "hybrid" / "manifest.json").is_file()

    before = files_of(tmp_path / "hybrid")
    materialize_model.main(arguments)
    assert files_of(tmp_path / "hybrid") == before
    renamed = (tmp_path / "hybrid").rename(tmp_path / "renamed")
    with pytest.raises(UserError, match=r"stage: hybrid -> renamed"):
        materialize_model.main([*arguments[:-1], str(renamed)])
    renamed.rename(tmp_path / "hybrid")
    mask_file(mask, dense, window_tokens=WINDOW + 1)
    with pytest.raises(UserError, match=r"\(mask: "):
        materialize_model.main(arguments)

    with pytest.raises(UserError, match="dense"):
        materialize_model.main(["--model", str(other), *arguments[2:5], str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()

    back = ["--model", str(tmp_path / "hybrid"), "--out", str(tmp_path / "again")]
    materialize_model.main([*back, "--reverse"])
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (dense / name).read_bytes()
