"""recipes/analyze_masks.py from mask files to numbers and pictures."""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.calibration import write_calibration
from bosch.masks.mask import GroupMask, MaskFile, num_windowed, read_mask, write_mask
from bosch.masks.named_masks import find_chains, find_panels, passed_over, read_masks
from bosch.masks.overlap import jaccard_distance
from bosch.model import ModelInfo, read_model_info
from eval.rows import write_rows
from recipes.analyze_masks import main, read_scores
from tests.attention_matrices import toy_calibration
from tests.masks import MODEL
from tests.model_factory import tiny_model

SHAPE = replace(MODEL, num_layers=4)


def write(
    runs: Path,
    method: str,
    ratio: float,
    seed: int | None = 0,
    model: ModelInfo = SHAPE,
    draw: int = 0,
) -> Path:
    """The mask of a run, drawn at random; `draw` stands for whatever made it."""
    places = list(itertools.product(range(model.num_layers), range(model.num_groups)))
    count = num_windowed(ratio, model.num_layers, model.num_groups)
    chosen = random.Random(f"{method} {draw}").sample(places, count)
    mask = GroupMask.from_windowed(chosen, model.num_layers, model.num_groups, 16)
    run = runs / f"{model.id.replace('/', '-')}-{method}-r{ratio}-s{seed}"
    (run / "mask").mkdir(parents=True)
    write_mask(run / "mask" / "mask.json", MaskFile(mask, model, method, ratio, seed=seed))
    return run


def result(run: str, step: int | None, task: str, value: float) -> dict[str, Any]:
    """A row of a run's results."""
    told = {"run": run, "step": step, "task": task, "value": value}
    return told | {"suite": "niah", "metric": "m"}


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


# --- names, chains and panels ---


def test_masks_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", 0.5), write(tmp_path, "fisher", 0.5, seed=None)]
    runs += [write(tmp_path, "bosch", 0.75, seed, draw=seed) for seed in (0, 1)]
    masks = read_masks([*runs, runs[0] / "mask" / "mask.json", runs[1] / "mask"])
    told = [mask.full_name for mask in masks]
    assert told == ["bosch r0.5", "fisher r0.5", "bosch s0 r0.75", "bosch s1 r0.75"]


