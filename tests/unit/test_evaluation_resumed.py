"""An evaluation that was killed, and what became of its files meanwhile."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bosch.eval import runner
from bosch.eval.judging import Judging, judge
from bosch.eval.settings import Label, SuiteRun
from bosch.eval.suites import niah
from bosch.run.files import DamagedArtifactError
from tests.hybrid_folders import embedded_hybrid


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_hybrid(tmp_path_factory.mktemp("training"))


@pytest.fixture
def begun(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An evaluation that was killed before a call of a function of the runner."""
    settings = niah.Settings(lengths=(256,), tasks=("niah_single_1",))
    judging = Judging((SuiteRun("niah", settings, 2),))

    def begin(killed_before: str) -> tuple[Path, Any]:
        def evaluate() -> None:
            judge(hybrid, judging, Label("one", 4, 4), tmp_path / "out", tmp_path / "examples")()

        with monkeypatch.context() as patch:
            patch.setattr(runner, killed_before, raise_killed)
            with pytest.raises(RuntimeError, match="killed"):
                evaluate()
        return tmp_path / "out", evaluate

    return begin


def raise_killed(*_: Any) -> None:
    raise RuntimeError("killed")


def test_a_damaged_prediction_of_an_unfinished_evaluation_is_made_again(
    begun: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, evaluate = begun("write_rows")
    evaluate()
    wanted = (folder / "niah" / "predictions.jsonl").read_bytes()
    shutil.rmtree(folder)
    begun("write_rows")
    (path,) = (folder / ".work").glob("niah-*.jsonl")
    first, second = path.read_text().splitlines(keepends=True)
    row = json.loads(second)
    changed = json.dumps(row | {"prediction": "42"}) + "\n"
    path.write_text(first + changed + "[" * 50_000 + "\n" + '{"task": []}\n' + first)
    with caplog.at_level("INFO", "bosch"):
        evaluate()
    assert f"{path}, line 2" in caplog.text
    assert (folder / "niah" / "predictions.jsonl").read_bytes() == wanted


def test_damaged_predictions_of_an_unfinished_evaluation_are_named(begun: Any) -> None:
    folder, evaluate = begun("write_rows")
    evaluate()  # all is scored, but no manifest protects it yet
    path = folder / "niah" / "predictions.jsonl"
    content = path.read_text()
    first, _ = content.splitlines(keepends=True)
    for damaged in (content.replace('"prediction": "', '"prediction": "4', 1), first):
        path.write_text(damaged)
        with pytest.raises(DamagedArtifactError, match=str(path)):
            evaluate()
    path.unlink()
    evaluate()
    assert path.read_text() == content
