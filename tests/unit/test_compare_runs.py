"""recipes/compare_runs.py on made-up run folders: what it finds, shows and warns about."""

import json
import math
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from bosch.eval import averages
from bosch.eval.eval_stage import publish
from bosch.eval.report import page
from bosch.eval.report.compare import LOSS, Comparison, compare, has_recovered, seeds_of_setups
from bosch.eval.report.intervals import Estimate
from bosch.eval.report.page import (
    answers,
    describe,
    recovery_rows,
    summarize,
    warnings,
    write_report,
)
from bosch.eval.report.paired import Paired, differing_dtypes, pair
from bosch.eval.report.pictures import draw_chart, make_charts
from bosch.eval.report.runs import append_run, read_archive, read_run
from bosch.eval.report.tables import (
    MISSING,
    make_tables,
    short_table,
    show_gap_share,
    show_tokens,
)
from bosch.eval.report.verdict import describe_difference
from bosch.eval.results import Label
from bosch.eval.rows import read_rows, write_rows
from bosch.eval.suites import longbench, ruler
from bosch.eval.suites._interface import Task
from bosch.eval.suites._reporting import ReportedScore
from bosch.masks.mask import read_mask
from bosch.model_files import read_json_object
from bosch.recipes import compare_runs
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_sealed_json
from tests.run_folders import STEP_TOKENS, FakeRun, recovering, write_suite


def test_averages_and_shares_are_those_of_the_suites(tmp_path: Path) -> None:
    folder = FakeRun(skill=recovering(0.1, 0.7)).write(tmp_path)
    comparison = compare([folder])
    first, results = (
        {(row["task"], row["length"], row["metric"]): row["value"] for row in rows}
        for step in ("step-000000", "step-000200")
        for rows in [json.loads((folder / f"eval/{step}/niah/scores.json").read_text())["rows"]]
    )
    key = ("average", 0, "string_match_all")
    assert comparison.curves_of(comparison.scores_of("average")[0])[0].values[-1] == results[key]
    share = (results[key] - first[key]) / (100 - first[key])  # dense answers all
    assert comparison.recoveries[0].gap_share.value == pytest.approx(share)
    # A task is the plain mean over its two lengths.
    task = next(score for score in comparison.scores if score.name == "niah_multikey_1")
    curve = comparison.curves[comparison.runs[0].name, task]
    values = [results["niah_multikey_1", length, "string_match_all"] for length in (512, 1024)]
    assert curve.values[-1] == pytest.approx(sum(values) / 2)


def test_there_are_intervals_where_single_examples_are_known(tmp_path: Path) -> None:
    paired = FakeRun("bosch", skill=recovering(0.1, 0.7)).write(tmp_path)
    without = FakeRun("fisher", skill=recovering(0.1, 0.7), with_samples=False).write(tmp_path)
    rows = {row.curve.run.name: row.gap_share for row in compare([paired, without]).recoveries}
    assert rows[paired.name].value == rows[without.name].value
    assert rows[paired.name].low < rows[paired.name].value < rows[paired.name].high
    assert rows[without.name].low is None


def test_the_loss_recovers_and_its_speed_is_told_in_tokens_and_flops(tmp_path: Path) -> None:
    folder = FakeRun(steps=(None, 0, 200)).write(tmp_path)
    write_losses(folder, start=3)
    comparison = compare([folder])
    (loss,) = (row for row in comparison.recoveries if row.curve.score is LOSS)
    last = float(loss.curve.tokens[-1])
    assert loss.gap_share.value == pytest.approx(1)
    assert loss.gap_share.low == pytest.approx(1)  # of each sequence as much
    for share in (0.5, 0.9, 0.95, 0.99):
        assert loss.tokens_to[share].value == pytest.approx(share * last / 2)
    tables = make_tables(comparison)
    (cells,) = (row for row in tables["recovery"].rows if row[1] == "validation loss")
    assert cells[-1] == "9.0e+12 FLOPs, 1 min 21 s"  # of 9 seconds and 1e12 FLOPs for ten steps
    assert [row[1:] for row in tables["positions"].rows] == [
        ["dense", "1.200", "3.200"],
        ["0", "2.000", "4.000"],
        ["200", "1.200", "3.200"],
    ]
    line = describe(loss.curve, loss)
    assert line.startswith("validation loss: recovered 100% of the gap to the dense model (2.200)")
    assert "from +0.800 to +0.000 after" in line
    names = {"suite": "loss", "statistic": "tokens_to_90"}.items()
    (row,) = (row for row in recovery_rows(comparison) if names <= row.items())
    assert row["flops"] == pytest.approx(9e12)


