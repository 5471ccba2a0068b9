"""Hybrids with the tools of others. Each test carries its row of the table in docs/library.md.

    python -m pytest -n 0 -m ecosystem                # every row; they stand in other files too
    REWRITE_TABLE=1 python -m pytest -n 0 tests/unit/test_ecosystem.py -k table

A row says what was tried, whether it `works`, is `refused` or `fails`, and what to know. Where a
package is absent, its rows are skipped with the command that runs them.
"""

import ast
import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import bosch
from bosch.hybrid.conversion import deploy
from bosch.hybrid.materialize import materialize
from bosch.hybrid.remote_code import ENTRY
from bosch.hybrid.sinks import measure_static_sink
from bosch.masks.mask import GroupMask
from bosch.run.errors import UserError
from tests.hybrid_folders import WINDOW, plain_folder, record_for
from tests.lm_eval_task import NAME, write_task
from tests.model_factory import MIXED, assert_close, logits, random_tokens, tiny_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"
BEGIN, END = "<!-- rows of the tests marked ecosystem -->\n", "<!-- end of rows -->\n"
REWRITE = "REWRITE_TABLE=1 python -m pytest -n 0 tests/unit/test_ecosystem.py -k table"
MASK = GroupMask.from_rows(MIXED, WINDOW)

row = pytest.mark.ecosystem
noisy = pytest.mark.filterwarnings("default")  # of packages that are not ours


def needs(package: str) -> Any:
    """The package, or a skip that says how to run the row."""
    if find_spec(package) is None:
        name = package.replace("_", "-")
        pytest.skip(f"pip install {name} && python -m pytest -n 0 -m ecosystem -k {package}")
    return pytest.importorskip(package)


