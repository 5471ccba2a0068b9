"""`--hours`: what is cut so that a run fits, and in which order. Speeds are given, nothing is timed
but in the last test, which runs a chain."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bosch.config import Config
from bosch.eval.rows import read_rows
from bosch.methods._settings import learning_tokens, load_method
from bosch.recipes import hours
from bosch.recipes.command import parse_command
from bosch.recipes.hours import Promise, fit, with_hours
from bosch.recipes.presets import paper, small, smoke, tiny
from bosch.recipes.recover import main
from bosch.run.errors import UserError
from bosch.run.files import write_sealed_json
from bosch.run.stage import Stage
from bosch.training import rehearsal
from bosch.training.train_stage import schedule_of
from tests.fork_server import PATIENCE, launch_environment, start


def seconds_of(config: Config) -> dict[str, float]:
    """Of a machine where a step takes a second, as does a question of each of 10 tasks, and a
    search of kappa 30 (a ranking: none) 300."""
    models = 1 + len(config.eval.checkpoints)
    searches = load_method(config.method).traits.searches
    found = {"search": 10.0 * config.mask.kappa} if searches else {}
    return found | {
        "evaluation": 10.0 * models * config.eval.niah_samples,
        "training": float(schedule_of(config).num_steps),
    }


def fitted(config: Config, seconds: float, **options: object) -> tuple[Config, Promise]:
    return fit(config, seconds / hours.PROMISED / 3600, seconds_of, **options)


LARGE = replace(tiny(), data=replace(tiny().data, tokens=1_024_000))  # 1,000 steps
LARGE = replace(LARGE, eval=replace(LARGE.eval, niah_samples=25, longbench_rows=25))


@pytest.mark.parametrize(
    ("seconds", "steps", "checkpoints", "questions", "kappa", "method"),
    [
        (2_300, 1_000, 3, 25, 30, "bosch"),  # 300 + 10 x 25 x 4 models + 1,000: all of it
        (2_299, 999, 3, 25, 30, "bosch"),  # fewer tokens first,
        (1_800, 500, 3, 25, 30, "bosch"),  # down to half
        (1_799, 749, 2, 25, 30, "bosch"),  # no evaluation on the way: 250 less, that tokens fill
        (1_549, 949, 2, 10, 30, "bosch"),  # 10 questions a task: 450 less
        (1_099, 739, 2, 10, 6, "bosch"),  # 6 masks a layer: 240 less
        (859, 559, 2, 10, 6, "razor"),  # a ranking: 60 less
        (799, 649, 2, 5, 6, "razor"),  # 5 questions a task: 150 less
        (649, 499, 2, 5, 6, "razor"),  # and at last fewer tokens
        (170, 20, 2, 5, 6, "razor"),
    ],
)
def test_what_costs_least_is_cut_first(
    seconds: float, steps: int, checkpoints: int, questions: int, kappa: int, method: str
) -> None:
    config, promise = fitted(LARGE, seconds + 1e-6)
    assert schedule_of(config).num_steps == steps
    assert len(config.eval.checkpoints) == checkpoints
    assert (config.eval.niah_samples, config.eval.longbench_rows) == (questions, questions)
    assert (config.mask.kappa, config.method) == (kappa, method)
    assert sum(promise.seconds.values()) == pytest.approx(seconds)
    said = " ".join(promise.cuts)  # as options that set it
    assert ("--data.tokens" in said) == (steps < 1_000)
    assert ("--eval.checkpoints 0 1 (it was 0 0.5 1)" in said) == (checkpoints < 3)
    assert ("--eval.niah-samples 5 (it was 25)" in said) == (questions == 5)
    assert ("--mask.kappa 6 (it was 30)" in said) == (kappa == 6 and method == "bosch")
    assert ("--method razor (it was bosch)" in said) == (method == "razor")


def test_what_cannot_fit_is_refused_with_the_least_hours_that_would() -> None:
    with pytest.raises(UserError, match=r"--hours 0\.04 is too short .* at least") as refused:
        fitted(LARGE, 0.04 * 3600 * hours.PROMISED)  # 115 s; the least is 170
    least = float(str(refused.value).rpartition("--hours ")[2].rstrip("."))
    assert least == 0.06  # 170 / .8 / 3,600 = .0590, rounded up to two digits
    assert schedule_of(fit(LARGE, least, seconds_of)[0]).num_steps >= hours.FEWEST_STEPS


def test_what_the_user_names_is_not_cut() -> None:
    named = ["method", "eval.niah_samples"]
    config, _ = fitted(LARGE, 1_100, named=named)
    assert (config.method, config.mask.kappa, config.eval.niah_samples) == ("bosch", 30, 25)
    assert (schedule_of(config).num_steps, len(config.eval.checkpoints)) == (50, 2)
    with pytest.raises(UserError, match=r"--data\.tokens and --eval\.niah-samples and --method"):
        fitted(LARGE, 1_100, named=["data.tokens", *named])


def test_runs_that_lack_something_to_cut() -> None:
    own = replace(small("tiny-qwen3"), method="bosch")
    config = replace(smoke(), method="interleave")
    assert list(hours.smaller(config, ())) == [config]  # a ranking, one question, no middle
    to_decide = replace(LARGE, train=replace(LARGE.train, until="recovered"))
    evaluations = {
        (len(c.eval.checkpoints), c.eval.niah_samples) for c in hours.smaller(to_decide, ())
    }
    assert evaluations == {(3, 25)}  # what the decision needs
    # Of options for the search a ranking knows nothing.
    assert all(c.method == "bosch" for c in hours.smaller(own, ["mask.options"]))
    # Suites of one's own are asked as little.
    suites = replace(own, eval=replace(own.eval, suites=("niah", "longbench_v2")))
    assert [c.eval.samples for c in hours.smaller(suites, ["method"])] == [None, None, 10, 5]
    # Rows of a suite that is not asked are none to cut.
    assert {c.eval.longbench_rows for c in hours.smaller(own, ())} == {None}
    # Without a training there is nothing to cut in it.
    config, _ = fitted(LARGE, 1_500, zero_shot=True)
    assert config.data.tokens == LARGE.data.tokens


def test_the_hours_that_a_refusal_names_are_enough() -> None:
    """Also where time is not in proportion to steps, as losses of held-out text are not."""

    def seconds_of_few(config: Config) -> dict[str, float]:
        steps = schedule_of(config).num_steps
        return {"training": steps + 50.0 * steps.bit_length(), "evaluation": 10.0}

    allowed = hours.PROMISED * 3600
    with pytest.raises(UserError, match=r"at least --hours \S+") as refused:
        fit(LARGE, 200 / allowed, seconds_of_few)
    (least,) = re.findall(r"at least --hours (\S+?)\.$", str(refused.value))
    config, promise = fit(LARGE, float(least), seconds_of_few)
    assert schedule_of(config).num_steps >= 20
    for asked in (float(least), 700 / allowed, 1_000 / allowed):
        config, promise = fit(LARGE, asked, seconds_of_few)
        assert sum(promise.seconds.values()) <= allowed * asked + 0.01


def test_a_mask_that_is_learned_without_a_training_has_to_fit() -> None:
    found = {"learning the mask": 600.0, "evaluation": 100.0}
    options = {"zero_shot": True}
    assert fit(LARGE, 701 / hours.PROMISED / 3600, lambda _: found, **options)[0] == LARGE
    with pytest.raises(UserError, match=r"takes .* \(learning the mask 10 min .* --hours 0\.25"):
        fit(LARGE, 699 / hours.PROMISED / 3600, lambda _: found, **options)


def test_a_search_with_options_stays_a_search() -> None:
    config = replace(LARGE, mask=replace(LARGE.mask, options=("effort=0.5",)))
    assert {each.method for each in hours.smaller(config, ())} == {"bosch"}


def test_a_learned_mask_takes_its_share_of_fewer_tokens_too() -> None:
    config = replace(paper("Qwen/Qwen3-1.7B-Base"), method="l1_gates")
    for steps in (1, 20):
        less = hours.with_steps(config, steps)
        assert schedule_of(less).num_steps == steps
        assert learning_tokens(less) > 0


def test_hours_are_a_limit_and_add_nothing() -> None:
    config, promise = fit(LARGE, 100.0, seconds_of)
    assert (config, promise.cuts) == (LARGE, ())
    assert "nothing is cut" in promise.lines()[0]
    for wrong in ("0", "-1", "nan"):
        with pytest.raises(UserError, match="hours is"):
            parse_command(["--hours", wrong])


# ------------------------------------------------------------------------------- of a whole run


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def have(speed: float) -> None:
        monkeypatch.setattr(rehearsal, "matmul_speed", lambda dtype: speed)

    return have


def test_a_run_that_goes_on_has_what_was_chosen_first(
    known_speed: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known_speed(3e10)
    first = parse_command(["--hours", "0.1"])
    assert first.run_path == Path("runs/tiny-qwen3-bosch-r0.75-hours0.1")
    first.run_path.mkdir(parents=True)
    record = {"config": asdict(first.config), "hours": asdict(first.promise)}
    (first.run_path / "run.json").write_text(json.dumps(record))
    known_speed(1e12)  # beside less other work
    again = parse_command(["--hours", "0.1"])
    assert first.promise.cuts
    assert (again.config, again.promise) == (first.config, first.promise)
    (first.run_path / "run.json").write_text(json.dumps({"config": asdict(first.config)}))
    with pytest.raises(UserError, match="began without"):
        parse_command(["--hours", "0.1"])


def test_what_the_command_line_names_is_kept(known_speed: Callable[[float], None]) -> None:
    known_speed(3e10)
    usual = parse_command(["--hours", "0.15"])
    assert [cut.split()[0] for cut in usual.promise.cuts][:2] == [
        "--data.tokens",
        "--eval.checkpoints",
    ]
    named = ["--eval.checkpoints", "0", "0.5", "1", "--method", "bosch"]
    command = parse_command(["--hours", "0.15", *named])
    assert command.config.eval.checkpoints == (0, 0.5, 1)
    assert command.config.mask == tiny().mask
    assert any("--eval.niah-samples 5 " in cut for cut in command.promise.cuts)


def choose(environment: dict[str, str], out: Path) -> None:
    os.environ |= environment
    rank = int(environment["RANK"])
    rehearsal.matmul_speed = lambda dtype: 3e10 * (1 + rank)
    config, promise = with_hours(tiny(), 0.1, out / "run.json", [], False)
    (out / f"rank-{rank}").write_text(f"{config} {promise}")


@pytest.mark.slow
def test_all_ranks_have_what_rank_0_chose(tmp_path: Path) -> None:
    ranks = [start(choose, one, tmp_path) for one in launch_environment(2)]
    for process in ranks:
        process.join(PATIENCE)
    first, second = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert first == second
    assert "data.tokens" in first


@pytest.mark.slow
def test_a_run_that_falls_behind_trains_less(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a launch that was killed when all of its hours were over."""
    run = tmp_path / "run"
    command = ["--preset", "smoke", "--hours", "2", "--run-dir", str(run)]
    run.mkdir()
    write_sealed_json(run / ".wall_seconds.json", {"seconds": [7_200.0]})
    main(command)
    said = capsys.readouterr().out
    assert "step 2 of 8: little time is left; training ends at 3" in said
    assert "run: training ended early, at step 3 of 8, so that --hours held" in said
    assert "eval/step-000008: left out" in said
    assert (run / "train" / "step-000003").is_dir()
    steps = {row["step"] for row in read_rows(run / "report" / "results.jsonl")}
    assert steps == {None, 0, 3}
    assert "at step 3 of 8" in (run / "report" / "report.html").read_text()
    main(command)  # by another clock
    said = capsys.readouterr().out
    assert "train: complete, reused" in said
    assert "eval/step-000003: complete, reused" in said
    assert "at step 3 of 8" in said
    main([*command, "--fresh", "train"])
    assert "at step 3 of 8" not in capsys.readouterr().out
    assert (run / "train" / "step-000008").is_dir()
    steps = {row["step"] for row in read_rows(run / "report" / "results.jsonl")}
    assert steps == {None, 0, 8}