def test_chains_join_rising_ratios_of_one_seed(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", 0.75, seed, draw=seed) for seed in (0, 1)]
    runs += [write(tmp_path, "bosch", 0.5, seed, draw=seed) for seed in (0, 1)]
    runs += [write(tmp_path, "fisher", 0.75, seed=3), write(tmp_path, "fisher", 0.25, seed=None)]
    runs += [write(tmp_path, "razor", 0.25)]
    chains = find_chains(read_masks(runs))
    ratios = {name: [mask.ratio for mask in chain] for name, chain in chains.items()}
    # Fisher's mask without a seed was not drawn: it goes with the one of seed 3.
    assert ratios == {"bosch s0": [0.5, 0.75], "bosch s1": [0.5, 0.75], "fisher": [0.25, 0.75]}


def test_a_seeds_own_mask_comes_before_one_without_a_seed(tmp_path: Path) -> None:
    runs = [write(tmp_path, "apl", ratio, seed=0) for ratio in (0.5, 0.75)]
    runs += [write(tmp_path, "apl", 0.5, seed=None, draw=1)]
    masks = read_masks(runs)
    (chain,) = find_chains(masks).values()
    assert chain == masks[:2]
    assert passed_over(masks, {"apl": chain}) == [(masks[2], masks[0])]


def test_masks_that_no_chain_takes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two calibration sets: nothing in either mask file tells them apart."""
    runs = [
        write(tmp_path, "fisher", ratio, seed=None, draw=draw).rename(tmp_path / f"{ratio}-{draw}")
        for draw in range(2)
        for ratio in (0.25, 0.5)
    ]
    assert [mask.name for mask in read_masks(runs)] == ["0.25-0", "0.5-0", "0.25-1", "0.5-1"]
    main([*map(str, runs), "--out", str(tmp_path / "out")])
    told = capsys.readouterr().out
    for left, used in ((0, 2), (1, 3)):
        files = [str(runs[number] / "mask" / "mask.json") for number in (left, used)]
        assert f"{files[0]} has no part in turnover and nesting: {files[1]} is" in told
    assert told.count("has no part") == 2


def test_two_models_share_a_panel_where_their_masks_have_the_same_names(tmp_path: Path) -> None:
    other = replace(SHAPE, id="org/other", revision="f" * 16, num_layers=6)
    runs = [write(tmp_path, name, 0.5, model=m) for m in (SHAPE, other) for name in ("a", "b")]
    runs += [write(tmp_path, name, 0.75) for name in ("a", "b")]
    panels = find_panels(read_masks(runs))
    found = [[(group[0].record.model.id, group[0].ratio) for group in panel] for panel in panels]
    assert found == [[("org/small", 0.5), ("org/other", 0.5)], [("org/small", 0.75)]]
    (alone,) = find_panels(read_masks([runs[0], runs[4]]))  # no ratio is shared
    assert [mask.ratio for mask in alone[0]] == [0.5, 0.75]


# --- the command ---


def test_every_analysis_leaves_numbers_and_a_picture(tmp_path: Path) -> None:
    methods = ("bosch", "fisher", "razor", "apl")
    runs = [
        write(tmp_path, name, ratio, draw=int(ratio * 100) if name == "bosch" else 0)
        for name in methods
        for ratio in (0.25, 0.5)
    ]
    for number, run in enumerate(runs):
        told = [(None, "average", 99), (0, "average", number), (0, "single", 50)]
        write_rows(run / "eval" / "results.jsonl", [result(run.name, *row) for row in told])
    out = tmp_path / "analysis"
    main([*map(str, runs), "--out", str(out)])
    names = ("distances", "depth", "turnover", "nesting", "performance")
    pictures = [*names, "chances"]
    assert {path.name for path in out.iterdir()} == {
        "masks.json",
        *(f"{name}.json" for name in names),
        *(f"{name}.png" for name in pictures),
    }
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in pictures)

    masks = [read_mask(run / "mask" / "mask.json").mask for run in runs]
    first, *_ = read(out, "distances.json")["pairs"]
    assert first["distance"] == jaccard_distance(masks[0], masks[1])
    assert len(read(out, "distances.json")["pairs"]) == 28
    assert first["random_same_total"]["expected_shared"] == pytest.approx(4 * 8 / 16)
    assert [row["method"] for row in read(out, "turnover.json")["turnover"]] == list(methods)
    nested = {row["method"]: row["is_nested"] for row in read(out, "nesting.json")["chains"]}
    assert nested == {"bosch": False, "fisher": True, "razor": True, "apl": True}
    depths = read(out, "depth.json")["masks"]
    assert depths[1]["layer_ratios"] == list(masks[1].layer_ratios)
    (measure,) = read(out, "performance.json")["measures"]
    assert (measure["measure"], measure["all"]["num_pairs"]) == ("niah m", 12)
    assert measure["all"]["num_masks"] == 8  # step 0 of each, not the dense model's


def test_runs_of_one_name_keep_their_own_scores(tmp_path: Path) -> None:
    runs = [write(tmp_path / folder, "bosch", 0.5, draw=n) for n, folder in enumerate(("a", "b"))]
    assert runs[0].name == runs[1].name
    masks = read_masks(runs)
    first, second = (mask.path for mask in masks)
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [result(str(runs[1]), 0, "average", 7)])
    write_rows(runs[0] / "eval" / "results.jsonl", [result(runs[0].name, 0, "average", 90)])
    assert read_scores((), masks) == {"niah m": {first: 90}}
    assert read_scores([rows], masks) == {"niah m": {first: 90, second: 7}}
    write_rows(runs[1] / "eval" / "results.jsonl", [result(runs[1].name, 0, "average", 10)])
    assert read_scores((), masks) == {"niah m": {first: 90, second: 10}}
    write_rows(rows, [result(runs[1].name, 0, "average", 7)])
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1: .*a/.* or .*b/.* whole path"):
        read_scores([rows], masks)


def test_masks_that_were_set_aside_have_no_scores(tmp_path: Path) -> None:
    run = write(tmp_path, "bosch", 0.5)
    shutil.copytree(run / "mask", run / "mask.old")
    write_rows(run / "eval" / "results.jsonl", [result(run.name, 0, "average", 90)])
    masks = read_masks([run, run / "mask.old"])
    assert read_scores((), masks) == {"niah m": {masks[0].path: 90}}


def test_weights_of_one_name_are_compared_apart(tmp_path: Path) -> None:
    models = [replace(SHAPE, revision=None, weight_hash=letter * 32) for letter in "ab"]
    for model in models:
        for draw in range(3):
            folder = tmp_path / str(model.weight_hash)
            run = write(folder, "bosch", 0.5, seed=draw, model=model, draw=draw)
            write_rows(run / "eval" / "results.jsonl", [result(run.name, 0, "average", draw)])
    main([*map(str, sorted(tmp_path.glob("*/*"))), "--out", str(tmp_path / "out")])
    (measure,) = read(tmp_path / "out", "performance.json")["measures"]
    assert (measure["all"]["num_masks"], len(measure["each"])) == (6, 2)


def test_same_masks_give_the_same_bytes(tmp_path: Path) -> None:
    runs = [write(tmp_path, name, 0.5) for name in ("a", "b")]
    for out in ("one", "two"):
        main([*map(str, runs), "--out", str(tmp_path / out)])
    files = [{p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("one", "two")]
    assert files[0] == files[1]


def test_one_mask_alone_has_its_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write(tmp_path, "bosch", 0.5)), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "depth.png").is_file()
    assert "no two masks of one model" in capsys.readouterr().out


def test_replacement_makes_the_masks_and_scores_them_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    tiny_model("qwen3", num_hidden_layers=4).save_pretrained(folder)
    info = read_model_info(folder)
    runs = [
        write(tmp_path, "bosch", ratio, model=info, draw=n) for n, ratio in enumerate((0.5, 0.75))
    ]
    calibration = tmp_path / "calibration"
    calibration.mkdir()
    write_calibration(calibration, toy_calibration(64, count=2))
    out = tmp_path / "out"
    command = [*map(str, runs), "--replacement", "--seeds", "2", "--out", str(out)]
    scored = [*command, "--model", str(folder), "--calibration", str(calibration)]
    main(scored)
    rows = read(out, "replacement.json")["rows"]
    assert [row["origin"] for row in rows] == ["as chosen", "smaller", "random"]
    assert [len(row["files"]) for row in rows] == [1, 2, 2]
    larger = read_mask(runs[1] / "mask" / "mask.json").mask
    for row in rows:
        for file in row["files"]:
            assert read_mask(Path(file), info).mask.num_windowed == larger.num_windowed
        assert 0 <= row["means"]["probability"] <= 1
    assert (out / "replacement.png").is_file()
    # Again: every score comes from the journal, and the model is not run.
    monkeypatch.setattr("bosch.search.scorer.Scorer.score", None)
    main(scored)
    assert read(out, "replacement.json")["rows"] == rows
    assert "bosch 0.5 \N{RIGHTWARDS ARROW} 0.75, random: " in capsys.readouterr().out


def test_nested_masks_leave_nothing_to_replace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write(tmp_path, "fisher", ratio) for ratio in (0.25, 0.5)]  # one draw, so nested
    main([*map(str, runs), "--replacement", "--out", str(tmp_path / "out")])
    assert "nothing to exchange" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "No masks were named"),
        (["nowhere"], r"nowhere is no mask\.json"),
        (["{run}", "--replacement"], "two ratios of one method"),
        (["{run}", "--results", "nowhere.jsonl"], "no such file"),
        (["{run}", "--results", "{rows}"], "row 1 has no field 'suite'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"run": "a", "value": 1}\n')
    places = {"run": write(tmp_path, "bosch", 0.5), "rows": rows}
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        main([*(a.format(**places) for a in arguments), "--out", str(tmp_path / "out")])
