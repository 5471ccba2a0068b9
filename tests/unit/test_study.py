"""recipes/study.py: what is archived is not run again, and the page says what the runs say."""

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bosch.analysis.overlap import jaccard_distance
from bosch.model_folder import read_model_info
from eval.compare import compare
from eval.results import collect_results
from eval.rows import read_rows, write_rows
from eval.run_archive import pack_run
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


def test_the_page_has_the_tables_and_says_who_is_first(small_study: Study, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "study.md"
    rows = [
        {"method": "bosch", "window": window, "suite": "niah", "value": 50.0 + window, "stderr": 1}
        for window in (16, 32)
    ]
    write_study_page(replace(small_study, windows=rows), page)
    text = page.read_text()
    assert "## Table 1: NIAH average before training" in text
    assert "| bosch | NIAH | 66.0 ± 1.0 | 82.0 ± 1.0 |" in text
    assert "clearly for it" in text
    assert "Figure 3, tables 15, 16: recovery at ratio 0.75" in text
    assert "Table 6" not in text  # nothing was run for it
    for name in ("recovery", "zero_shot"):
        assert (tmp_path / "docs" / "study" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"(study/{name}.png)" in text


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
    setting = study_parts.Setting(tmp_path, tmp_path, 20, ("bosch",), 0.75, (), ())
    rows = [{"method": "bosch", "window": window} for window in study_parts.WINDOWS]
    write_rows(tmp_path / "windows.jsonl", rows[1:])
    told = study_parts.parts_left(setting)
    assert told[0] == f"Figure 4: other windows: 1 of {len(rows)} evaluations"
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
    assert "the same 160 test examples" in text


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
        {"method": name, "window": 16, "suite": "niah", "value": value, "stderr": 2.0}
        for name, value in (("bosch", 50.0), ("fisher", 60.0))
    ]
    long = [
        {"method": name, "length_asked": 4096, "suite": "niah", "value": value, "stderr": 2.0}
        for name, value in (("dense", 90.0), ("bosch", 50.0), ("fisher", 40.0))
    ]
    turnover = [
        {"method": "bosch", "smaller_ratio": 0.5, "larger_ratio": 0.75}
        | {"raw": 0.15, "chance": 0.25, "normalized": 0.3}
    ]
    replacement = [
        {"step": "bosch 0.5 → 0.75", "origin": origin, "num_replaced": 2}
        | {"scores": {"probability": values}, "means": {"probability": values[0]}}
        for origin, values in (
            ("as chosen", [0.9]),
            ("smaller", [0.7, 0.7]),
            ("random", [0.4, 0.4]),
        )
    ]
    whole = replace(small_study, windows=windows, long=long)
    whole = replace(whole, turnover=turnover, replacement=replacement)
    write_study_page(whole, tmp_path / "study.md")
    text = (tmp_path / "study.md").read_text()
    assert "bosch has 50.0 at W 16 after fisher's 60.0." in text
    assert "bosch has 50.0 at 4,096 tokens, the best." in text
    assert "Here bosch's is 30% of it." in text  # the paper's 26 to 44 % are normalized
    assert "0.5 → 0.75 0.900, 0.700, 0.400." in text
    assert text.count("± is one standard error over examples.") == 2
    # Both masks have 12 of 16 groups; 8 to 12 are shared.
    (line,) = [line for line in text.splitlines() if "fisher is the nearest" in line]
    masks = {
        (run.method, run.seed): run.mask.mask
        for run in small_study.comparison.runs
        if run.mask and run.ratio == 0.75
    }
    mean = sum(jaccard_distance(masks["bosch", s], masks["fisher", s]) for s in (0, 1)) / 2
    assert f"at a Jaccard distance of {mean:.2f}" in line
    assert "## Figure 2: Jaccard distances of windowed groups at ratio 0.75" in text
    assert "at ratio 0.5: no static method was run" in text


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


@pytest.mark.slow
def test_parts_that_are_no_chains_leave_their_rows_and_are_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study_parts, "WINDOWS", (32,))
    monkeypatch.setattr(study_parts, "LONG", ((4_096, 2.0),))
    monkeypatch.setattr(study_parts, "LONG_SAMPLES", 1)
    options = study.Options(archive=tmp_path / "archive", runs=tmp_path / "runs", samples=1)
    for ratio in (0.5, 0.75):
        archive_run(study.Chain("fisher", ratio, 0, trained=False), options, tmp_path)
    parts = page_options(tmp_path, "windows", "long", "replacement")
    words = [*parts, "--trained", "fisher", "--samples", "1"]
    study.main(words)
    windows = read_rows(options.archive / "windows.jsonl")
    assert [(row["window"], row["suite"]) for row in windows] == [(32, "longbench"), (32, "niah")]
    long = read_rows(options.archive / "long.jsonl")
    assert [(row["method"], row["length_asked"]) for row in long] == [
        ("dense", 4_096),
        ("fisher", 4_096),
    ]
    assert (options.archive / "turnover.json").is_file()
    capsys.readouterr()
    study.main([*words[: words.index("replacement")], *words[words.index("replacement") + 1 :]])
    assert "evaluate" not in capsys.readouterr().out
