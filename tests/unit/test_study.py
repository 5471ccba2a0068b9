"""recipes/study.py: what is archived is not run again, and the page says what the runs say."""

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bosch.analysis.overlap import jaccard_distance
from bosch.mask import read_mask, write_mask
from bosch.model_folder import read_model_info
from eval.compare import compare
from eval.measures import ROUNDING
from eval.results import collect_results
from eval.rows import read_rows, write_rows
from eval.run_archive import pack_run
from eval.run_results import RunResults
from eval.study import AFTER, BEFORE, Study, advantage
from eval.study_page import write_study_page
from eval.study_tables import show_advantage
from recipes import presets, study, study_parts
from recipes.benchmarks import methods, search_study
from tests.run_folders import FakeRun


@dataclass(frozen=True)
class Skills:
    """Right answers before and after training, other for each method."""

    start: float
    gain: float = 0.3

    def __call__(self, step: int | None, task: str) -> float:
        return 0.95 if step is None else self.start + self.gain * step / 200


METHODS = {"bosch": Skills(0.5), "fisher": Skills(0.2), "interleave": Skills(0.5)}


@pytest.fixture
def small_study(tmp_path: Path) -> Study:
    runs = [
        FakeRun(method, 0.75, seed, steps=(None, 0, 200), skill=skill)
        for method, skill in METHODS.items()
        for seed in (0, 1)
    ]
    runs.append(FakeRun("bosch", 0.5, steps=(None, 0), skill=METHODS["bosch"]))
    folders = [run.write(tmp_path / "runs") for run in runs]
    return Study(compare(folders), tuple(METHODS), 0.75, command="python recipes/study.py")


def test_an_advantage_is_clear_where_the_skill_differs(small_study: Study) -> None:
    niah = small_study.comparison.averages[0]
    better = advantage(small_study, "fisher", 0.75, niah, BEFORE)
    same = advantage(small_study, "interleave", 0.75, niah, AFTER)
    assert better is not None
    assert better.sign == 1
    assert better.points == pytest.approx(30, abs=12)
    assert same is not None
    assert (same.points, same.sign) == (0, 0)
    assert advantage(small_study, "razor", 0.75, niah, BEFORE) is None


def judged(value: float, **named: object) -> dict[str, Any]:
    """A row of an evaluation that belongs to no run: one task, with four examples."""
    cells = [["single_1", 512, 1.0, [value - 20, value - 10, value + 10, value + 20]]]
    return {"suite": "niah", "value": value, "stderr": 1.0, "n": 4, "cells": cells} | named