def test_a_headline_that_its_interval_cannot_carry_says_how_many_examples_would(
    tmp_path: Path,
) -> None:
    """Of 6 tasks at 2 lengths with 8 examples each. Half-widths of 1.1 and .25: 96 x 4.4^2."""
    folder = FakeRun(steps=(None, 0, 200)).write(tmp_path)
    write_losses(folder, start=3)
    recoveries = {row.curve.score.suite: row for row in compare([folder]).recoveries}
    wide, narrow = Estimate(0.17, -1.0, 1.2), Estimate(0.5, 0.0, 1.0)
    niah, loss = recoveries["niah"], recoveries["loss"]
    line = describe(niah.curve, replace(niah, gap_share=wide))
    assert line.startswith("NIAH: 96 examples are too few to tell how much of the gap")
    assert line.endswith("tokens; about 1,900 would do (--eval.samples 159)")  # 1,858.6; 1,900 / 12
    assert "from -" in line
    assert "17%" not in line
    assert "recovered 50% [0%, 100%]" in describe(niah.curve, replace(niah, gap_share=narrow))
    line = describe(loss.curve, replace(loss, gap_share=wide))
    assert "3 held-out sequences are too few" in line
    assert line.endswith("about 59 would do (--data.held-out-sequences 59)")  # 58.08
    # What tables and recovery.jsonl hold stays.
    assert show_gap_share(replace(niah, gap_share=wide)) == "17% [-100%, 120%]"


def test_the_first_sentence_says_level_only_where_its_interval_is_narrow() -> None:
    score = ReportedScore("niah", "average", "average", {})
    for difference, num_examples, expected in (
        (Estimate(0.5, -1.5, 1.9), 600, "level with the dense model within ±1.9 points (n = 600)"),
        (Estimate(-9.1, -13.0, -5.0), 1_200, "9.1 points below the dense model [-13.0, -5.0]"),
        (Estimate(3.0, 0.5, 6.0), 64, "3.0 points above the dense model [+0.5, +6.0] (n = 64)"),
        (Estimate(-4.0, -9.0, 1.0), 64, "no clear difference from the dense model: -4.0 points"),
        # No example differs: of so few, 3 in n could (the rule of three).
        (
            Estimate(0.0, 0.0, 0.0),
            5,
            "no clear difference from the dense model: ±60 points (n = 5)",
        ),
        (Estimate(0.0, 0.0, 0.0), 300, "level with the dense model within ±1.0 points (n = 300)"),
        (Estimate(-33.3), 8, "33.3 points below the dense model (n = 8, no interval)"),
        (Estimate(0.0), 8, "at the dense model's score (n = 8, no interval)"),
    ):
        value = 50.0 + (difference.value or 0)
        unseen = 300 / num_examples
        paired = Paired(score, value, 50.0, difference, Estimate(None), num_examples, unseen)
        assert describe_difference(paired).startswith(expected)


def test_where_no_example_differs_the_part_that_weighs_most_bounds_the_difference() -> None:
    """Three tasks of 25 needles weigh a sixth each, and one with several keys weighs half."""
    weights = {(name, 512): 1 / 6 for name in "abc"} | {("d", 512): 1 / 2}
    same = {cell: {index: 100.0 * (index % 2) for index in range(25)} for cell in weights}
    found = pair(ReportedScore("niah", "average", "average", weights), same, same)
    assert found is not None
    assert found.unseen == pytest.approx(6)  # 3 in 25 of a half
    assert describe_difference(found).endswith("±6 points (n = 100)")


def test_a_share_of_the_gap_is_not_shown_without_an_interval(tmp_path: Path) -> None:
    folder = FakeRun(skill=recovering(0.1, 0.7), with_samples=False).write(tmp_path)
    comparison = compare([folder])
    ((_, lines),) = answers(comparison)
    assert " points below the dense model (n = 96, no interval); LongBench: " in lines[0]
    assert not [line for line in lines[2:] if "%" in line or "recovered" in line]
    assert {row[2] for row in make_tables(comparison)["recovery"].rows} == {"no interval"}
    # What counts by the number stays.
    assert comparison.recoveries[0].gap_share.value is not None


