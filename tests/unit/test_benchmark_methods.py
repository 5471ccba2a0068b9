"""The benchmark of all methods at its smallest: it runs, goes on where it stopped, and prints what
it measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from bosch.plugins import list_plugins
from recipes.benchmark import run_benchmark
from recipes.benchmarks.methods import Options, choose_methods, describe_table, summarize


def test_methods_are_judged_beside_full_and_windowed_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = tmp_path / "result.json", tmp_path / "docs" / "methods.md"
    arguments = [
        *("--model", "tiny-qwen3-2layer", "--methods", "interleave", "random_groups"),
        *("--ratio", "0.5", "--seeds", "2", "--samples", "1", "--lengths", "256"),
        *("--runs", str(tmp_path / "runs"), "--table", str(page), "--out", str(result)),
    ]
    run_benchmark("methods", arguments)
    rows = {row["name"]: row for row in json.loads(result.read_text())["rows"]}
    names = ["full attention", "everything windowed", "interleave", "random_groups"]
    assert list(rows) == names
    for name in names:
        assert 0 <= rows[name]["value"] <= 100
    assert (rows["interleave"]["masks"], rows["random_groups"]["masks"]) == (1, 2)
    assert rows["interleave"]["stderr_of_seeds"] == 0
    assert len(rows["random_groups"]["seconds"]) == 2
    text = page.read_text()
    assert f"| interleave | {rows['interleave']['value']:.1f} |" in text
    assert all(f"| {name} | " in text for name in list_plugins("bosch.methods"))
    # Again: nothing is predicted twice, and the page is the same.
    monkeypatch.setattr("eval.generate.Generator.generate", None)
    run_benchmark("methods", arguments)
    assert page.read_text() == text
    assert "complete" in capsys.readouterr().out


def test_methods_that_need_more_than_a_calibration_set_are_named(tmp_path: Path) -> None:
    names, left_out = choose_methods(Options(archive=tmp_path))
    assert "fisher" in names
    assert "--path" in left_out["from_file"]
    assert "learns from tokens" in left_out["consa"]
    assert {*names, *left_out} == set(list_plugins("bosch.methods"))


def rows_of(single: float, multikey: float, stderr: float = 2.0) -> list[dict[str, Any]]:
    told = {"stderr": stderr, "n": 12}
    return [
        {"task": "single", "length": 512, "value": single} | told,
        {"task": "multikey", "length": 512, "value": multikey} | told,
        {"task": "average", "length": 0, "value": (single + multikey) / 2} | told,
    ]


def test_row_has_mean_and_error_over_calibration_sets() -> None:
    row = summarize("full attention", [rows_of(80, 40), rows_of(90, 50), rows_of(70, 30)], [])
    assert row["value"] == 60
    assert row["stderr_of_seeds"] == pytest.approx(10 / 3**0.5)  # deviation 10 of three
    assert row["groups"] == {"single 512": 80, "multikey 512": 40}
    assert row["stderr_of_examples"] == 2


def test_table_ranks_methods_between_the_references() -> None:
    dense, windowed = (summarize(n, [rows_of(v, v)], []) for n, v in (("dense", 90), ("none", 5)))
    low, high = (
        summarize(n, [rows_of(v, v)], []) | {"seconds": [1.0, 3.0]}
        for n, v in (("a", 20), ("b", 60))
    )
    lines = describe_table([dense, windowed, low, high])
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| dense", "| b", "| a", "| none"]
    assert lines[3] == "| b | 60.0 |  | 2.0 | 60.0 | 60.0 | 0 | 2.0 |"
