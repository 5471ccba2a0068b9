"""The study of learned and searched masks at its smallest: it runs, a line a result, goes on from
the lines alone, and makes its page from them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bosch import progress
from recipes.benchmark import run_benchmark
from recipes.benchmarks._learned_masks_page import MARK, describe_rows, write_page
from recipes.benchmarks.learned_masks import VARIANTS


@pytest.fixture(autouse=True)
def quiet_end() -> Iterator[None]:
    yield
    progress.close()


def arguments_of(folder: Path, *variants: str) -> list[str]:
    return [
        *("--model", "tiny-qwen3-2layer", "--variants", *variants),
        *("--ratios", "0.5", "--seeds", "0", "--samples", "1", "--tokens", "16384"),
        *("--rows", str(folder / "rows.jsonl"), "--page", str(folder / "consa.md")),
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_cell_is_a_line_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = ("--runs", str(tmp_path / "runs"))
    both = arguments_of(tmp_path, "consa", "random_groups")
    trained = [*arguments_of(tmp_path, "consa"), "--train"]
    run_benchmark("learned_masks", [*both, *runs])
    run_benchmark("learned_masks", [*trained, *runs])
    rows = read_lines(tmp_path / "rows.jsonl")
    assert [(row["variant"], row["state"]) for row in rows] == [
        ("consa", "zero-shot"),
        ("random_groups", "zero-shot"),
        ("consa", "trained"),
    ]
    assert rows[0]["learning_tokens"] > 0
    assert rows[1]["learning_tokens"] == 0
    left = 16_384 - rows[0]["learning_tokens"]  # whole steps of two sequences, as it happens
    assert rows[2]["training_tokens"] == left
    assert left % (2 * 1024) == 0
    for row in rows:
        assert sum(line.count("0") for line in row["z"]) == 8
        assert 0 <= row["niah"]["value"] <= 100
    # What training says of its start is computed in another place.
    metrics = read_lines(tmp_path / "runs" / "consa-r0.5-s0" / "train" / "metrics.jsonl")
    assert rows[0]["validation_loss"] == pytest.approx(metrics[0]["validation_loss"], abs=1e-5)
    assert rows[2]["validation_loss"] < rows[0]["validation_loss"]
    # Another day: only the lines are left.
    page = (tmp_path / "consa.md").read_text()
    monkeypatch.setattr("recipes.benchmarks.learned_masks.run_cell", None)
    run_benchmark("learned_masks", both)
    run_benchmark("learned_masks", trained)
    assert (tmp_path / "consa.md").read_text() == page
    assert read_lines(tmp_path / "rows.jsonl") == rows


def row_of(variant: str, ratio: float, seed: int, niah: float, z: list[str]) -> dict[str, Any]:
    figure = {"value": niah, "stderr": 2.0, "n": 12}
    return {
        "variant": variant,
        "ratio": ratio,
        "seed": seed,
        "state": "zero-shot",
        "model": "model x",
        "samples": 1,
        "lengths": [512],
        "window": 8,
        "budget_tokens": 1000,
        "learning_tokens": 300,
        "training_tokens": 0,
        "niah": figure,
        "longbench": figure,
        "validation_loss": 1.5,
        "z": z,
        "unit": "group",
    }


def test_tables_hold_means_depth_and_nesting() -> None:
    half = ["1111", "0000", "1100", "0011"]
    rows = [
        row_of("consa", 0.5, 0, 40.0, half),
        row_of("consa", 0.5, 1, 60.0, half),
        row_of("consa", 0.75, 0, 30.0, ["1100", "0000", "1000", "0001"]),
        row_of("bosch", 0.5, 0, 70.0, half),
    ]
    lines = describe_rows(rows, tuple(VARIANTS))
    assert "| consa | zero-shot | 0, 1 | 300 | 0 | 50.0 ± 10.0 | 50.0 ± 10.0 | 1.500 |" in lines
    assert "| consa | trained | not run | | | | | |" in lines
    assert "| bosch | zero-shot | 0 | 300 | 0 | 70.0 ± 2.0 | 70.0 ± 2.0 | 1.500 |" in lines
    assert any(line.startswith("| consa | 0 | 4 0 2 2 | 1 layers |") for line in lines)
    (nested,) = [line for line in lines if "→" in line]
    assert nested.startswith("| consa | 0 | 0.5 → 0.75 | 100 % | 75 % | yes |")


def test_what_was_written_above_the_tables_stays(tmp_path: Path) -> None:
    page = tmp_path / "consa.md"
    write_page(page, [], tuple(VARIANTS))
    page.write_text(page.read_text().replace(MARK, f"What I read in them.\n\n{MARK}"))
    write_page(page, [row_of("consa", 0.5, 0, 40.0, ["10", "01"])], tuple(VARIANTS))
    text = page.read_text()
    assert text.index("What I read") < text.index(MARK) < text.index("## Ratio 0.5")
    assert text.count(MARK) == 1


def test_an_unknown_variant_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_benchmark("learned_masks", ["--variants", "consaa", "--rows", str(tmp_path / "rows")])
    assert "consaa" in capsys.readouterr().err