def test_a_card_has_each_model_s_scores_with_their_number_of_examples(tmp_path: Path) -> None:
    folder = FakeRun(steps=(None, 0, 200)).write(tmp_path)
    empty = "# A model\n\n<!-- scores -->\nNone.\n<!-- end of scores -->\n\nMore.\n"
    for place in ("model", "train/step-000200"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "README.md").write_text(empty)
    publish(folder)
    untrained, trained = (
        (folder / place / "README.md").read_text() for place in ("model", "train/step-000200")
    )
    assert "without training (run tiny-qwen3-bosch-r0.75)" in untrained
    assert f"after {show_tokens(200 * STEP_TOKENS)} tokens of training" in trained
    for card, step in ((untrained, "0"), (trained, "200")):
        assert card.startswith("# A model\n\n<!-- scores -->\nIn percent, ")
        assert card.endswith("\n<!-- end of scores -->\n\nMore.\n")
        (cells,) = (
            row[3:]
            for row in make_tables(compare([folder]))["dense"].rows
            if row[1:3] == [step, "NIAH average"]
        )
        count, ours, dense, difference, _ = cells
        assert f"| NIAH average | {ours} | {dense} | {difference} | {count} |" in card


def test_page_and_terminal_open_with_that(tmp_path: Path) -> None:
    """Training ends above the dense model, by more than the few examples can tell."""

    def skill(step: int | None, task: str) -> float:
        return 0.85 if step is None else 0.75 + step / 1_000

    comparison = compare([FakeRun(steps=(None, 0, 200), skill=skill).write(tmp_path)])
    ((_, lines),) = answers(comparison)
    page_file = write_report(comparison, tmp_path / "report")[0].read_text()
    sentence, _, *suites = lines
    assert sentence.startswith("NIAH: 7.3 points above the dense model [+3.1, ")
    assert f'<span class="lead">{sentence}</span>' in page_file
    assert str(next(summarize(comparison))) == sentence
    for line in suites:
        assert "examples are too few to tell how much of the gap" in line
        assert line in list(summarize(comparison))
        assert line.replace("+", "&#43;") in page_file or line in page_file


@pytest.mark.pictures
def test_names_of_dense_models_lie_beside_the_curves_and_beside_each_other(tmp_path: Path) -> None:
    comparison = compare([FakeRun().write(tmp_path)])
    chart = next(one for one in make_charts(comparison) if one.name == "recovery")
    panels = [replace(one, dense=[("dense b", 99.9), ("dense a", 100.0)]) for one in chart.panels]
    figure = draw_chart(replace(chart, panels=panels), chart.labels)
    for axes in figure.axes:
        lower, upper = axes.texts
        assert (lower.get_text(), upper.get_text()) == ("dense b\n99.9", "dense a\n100.0")
        boxes = [text.get_window_extent() for text in (lower, upper)]
        assert not boxes[0].overlaps(boxes[1])
        assert not any(box.overlaps(axes.get_window_extent()) for box in boxes)
        assert axes.get_ylim()[1] <= 102  # where no score can be


def test_what_stored_lessons_took_is_in_the_cost(tmp_path: Path) -> None:
    """3e11 FLOPs and 1.5 seconds a step; of the ten steps until 90 %, nine."""
    folders = []
    for seed, (is_asked, is_known) in enumerate(((True, True), (False, True), (False, False))):
        folder = FakeRun(steps=(None, 0, 200), seed=seed).write(tmp_path)
        write_losses(folder, start=3)
        record = read_json_object(folder / "run.json")
        record["config"]["train"] |= {"stored_shares": None if is_asked else 64}
        (folder / "run.json").write_text(json.dumps(record))
        if not is_asked and is_known:
            rows = read_rows(folder / "train" / "metrics.jsonl")
            cost = {"lesson_flops": 3e11, "lesson_seconds": 1.5}
            write_rows(
                folder / "train" / "metrics.jsonl",
                [row | (cost if row["step"] else {}) for row in rows],
            )
            lessons = tmp_path / "shared" / "lessons-0"
            lessons.mkdir(parents=True)
            (lessons / "manifest.json").write_text('{"wall_seconds": [30, 33]}')
            (folder / "lessons").mkdir()
            write_sealed_json(
                folder / "lessons" / "reference.json", {"folder": "../../shared/lessons-0"}
            )
        folders.append(folder)
    archive = tmp_path / "rows.jsonl"
    for folder in folders:
        append_run(archive, read_run(folder))
    for comparison in (compare(folders), compare([archive])):
        found = make_tables(comparison)
        cells = [row[-1] for row in found["recovery"].rows if row[1] == "validation loss"]
        assert cells == [
            "9.0e+12 FLOPs, 1 min 21 s",
            "1.2e+13 FLOPs, 1 min 34 s",
            "9.0e+12 FLOPs, 1 min 21 s, and lessons, whose cost is unknown",
        ]
        column = found["cost"].header.index("lessons time")
        assert [row[column] for row in found["cost"].rows] == ["–", "1 min 3 s", "unknown"]
        names = {"suite": "loss", "statistic": "tokens_to_90"}.items()
        asked, known, unknown = (r for r in recovery_rows(comparison) if names <= r.items())
        assert known["flops"] - asked["flops"] == pytest.approx(9 * 3e11)
        assert known["hours"] - asked["hours"] == pytest.approx(9 * 1.5 / 3600)
        assert unknown["lacks_lessons"]
        assert "lacks_lessons" not in known


