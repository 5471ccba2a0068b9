"""From an empty folder to a report with one command, nothing prepared: the model and the text are
on the hub, for which a local folder stands in. And the same without a hub.

What is typed and answered is shown by

    python -m pytest tests/chain/test_first_hour.py -m "slow or not slow" -k leads -rP
"""

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bosch.recipes import generate_text, presets, recover
from bosch.run.errors import MissingFileError
from tests.stand_in_hub import connect, write_dataset, write_model, write_text

MODEL = "Qwen/Qwen3-0.6B-Base"
DATASET, _, CONFIG = presets.SHORT_TEXT.removeprefix("hf:").partition("?config=")
COMMAND = f"--model {MODEL} --ratio 0.75".split()
# Less of everything than the preset `small` has, which such a model gets.
SHORT = (
    "--data.tokens 8192 --data.repeats 0 --calibration.examples 8 --mask.kappa 2 "
    "--data.held-out-sequences 8 --eval.samples 1 --eval.suites niah --eval.checkpoints 0 1"
).split()


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one. The hub is out of reach."""
    connect(tmp_path / "hub", monkeypatch)
    monkeypatch.setattr(presets, "TOY_BYTES", 0)  # the stand-in has so few weights, not the model
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def type_in(main: Callable[[Sequence[str]], None], *words: str) -> str:
    """Run a command. Its output is returned, and shown by `pytest -rP`."""
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        main(words)
    verb = {recover.main: "recover", generate_text.main: "generate"}[main]
    print(f"$ bosch {verb} {shlex.join(words)}\n{answer.getvalue()}")
    return answer.getvalue()


@pytest.mark.parametrize("offline", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_command_leads_from_an_empty_folder_to_the_report(
    offline: bool, empty_folder: Path
) -> None:
    """And one more to text of the hybrid, whose folder is in the run."""
    hub = empty_folder.parent / "hub"
    if offline:
        write_model(empty_folder.parent / "elsewhere", MODEL).rename("model")
        folder = Path("model")
        write_text(empty_folder / "text.jsonl", 400)
        given = ["--model", str(folder), "--data.source", "text.jsonl", "--preset", "small"]
    else:
        write_model(hub, MODEL)
        write_dataset(hub, DATASET, CONFIG, num_documents=400)
        given = COMMAND
    assert "preset small" in type_in(recover.main, *given, *SHORT)
    (run,) = (path for path in Path("runs").iterdir() if path.name != "shared")
    assert (run / "report" / "report.html").is_file()
    facts = json.loads((run / "calibration" / "reference.json").read_text())["facts"]["settings"]
    source = "text.jsonl" if offline else presets.SHORT_TEXT
    assert facts["essays"] == f"text:{source}"
    (trained,) = run.glob("train/step-*")
    words = ["--model", str(trained), "--prompt", "Once upon a time", "--max-tokens", "4"]
    assert "answer: 4 tokens" in type_in(generate_text.main, *words)


def test_without_a_hub_it_names_the_two_options_that_it_needs(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is demanded before anything runs, and then that these two are enough."""
    for more, named in (
        ([], r"^\S+ and text .*--model DIR --data\.source TEXT, .*\.$"),
        (["--data.source", "text.jsonl"], r"^\S+ is on the hub, .*--model DIR\.$"),
    ):
        with pytest.raises(MissingFileError, match=named):
            recover.main([*COMMAND, *more, "--dry-run"])
    folder = write_model(empty_folder.parent / "elsewhere", MODEL)
    mine = ["--preset", "small", "--model", str(folder), "--ratio", "0.75"]
    with pytest.raises(MissingFileError, match=r"--data\.source TEXT") as refused:
        recover.main([*mine, "--dry-run"])
    assert len(str(refused.value)) < 5 * 100
    assert [*empty_folder.iterdir()] == []
    write_text(empty_folder / "text.jsonl", 400)
    recover.main([*mine, "--data.source", "text.jsonl", "--dry-run"])
    assert "train: run" in capsys.readouterr().out
