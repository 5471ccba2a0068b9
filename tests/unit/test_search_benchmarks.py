"""The benchmarks of the search at their smallest, on the two-layer model: they measure, go on where
they stopped, and their rows make the page.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bosch import progress
from recipes.benchmark import run_benchmark
from recipes.benchmarks import _search, search, search_page, search_study, search_truth

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
    page = search_page.describe_speed(kept)
    assert f"| {work['swap']['value']:.1f}x |" in "\n".join(page)
    monkeypatch.setattr(search, "search", None)  # again: nothing is searched twice
    run_benchmark("search", [*MODEL, *small, *files])
    assert rows_of(out) == rows


def test_searches_are_judged_by_the_truth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, rows, out = (folder / name for name in ("truth.npz", "truth.jsonl", "truth.json"))
    arguments = [
        *(*MODEL, "--ratios", str(RATIO), "--seeds", "2", "--kappa", "4", "--examples", "4"),
        *("--values", str(values), "--rows", str(rows), "--runs", str(folder / "runs")),
        *("--out", str(out)),
    ]
    run_benchmark("search_truth", arguments)
    first = rows_of(out)
    names = [*search_truth.METHODS, *search_truth.bare_names()]
    assert [row["search"] for row in first] == names
    assert len(rows.read_text().splitlines()) == 2 * len(names)
    for row in first:
        assert (row["masks"], row["seeds"]) == (120, 2)
        assert row["worst_gap"] >= row["gap"] >= 0
        assert (row["value"] == 100) == (row["gap"] == 0)
        assert 1 <= row["rank"] <= 120
    # The values are those of the masks: scored once more, without the table.
    options = search_truth.Options(
        model=MODEL[1], ratios=(RATIO,), examples=4, values=values, runs=folder / "runs"
    )
    (table,) = search_truth.read_tables(options)[1].values()
    setup = _search.set_up(search_truth.config_of(options), options.runs)
    objective = search_truth.MaskObjective(
        search_truth.Scorer(setup.model, setup.calibration, setup.config.window),
        setup.calibration,
        "accuracy",
    )
    for z in list(table)[::40]:
        assert objective(z).probability == pytest.approx(table[z].probability, abs=1e-5)
    # Again: a row that was lost is made again, the same; no mask is scored again.
    kept = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(kept[:-1]) + kept[-1][:20])
    capsys.readouterr()
    run_benchmark("search_truth", arguments)
    again, before = json.loads(rows.read_text().splitlines()[-1]), json.loads(kept[-1])
    assert again["z"] == before["z"]
    assert again["probability"] == pytest.approx(before["probability"], abs=1e-6)
    assert rows.read_text().startswith("".join(kept[:-1]))
    assert "all masks" not in capsys.readouterr().out
    # Searches with more evaluations are kept beside these, and not mixed with them.
    more = [*arguments, "--kappa", "5", "--seeds", "1"]
    run_benchmark("search_truth", more)
    assert {row["seeds"] for row in rows_of(out)} == {1}
    assert len(rows.read_text().splitlines()) == 3 * len(names)


@pytest.mark.slow
def test_masks_are_judged_on_held_out_tests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = folder / "study.jsonl"
    arguments = [
        *(*MODEL, "--seeds", "2", "--kappa", "2", "--examples", "4", "--samples", "1"),
        *("--length", "512"),
        *("--kappas", "2", "--kappa-seeds", "1", "--ratios", "0.5"),
        *("--searches", "bosch", "bosch_plus", "random_groups"),
        *("--rows", str(rows), "--runs", str(folder / "runs")),
    ]
    run_benchmark("search_study", arguments)
    found = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert len(found) == 2 + 2 * 3 + 2 + 1  # the ends, the masks, the layers, the groups
    assert found["dense"]["niah"] > found["windowed"]["niah"]
    assert len(found["groups at 0.5"]["full"]) == 16
    options = search_study.Options(
        model=MODEL[1],
        seeds=2,
        kappa=2,
        examples=4,
        length=512,
        samples=1,
        ratios=(0.5,),
        rows=rows,
    )
    page = "\n".join(search_page.describe_study(search_study.Study(options)))
    assert "| random_groups | 2 |" in page
    assert "- bosch at 0.5, kappa 10: seeds 0, 1, 2" in page  # not run: kappas of the defaults
    assert "Not measured" not in page
    # Again: nothing is searched or judged twice.
    monkeypatch.setattr(search_study, "search", None)
    monkeypatch.setattr(search_study.measure_tiny, "judge_of", None)
    before = rows.read_text()
    run_benchmark("search_study", arguments)
    assert rows.read_text() == before


def test_the_page_says_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "search.md"
    none = [f"--{name}={tmp_path / name}" for name in ("speed", "truth-values", "truth-rows")]
    run_benchmark("search_page", [f"--page={page}", *none, f"--study={tmp_path / 'study'}"])
    assert page.read_text().count("Not measured") == 3


def test_a_search_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="--searches nomad: it must be one of bosch_plus, swap"):
        search.Options(searches=("nomad",))
    with pytest.raises(ValueError, match="--parts mask: it must be one of masks, layers"):
        search_study.Options(parts=("mask",))
