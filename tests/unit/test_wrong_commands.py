"""Wrong command lines and inputs of every program: exit code 2, one sentence that names the value,
no traceback, and every file as before.

Most run in this process through the command `bosch`; some run as programs, where torch must not be
imported for a mistake that the command line alone shows.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bosch.__main__ import PROGRAMS, start
from bosch.assets import asset_folder
from bosch.masks.mask import write_mask
from bosch.run.lock import LockRecord
from tests.masks import small_record

SMALL = "tiny-qwen3-2layer"

# A command line, and words that its sentence must have.
WRONG_LINES = {
    # the command itself
    "recovr": "recovr 'recover'",
    "--ratio .5": "--ratio recover",
    "mask shwo mask.json": "shwo 'show'",
    "niah score": "score build",
    # recover
    "recover --ratoi .5": "--ratoi --ratio",
    "recover .5": "'.5'",
    "recover --ratio": "--ratio",
    "recover --ratio 1.2": "ratio 1.2",
    "recover --ratio -0.1": "ratio -0.1",
    "recover --ratio half": "--ratio 'half'",
    "recover --window 0": "window 0",
    "recover --window 3x": "--window '3x'",
    "recover --seed -1": "seed -1",
    "recover --method bosh": "--method bosh 'bosch'",
    "recover --preset papr": "--preset papr 'paper'",
    "recover --model notes.txt": "--model notes.txt",
    "recover --model empty/": "empty config.json",
    "recover --model broken_json/": "broken_json/config.json",
    "recover --model list_json/": "list_json/config.json",
    "recover --model no_shape/": "no_shape num_hidden_layers",
    "recover --train.attention flsh": "train.attention flsh",
    "recover --train.kernels fast": "--train.kernels 'fast' 'liger'",
    "recover --train.betas .9 1": "train.betas 1.0",
    "recover --train.batch-sequences 2.5": "--train.batch-sequences '2.5' whole",
    "recover --mask.options kapa=3": "kapa=3",
    "recover --mask.kappa 0": "mask.kappa 0",
    "recover --fresh maks": "--fresh maks 'mask'",
    "recover --from trian": "--from trian 'train'",
    "recover --data.tokens-from empty": "empty",
    "recover --data.tokens-from broken_tokens": "broken_tokens",
    "recover --data.tokens 100": "data.tokens 100",
    "recover --data.source nowhere.jsonl": "nowhere.jsonl",
    "recover --calibration.essays nowhere.json": "nowhere.json",
    "recover --run-dir notes.txt": "notes.txt",
    "recover --preset smoke --run-dir in_use": "in_use",
    "recover --preset smoke --run-dir broken_run": "broken_run/mask/started.json",
    "recover --eval.niah-lengths 512 256": "eval.niah_lengths 512, 256",
    "recover --eval.checkpoints 0 2": "eval.checkpoints 2.0",
    # search
    "search --method fihser": "fihser 'fisher'",
    "search --method fisher": "fisher --calibration",
    "search --method fisher --calibration nowhere": "nowhere",
    "search --method fisher --calibration empty": "empty",
    "search --method interleave --kapa 3": "--kapa --help",
    "search --method from_file": "--path",
    "search --method from_file --path nowhere.json": "nowhere.json",
    # calibrate
    "calibrate --examples 0": "examples 0",
    "calibrate --examples 5 --questions-per-context 2": "examples 5 2",
    "calibrate --length 99999": "--length 99999",
    "calibrate --tasks niah_single_9": "niah_single_9",
    "calibrate --against nowhere.jsonl": "--against nowhere.jsonl",
    "calibrate --against notes.txt": "notes.txt",
    "calibrate --essays notes.npz": "notes.npz",
    # materialize
    f"materialize --model {SMALL}": "--out",
    f"materialize --model {SMALL} --mask nowhere.json --out out": "nowhere.json",
    f"materialize --model {SMALL} --mask broken.json --out out": "broken.json",
    f"materialize --model {SMALL} --mask list.json --out out": "list.json",
    f"materialize --model {SMALL} --mask notes.npz --out out": "notes.npz",
    f"materialize --model {SMALL} --mask mask.json --out out": "mask.json org/small",
    f"materialize --model {SMALL} --mask mask.json --out out --reverse": "--reverse --mask",
    f"materialize --model {SMALL} --out out --reverse": SMALL,
    # tokens
    "tokens --source nowhere.jsonl": "nowhere.jsonl",
    "tokens --source toy@-1": "toy@-1",
    "tokens --sequence-length 1": "sequence_length 1",
    "tokens --tokens many": "--tokens 'many'",
    "tokens --model empty/ --source toy": "empty",
    "tokens --seed -3": "seed -3",
    # train
    f"train --model {SMALL} --out out": "--tokens",
    f"train --model {SMALL} --out out --tokens nowhere": "nowhere",
    f"train --model {SMALL} --out out --tokens empty": "empty",
    f"train --model {SMALL} --out out --tokens broken_tokens": "broken_tokens",
    f"train --model {SMALL} --out out --tokens empty --betas .9": "--betas 2",
    f"train --model {SMALL} --out out --tokens empty --precision fp8": "--precision 'fp8'",
    f"train --model {SMALL} --out out --tokens empty --evaluated 0 3": "evaluated 3.0",
    f"train --model {SMALL} --out out --tokens empty --budget 0": "budget 0",
    "train --model empty/ --out out --tokens empty": "empty",
    # evaluate
    "evaluate --suite niha": "niha 'niah'",
    "evaluate --suite": "--suite",
    "evaluate --suite lm-eval:": "lm-eval:",
    "evaluate --window 8": "--window 8",
    "evaluate --lengths 9999": "9999",
    "evaluate --limit 0": "samples 0",
    "evaluate --yarn .5": "yarn 0.5",
    "evaluate --suite longbench --longbench-data nowhere/": "nowhere",
    "evaluate --suite gsm8k --gsm8k-data notes.txt": "notes.txt",
    "evaluate --suite gsm8k --gsm8k-tasks gsm9k": "gsm9k",
    # compare, sweep
    "compare nowhere": "nowhere",
    "compare empty notes.txt": "empty notes.txt",
    "compare --basline fisher": "--basline --baseline",
    "compare broken_run --rebuild-tb=3": "3",
    "compare broken.jsonl": "broken.jsonl",
    "sweep": "--methods",
    "sweep --methods bosch,fihser": "fihser 'fisher'",
    "sweep --methods fisher --ratios x": "x",
    "sweep --methods fisher --seeds 0": "seeds 0",
    "sweep --methods fisher --windows 8,a": "--windows 8,a",
    "sweep --methods fisher --run-dir out": "--run-dir",
    "sweep --methods fisher --rations .5": "--rations",
    "sweep --methods fisher --rows broken.jsonl": "broken.jsonl",
    # generate
    f"generate --model {SMALL}": "--prompt --prompt-file",
    f"generate --model {SMALL} --prompt a --prompt-file notes.txt": "--prompt --prompt-file",
    f"generate --model {SMALL} --prompt-file nowhere.txt": "nowhere.txt",
    f"generate --model {SMALL} --prompt-file notes.npz": "notes.npz",
    f"generate --model {SMALL} --prompt a --top-p 2": "top_p 2.0",
    f"generate --model {SMALL} --prompt a --device tpu": "--device 'tpu'",
    "generate --model nowhere/ --prompt a": "nowhere/",
    "generate --model broken_weights/ --prompt a": "broken_weights",
    # analyze, mask
    "analyze nowhere.json": "nowhere.json",
    "analyze": "",
    "analyze broken.json": "broken.json",
    "analyze mask.json --seeds 0": "seeds 0",
    "analyze mask.json --replacement": "--replacement",
    "mask show": "PATH",
    "mask show nowhere.json": "nowhere.json",
    "mask show broken.json": "broken.json",
    "mask show list.json": "list.json",
    "mask show empty": "empty",
    "mask show notes.npz": "notes.npz",
    "mask show mask.json --context 0": "--context 0",
    "mask export mask.json --format exl --out out": "--format 'exl'",
    "mask import notes.txt --format duo --model nowhere": "nowhere",
    f"mask import notes.txt --format duo --model {SMALL} --window 8 --ratio .5": "notes.txt",
    f"mask import broken.json --format layer_types --model {SMALL}": "broken.json",
    # suites
    f"niah build --task x --length 256 --tokenizer {SMALL} --essays toy --out out": "",
    "longbench score --in nowhere.jsonl --out out": "nowhere.jsonl",
    "gsm8k score --in broken.jsonl --out out": "broken.jsonl",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with inputs that are wrong in one way each, and one good mask."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "notes.txt").write_text("These are notes.\n")
    (folder / "notes.npz").write_bytes(b"\x93NUMPY\xff\xfe\x00")
    (folder / "broken.json").write_text('{"z": [[1, 0')
    (folder / "broken.jsonl").write_text('{"task": "gsm8k"')
    (folder / "list.json").write_text("[]")
    write_mask(folder / "mask.json", small_record())
    (folder / "empty").mkdir()
    asset = asset_folder(SMALL)
    for name, config in {
        "broken_json": '{"model_type": ',
        "list_json": "[]",
        "no_shape": "{}",
    }.items():
        shutil.copytree(asset, folder / name)
        (folder / name / "config.json").write_text(config)
    shutil.copytree(asset, folder / "broken_weights")
    (folder / "broken_weights" / "model.safetensors").write_bytes(b"no weights")
    (folder / "broken_tokens").mkdir()
    for name in ("manifest.json", "tokens.json"):
        (folder / "broken_tokens" / name).write_text("{")
    (folder / "broken_run" / "mask").mkdir(parents=True)
    (folder / "broken_run" / "mask" / "started.json").write_text("{")
    (folder / "in_use").mkdir()
    LockRecord.of_this_process().write(folder / "in_use")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file; a lock and the log of a run that began are no results."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path): path.read_bytes()
        for path in files
        if not path.name.startswith(".lock") and path.name != "recover.log"
    }


def check(status: object, output: str, errors: str, line: str, words: str) -> None:
    assert status == 2, output + errors
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    assert "Traceback" not in errors
    for word in words.split():
        assert word in errors, f"{line}: {errors}"


def test_every_program_is_among_them() -> None:
    assert len(WRONG_LINES) >= 60
    assert {line.split()[0] for line in WRONG_LINES} > {*PROGRAMS, "niah", "longbench", "gsm8k"}


@pytest.mark.parametrize(("line", "words"), WRONG_LINES.items())
def test_a_wrong_command_ends_in_one_sentence_and_leaves_the_files(
    line: str,
    words: str,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "argv", ["bosch"])  # the command sets it
    before = contents(inputs)
    with pytest.raises(SystemExit) as stop:
        start("bosch", shlex.split(line))
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, line, words)
    assert contents(inputs) == before


# Mistakes that the command line alone shows: a process with a startup of its own, without torch.
WITHOUT_TORCH = [
    "recovr",
    "recover --ratoi .5",
    "recover --ratio 1.2",
    "recover --model notes.txt",
    "calibrate --examples 0",
    f"materialize --model {SMALL}",
    "tokens --tokens many",
    f"train --model {SMALL} --out out --tokens nowhere",
    "evaluate --suite niha",
    "compare nowhere",
    "sweep",
    f"generate --model {SMALL}",
    "analyze nowhere.json",
    "mask show broken.json",
    "longbench score --in nowhere.jsonl --out out",
]
PROGRAM = """
import sys
from bosch.__main__ import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def run_program(
    folder: Path, *words: str, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("line", WITHOUT_TORCH)
def test_a_mistake_in_the_command_line_loads_no_torch(line: str, inputs: Path) -> None:
    done = run_program(inputs, *shlex.split(line))
    check(done.returncode, done.stdout, done.stderr, line, WRONG_LINES[line])


@pytest.mark.parametrize("line", ["recover --ratio half", "sweep", "recover --train.kernels fast"])
def test_on_a_terminal_it_is_the_same_sentence(
    line: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There tyro colors what it prints, and wraps it."""
    monkeypatch.setenv("COLUMNS", "40")
    reader, terminal = os.openpty()
    done = run_program(inputs, *shlex.split(line), stdout=terminal)
    os.close(terminal)
    os.close(reader)
    check(done.returncode, "", done.stderr, line, WRONG_LINES[line])
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "",
        *PROGRAMS,
        "mask show",
        "niah build",
        "longbench score",
        "gsm8k score",
    ],
)
def test_help_loads_no_torch(program: str, inputs: Path) -> None:
    done = run_program(inputs, *program.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout
    assert "python recipes/" not in done.stdout
