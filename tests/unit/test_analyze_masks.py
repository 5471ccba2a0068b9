"""recipes/analyze_masks.py from mask files to numbers and pictures."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.masks.analysis import compare, find_chains, read_masks
from bosch.masks.mask import GroupMask, MaskFile, num_windowed, read_mask, write_mask
from bosch.model import ModelInfo
from bosch.recipes.analyze_masks import main
from bosch.run.errors import UserError
from tests.masks import MODEL

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


def read(out: Path) -> Any:
    return json.loads((out / "analysis.json").read_text())


# --- names, chains and panels ---


def test_masks_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", 0.5), write(tmp_path, "fisher", 0.5, seed=None)]
    runs += [write(tmp_path, "bosch", 0.75, seed, draw=seed) for seed in (0, 1)]
    masks = read_masks([*runs, runs[0] / "mask" / "mask.json", runs[1] / "mask"])
    names = [mask.full_name for mask in masks]
    assert names == ["bosch r0.5", "fisher r0.5", "bosch s0 r0.75", "bosch s1 r0.75"]


def test_chains_join_rising_ratios_of_one_seed(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", 0.75, seed, draw=seed) for seed in (0, 1)]
    runs += [write(tmp_path, "bosch", 0.5, seed, draw=seed) for seed in (0, 1)]
    runs += [write(tmp_path, "fisher", ratio, seed=None) for ratio in (0.25, 0.75)]
    runs += [write(tmp_path, "apl", 0.75, seed=3), write(tmp_path, "apl", 0.25, seed=None)]
    runs += [write(tmp_path, "razor", 0.25)]
    chains = find_chains(read_masks(runs))
    ratios = {name: [mask.ratio for mask in chain] for name, chain in chains.items()}
    # A mask without a seed was not drawn: it goes with the one of seed 3.
    bosch = {"bosch s0": [0.5, 0.75], "bosch s1": [0.5, 0.75]}
    assert ratios == bosch | {"fisher": [0.25, 0.75], "apl s3": [0.25, 0.75]}
    # Where there is one of the seed itself, that one.
    runs = [write(tmp_path / "apl", "apl", ratio, seed=0) for ratio in (0.5, 0.75)]
    masks = read_masks([write(tmp_path / "apl", "apl", 0.5, seed=None, draw=1), *runs])
    assert find_chains(masks) == {"apl": masks[1:]}


def test_chains_of_two_models_name_them(tmp_path: Path) -> None:
    models = [replace(SHAPE, revision=None, weight_hash=letter * 32) for letter in "ab"]
    runs = [
        write(tmp_path / str(model.weight_hash), "bosch", ratio, model=model)
        for model in models
        for ratio in (0.25, 0.5)
    ]
    assert list(find_chains(read_masks(runs))) == [f"bosch {model}" for model in models]


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
    printed = capsys.readouterr().out
    for left, used in ((0, 2), (1, 3)):
        files = [str(runs[number] / "mask" / "mask.json") for number in (left, used)]
        assert any(files[0] in line and files[1] in line for line in printed.splitlines())


# --- the command ---


def test_every_analysis_leaves_numbers_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("bosch", "fisher", "razor", "apl")
    runs = [
        write(tmp_path, name, ratio, draw=int(ratio * 100) if name == "bosch" else 0)
        for name in methods
        for ratio in (0.25, 0.5)
    ]
    out = tmp_path / "analysis"
    main([*map(str, runs), "--out", str(out)])
    assert {path.name for path in out.iterdir()} == {"analysis.json", "depth.png", "distances.png"}
    assert (out / "depth.png").read_bytes()[:4] == b"\x89PNG"
    results = read(out)
    masks = [read_mask(run / "mask" / "mask.json").mask for run in runs]
    assert len(results["pairs"]) == 28
    assert results["pairs"][0]["distance"] == compare(masks[0], masks[1]).distance
    assert results["pairs"][0]["expected_shared"] == pytest.approx(4 * 8 / 16)
    assert [row["method"] for row in results["turnover"]] == list(methods)
    # One draw at both ratios: what is on the window stays there.
    assert [row["raw"] > 0 for row in results["turnover"]] == [True, False, False, False]
    assert results["masks"][1]["layer_ratios"] == list(masks[1].layer_ratios)
    main([*map(str, runs), "--out", str(tmp_path / "again")])
    for path in out.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    printed = capsys.readouterr().out
    assert "org/small (0123456789ab), ratio 0.5 │     6 │" in printed
    assert "  bosch │ 0.25 │ 0.5 │" in printed


def test_one_mask_alone_has_its_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write(tmp_path, "bosch", 0.5)), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "depth.png").is_file()
    assert "no table of distances" in capsys.readouterr().out


def test_the_masks_of_table_5_are_written(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", ratio, draw=n) for n, ratio in enumerate((0.5, 0.75))]
    main([*map(str, runs), "--replacement", "3", "--out", str(tmp_path / "out")])
    rows = read(tmp_path / "out")["replacement"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    larger = read_mask(runs[1] / "mask" / "mask.json")
    for row in rows:
        made = read_mask(Path(row["file"]), larger.model)
        assert (made.method, made.ratio_asked) == ("replacement", 0.75)
        assert made.mask != larger.mask
    nested = [write(tmp_path, "fisher", ratio) for ratio in (0.25, 0.5)]  # of one draw
    with pytest.raises(UserError, match="--replacement needs"):
        main([*map(str, nested), "--replacement", "3", "--out", str(tmp_path / "nested")])


@pytest.mark.parametrize(("arguments", "named"), [([], "masks"), (["nowhere"], "nowhere")])
def test_mistakes_are_named(arguments: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        main([*arguments, "--out", str(tmp_path / "out")])
