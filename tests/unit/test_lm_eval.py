"""eval/lm_eval_bridge.py: lm-eval's numbers as rows, and a task of its own."""

import json
from pathlib import Path

import pytest

from bosch.eval.lm_eval_bridge import results_of
from bosch.eval.suites._interface import Result
from bosch.recipes import evaluate_model
from bosch.run.checkout import how_to_install
from bosch.run.errors import MissingFileError, UserError
from tests.lm_eval_task import NAME, write_task


def test_lm_eval_s_numbers_become_rows() -> None:
    """Output of lm-eval 0.4.13 for these two tasks, shortened."""
    needles = {"alias": "x", "4096,none": -1, "1024,none": 0.5, "1024_stderr,none": 0.1}
    sums = {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"}
    counts = {"niah_single_1": {"effective": 4}, "gsm8k": {"effective": 8}}
    found = {"results": {"niah_single_1": needles, "gsm8k": sums}, "n-samples": counts}
    assert list(results_of(found)) == [
        Result("niah_single_1", 1024, "string_match_all", 0.5, 0.1, 4),
        Result("gsm8k", 0, "exact_match strict-match", 0.25, None, 8),
    ]


def test_lm_eval_runs_a_task_or_is_named_as_missing(tmp_path: Path) -> None:
    arguments = ["--model", "tiny-qwen3-2layer", "--suite", "lm-eval:niah_single_1", "--limit", "1"]
    arguments += ["--out", str(tmp_path / "judged")]
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=how_to_install("lm-eval", "lm-eval")):
            evaluate_model.main(arguments)
        return
    tasks = write_task(tmp_path / "tasks", "one two three", " four")
    own = ["--suite", f"lm-eval:{NAME}", "--include-path", str(tasks), "--limit", "1"]
    evaluate_model.main([*arguments[:2], *own, "--out", str(tmp_path / "owned")])
    (row,) = json.loads((tmp_path / "owned" / "lm-eval" / "scores.json").read_text())["rows"]
    assert (row["task"], row["n"]) == (NAME, 1)
    with pytest.raises(MissingFileError, match=r"the data of hellaswag: .*HF_HOME"):
        evaluate_model.main([*arguments[:2], "--suite", "lm-eval:hellaswag", *arguments[-2:]])
    evaluate_model.main([*arguments, "--lengths", "256"])
    (row,) = json.loads((tmp_path / "judged" / "lm-eval" / "scores.json").read_text())["rows"]
    assert (row["task"], row["length"], row["n"]) == ("niah_single_1", 256, 1)