def hybrid() -> PreTrainedModel:
    model = deploy(tiny_model("qwen3"), MIXED, WINDOW)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dense` and `hybrid`: one model, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    dense = plain_folder(folder / "dense")
    materialize(dense, record_for(dense), folder / "hybrid")
    return folder


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def greedy(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **options)


@row("Trainer: `train(resume_from_checkpoint=True)`", "works", "")
@row(
    "Trainer: `train`, checkpoints, `save_model`",
    "works",
    "Checkpoints are folders of the hybrid. Our own recovery is faster and resumes exactly.",
)
def test_the_trainer_trains_saves_and_resumes_hybrids(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(4, 20).tolist()]
    usual: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_steps": 1, "max_steps": 2}
    usual |= {"per_device_train_batch_size": 2, "learning_rate": 0.01}
    ids = random_tokens(1, 40)
    before, found = logits(hybrid(), ids), []
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        settings = TrainingArguments(str(tmp_path), **usual)
        training = Trainer(hybrid(), settings, train_dataset=Dataset.from_list(rows))
        assert training.train(resume_from_checkpoint=checkpoint).global_step == 2
        training.save_model(tmp_path / "saved")
        found += [logits(load(tmp_path / name), ids) for name in ("saved", "checkpoint-2")]
    assert not torch.equal(found[0], before)
    assert all(torch.equal(one, found[0]) for one in found)


@row("Trainer: `bf16=True`", "works", "With weights in fp32 or bf16.")
def test_the_trainer_trains_hybrids_with_sinks_under_autocast(tmp_path: Path) -> None:
    dense = tiny_model("qwen3")
    sink = measure_static_sink(dense, list(random_tokens(3, 5, seed=3)))
    model, rows = deploy(dense, MIXED, WINDOW, sink), random_tokens(2, 3 * WINDOW).tolist()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    settings = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, bf16=True, max_steps=1, learning_rate=0.01
    )
    Trainer(model, settings, train_dataset=data).train()
    same = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert same == []


def lora(model: PreTrainedModel) -> Any:
    from peft import LoraConfig, get_peft_model

    # Not zero at the start, so that the adapter changes the logits.
    settings = LoraConfig(target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return get_peft_model(model, settings)


@noisy
@row(
    "peft: LoRA on a hybrid",
    "works",
    "Name `target_modules`: peft has no defaults for hybrids. `merge_and_unload()` gives a hybrid "
    "again.",
)
def test_peft_trains_saves_loads_and_merges_an_adapter_of_a_hybrid(tmp_path: Path) -> None:
    peft, ids = needs("peft"), random_tokens(1, 40)
    model = lora(hybrid())
    model(ids, labels=ids).loss.backward()
    gradients = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert gradients
    assert all("lora_" in name for name in gradients)
    model.eval().save_pretrained(tmp_path / "adapter")
    expected = logits(model, ids)
    assert (expected - logits(hybrid(), ids)).abs().max() > 0.1
    loaded = peft.PeftModel.from_pretrained(hybrid(), tmp_path / "adapter")
    assert_close(logits(loaded, ids), expected)
    assert torch.equal(greedy(loaded, ids), greedy(loaded, ids, use_cache=False))
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_close(logits(load(tmp_path / "merged"), ids), expected)


@noisy
@row(
    "peft: an adapter of the dense model",
    "refused",
    "`bosch.materialize` asks for the merged model. **peft itself loads such an adapter into a "
    "hybrid without a word, and the numbers are wrong**: the hybrid's heads have another order.",
)
def test_peft_adapters_of_the_dense_model_are_merged_before(tmp_path: Path) -> None:
    peft, ids = needs("peft"), random_tokens(1, 40)
    model = lora(tiny_model("qwen3")).eval()
    with bosch.masked(model, MASK):
        expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="merge_and_unload"):
        bosch.materialize(model, MASK)
    misfit = peft.PeftModel.from_pretrained(hybrid(), tmp_path)
    assert (logits(misfit, ids) - expected).abs().max() > 0.1
    assert_close(logits(bosch.materialize(model.merge_and_unload(), MASK), ids), expected)


@row("pipeline: `text-generation` from a folder, in batches", "works", "After `import bosch`.")
def test_a_pipeline_writes_the_same_in_batches(folders: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders / "hybrid", padding_side="left")
    writer = pipeline("text-generation", model=str(folders / "hybrid"), tokenizer=tokenizer)
    texts = ["abc abc abc abc abc abc ", "The q"]
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert writer(texts, batch_size=2, **settings) == [writer(text, **settings) for text in texts]


@row(
    "generate: assisted by another model",
    "works",
    "A hybrid may draft for its dense model, and be drafted for.",
)
def test_dense_model_and_hybrid_draft_for_each_other(folders: Path) -> None:
    dense, model, ids = load(folders / "dense"), load(folders / "hybrid"), random_tokens(1, 40)
    for writer, drafter in ((dense, model), (model, dense)):
        assert torch.equal(greedy(writer, ids, assistant_model=drafter), greedy(writer, ids))


@noisy
@row(
    "`transformers serve`",
    "fails",
    "With AttributeError: it takes classes out of transformers' own module only. vLLM serves "
    "hybrids ([serving.md](serving.md)).",
)
def test_transformers_serve_finds_no_class_of_ours(folders: Path) -> None:
    from transformers.cli.serving.model_manager import ModelManager

    with pytest.raises(AttributeError, match="no attribute BoschQwen3ForCausalLM"):
        ModelManager("cpu").load_model_and_processor(f"{folders / 'hybrid'}@main")


@row("generate_batch: continuous batching", "refused", "Use `generate`, which takes batches.")
def test_continuous_batching_is_refused_in_our_words() -> None:
    with pytest.raises(UserError, match="use generate, or vLLM"):
        hybrid().generate_batch([[5, 6, 7]], max_new_tokens=2)


@row("files: `device_map`, with layers left on disk", "works", "")
def test_layers_may_stay_on_disk(folders: Path, tmp_path: Path) -> None:
    model, ids = load(folders / "hybrid"), random_tokens(1, 40)
    names = ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "rotary_emb")
    places = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    places["model.layers.1"] = "disk"
    parts = load(folders / "hybrid", device_map=places, offload_folder=tmp_path)
    assert parts.model.layers[1].self_attn.q_proj.weight.is_meta
    assert torch.equal(logits(parts, ids), logits(model, ids))


@row(
    "files: a hybrid, loaded and saved again",
    "works",
    "With the code that loads the folder without the package.",
)
def test_a_hybrid_is_saved_with_its_code(folders: Path, tmp_path: Path) -> None:
    model, ids, again = load(folders / "hybrid"), random_tokens(1, 40), tmp_path / "again"
    model.save_pretrained(again)
    assert torch.equal(logits(load(again), ids), logits(model, ids))
    for path in (folders / "hybrid").glob("*.py"):
        assert (again / path.name).read_bytes() == path.read_bytes()
    assert json.loads((again / "config.json").read_text())["auto_map"] == model.config.auto_map
    assert (again / ENTRY).is_file()


@pytest.mark.slow  # transformers loads all its models' configs to name them
@row(
    "files: `AutoModel`, `AutoModelForSequenceClassification`",
    "refused",
    "By transformers: a hybrid is a causal language model only.",
)
def test_other_auto_classes_refuse_a_hybrid(folders: Path) -> None:
    for auto in (AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            auto.from_pretrained(folders / "hybrid")


@noisy
@row(
    "lm-eval: its own command line",
    "works",
    "With `trust_remote_code=True`; `bosch evaluate --suite lm-eval:TASK` needs no such word.",
)
def test_lm_eval_s_command_line_judges_a_hybrid(folders: Path, tmp_path: Path) -> None:
    needs("lm_eval")
    text, target = "one two three four five six", " seven"
    tasks = write_task(tmp_path / "tasks", text, target)
    model = f"pretrained={folders / 'hybrid'},dtype=float32,trust_remote_code=True"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model]
    command += ["--include_path", str(tasks), "--tasks", NAME, "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    caches = {name: str(tmp_path / name) for name in ("HF_MODULES_CACHE", "HF_DATASETS_CACHE")}
    environment = os.environ | caches
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob(f"samples_{NAME}_*.jsonl")
    (found,) = [json.loads(line)["perplexity"] for line in samples.read_text().splitlines()]

    tokenizer = AutoTokenizer.from_pretrained(folders / "hybrid")
    ids = tokenizer(text + target, return_tensors="pt").input_ids
    by_hand = {}
    for name in ("hybrid", "dense"):
        chances = logits(load(folders / name), ids)[0].log_softmax(-1)
        places = range(ids.shape[1] - len(target), ids.shape[1])
        by_hand[name] = sum(float(chances[place - 1, ids[0, place]]) for place in places)
    assert math.isclose(found, by_hand["hybrid"], rel_tol=1e-4)
    assert not math.isclose(found, by_hand["dense"], rel_tol=1e-3)


@noisy
@row(
    "quantization: torchao (int8)",
    "works",
    "In memory, at loading, saved and loaded. Quantize the hybrid, not the model it is made of.",
)
def test_torchao_quantizes_hybrids_and_is_refused_before(folders: Path, tmp_path: Path) -> None:
    needs("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import TorchAoConfig

    ids, settings = random_tokens(1, 40), Int8WeightOnlyConfig()
    dense = load(folders / "dense", attn_implementation="bosch")
    quantize_(dense, settings)
    with bosch.masked(dense, MASK):
        expected = logits(dense, ids)
    with pytest.raises(UserError, match="quantize the hybrid"):
        bosch.materialize(dense, MASK)
    model = load(folders / "hybrid")
    exact = logits(model, ids)
    quantize_(model, settings)
    assert_close(logits(model, ids), expected)  # the permutation keeps each row's scale
    assert not torch.equal(expected, exact)
    assert torch.equal(greedy(model, ids), greedy(model, ids, use_cache=False))

    loaded = load(folders / "hybrid", quantization_config=TorchAoConfig(settings))
    assert_close(logits(loaded, ids), exact, 0.5)
    loaded.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), ids), logits(loaded, ids))


@noisy
@row(
    "quantization: bitsandbytes (int8, nf4)",
    "works",
    "At loading, saved and loaded. Quantize the hybrid, not the model it is made of.",
)
def test_bitsandbytes_quantizes_hybrids_alone(folders: Path, tmp_path: Path) -> None:
    needs("bitsandbytes")
    ids = random_tokens(1, 40)
    for name in ("load_in_8bit", "load_in_4bit"):
        kind = {"quantization_config": BitsAndBytesConfig(**{name: True})}
        model = load(folders / "hybrid", **kind)
        found = logits(model, ids)
        assert not model.model.layers[0].self_attn.q_proj.weight.is_floating_point()
        assert torch.equal(greedy(model, ids), greedy(model, ids, use_cache=False))
        model.save_pretrained(tmp_path / name)
        assert torch.equal(logits(load(tmp_path / name), ids), found)
        dense = load(folders / "dense", attn_implementation="bosch", **kind)
        with pytest.raises(UserError, match="quantize the hybrid"):
            bosch.materialize(dense, MASK)
        if name == "load_in_8bit":  # a scale a row, which the permutation keeps
            with bosch.masked(dense, MASK):
                assert_close(logits(dense, ids), found)


def table_rows() -> list[tuple[str, str, str]]:
    """Name, result and words of every test marked with a row, in the order of the names."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        for call in (call for one in functions for call in one.decorator_list):
            marks = ("row", "pytest.mark.ecosystem")
            if isinstance(call, ast.Call) and ast.unparse(call.func) in marks:
                name, result, words = (ast.literal_eval(argument) for argument in call.args)
                found.append((name, result, words))
    return sorted(found)


def test_the_table_of_the_page_is_that_of_the_tests() -> None:
    rows = table_rows()
    assert len({name for name, _, _ in rows}) == len(rows) > 20
    assert {result for _, result, _ in rows} <= {"works", "refused", "fails"}
    lines = [("with", "result", "to know"), ("---",) * 3, *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page = before + BEGIN + table + END + after
    if os.environ.get("REWRITE_TABLE"):
        PAGE.write_text(page, "utf-8")
    assert PAGE.read_text("utf-8") == page, f"the rows have changed: {REWRITE}"
