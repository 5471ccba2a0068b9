"""The benchmarks of the search at their smallest, on the two-layer model: they measure, and go on
where they stopped.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import search
from benchmarks.__main__ import run_benchmark
from bosch.run import progress

MODEL = ("--model", "tiny-qwen3-2layer")
RATIO = 0.875  # 2 of 16 groups stay full: 120 masks


@pytest.fixture(autouse=True)
def threads_and_lines_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    progress.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def test_accelerations_are_measured_beside_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = folder / "speed.json", folder / "speed.jsonl"
    small = "--examples 4 --kappa 2 --ratios 0.5 --searches swap bosch --switches swap".split()
    files = ["--no-preset", "--rows", str(kept), "--runs", str(folder / "runs"), "--out", str(out)]
    run_benchmark("search", [*MODEL, *small, *files])
    rows = rows_of(out)
    work = {row["search"]: row for row in rows if "layer-forwards: none" in row["name"]}
    assert work["swap"]["at_least"] == 4
    assert "at_least" not in work["bosch"]
    for row in work.values():
        # Two layers of one text for each evaluation; without the memo some masks more than once.
        assert row["none"] >= 2 * row["texts"] * row["evaluations"] - 1e-6
        assert row["value"] == row["none"] / row["all"] > 1
    switches = {row["switch"]: row for row in rows if "switch" in row}
    assert set(switches) == set(search.SWITCHES)
    assert switches["answer_rows"]["value"] > 1
    monkeypatch.setattr(search, "search", None)  # again: nothing is searched twice
    run_benchmark("search", [*MODEL, *small, *files])
    assert rows_of(out) == rows


def test_a_search_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="--searches nomad: it must be one of bosch_plus, swap"):
        search.Options(searches=("nomad",))