def write_losses(folder: Path, start: float, dense: float = 2.2) -> None:
    """Of three held-out sequences. 0.8 are won along a line by step 100, and then nothing more."""
    rows = read_rows(folder / "train" / "metrics.jsonl")
    for row in rows:
        losses = {"validation_loss": start - 0.8 * min(1, row["step"] / 100)}
        losses |= {"dense_validation_loss": dense} if row["step"] == 0 else {}
        for name, loss in losses.items() if "validation_loss" in row else ():
            row |= {name: loss, f"{name}_by_sequence": [loss - 0.1, loss, loss + 0.1]}
            row[f"{name}_by_position"] = {"0": loss - 1, "64": loss + 1}
    write_rows(folder / "train" / "metrics.jsonl", rows)


def test_a_loss_above_the_baselines_is_told_in_nats_with_its_sign(tmp_path: Path) -> None:
    high, low = (FakeRun(method).write(tmp_path) for method in ("bosch", "fisher"))
    write_losses(high, start=3.25)
    write_losses(low, start=3, dense=2.2007)  # rounded in another order
    (chart,) = (chart for chart in make_charts(compare([high, low])) if chart.name == "losses")
    assert chart.panels[0].dense == [("dense model", -2.2)]
    for run, baseline, sign in ((high, "fisher", "+"), (low, "bosch", "-")):
        table = make_tables(compare([high, low], baseline))["baseline"]
        (row,) = (row for row in table.rows if row[1] == "validation loss")
        assert row[0] == read_run(run).setup
        assert row[2:] == [f"{sign}0.250* (1 seed)"] * 2


def test_a_method_as_baseline_gives_differences_over_seeds_for_each_ratio(tmp_path: Path) -> None:
    runs = [
        FakeRun(method, ratio, seed, (None, 0), skill=lambda step, task, at=at: at).write(tmp_path)
        for method, at in {"bosch": 0.9, "fisher": 0.2}.items()
        for ratio, seed in ((0.5, 0), (0.5, 1), (0.75, 0))
    ]
    comparison = compare(runs, baseline="fisher")
    rows = make_tables(comparison)["baseline"].rows
    kinds = ["tiny-qwen3 bosch r0.5 W64", "tiny-qwen3 bosch r0.75 W64"]
    assert [(row[0], row[1]) for row in rows] == [
        (kind, f"{suite} average") for suite in ("NIAH", "LongBench") for kind in kinds
    ]
    curves = comparison.curves_of(comparison.scores_of("average")[0])
    for row, seeds in zip(rows, ("2", "1 seed"), strict=False):
        assert row[2].startswith(f"{curves[0].values[0] - curves[3].values[0]:+.1f} [")
        assert row[2].endswith(f"]* ({seeds})")
        assert row[3] == "–"
    with pytest.raises(UserError, match=r"--baseline razor.*bosch, fisher"):
        compare(runs, baseline="razor")


