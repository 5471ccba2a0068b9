"""docs/consa.md: learned and searched masks of a study side by side."""

import json
from pathlib import Path

import numpy as np
import pytest

from eval.compare import compare, recoveries
from eval.learned_page import MARK, write_learned_page
from eval.study import Study
from eval.study_tables import recovery_table
from tests.run_folders import FakeRun

METHODS = ("consa", "l1_gates", "bosch", "fisher")
RATIOS = (0.75, 0.5)


@pytest.fixture
def small_study(tmp_path: Path) -> Study:
    runs = [
        FakeRun("bosch", 0.75, seed, steps=(None, 0, 200), skill=lambda step, task: 0.5)
        for seed in (0, 1)
    ]
    runs.append(FakeRun("bosch", 0.5, steps=(None, 0)))
    runs.append(FakeRun("consa", 0.75, 1, steps=(None, 0), skill=lambda step, task: 0.5))
    runs.append(FakeRun("l1_gates", 0.75, steps=(None, 0, 120), learning_tokens=80_000))
    folders = [run.write(tmp_path / "runs") for run in runs]
    return Study(compare(folders), METHODS, 0.75)


def test_it_has_what_was_run_and_says_what_was_not(small_study: Study, tmp_path: Path) -> None:
    page = tmp_path / "consa.md"
    write_learned_page(small_study, METHODS, RATIOS, page)
    parts = page.read_text().split("\n## ")
    before, after = (
        next(part for part in parts if part.startswith(f"Ratio 0.75, {state}"))
        for state in ("before training", "after training")
    )
    assert "| consa | 1 | 0 + 0 | " in before  # the seed that was run
    assert "| bosch | 0, 1 | 0 + 0 | " in before
    assert "| fisher | not run |" in before
    assert "| consa | not run |" in after
    assert "| bosch | 0, 1 | 0 + 200k | " in after
    assert "| l1_gates | 0 | 80k + 120k | " in after
    assert not any(part.startswith("Ratio 0.5, after training") for part in parts)
    depth = next(part for part in parts if part.startswith("Depth at ratio 0.75"))
    assert "| bosch | 0 | " in depth
    nesting = next(part for part in parts if part.startswith("Nesting"))
    assert "| bosch | 0 | 0.5 to 0.75 | " in nesting


def test_losses_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Each seed has a held-out text of its own."""
    folders = []
    for method, seed, above in (("bosch", 0, 0.0), ("bosch", 1, 1.0), ("fisher", 1, 1.25)):
        run = FakeRun(method, seed=seed, steps=(None, 0, 200)).write(tmp_path / "runs")
        metrics = run / "train" / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        for row in rows:
            if "validation_loss" in row:
                row["validation_loss"] += above
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(run)
    study = Study(compare(folders), METHODS, 0.75)
    write_learned_page(study, METHODS, RATIOS, tmp_path / "consa.md")
    pages = [(tmp_path / "consa.md").read_text(), "\n".join(map(str, recovery_table(study).rows))]
    assert "| +0.250 |" in pages[0]
    assert "'200k', '1', " in pages[1]
    assert "'+0.250'" in pages[1]


def test_what_was_written_above_the_tables_stays(small_study: Study, tmp_path: Path) -> None:
    page = tmp_path / "consa.md"
    write_learned_page(small_study, METHODS, RATIOS, page)
    first = page.read_text()
    page.write_text(first.replace(MARK, f"What I read in them.\n\n{MARK}"))
    write_learned_page(small_study, METHODS, RATIOS, page)
    text = page.read_text()
    assert text.index("What I read") < text.index(MARK)
    assert text.replace("What I read in them.\n\n", "") == first


def test_a_learned_mask_pays_for_its_tokens(small_study: Study) -> None:
    """Scores on the way are means over the tokens since all have scores, and until then."""
    found = {row.run: row for row in recoveries(small_study.comparison)}
    learned, searched = found["tiny-qwen3-l1_gates-r0.75"], found["tiny-qwen3-bosch-r0.75"]
    assert learned.curve.tokens.tolist() == [80_000, 200_000]
    middle = float(np.interp(140_000, learned.curve.tokens, learned.curve.values))
    assert learned.mean_score.value == pytest.approx(middle)
    assert searched.mean_score.value == pytest.approx(searched.curve.values[0])  # it is level
    (run,) = [run for run in small_study.comparison.runs if run.method == "l1_gates"]
    assert (run.learning_tokens, run.trained_tokens) == (80_000, 120_000)
