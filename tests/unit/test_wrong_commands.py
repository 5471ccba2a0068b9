"""Wrong command lines and inputs of every program: exit code 2, one sentence that names the value,
no traceback, no new file or folder, and every file as before. The lines: tests/wrong_lines.py."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import benchmarks.__main__
from bosch.__main__ import main as run_bosch
from bosch.assets import asset_folder
from bosch.hybrid.materialize import materialize
from bosch.hybrid.shards import INDEX, SINGLE
from bosch.masks.mask import GroupMask, MaskFile, write_mask
from bosch.model import read_model_info
from bosch.programs import PROGRAMS
from bosch.recipes import serve_model
from bosch.run.dist import FolderLock
from bosch.run.errors import run_main
from tests.masks import small_record
from tests.sampled import sampled
from tests.wrong_lines import SMALL, WRONG_LINES


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Every file with its size and time, and every folder. In a folder that was there before, the
    lock and the log of a run that began are no results."""
    return {
        str(path): None if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.name.startswith(".lock") and path.name != "recover.log"
    }


def test_every_program_is_among_them() -> None:
    assert {line.split()[0] for line in WRONG_LINES} >= PROGRAMS.keys()


@pytest.mark.parametrize(("line", "words"), sampled(WRONG_LINES.items(), slice(None, None, 3)))
def test_a_wrong_command_ends_in_one_sentence_and_leaves_the_files(
    line: str,
    words: str,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "argv", ["bosch"])  # the command sets it
    # Or a server would take this process's place where `make serving` has been run.
    monkeypatch.setattr(serve_model, "usual_python", lambda: sys.executable)
    before = contents(inputs)
    with pytest.raises(SystemExit) as stop:
        run_bosch(shlex.split(line))
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, line, words)
    assert contents(inputs) == before


def test_a_wrong_benchmark_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", "latency", "--windw", "3"])
    with pytest.raises(SystemExit) as stop:
        run_main(benchmarks.__main__.main)
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, "latency --windw 3", "--windw --window")


# Mistakes that the command line alone shows: torch is not imported for them.
WITHOUT_TORCH = [
    "recovr",
    "recover --ratoi .5",
    "recover --model notes.txt",
    "calibrate --examples 0",
    f"train --model {SMALL} --out out --tokens-from nowhere",
    "evaluate --suite niha",
    "compare nowhere",
    f"generate --model {SMALL}",
    "mask show broken.json",
]
PROGRAM = """
import sys
from bosch.__main__ import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def run_program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        capture_output=True,
    )


@pytest.mark.parametrize("line", sampled(WITHOUT_TORCH, slice(None, None, 4)))
def test_a_mistake_in_the_command_line_loads_no_torch(line: str, inputs: Path) -> None:
    done = run_program(inputs, *shlex.split(line))
    check(done.returncode, done.stdout, done.stderr, line, WRONG_LINES[line])


@pytest.mark.parametrize("program", sampled(["", *PROGRAMS, "mask show"], slice(0, 3)))
def test_help_loads_no_torch(program: str, inputs: Path) -> None:
    done = run_program(inputs, *program.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout
    assert "python recipes/" not in done.stdout


# --- files and folders that are wrong in one way each ---


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
        run_bosch(shlex.split(f"tokens --model good {TOKENS} --out tokens"))
        run_bosch(shlex.split(f"calibrate --model good {CALIBRATION} --out calibration"))
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
    copy("own_window", layer_types=["sliding_attention"] * 2, **windows)

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