def test_settings_as_baseline_are_compared_within_a_method(tmp_path: Path) -> None:
    def write(objective: str, method: str, last_step: int, last: float) -> Path:
        def skill(step: int | None, task: str) -> float:
            return last if step else 0.1

        run = FakeRun(method, steps=(None, 0, last_step), samples=20, skill=skill)
        folder = run.write(tmp_path / f"{objective}-{last_step}")
        change(folder / "run.json", "config", "train", "objective", value=objective)
        change(folder / "run.json", "config", "data", "tokens", value=1_000 * last_step)
        return folder

    methods = ("bosch", "fisher")
    taught = [write("distill", method, 100, 0.9) for method in methods]
    plain = [write("next-token", method, 100, 0.3) for method in methods]
    runs = [*taught, *plain, write("next-token", "bosch", 200, 0.6)]

    def points(baseline: str) -> dict[str, float]:
        """Of each method's `distill` above the baseline, NIAH average after training."""
        rows = compare(runs, baseline).differences
        ends = {row.setup: row.end for row in rows if row.score.suite == "niah"}
        return {name.split()[1]: end.value for name, end in ends.items() if "distill" in name}

    at_equal_tokens = points("train.objective=next-token")
    assert list(at_equal_tokens) == ["bosch", "fisher"]
    assert min(at_equal_tokens.values()) > 45
    at_more_tokens = points("train.objective=next-token,data.tokens=2e5")
    assert list(at_more_tokens) == ["bosch"]
    assert 15 < at_more_tokens["bosch"] < 45
    with pytest.raises(UserError, match="no run has such settings"):
        compare(plain, "train.objective=distill")

    # A run is compared with one that was trained alike, in whatever order they are given.
    for order in (runs, runs[::-1]):
        by_method = compare(order, "bosch")
        ends = [row.end.value for row in by_method.differences if "distill" in row.setup]
        assert ends == pytest.approx([0, 0, 0])  # NIAH, LongBench, loss
        assert not by_method.baseline.apart
    unlike = compare([taught[1], plain[0]], "bosch")
    assert [(row.start.value, row.end.num_seeds) for row in unlike.differences] == [(0, 0)] * 3
    assert (
        "not compared with bosch after training: no such run has the same train.objective"
        in (warnings(unlike)[-1])
    )


def test_archived_runs_are_read_like_their_folders(tmp_path: Path) -> None:
    runs = [FakeRun(method, learning_tokens=7).write(tmp_path) for method in ("bosch", "fisher")]
    archive = tmp_path / "rows.jsonl.gz"
    for run in (*runs, runs[0]):  # of lines on one run the last counts
        append_run(archive, read_run(run))
    stored, folders = compare([archive], "fisher"), compare(runs, "fisher")
    assert [run.name for run in stored.runs] == [run.name for run in folders.runs]
    assert make_tables(stored) == make_tables(folders)
    assert recovery_rows(stored) == recovery_rows(folders)
    assert [run.rows for run in stored.runs] == [run.rows for run in folders.runs]
    # A model's windows of its own count in the bytes that are saved.
    (run,) = compare([runs[0]]).runs
    assert run.mask is not None
    mask = replace(run.mask, mask=replace(run.mask.mask, own_windows=(512, 512)))
    append_run(archive, replace(run, mask=mask))
    assert read_archive(archive)[0].mask == mask


def test_answers_in_different_number_formats_are_told(tmp_path: Path) -> None:
    folders = [FakeRun(method).write(tmp_path) for method in ("bosch", "fisher")]
    for folder, dtype in zip(folders, ("bfloat16", "float32"), strict=True):
        for path in folder.glob("eval/*/niah/scores.json"):
            content = json.loads(path.read_text())
            content["rows"] = [row | {"dtype": dtype} for row in content["rows"]]
            path.write_text(json.dumps(content))
    found = [line for line in warnings(compare(folders)) if "number formats" in line]
    assert len(found) == 1
    assert re.search(rf"^niah: .* bfloat16 by {folders[0].name}.* float32 by", found[0])
    assert not [line for line in warnings(compare(folders[:1])) if "number formats" in line]
    steps = [folder / "eval" / "step-000000" for folder in folders]
    (line,) = differing_dtypes(*steps)
    assert "in bfloat16" in line
    assert not [*differing_dtypes(steps[0], steps[0])]


def test_the_masks_of_archived_runs_are_written_as_files(tmp_path: Path) -> None:
    archive = tmp_path / "rows.jsonl.gz"
    run = read_run(FakeRun().write(tmp_path))
    append_run(archive, run)
    folder = tmp_path / "masks"
    compare_runs.main([str(archive), "--out", str(tmp_path / "report"), "--masks", str(folder)])
    (file,) = folder.iterdir()
    assert file.name == f"{run.name}.json"
    assert read_mask(file) == run.mask


