"""Analyses of masks: values worked by hand, the paper's table 3, null models; and `bosch analyze`,
from mask files to numbers and pictures."""

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bosch
from bosch.hybrid.sinks import write_constants
from bosch.masks.analysis import (
    ScoredMask,
    compare,
    correlate_scores,
    find_chains,
    overlap_chances,
    read_masks,
    replace_groups,
    turnover,
)
from bosch.masks.mask import GroupMask, MaskFile, num_windowed, read_mask, write_mask
from bosch.methods import from_file
from bosch.methods._choose import make_mask
from bosch.recipes.analyze_masks import main
from bosch.run.errors import UserError
from bosch.sink import CONSTANTS_FILE, Sink, SinkConstants
from tests.convex_toy import inputs_without_model
from tests.masks import MODEL
from tests.run_folders import FakeRun


def mask_of(*rows: str, unit: str = "group") -> GroupMask:
    return GroupMask.from_rows(rows, 16, unit)  # type: ignore[arg-type]


def random_mask(num_layers: int, num_groups: int, windowed: int, seed: object) -> GroupMask:
    everything = list(itertools.product(range(num_layers), range(num_groups)))
    chosen = random.Random(str(seed)).sample(everything, windowed)
    return GroupMask.from_windowed(chosen, num_layers, num_groups, 16)


def test_distance_is_one_minus_shared_over_either() -> None:
    first, second = mask_of("0011", "1101"), mask_of("0101", "1111")
    # Windowed: {00, 01, 12} and {00, 02}; one shared of four.
    assert compare(first, second)["distance"] == 0.75
    assert compare(first, first)["distance"] == 0
    assert compare(mask_of("11"), mask_of("11"))["distance"] == 0
    assert compare(mask_of("11"), mask_of("01"))["distance"] == 1
    with pytest.raises(UserError, match="1 layers x 2 groups and 2 layers x 2 groups"):
        compare(mask_of("01"), mask_of("01", "01"))


def test_normalized_turnover_agrees_with_table_3() -> None:
    # T and T~ of table 3, in per cent: 1.7B, 8B and 1.7B
    for first, second, raw, normalized in ((0.25, 0.5, 30, 30), (0.5, 0.75, 15, 30),
                                           (0.75, 0.875, 6, 36)):  # fmt: skip
        num_smaller, num_larger = (round(ratio * 28 * 8) for ratio in (first, second))
        given_up = round(raw / 100 * num_smaller)
        places = [divmod(number, 8) for number in range(28 * 8)]
        smaller = GroupMask.from_windowed(places[:num_smaller], 28, 8, 16)
        larger = GroupMask.from_windowed(places[given_up : given_up + num_larger], 28, 8, 16)
        measured = {name: share or 0 for name, share in turnover(smaller, larger).items()}
        assert 100 * measured["raw"] == pytest.approx(raw, abs=0.5)
        # T is rounded in the table.
        assert 100 * measured["normalized"] == pytest.approx(normalized, abs=2)
        # Random masks: 1 - the larger ratio.
        assert measured["chance"] == pytest.approx(1 - second)
        assert measured["normalized_chance"] == pytest.approx({0.875: 0.75}.get(second, 0.5))


def test_the_chance_of_an_overlap_counts_all_draws() -> None:
    drawn = [len({0, 1, 2} & set(draw)) for draw in itertools.combinations(range(7), 4)]
    counts = np.bincount(drawn, minlength=4) / len(drawn)
    measured = overlap_chances(mask_of("0001111"), mask_of("0000111"))
    np.testing.assert_allclose(list(measured.values()), counts)
    # Qwen3 14B and more: no overflow.
    large = (random_mask(48, 8, windowed, seed=0) for windowed in (192, 336))
    assert sum(overlap_chances(*large).values()) == pytest.approx(1)


def test_groups_of_the_smaller_ratio_are_swapped_in() -> None:
    """A' of the paper's C.1: the larger mask keeps its size and takes over all that it lacked."""

    def windowed(mask: GroupMask) -> set[tuple[int, int]]:
        return {(l, g) for l, row in enumerate(mask.z) for g, bit in enumerate(row) if not bit}

    smaller, larger = random_mask(6, 4, 8, seed=1), random_mask(6, 4, 14, seed=5)
    incoming = windowed(smaller) - windowed(larger)
    assert incoming
    swapped = [replace_groups(smaller, larger, seed) for seed in range(3)]
    for mask, count in swapped:
        assert (count, mask.num_windowed) == (len(incoming), larger.num_windowed)
        assert windowed(mask) - windowed(larger) == incoming
    assert len({mask for mask, _ in swapped}) > 1
    assert replace_groups(smaller, larger, 0) == swapped[0]
    mask, _ = replace_groups(smaller, replace(larger, own_windows=(512, 512)), 0)
    assert mask.own_windows == (512, 512)


