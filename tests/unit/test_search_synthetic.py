"""Searches on synthetic models: budgets, accelerations and journals."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks._synthetic import FAMILIES, Spec, SyntheticModel, choose, inputs_of
from bosch.config import MaskConfig
from bosch.method import Selection
from bosch.methods._settings import default_settings
from bosch.run.errors import UserError
from bosch.search.journal import FILE
from bosch.search.settings import Accelerations

RATIO, KAPPA = 0.75, 8


@pytest.fixture
def head_scores(tmp_path: Path) -> Path:
    """A table of head scores like a published one: 12 layers of 8 heads."""
    draw = random.Random(0)
    rows = ("\t".join(str(draw.random() ** 4) for _ in range(8)) for _ in range(12))
    path = tmp_path / "heads.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def model(head_scores: Path) -> SyntheticModel:
    return SyntheticModel(Spec(8, 8, "published", pairs=True, seed=1, patterns=head_scores))


def search(model: SyntheticModel, folder: Path, method: str, **changes: Any) -> Selection:
    folder.mkdir(exist_ok=True)
    settings = replace(default_settings(method, MaskConfig(kappa=KAPPA)), **changes)
    return choose(method, inputs_of(model, settings, RATIO, 0, folder))


def trace(selection: Selection) -> dict[str, Any]:
    return dict(selection.score_trace or {})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The journal without times, and without work: after a kill no states are cached."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    unlike = ("seconds", "layer_forwards", "check")
    return [{n: v for n, v in line.items() if n not in unlike} for line in lines]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pairs", [False, True])
def test_a_search_beats_random_masks_on_both_sets(
    pairs: bool, family: str, head_scores: Path, tmp_path: Path
) -> None:
    model = SyntheticModel(Spec(8, 8, family, pairs, seed=1, patterns=head_scores))
    found = search(model, tmp_path, "global_swap")
    scores = trace(found)["hybrid"]  # through the scorer, text by text
    assert scores == pytest.approx(model.score(found.mask.z)._asdict(), abs=1e-4)
    for seed in range(10):
        drawn = choose("random_groups", inputs_of(model, None, RATIO, seed, tmp_path))
        for held_out in (False, True):
            ours, theirs = (model.score(one.mask.z, held_out) for one in (found, drawn))
            assert ours.accuracy + ours.probability > theirs.accuracy + theirs.probability


def test_guided_swaps_find_better_masks_with_as_many_evaluations(tmp_path: Path) -> None:
    """Than swaps in random order, from the same rankings."""
    better = {False: 0, True: 0}
    for seed in range(6):
        model = SyntheticModel(Spec(8, 8, "heavy", pairs=True, seed=seed))
        values = {}
        for optimizer in ("guided", "swap"):
            found = search(
                model, tmp_path / f"{optimizer}{seed}", "global_swap", optimizer=optimizer
            )
            score = model.score(found.mask.z, held_out=True)
            values[optimizer] = score.accuracy + score.probability
        better[values["guided"] > values["swap"]] += 1
    assert better[True] >= 5, better


@pytest.mark.parametrize("most", [None, 2, 30])
def test_a_search_spends_its_budget_exactly(
    most: int | None, model: SyntheticModel, tmp_path: Path
) -> None:
    found = search(model, tmp_path, "global_swap", max_evaluations=most)
    # The paper's plan: 8 for each of 8 layers in stage 1, and for the 4 with a choice in stage 3;
    # less 4 rankings; and the dense and the fully windowed model.
    assert trace(found)["evaluations"] == len(lines_of(tmp_path)[1:]) == (most or 8 * 12 - 4 + 2)
    assert sum(row.count(0) for row in found.mask.z) == 48


@pytest.mark.parametrize("optimizer", ["swap", "one_plus_one"])
@pytest.mark.parametrize("method", ["global_swap", "bosch_multi"])
def test_accelerations_change_no_mask(
    method: str, optimizer: str, model: SyntheticModel, tmp_path: Path
) -> None:
    changes = {"objective": "accuracy+probability", "optimizer": optimizer}
    fast, plain = (
        search(model, tmp_path / name, method, accelerations=accelerations, **changes)
        for name, accelerations in {"fast": Accelerations(), "plain": Accelerations.none()}.items()
    )
    assert fast.mask == plain.mask
    assert trace(fast)["evaluations"] == trace(plain)["evaluations"]
    work = [dict(selection.cost or {})["layer_forwards"] for selection in (fast, plain)]
    assert work[0] < 0.7 * work[1]


@pytest.mark.parametrize("method", ["global_swap", "bosch_multi"])
def test_a_search_resumes_from_any_line_of_its_journal(
    method: str, model: SyntheticModel, tmp_path: Path
) -> None:
    changes = {"objective": "accuracy+probability", "optimizer": "swap"}
    whole = search(model, tmp_path, method, **changes)
    lines, content = lines_of(tmp_path), (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    for kept in random.Random(0).sample(range(1, len(content)), 4):
        (tmp_path / FILE).write_bytes(b"".join(content[:kept]) + content[kept][:50])
        assert search(model, tmp_path, method, **changes).mask == whole.mask
        assert lines_of(tmp_path) == lines


def test_the_benchmark_completes_the_rows_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    options = "--sizes 4x4 --seeds 2 --ratios .5 --families heavy --pairs True --kappa 4".split()

    def run(*methods: str) -> list[dict[str, Any]]:
        more = ["--best-evaluations", "50", "--best-seeds", "1", "--out", str(path)]
        run_benchmark("search_synthetic", [*options, *more, "--methods", *methods])
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        return rows

    swaps = "global_swap,kappa=3"
    first = run(swaps, "best")
    assert [row["method"] for row in first] == [swaps, "best", swaps]
    assert first[1]["calibration"]["value"] >= first[0]["calibration"]["value"]
    path.write_text(path.read_text().replace('"cpu_seconds": ', '"cpu_seconds": 77'))
    again = run("random_groups", swaps)
    assert [row["method"] for row in again[3:]] == ["random_groups"] * 2
    assert all(row["cpu_seconds"] >= 77 for row in again[:3])
    assert "       random_groups │" in capsys.readouterr().out


def test_head_scores_of_a_smaller_model_are_refused(head_scores: Path) -> None:
    with pytest.raises(UserError, match="12 x 8 numbers, fewer than the model's 16 x 8"):
        SyntheticModel(Spec(16, 8, "published", pairs=False, seed=0, patterns=head_scores))