def test_a_suite_without_its_average_recovers_by_its_parts(tmp_path: Path) -> None:
    """RULER without the downloads of SQuAD and HotpotQA; LongBench without a whole category."""
    fake, other = FakeRun(samples=40, skill=recovering(0.1, 0.9)), FakeRun("fisher")
    folder = fake.write(tmp_path)
    for step in fake.steps:
        place = folder / "eval" / ("dense" if step is None else f"step-{step:06}")
        tokens = None if step is None else step * STEP_TOKENS
        label = Label(fake.name, step, tokens)
        scored = fake.answers(step, {Task(task, 512): (ruler.METRIC,) for task in ("vt", "fwe")})
        write_suite(
            place / "ruler",
            label,
            scored,
            averages.summarize(ruler, ruler.Settings(), scored),
            True,
        )
        shutil.rmtree(place / "longbench")
        scored = fake.answers(step, {Task("hotpotqa"): ("f1",)})
        results = averages.summarize(longbench, longbench.Settings(), scored)
        write_suite(place / "longbench", label, scored, results, True)
    comparison = compare([folder])
    shares = {row.curve.score.headline: row for row in comparison.recoveries}
    assert {"RULER vt", "RULER fwe", "LongBench hotpotqa"} < shares.keys()
    assert not has_recovered(comparison, 100)
    lines = dict(answers(comparison))[fake.name]
    assert any(line.startswith("RULER vt: recovered ") for line in lines)
    both = compare([folder, other.write(tmp_path)])
    assert f"{other.name}: RULER: not evaluated" in warnings(both)
    names = {"run": fake.name, "score": "vt", "statistic": "tokens_to_50", "clear_gap": True}
    (row,) = (row for row in recovery_rows(comparison) if names.items() <= row.items())
    assert row["hours"] == pytest.approx(row["value"] / STEP_TOKENS / 10 * 9 / 3600)


def test_a_last_line_needs_no_end_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "rows.jsonl"
    for method in ("bosch", "fisher"):
        append_run(archive, read_run(FakeRun(method).write(tmp_path)))
        archive.write_bytes(archive.read_bytes().rstrip(b"\n"))
    assert [run.method for run in read_archive(archive)] == ["bosch", "fisher"]
    content = archive.read_text().splitlines()[0]
    for damaged in (content.replace('"n": ', '"n": 1'), content[:-9], '{"mask": "run"}'):
        archive.write_text(damaged)
        with pytest.raises(UserError, match=rf"{archive}, line 1"):
            read_archive(archive)


def test_means_over_seeds_have_the_standard_error_of_their_values(tmp_path: Path) -> None:
    runs = [
        FakeRun(seed=seed, skill=recovering(0.1 + seed / 5, 0.9)).write(tmp_path)
        for seed in range(3)
    ]
    comparison = compare(runs)
    niah = comparison.scores_of("average")[0]
    values = [curve.values[0] for curve in comparison.curves_of(niah)]
    mean = sum(values) / 3
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 2 / 3)
    (row,) = make_tables(comparison)["seeds_before"].rows
    assert row[1] == f"{mean:.1f} ± {error:.1f} (3)"


def test_shorter_runs_are_named_and_not_averaged_at_the_end(tmp_path: Path) -> None:
    whole = [FakeRun(seed=seed).write(tmp_path) for seed in (0, 1)]
    half = FakeRun(seed=2, steps=(None, 0, 100)).write(tmp_path)
    other = FakeRun("fisher", steps=(None, 0, 100)).write(tmp_path)
    comparison = compare([*whole, half, other], whole[0].name)
    assert num_seeds(comparison, at_end=True) == [2, 1]
    assert num_seeds(comparison, at_end=False) == [3, 1]
    beside = {row.setup: row.end for row in comparison.differences}
    assert beside[whole[1].name].value is not None
    assert beside[half.name].value is beside[other.name].value is None
    names = f"100k in {half.name}, {other.name}"
    assert any(names in line for line in warnings(comparison))


def num_seeds(comparison: Comparison, at_end: bool) -> list[int]:
    niah = comparison.scores_of("average")[0]
    return [len(of) for of in seeds_of_setups(comparison, niah, at_end).values()]


def change(path: Path, *names: str, value: object) -> None:
    content = inner = json.loads(path.read_text())
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    path.write_text(json.dumps(content))


def test_only_runs_that_differ_in_the_seed_alone_are_averaged(tmp_path: Path) -> None:
    seeds = [FakeRun(seed=seed).write(tmp_path / "runs") for seed in (0, 1)]
    faster, again = (FakeRun().write(tmp_path / name) for name in ("faster", "again"))
    change(faster / "run.json", "config", "train", "peak_learning_rate", value=0.5)
    comparison = compare([*seeds, faster, again])
    assert num_seeds(comparison, at_end=True) == [2, 1, 1]
    assert "train.peak_learning_rate 0.5" in comparison.runs[2].setup
    assert f"again/{again.name}" in comparison.runs[3].setup