def test_distance_and_score_correlate_by_rank() -> None:
    masks = {"a": mask_of("0111"), "b": mask_of("0011"), "c": mask_of("1100")}
    # Distances of ab, ac, bc: 1/2, 1, 1. Differences of the scores: 1, 5, 4. Ranks 1, 2.5, 2.5 and
    # 1, 3, 2 have the correlation 1.5 / sqrt(1.5 * 2).
    scored = [ScoredMask(n, masks[n], score) for n, score in zip("abc", (10, 11, 15), strict=True)]
    found = correlate_scores(scored)
    assert found["spearman"] == pytest.approx(1.5 / (1.5 * 2) ** 0.5)
    assert (found["methods"], found["pairs"]) == (3, 3)
    # Another seed of a method is another pair with the others, none with itself.
    again = correlate_scores([*scored, ScoredMask("a", mask_of("1011"), 10)])
    assert (again["methods"], again["pairs"]) == (3, 5)
    alike = correlate_scores([replace(one, score=7.0) for one in scored])
    assert (alike["spearman"], alike["low"], alike["high"]) == (None, None, None)
    assert correlate_scores([])["spearman"] is None


def test_the_interval_of_a_correlation_is_over_methods() -> None:
    """Scores that follow the masks are told from scores that do not; copies of a method's masks do
    not make the interval smaller, as they would if pairs were drawn."""
    chosen = [random_mask(4, 8, 16, seed=n) for n in range(9)]
    target = random_mask(4, 8, 16, seed="target")
    close = [-compare(mask, target)["distance"] for mask in chosen]
    chance = random.Random(0).sample(close, len(close))
    sides = []
    for scores in (close, chance):
        members = [
            ScoredMask(str(n), m, s) for n, (m, s) in enumerate(zip(chosen, scores, strict=True))
        ]
        once, many = correlate_scores(members), correlate_scores(members * 3)
        assert once["spearman"] == pytest.approx(many["spearman"])
        assert (once["low"], once["high"]) == pytest.approx((many["low"], many["high"]))
        sides.append(once)
    assert (sides[0]["spearman"] or 0) > (sides[1]["spearman"] or 0)
    assert (sides[1]["low"] or 0) < 0 < (sides[1]["high"] or 0)


def write(
    runs: Path, method: str, ratio: float, seed: int | None = 0, draw: int = 0, sink: str = "none"
) -> Path:
    """The mask of a run, drawn at random; `draw` stands for whatever made it."""
    mask = random_mask(4, 4, num_windowed(ratio, 4, 4), f"{method} {draw}")
    mask = replace(mask, sink=Sink.parse(sink))
    run = runs / f"{method}-r{ratio}-s{seed}-{sink}"
    (run / "mask").mkdir(parents=True)
    model = replace(MODEL, num_layers=4)
    write_mask(run / "mask" / "mask.json", MaskFile(mask, model, method, ratio, seed=seed))
    return run


def analyze(runs: list[Path], out: Path, *options: str) -> Any:
    main([*map(str, runs), "--out", str(out), *options])
    return json.loads((out / "analysis.json").read_text())


