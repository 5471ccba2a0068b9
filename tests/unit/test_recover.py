"""recipes/recover.py: what it says, what it refuses, what it leaves."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bosch.__main__ import main as bosch
from bosch.assets import asset_folder
from bosch.recipes import recover as recipe
from bosch.run.errors import exit_on_user_error

SMALLEST = asset_folder("tiny-qwen3-2layer")
Recover = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Recover:
    """The command, in this process and in an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        try:
            exit_on_user_error(lambda: recipe.main(arguments), debug=False)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_as_a_program_it_ends_the_same_way_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    program = [sys.executable, str(recipe.__file__), "--method", "bosh"]
    for more, code, start in (([], 2, "error: --method bosh"), (["--debug"], 1, "Traceback")):
        run = subprocess.run([*program, *more], cwd=tmp_path, capture_output=True, text=True)
        assert (run.returncode, run.stderr[: len(start)]) == (code, start)


def test_dry_run_says_what_the_run_will_take_and_leave(tmp_path: Path, recover: Recover) -> None:
    words = ("--preset", "smoke", "--train.keep-checkpoints", "1", "--ratio", "0.33", "--seed", "3")
    words += ("--eval.suites", "niah")
    said = recover(*words, "--dry-run").stdout
    assert "--ratio 0.33 means 6 of 16 groups, 0.375\n" in said
    time = r"\ntime here, of the whole run: about .*training \S+ s, start and report \S+ s\); "
    time += r"attention counts as products of matrices\n"
    assert re.search(time, said), said
    told = re.search(r"hybrid (\S+) MB, 1 evaluated\D+ (\S+) MB, 1 training states (\S+) MB", said)
    assert told, said
    run = recover(*words)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "runs" / "tiny-qwen3-2layer-bosch-r0.33-s3"
    saved = json.loads((folder / "run.json").read_text())
    assert (saved["config"]["window"], saved["command"]) == (32, [*words])
    log = (folder / "recover.log").read_text().splitlines()
    assert [line[20:] for line in log] == run.stdout.splitlines()
    folders = ("model", "train/step-000008", "train/checkpoints/step-000008")
    for megabytes, name in zip(told.groups(), folders, strict=True):
        files = [*(folder / name).iterdir()]
        weights = [f for f in files if f.suffix == ".safetensors"] or files
        size = sum(file.stat().st_size for file in weights)
        assert float(megabytes) == pytest.approx(size / 1e6, rel=0.05), name
    assert saved["config"]["sink"] == "static"
    saved["config"]["sink"] = "auto"  # as earlier versions stored it
    (folder / "run.json").write_text(json.dumps(saved))
    assert "disk:" not in recover(*words, "--dry-run").stdout  # nothing is left to do
    refused = recover(*words, "--run-dir", str(folder), "--sink", "none")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "sink: static -> (not there)" in refused.stderr


def test_it_begins_with_what_differs_and_ends_with_what_there_is_now(
    tmp_path: Path, recover: Recover
) -> None:
    words = ("--preset", "smoke", "--window", "16", "--zero-shot", "--eval.suites", "niah")
    run = recover(*words)
    assert run.returncode == 0, run.stderr
    first, *rest = run.stdout.split("run folder ", 1)[1].splitlines()
    assert first == "runs/tiny-qwen3-2layer-bosch-r0.75"
    changes = "unlike the preset: --window 16 --eval.suites niah (--show-settings lists all)"
    assert rest[:4] == [
        "--ratio 0.75 means 12 of 16 groups",
        "sink static",
        "preset smoke",
        changes,
    ]
    assert "max-variables" not in run.stdout

    *_, hybrid, generate, serve, report = run.stdout.splitlines()
    assert hybrid == f"the hybrid is in {first}/model"
    assert report == f"report in {first}/report/report.html"
    place, command = serve.split(": ", 1)
    assert place == "  serve (docs/serving.md)"
    assert command.endswith(f"bosch serve --model {first}/model")
    words = shlex.split(generate.removeprefix("  generate: "))
    assert Path(words[0]).name == "bosch"
    bosch([*words[1:], "--max-tokens", "4"])  # as a user would go on
    assert "| NIAH average | " in (tmp_path / first / "model" / "README.md").read_text()

    shown = recover("--preset", "smoke", "--dry-run", "--show-settings").stdout
    assert "--mask.max-variables 49" in shown
    assert "--show-settings" not in shown
    brief = recover("--preset", "smoke", "--dry-run", "--eval.samples", "2").stdout
    assert "unlike the preset: --eval.samples 2 (--show" in brief
    assert "all else as in the preset (--show" in recover("--preset", "smoke", "--dry-run").stdout


def test_commands_are_named_as_they_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", "")
    assert recipe.program("python") == str(own / "python")
    monkeypatch.setenv("PATH", str(own))
    assert recipe.program("python") == "python"


def test_all_that_is_missing_is_said_at_once(tmp_path: Path, recover: Recover) -> None:
    """Tests are offline."""
    wrong = "--preset smoke --window 4096 --data.source nowhere.txt --train.attention flsh"
    wrong += " --calibration.essays essays.json --eval.longbench-data zai-org/LongBench"
    words = ("--window 4096", "essays.json", "zai-org/LongBench", "gsm8k", "nowhere.txt", "flsh")
    for dry_run in ([], ["--dry-run"]):
        _, *lines = recover(*wrong.split(), *dry_run).stderr.splitlines()
        for line, named in zip(lines, words, strict=True):
            assert named in line
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("train.attention=flash", "train.attention flash CUDA"),
        (f"data.source=prolong-64k?tokenizer={SMALLEST}", "prolong-data-64K cache ?folder="),
        ("data.source=hf:nobody/texts", "hf:nobody/texts download"),
        ("data.source=text.txt", "3,400 bytes too little for 4,096 tokens name more text"),
        # As many bytes as tokens are needed, and too few tokens.
        ("data.source=more.txt", "tokens, too little for 4,096 4,096 held out; name more text"),
    ],
)
def test_what_cannot_run_here_is_refused(
    option: str, words: str, tmp_path: Path, recover: Recover
) -> None:
    """Or be fetched: tests are offline. And before the search."""
    (tmp_path / "text.txt").write_text("A word and more. " * 200)
    (tmp_path / "more.txt").write_text("A word and more. " * 600)
    run = recover("--preset", "smoke", f"--{option}", CUDA_VISIBLE_DEVICES="")
    assert (run.returncode, run.stderr[:7]) == (2, "error: ")
    assert [word for word in words.split() if word not in run.stderr] == []
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "more.txt"}