@pytest.mark.pictures
def test_report_is_one_file_with_nothing_outside_it(tmp_path: Path) -> None:
    runs = [FakeRun(method).write(tmp_path) for method in ("bosch", "fisher")]
    mine = tmp_path / "report" / "niah_mine.png"
    mine.parent.mkdir()
    mine.touch()
    written, again = (
        write_report(compare(runs, runs[1].name), tmp_path / name) for name in ("report", "again")
    )
    assert mine.exists()
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    html = (tmp_path / "report" / "report.html").read_text()
    pictures = {path.name: path.read_bytes() for path in written if path.suffix == ".png"}
    assert {"recovery.png", "niah_tasks.png", "longbench_categories.png"} <= pictures.keys()
    shown = [b64decode(png) for png in re.findall(r' src="data:image/png;base64,(.+?)">', html)]
    assert shown == [*pictures.values()]
    without = re.sub(r' src="data:image/png;base64,.+?">', ">", html)
    outside = r"https?:|@import|url\(|<link|<iframe|<script|(src|href|srcset)="
    assert not re.search(outside, without)
    rows = read_rows(tmp_path / "report" / "results.jsonl")
    assert {row["run"] for row in rows} == {run.name for run in runs}
    assert set(rows[0]) == set("run step tokens suite task length metric value stderr n".split())