def test_chains_join_rising_ratios_of_one_seed(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", 0.75, seed, draw=seed) for seed in (0, 1)]
    runs += [write(tmp_path, "bosch", 0.5, seed, draw=seed) for seed in (0, 1)]
    runs += [write(tmp_path, "fisher", ratio, seed=None) for ratio in (0.25, 0.75)]
    runs += [write(tmp_path, "apl", 0.75, seed=3), write(tmp_path, "apl", 0.25, seed=None)]
    chains = find_chains(read_masks(runs))
    ratios = {name: [mask.ratio for mask in chain] for name, chain in chains.items()}
    # A mask without a seed was not drawn: it goes with the one of seed 3.
    bosch = {"bosch s0": [0.5, 0.75], "bosch s1": [0.5, 0.75]}
    assert ratios == bosch | {"fisher": [0.25, 0.75], "apl s3": [0.25, 0.75]}
    runs += [write(tmp_path, "fisher", ratio, None, sink="tokens=4") for ratio in (0.25, 0.5)]
    found = find_chains(read_masks(runs))["fisher sink tokens=4"]
    assert [mask.ratio for mask in found] == [0.25, 0.5]


@pytest.mark.pictures
def test_every_analysis_leaves_numbers_and_pictures(tmp_path: Path) -> None:
    methods = ("bosch", "fisher", "razor", "apl")
    runs = [
        write(tmp_path, name, ratio, draw=int(ratio * 100) if name == "bosch" else 0)
        for name in methods
        for ratio in (0.25, 0.5)
    ]
    out = tmp_path / "analysis"
    results = analyze(runs, out)
    assert {path.name for path in out.iterdir()} == {"analysis.json", "distances.png"}
    assert (out / "distances.png").read_bytes()[:4] == b"\x89PNG"
    masks = [read_mask(run / "mask" / "mask.json").mask for run in runs]
    assert len(results["pairs"]) == 28
    assert results["pairs"][0]["distance"] == compare(masks[0], masks[1])["distance"]
    assert results["pairs"][0]["expected_shared"] == pytest.approx(4 * 8 / 16)
    assert [row["method"] for row in results["turnover"]] == list(methods)
    # One draw at both ratios: what is on the window stays there.
    assert [row["raw"] > 0 for row in results["turnover"]] == [True, False, False, False]
    analyze(runs, tmp_path / "again")
    for path in out.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_masks_and_scores_of_runs_are_correlated(tmp_path: Path) -> None:
    def run(method: str, right: float, seed: int = 0) -> Path:
        return FakeRun(method, seed=seed, steps=(0,), skill=lambda step, task: right).write(
            tmp_path
        )

    runs = [run("bosch", 0.9), run("fisher", 0.6, seed=1), run("razor", 0.3)]
    for run_path in runs:  # some suites have an average of each length too
        path = run_path / "eval" / "step-000000" / "niah" / "scores.json"
        scores = json.loads(path.read_text())
        average = next(row for row in scores["rows"] if row["task"] == "average")
        scores["rows"] += [average | {"length": length, "value": 0.0} for length in (512, 1024)]
        path.write_text(json.dumps(scores))
    rows = analyze(runs, tmp_path / "out")["correlation"]
    assert {row["suite"] for row in rows} == {"niah", "longbench"}
    assert all((row["ratio"], row["methods"], row["pairs"]) == (0.75, 3, 3) for row in rows)
    # A mask without its run has no scores.
    alone = [run / "mask" / "mask.json" for run in runs]
    assert analyze(alone, tmp_path / "same")["correlation"] == rows
    (moved := tmp_path / "alone").mkdir()
    files = [path.rename(moved / f"{n}.json") for n, path in enumerate(alone)]
    assert analyze(files, tmp_path / "none")["correlation"] == []


def test_the_masks_of_table_5_are_written(tmp_path: Path) -> None:
    runs = [write(tmp_path, "bosch", ratio, draw=n) for n, ratio in enumerate((0.5, 0.75))]
    rows = analyze(runs, tmp_path / "out", "--replacement", "3")["replacement"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    larger = read_mask(runs[1] / "mask" / "mask.json")
    for row in rows:
        made = read_mask(Path(row["file"]), larger.model)
        assert (made.method, made.ratio_asked) == ("replacement", 0.75)
        assert made.mask != larger.mask


def test_the_masks_of_table_5_keep_their_sinks(tmp_path: Path) -> None:
    """Each ratio's mask has constants of its own, as from another calibration set."""
    inputs, runs, constants = inputs_without_model(from_file, (4, 4), 0.5), [], {}
    for number, ratio in enumerate((0.25, 0.5, 0.75)):
        runs.append(write(tmp_path, "bosch", ratio, draw=number))
        record = read_mask(path := runs[-1] / "mask" / "mask.json")
        mask = replace(record.mask, sink=Sink("static"))
        write_mask(path, replace(record, mask=mask, model=inputs.model_info))
        shape, draw = (4, 4, inputs.model_info.head_dim), torch.Generator().manual_seed(number)
        constants[ratio] = SinkConstants(*(torch.randn(shape, generator=draw) for _ in range(2)))
        write_constants(path, Sink("static", constants=constants[ratio]))
    rows = analyze(runs, tmp_path / "out", "--replacement", "2")["replacement"]
    assert [row["larger_ratio"] for row in rows] == [0.5, 0.5, 0.75, 0.75]
    for row in rows:
        path, expected = Path(row["file"]), constants[row["larger_ratio"]]
        loaded = bosch.load_mask(path)
        settings = from_file.Settings(path=path)
        assert from_file.own_sink(settings, 16) == loaded.mask.sink == Sink("static")
        asked = replace(inputs, settings=settings, ratio=row["larger_ratio"], window_tokens=16)
        selection = make_mask("from_file", replace(asked, sink=Sink("static")))
        assert selection.mask == loaded.mask
        for mask in (loaded.mask, selection.mask):
            found = mask.sink.known_constants()
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

    first, second = (read_mask(run / "mask" / "mask.json").mask for run in runs[:2])
    assert replace_groups(first, second, 0)[0].sink == Sink("static")
    tokens = Sink("tokens", 2)
    assert replace_groups(first, replace(second, sink=tokens), 0)[0].sink == tokens
    (runs[1] / "mask" / CONSTANTS_FILE).unlink()
    with pytest.raises(UserError, match=re.escape(str(runs[1] / "mask" / CONSTANTS_FILE))):
        analyze(runs, tmp_path / "again", "--replacement", "1")
