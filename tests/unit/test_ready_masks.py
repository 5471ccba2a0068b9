"""Ready masks: made from a run, found by name, refused for other weights."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bosch
from bosch.masks import __main__ as commands
from bosch.masks import ready
from bosch.recipes import materialize_model, recover, search_mask
from bosch.run.errors import UserError

TINY = Path(bosch.__file__).parent / "assets" / "tiny-qwen3-2layer"
NAME = "tiny-2layer@0.5"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a searched mask and its static sinks, and scores as evaluations write them."""
    run = tmp_path_factory.mktemp("run") / "searched"
    (run / "eval").mkdir(parents=True)
    rows = [
        {"run": "searched", "step": step, "tokens": 0, "suite": "niah", "task": "niah_single_1",
         "length": 256, "metric": "accuracy", "value": value, "stderr": None, "n": 1}
        for step, value in ((None, 100.0), (0, 50.0), (8, 75.0))
    ]  # fmt: skip
    (run / "eval" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="bosch").eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    few = {"examples": 4, "length": 256, "questions_per_context": 2, "essays": "toy"}
    calibration = bosch.calibrate(tokenizer, **few)
    bosch.search_mask(
        model, calibration, ratio=0.5, window=32, method="retrieval_head", folder=run / "mask"
    )
    return run


@pytest.mark.parametrize("name", ["0.5", "0.75", "0.875", "0.95"])
def test_a_mask_of_the_package_loads(name: str) -> None:
    mask = bosch.load_mask(f"smollm2-135m@{name}")
    assert mask.ratio_asked == float(name)
    evidence = json.loads((ready.FOLDER / f"smollm2-135m@{name}" / "evidence.json").read_text())
    assert evidence["cost"]["method"] == mask.method


@pytest.fixture
def published(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ready, "FOLDER", tmp_path / "masks")
    commands.main(["publish", str(run), NAME, "--to", str(tmp_path / "masks")])
    return tmp_path / "masks" / NAME


def test_a_published_mask_has_its_sinks_and_what_it_stands_on(run: Path, published: Path) -> None:
    files = {path.name: path.read_bytes() for path in published.iterdir()}
    assert files.keys() == {"mask.json", "sinks.safetensors", "evidence.json"}
    for name in ("mask.json", "sinks.safetensors"):
        assert files[name] == (run / "mask" / name).read_bytes()
    evidence = json.loads(files["evidence.json"])
    assert [(row["step"], row["value"]) for row in evidence["scores"]] == [(None, 100), (0, 50)]
    assert evidence["cost"]["method"] == "retrieval_head"
    commands.main(["publish", str(run), NAME, "--to", str(published.parent)])  # the same again
    assert {path.name: path.read_bytes() for path in published.iterdir()} == files


def test_a_ready_mask_is_found_by_its_name(
    run: Path,
    published: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="bosch")
    loaded, made = bosch.load_mask(NAME, model), bosch.load_mask(run / "mask" / "mask.json")
    assert loaded.mask.z == made.mask.z
    constants = [mask.mask.sink.known_constants() for mask in (loaded, made)]
    assert all(map(torch.equal, *constants))
    commands.main(["show", NAME])
    assert "window 32 tokens" in capsys.readouterr().out
    weights, tables = [], []
    for number, mask in enumerate((NAME, str(run / "mask" / "mask.json"))):
        out, table = tmp_path / f"hybrid-{number}", tmp_path / f"mask-{number}.tsv"
        materialize_model.main(["--model", str(TINY), "--mask", mask, "--out", str(out)])
        weights.append((out / "model.safetensors").read_bytes())
        commands.main(["export", mask, "--out", str(table)])
        tables.append(table.read_bytes())
    assert weights[0] == weights[1]
    assert tables[0] == tables[1]
    capsys.readouterr()
    words = ["--model", str(TINY), "--ratio", "0.5", "--window", "32", "--method", "from_file"]
    search_mask.main([*words, "--path", NAME, "--run-dir", str(tmp_path / "again")])
    again = bosch.load_mask(tmp_path / "again" / "mask" / "mask.json")
    assert again.mask.z == made.mask.z
    assert again.mask.sink.kind == "static"
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    words += ["--mask.options", f"path={NAME}", "--preset", "smoke", "--zero-shot"]
    recover.main([*words, "--eval.suites", "niah", "--run-dir", "chain"])
    said = capsys.readouterr().out
    assert "mask: starts" in said
    assert "calibration: starts" not in said  # nothing is chosen, and the file has its sinks


def test_other_weights_and_unknown_names_are_refused(published: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="bosch")
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.save_pretrained(tmp_path / TINY.name)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / TINY.name)
    with pytest.raises(UserError, match=rf"{NAME}/mask\.json: the mask was made for tiny-qwen3"):
        bosch.load_mask(NAME, other)
    with pytest.raises(UserError, match=rf"name of a ready mask: did you mean '{NAME}'"):
        bosch.load_mask("tiny-2layr@0.5")
    with pytest.raises(UserError, match=r"nowhere\.json"):
        bosch.load_mask("nowhere.json")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tiny", "MODEL@RATIO"),
        ("../tiny@0.5", "MODEL@RATIO"),
        ("tiny@0.5.0", "MODEL@RATIO"),
        ("tiny@.", "MODEL@RATIO"),
        ("tiny@0.75", "has the ratio 0.5"),
    ],
)
def test_a_name_says_model_and_ratio(run: Path, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        ready.publish(run, name, tmp_path)


def test_another_mask_of_a_name_is_not_replaced(run: Path, published: Path) -> None:
    (published / "mask.json").write_text("{}")
    with pytest.raises(UserError, match="holds another mask"):
        ready.publish(run, NAME, published.parent)
    with pytest.raises(UserError, match=r"holds no mask\.json"):
        ready.publish(published.parent, NAME, published.parent)