def test_missing_and_damaged_parts_of_runs_are_named(tmp_path: Path) -> None:
    zero_shot = FakeRun("bosch", ratio=0.5, steps=(None, 0)).write(tmp_path)
    no_dense = FakeRun("razor", steps=(0, 100)).write(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    torn = FakeRun("dcam").write(tmp_path)
    with (torn / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "tok')  # it is still training
    (torn / "eval" / "step-000200" / "niah" / "scores.json").write_text('{"rows": [')
    (torn / "mask" / "mask.json").write_text("{}")
    comparison = compare([zero_shot, no_dense, empty, torn])
    text = "\n".join(["", *warnings(comparison)])
    assert f"\n{zero_shot.name}: evaluated only before training" in text
    assert f"\n{no_dense.name}: the dense model was not evaluated" in text
    assert f"\nempty, {torn.name}: no mask" in text
    assert f"\n{torn.name}: {torn / 'eval/step-000200/niah/scores.json'} is not a valid" in text
    shares = {row[0]: row[2] for row in make_tables(comparison)["recovery"].rows}
    assert shares[no_dense.name] == MISSING  # nobody knows whether there is a gap
    write_report(comparison, tmp_path / "report")


def test_a_linked_run_has_what_it_shares_and_a_copy_without_it_says_so(tmp_path: Path) -> None:
    elsewhere = FakeRun().write(tmp_path / "elsewhere")
    runs = tmp_path / "runs"
    (runs / "shared").mkdir(parents=True)
    (elsewhere / "eval" / "dense").rename(runs / "shared" / "eval-dense-0")
    (elsewhere / "eval" / "dense").mkdir()
    write_sealed_json(
        elsewhere / "eval" / "dense" / "reference.json",
        {"folder": "../../../shared/eval-dense-0"},
    )
    linked = runs / elsewhere.name
    linked.symlink_to(elsewhere)
    assert not any("dense" in line for line in warnings(compare([linked])))
    assert len(compare([linked, elsewhere]).runs) == 1
    # Or beside the folder that the link leads to.
    other = tmp_path / "other" / elsewhere.name
    other.parent.mkdir()
    other.symlink_to(linked.parent / "moved")
    elsewhere = elsewhere.rename(linked.parent / "moved")
    assert not any("dense" in line for line in warnings(compare([other])))
    elsewhere = elsewhere.rename(tmp_path / "elsewhere" / "copy")
    said = "\n".join(warnings(compare([elsewhere])))
    assert "eval-dense-0, which is not there; copy a run together with shared" in said


def test_a_damaged_prediction_is_named_and_nothing_is_drawn_from_it(tmp_path: Path) -> None:
    folder = FakeRun(skill=recovering(0.1, 0.7)).write(tmp_path)
    path = folder / "eval/step-000200/niah/predictions.jsonl"
    path.write_text(path.read_text().replace(": 1.0", ": NaN", 1))
    comparison = compare([folder])
    assert [row.gap_share.low is None for row in comparison.recoveries] == [True, False]
    assert [line for line in warnings(comparison) if f"{path}: left out 1 rows" in line]


def test_runs_that_are_not_comparable_are_named(tmp_path: Path) -> None:
    more, fewer = (FakeRun(f"with {n}", samples=n).write(tmp_path) for n in (8, 5))
    above = FakeRun("razor").write(tmp_path)
    lines = warnings(compare([more, fewer, above]))
    # Six tasks at two lengths.
    same = f"96 of 512, 1024 tokens in {more.name}, {above.name}; 60 of 512, 1024 tokens in"
    assert any("NIAH average" in line and f"{same} {fewer.name}" in line for line in lines)
    found = compare([more, fewer, above], baseline="razor").differences
    assert {row.setup for row in found if row.score is not LOSS} == {"tiny-qwen3 with 8 r0.75 W64"}


def test_answers_about_other_texts_are_not_paired(tmp_path: Path) -> None:
    """Needles are hidden in the text of the training, so it may differ between runs."""
    here = FakeRun("fisher").write(tmp_path)
    same = FakeRun("razor").write(tmp_path)
    other = FakeRun("kvzip", text="books").write(tmp_path)
    archive = tmp_path / "rows.jsonl"
    append_run(archive, read_run(other))
    for runs in ([here, same, other], [here, same, archive]):
        comparison = compare(runs, baseline="fisher")
        average = [row for row in comparison.differences if row.score.kind == "average"]
        assert {row.setup for row in average} == {"tiny-qwen3 razor r0.75 W64"}
        named = f"asked other texts, .*: {here.name}, {same.name}; others in {other.name}"
        assert any(re.search(named, line) for line in warnings(comparison))
    assert not any("other texts" in line for line in warnings(compare([here, same])))


def test_the_answers_begin_with_the_best_run(tmp_path: Path) -> None:
    """A line on the mask, then one per suite."""
    dense = FakeRun("fisher", steps=(None,)).write(tmp_path)
    start = FakeRun("razor", steps=(None, 0)).write(tmp_path)
    trained = FakeRun().write(tmp_path)
    found = dict(answers(compare([dense, start, trained])))
    assert [*found] == [trained.name, start.name, dense.name]
    _, mask, *suites = found[trained.name]
    assert mask.startswith("bosch, 12 of 16 KV groups on a window of 64 tokens")
    # 4 groups have room for 1,024 + 128 tokens, 12 for 63 + 16: .339 of 16 times 1,024.
    assert mask.endswith("KV bytes saved: 60% at 512 tokens")
    assert suites == [describe(row.curve, row) for row in compare([trained]).recoveries]
    assert re.fullmatch(
        r"NIAH: -\S+ \[.+\] points from the dense model \(89.6\) before training",
        found[start.name][2],
    )
    assert len(found[dense.name]) == 1  # nothing but its mask


@pytest.mark.parametrize("dense", [0.6, 0.65])
def test_there_is_no_share_of_a_gap_that_may_not_exist(tmp_path: Path, dense: float) -> None:
    run = FakeRun(skill=lambda step, task: dense if step is None else 0.6).write(tmp_path)
    lines = [str(line) for line in page.summarize(compare([run]))]
    assert not any("% [" in line for line in lines if "gap" in line)
    # It says how large the gap may be.
    said = re.compile(r"no significant gap \(± \d+\.\d\)")
    assert any(said.search(line) for line in lines)
    assert said.search(str(short_table(compare([run])).rows))


def test_command_skips_what_is_not_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    FakeRun(steps=(None, 0)).write(tmp_path / "runs")
    (tmp_path / "runs" / "shared").mkdir()
    (tmp_path / "runs" / "nohup.out").touch()
    (tmp_path / "runs" / "real_model.jsonl").write_text('{"method": "razor"}\n')  # of a benchmark
    compare_runs.main([*map(str, (tmp_path / "runs").iterdir()), "--out", "out"])
    output = capsys.readouterr().out
    assert "tiny-qwen3-bosch-r0.75" in output
    assert "out/report.html" in output
    with pytest.raises(UserError, match="runs/shared"):
        compare_runs.main(["runs/shared"])
    with pytest.raises(MissingFileError, match="runs/nothing"):
        compare_runs.main(["runs/nothing"])