def test_the_page_has_the_tables_and_says_who_is_first(small_study: Study, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "study.md"
    rows = [
        judged(50.0 + window, method="bosch", window=window, seed=seed, key="one")
        for window in (16, 32)
        for seed in (0, 1)
    ]
    write_study_page(replace(small_study, windows=rows), page)
    text = page.read_text()
    assert "## Table 1: NIAH average before training" in text
    assert "| bosch | NIAH | 66.0 ± 1.0 | 82.0 ± 1.0 |" in text
    assert "clearly for it" in text
    assert "## Figure 3: recovery at ratio 0.75" in text
    assert "| method | tokens | single 512 | single 1,024 | multikey 512 | multikey 1,024 |" in text
    assert "## Table 16: LongBench at the checkpoints" in text
    assert "Table 6" not in text  # nothing was run for it
    for name in ("recovery", "zero_shot", "windows", "distances"):
        assert (tmp_path / "docs" / "study" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"(study/{name}.png)" in text


def test_the_papers_claims_are_held_against_its_own_rivals(tmp_path: Path) -> None:
    skills = {
        "bosch": Skills(0.6),
        "bosch_single": Skills(0.6),  # with the same masks
        "bosch_plus": Skills(0.9),  # which the paper has not
        "fisher": Skills(0.3),
        "interleave": Skills(0.1),
        "random_layers": Skills(0.2),
    }
    runs = [
        FakeRun(method, 0.75, seed, steps=(None, 0), skill=skill, samples=20)
        for method, skill in skills.items()
        for seed in (0, 1)
    ]
    folders = {(run.method, run.seed): run.write(tmp_path / "runs") for run in runs}
    for seed in (0, 1):
        mask = (folders["bosch", seed] / "mask" / "mask.json").read_text()
        mask = mask.replace('"method": "bosch"', '"method": "bosch_single"')
        (folders["bosch_single", seed] / "mask" / "mask.json").write_text(mask)
    compared = compare([*folders.values()])
    page = tmp_path / "docs" / "study.md"
    write_study_page(Study(compared, tuple(skills), 0.75), page)
    found = [line for line in page.read_text().splitlines() if line.startswith("- ")]
    assert "in 2 of 2 runs that is the mask of its first stage" in found[0]
    theirs, others = (line for line in found if "comparisons" in line and "NIAH" in line)
    assert "every rival of the paper at 1 of 1 ratios" in theirs
    assert "of 3 comparisons 3 are clearly for it, 0 clearly against it, 0 open." in theirs
    assert "of 1 comparisons 0 are clearly for it, 1 clearly against it, 0 open" in others
    assert others.endswith("Against: bosch_plus at 0.75.")
    (line,) = [line for line in found if "the range of RAND" in line]
    means = {run.method: mean_at_start(run) for run in compared.runs if not run.seed}
    drawn = means["random_layers"]  # under both seeds
    told = f"0 of 1 cases on NIAH average (first random_layers over its seeds): at 0.75 {drawn:.1f}"
    told += f" to {drawn:.1f}, interleave {means['interleave']:.1f}."
    assert line.endswith(told)
    (line,) = [line for line in found if "gap to the competitors" in line]
    ahead = means["bosch"] - means["random_layers"]  # the median of the paper's three
    assert line.endswith(f"by {ahead:.1f} at 0.75.")


def mean_at_start(run: RunResults) -> float:
    wanted = {"task": "average", "suite": "niah", "step": 0}
    (average,) = [row for row in run.rows if wanted.items() <= row.items()]
    return float(average["value"])


def test_what_was_not_trained_is_not_told_as_trained(tmp_path: Path) -> None:
    folders = [
        FakeRun(method, 0.75, steps=(None, 0), skill=skill).write(tmp_path / "runs")
        for method, skill in METHODS.items()
    ]
    untrained = Study(compare(folders), tuple(METHODS), 0.75, left=["Ratio 0.5: 3 of 3 runs"])
    niah = untrained.comparison.averages[0]
    assert advantage(untrained, "fisher", 0.75, niah, BEFORE) is not None
    assert advantage(untrained, "fisher", 0.75, niah, AFTER) is None
    page = tmp_path / "docs" / "study.md"
    write_study_page(untrained, page)
    text = page.read_text()
    assert "on NIAH average: not trained yet." in text
    assert text.endswith("## Not run yet\n\n- Ratio 0.5: 3 of 3 runs\n")


def archive_run(chain: study.Chain, options: study.Options, tmp_path: Path) -> Path:
    """As if the chain had run, with the model as it is."""
    made = FakeRun(chain.method, chain.ratio, chain.seed)
    run = made.write_as(chain.arguments(options), tmp_path / "made")
    path = options.archive / f"{chain.name}.json.gz"
    pack_run(run, path)
    return path


def test_an_archived_run_counts_for_its_command_and_model_alone(tmp_path: Path) -> None:
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    trained = study.Chain("bosch", 0.75, 0, trained=True)
    zero_shot = replace(trained, trained=False)
    assert not study.is_archived(trained, options)
    path = archive_run(trained, options, tmp_path)
    assert study.is_archived(trained, options)
    assert study.is_archived(zero_shot, options)
    assert study.is_archived(trained, replace(options, runs=tmp_path / "elsewhere"))
    assert not study.is_archived(trained, replace(options, samples=7))
    content = gzip.decompress(path.read_bytes()).decode()
    info = read_model_info(presets.find_model(presets.TINY_MODEL))  # type: ignore[arg-type]
    path.write_bytes(gzip.compress(content.replace(info.weight_hash, "0" * 32).encode()))
    assert not study.is_archived(trained, options)


def test_an_archived_run_of_other_settings_is_run_again(tmp_path: Path) -> None:
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    chain = study.Chain("fisher", 0.5, 1, trained=False)
    path = archive_run(chain, options, tmp_path)
    files = json.loads(gzip.decompress(path.read_bytes()))
    run = json.loads(files["run.json"])
    run["config"]["calibration"]["length"] //= 2  # as if the preset had changed since
    path.write_bytes(gzip.compress(json.dumps(files | {"run.json": json.dumps(run)}).encode()))
    assert not study.is_archived(chain, options)


def test_methods_takes_its_rows_from_the_archive(tmp_path: Path) -> None:
    options = methods.Options(runs=tmp_path / "methods", archive=tmp_path / "archive", samples=8)
    packed = study.Options(archive=options.archive, samples=8)
    for seed in (0, 1):
        archive_run(study.Chain("fisher", 0.75, seed, trained=False), packed, tmp_path)
    configs = [methods.config_of(options, "fisher", seed) for seed in (0, 1)]
    row = methods.judge_runs("fisher", configs, options)
    made = FakeRun("fisher", 0.75, 0, steps=(0,)).write(tmp_path / "again")
    (judged,) = [
        r
        for r in collect_results(made / "eval", "")
        if r["task"] == "average" and r["suite"] == "niah"
    ]
    assert row["values"] == [judged["value"]] * 2


def test_a_zero_shot_run_is_no_trained_one(tmp_path: Path) -> None:
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    chain = study.Chain("fisher", 0.5, 1, trained=False)
    archive_run(chain, options, tmp_path)
    assert study.is_archived(chain, options)
    assert not study.is_archived(replace(chain, trained=True), options)


def test_searches_are_judged_by_their_masks_in_the_archive(tmp_path: Path) -> None:
    options = search_study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    packed = study.Options(archive=options.archive)
    archive_run(study.Chain("bosch_multi", 0.75, 1, trained=False), packed, tmp_path)
    found = search_study.find_archived(options, "bosch_multi", 0.75, 30, seed=1)
    assert found is not None
    assert [row.count(0) for row in found[0]] == [6] * 8
    assert search_study.find_archived(options, "bosch_multi", 0.75, 30, seed=0) is None
    assert search_study.find_archived(options, "bosch_multi", 0.75, 100, seed=1) is None
    other = replace(options, length=512)
    assert search_study.find_archived(other, "bosch_multi", 0.75, 30, seed=1) is None


def test_what_is_left_of_the_plan_is_told_by_ratio(tmp_path: Path) -> None:
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    trained = study.Chain("bosch", options.trained_ratio, 0, trained=True)
    archive_run(trained, options, tmp_path)
    left = study.describe_left(replace(options, ratios=(0.5,), seeds=1))  # of the whole plan, still
    assert "Ratio 0.75, recovery: 29 of 30 runs" in left
    assert "Ratio 0, recovery: 3 of 3 runs" in left
    assert any(line.startswith("Ratio 0.25, before training: ") for line in left)


def test_a_part_that_has_only_begun_is_told_as_left(tmp_path: Path) -> None:
    setting = study_parts.Setting(tmp_path, tmp_path, 20, ("bosch",), 0.75, (), (), seeds=2)
    rows = [
        {"method": "bosch", "window": window, "seed": seed, "suite": suite}
        for window in study_parts.WINDOWS
        for seed in (0, 1)
        for suite in ("niah", "longbench")
    ]
    write_rows(tmp_path / "windows.jsonl", rows[2:])
    told = study_parts.parts_left(setting)
    assert told[0] == f"Figure 4: other windows: 1 of {len(rows) // 2} evaluations"
    write_rows(tmp_path / "windows.jsonl", rows)
    assert study_parts.parts_left(setting) == told[1:]


def test_the_plan_has_every_method_ratio_and_seed_once(tmp_path: Path) -> None:
    chains = study.plan_chains(study.Options())
    assert len({chain.name for chain in chains}) == len(chains)
    methods = {chain.method for chain in chains}
    assert {"bosch", "consa", "random_groups", "apl"} <= methods
    assert "from_file" not in methods
    assert sum(chain.trained for chain in chains) == 3 * (5 + 1 + 2 * 8 - 3)  # control; three twice


def page_options(tmp_path: Path, *only: study.Part) -> list[str]:
    places = {"archive": "archive", "runs": "runs", "page": "study.md"}
    words = [word for name, to in places.items() for word in (f"--{name}", str(tmp_path / to))]
    return [*words, "--only", *only]


def test_a_page_from_the_archive_leaves_the_folders_of_chains_alone(tmp_path: Path) -> None:
    """A chain that is trained later goes on in a folder that it can go on in."""
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    chain = study.Chain("fisher", 0.75, 0, trained=False)
    path = archive_run(chain, options, tmp_path)
    study.main(page_options(tmp_path, "page"))
    assert not (options.runs / chain.name).exists()
    assert "1 runs of `recipes/recover.py`" in (tmp_path / "study.md").read_text()

    files = json.loads(gzip.decompress(path.read_bytes()))
    other = {name: text for name, text in files.items() if not name.startswith("eval/step")}
    path.write_bytes(gzip.compress(json.dumps(other).encode()))
    study.main(page_options(tmp_path, "page"))  # as the archive is now
    assert "| fisher | – |" in (tmp_path / "study.md").read_text()


def test_a_part_that_cannot_be_made_does_not_keep_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    archive_run(study.Chain("fisher", 0.75, 0, trained=False), options, tmp_path)
    with pytest.raises(SystemExit):
        study.main(page_options(tmp_path, "windows", "page"))
    assert (tmp_path / "study.md").is_file()
    assert "windows: " in capsys.readouterr().out


def test_the_page_counts_each_test_example_once(small_study: Study, tmp_path: Path) -> None:
    write_study_page(small_study, tmp_path / "study.md")
    text = (tmp_path / "study.md").read_text()
    # 8 examples of 6 tasks at 2 lengths, and of 8 data sets.
    assert "the same 96 examples of NIAH, in 512 and 1,024 tokens, and 64 of the toy" in text


def test_what_rests_on_one_seed_is_never_clear(small_study: Study, tmp_path: Path) -> None:
    niah = small_study.comparison.averages[0]
    one_seed = [run for run in small_study.comparison.runs if run.seed == 0]
    found = advantage(
        replace(small_study, comparison=replace(small_study.comparison, runs=one_seed)),
        *("fisher", 0.75, niah, BEFORE),
    )
    assert found is not None
    assert found.low is not None
    assert found.low > 0
    assert found.sign == 0
    assert show_advantage(found).endswith("] (1 seed)")


def test_the_page_has_a_sentence_on_each_part_that_was_run(
    small_study: Study, tmp_path: Path
) -> None:
    windows = [
        judged(value + seed, method=name, window=window, seed=seed, key=f"{name}{window}{seed}")
        for window in (16, 64)  # 64 is the window that masks were chosen for
        for name, value in (("bosch", 50.0), ("fisher", 60.0), ("bosch_plus", 70.0))
        for seed in (0, 2)
    ]
    long = [
        judged(value, method=name, length_asked=4096, seed=0, key=name)
        for name, value in (("dense", 90.0), ("bosch", 50.0), ("fisher", 40.0))
    ]
    exchanged = [
        judged(value, smaller=0.5, larger=0.75, origin=origin, seed=0, suite=suite)
        for suite in ("niah", "longbench")
        for origin, value in (("smaller", 41.0), ("random", 42.0))
    ]
    whole = replace(small_study, windows=windows, long=long, exchanged=exchanged)
    write_study_page(whole, tmp_path / "study.md")
    text = (tmp_path / "study.md").read_text()
    (line,) = [line for line in text.splitlines() if "under other windows" in line]
    assert line.endswith(
        "on NIAH average: bosch 51.0 ± 1.0, fisher 61.0 ± 1.0 at W 16; of 1 comparisons 0 are "
        "clearly for it, 1 clearly against it, 0 open. Against: fisher at W 16. Beside methods "
        "that the paper has not: bosch 51.0 ± 1.0, bosch_plus 71.0 ± 1.0 at W 16; of 1 "
        "comparisons 0 are clearly for it, 1 clearly against it, 0 open. Against: bosch_plus at "
        "W 16."
    )
    # The same examples on both sides: each is answered better by the same points.
    lead = "-10.0 [-10.0, -10.0]"
    assert f"| fisher | NIAH | {lead} | {lead} |" in text
    assert "on NIAH average: bosch 50.0, fisher 40.0 at 4,096 tokens; of 1 comparisons 0" in text
    assert "| fisher | NIAH | +10.0 [+10.0, +10.0] (1 seed) |" in text
    # FakeRun's masks are nested. Worked by hand: of 8 of 16 groups at random 2 are among the 4 full
    # ones of the larger mask, which is half of the 4 that could be.
    assert "from 0.5 to 0.75 0% (paper 29 to 31 %), at random 50%." in text
    assert "| bosch | 0.5 to 0.75 | 1 | 0.0 | 25.0 | 0.0 | 50.0 |" in text
    assert "| bosch | NIAH | 51.0 ± 1.0 (2) | 51.0 ± 1.0 (2) |" in text
    niah = small_study.comparison.averages[0]
    chosen = small_study.curves("bosch", 0.75, niah)[0].values[0]  # of the seed that exchanged
    assert f"from 0.5 to 0.75 {chosen:.1f}, {chosen - 41:+.1f} [" in text
    assert f"| 0.5 to 0.75 | as chosen | 1 | {chosen:.1f} | – |" in text
    assert f"| 0.5 to 0.75 | smaller | 1 | 41.0 | {chosen - 41:+.1f} [" in text
    # Both masks have 12 of 16 groups; 8 to 12 are shared.
    (line,) = [line for line in text.splitlines() if "are far from those" in line]
    masks = {
        (run.method, run.seed): run.mask.mask
        for run in small_study.comparison.runs
        if run.mask and run.ratio == 0.75
    }
    mean = sum(jaccard_distance(masks["bosch", s], masks["fisher", s]) for s in (0, 1)) / 2
    assert f"at ratio 0.75: fisher {mean:.2f} ± " in line
    assert "## Figure 2: Jaccard distances of windowed groups at ratio 0.75" in text


def test_a_chain_that_was_stopped_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A STOP file or a signal ends recover.py with everything saved and exit status 0."""
    stopped = tmp_path / "stopped.py"
    stopped.write_text("raise SystemExit(0)")
    monkeypatch.setattr(study, "RECOVER", stopped)
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    for trained in (False, True):
        _, reason, _ = study.run_chain(study.Chain("fisher", 0.75, 0, trained), options)
        assert reason == "stopped before its end"
    assert not options.archive.exists()


def test_groups_are_exchanged_where_masks_turn_over(tmp_path: Path) -> None:
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs")
    setting = study_parts.Setting(options.runs, options.archive, 20, (), 0.75, (), (), seeds=1)
    paths = {
        ratio: archive_run(study.Chain("bosch", ratio, 0, False), options, tmp_path / f"{ratio}")
        for ratio in study_parts.RATIOS
    }
    assert list(study_parts.exchanged_masks(setting)) == []  # FakeRun's are nested
    assert not any("Table 5" in line for line in study_parts.parts_left(setting))

    folder = setting.unpack(paths[0.75])
    record = read_mask(folder / "mask" / "mask.json")
    turned = replace(record.mask, z=tuple(row[::-1] for row in record.mask.z))
    write_mask(folder / "mask" / "mask.json", replace(record, mask=turned))
    pack_run(folder, paths[0.75])
    found = list(study_parts.exchanged_masks(setting))
    told = [(named["smaller"], named["larger"], named["origin"]) for named, _ in found]
    steps = [(0.5, 0.75), (0.75, 0.875)]
    assert told == [(*step, origin) for step in steps for origin in ("smaller", "random")]
    named, taken_back = found[0]
    # The smaller mask has groups 0 to 3 of each of 8 layers on the window, the turned one 2 to 7.
    assert named["replaced"] == 16
    assert taken_back.mask.num_windowed == turned.num_windowed
    assert all(row[:2] == (0, 0) for row in taken_back.mask.z)
    assert "Table 5: groups exchanged between ratios: 4 of 4 evaluations" in (
        study_parts.parts_left(setting)
    )


@pytest.mark.slow
def test_parts_that_are_no_chains_leave_their_rows_and_are_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study_parts, "WINDOWS", (32,))
    monkeypatch.setattr(study_parts, "LONG", ((4_096, 2.0),))
    monkeypatch.setattr(study_parts, "LONG_SAMPLES", 1)
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs", samples=1)
    archive_run(study.Chain("fisher", 0.75, 0, trained=False), options, tmp_path)
    words = page_options(tmp_path, "windows", "long")
    words += ["--trained", "fisher", "--samples", "1", "--seeds", "1"]
    study.main(words)
    windows = read_rows(options.archive / "windows.jsonl")
    assert [(row["window"], row["suite"]) for row in windows] == [(32, "longbench"), (32, "niah")]
    long = read_rows(options.archive / "long.jsonl")
    assert [(row["method"], row["length_asked"]) for row in long] == [
        ("dense", 4_096),
        ("fisher", 4_096),
    ]
    for row in (*windows, *long):  # its examples give its value
        mean = sum(weight * fmean(scores) for _, _, weight, scores in row["cells"])
        assert mean == pytest.approx(row["value"], abs=ROUNDING)
        assert sum(len(scores) for *_, scores in row["cells"]) == row["n"]
    capsys.readouterr()
    study.main(words)
    assert "evaluate" not in capsys.readouterr().out