def test_what_is_made_again_is_counted_anew(tmp_path: Path) -> None:
    stages = [Stage("train", run=lambda out: None), Stage("eval/dense", run=lambda out: None)]

    def make(name: str, seconds: float) -> None:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        write_sealed_json(tmp_path / name / "manifest.json", {"wall_seconds": [seconds]})

    make("eval/dense", 10)
    make("train", 99)
    seconds = {"training": 90.0, "evaluation": 9.0, "start and report": 5.0}
    first = Promise(1.0, seconds, begun=0.0).keep(tmp_path, stages, 116.0)
    assert first.taken == {"training": 99, "evaluation": 10, "start and report": 7}
    assert first.keep(tmp_path, stages, 5.0) == first  # everything is reused
    make("train", 44)  # --fresh train
    again = first.keep(tmp_path, stages, 50.0)
    assert again.taken == {"training": 44, "evaluation": 10, "start and report": 7}
    assert "training 44.0 s of 1 min 30 s" in again.describe_taken()


@pytest.mark.slow
def test_a_run_says_what_was_promised_and_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["--preset", "smoke", "--hours", "2", "--run-dir", str(tmp_path / "run")]
    main(command)
    said = capsys.readouterr().out
    assert "--hours 2: nothing is cut; promised: about" in said
    assert "hours were promised" in said
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["hours"]
    assert kept["asked"] == 2
    assert kept["taken"].keys() == kept["seconds"].keys()
    assert all(seconds >= 0 for seconds in kept["taken"].values())
    main(command)  # everything is reused, and the record stays
    again = json.loads((tmp_path / "run" / "run.json").read_text())["hours"]
    assert again == kept
