"""The chain as the README starts it: to its end, again, and on two ranks."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bosch.eval.report.runs import read_run
from bosch.masks.mask import read_mask
from bosch.recipes import sweep
from tests.smoke_chain import CHAIN, RUN, Undisturbed, results, start

RECOVER = Path(__file__).parents[2] / "recipes" / "recover.py"
LAUNCH = [str(Path(sys.executable).with_name("accelerate")), "launch"]
TWO = ("--use_fsdp", "--num_processes", "2", "--main_process_port", "0")


def launch(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def losses(run: Path) -> list[float]:
    lines = (run / "train" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def test_chain_leaves_mask_model_scores_curves_and_report(undisturbed: Undisturbed) -> None:
    folder, _ = undisturbed
    found = results(folder / RUN)
    name = RUN.name
    assert {f"{name}/mask/mask.json", f"{name}/train/step-000008/model.safetensors"} <= set(found)
    rows = [json.loads(line) for line in found[f"{name}/report/results.jsonl"].splitlines()]
    judged = {(row["step"], row["suite"]) for row in rows if row["task"] == "average"}
    assert judged == {(step, suite) for step in (None, 0, 8) for suite in ("niah", "longbench")}
    assert len(losses(folder / RUN)) == 8
    assert list((folder / RUN / "tb").rglob("events.out.tfevents.*"))
    assert (folder / RUN / "report" / "report.html").stat().st_size > 10_000
    # A sweep knows it by the files that it was made from.
    (chain,) = sweep.list_chains(sweep.Options(("bosch",), ("0.75",)), ["--preset", "smoke"])
    made_from = read_run(folder / RUN).made_from
    assert made_from.keys() == {"calibration", "mask", "tokens", "eval/dense"}
    assert made_from == chain.made_from


def test_no_stage_begins_with_the_model_of_an_earlier_one(undisturbed: Undisturbed) -> None:
    """The run does without automatic garbage collection. Only the evaluation of a checkpoint runs
    while the training's model and its teacher wait."""
    folder, _ = undisturbed
    (line,) = re.findall(r"^models (.*)$", folder.with_suffix(".log").read_text(), re.MULTILINE)
    models = json.loads(line)
    assert {"mask", "eval-dense", "model", "train"} <= set(models)
    assert {name: count for name, count in models.items() if count} == {"eval/step-000008": 2}


@pytest.mark.slow
def test_a_chain_that_learns_answers_makes_them_before_its_lessons(tmp_path: Path) -> None:
    words = ["--data.answers", "0.3", "--train.on-policy", "0.25", "--train.stored-shares", "8"]
    words += ["--train.objective", "distill", "--data.sequence-length", "512"]
    command = (sys.executable, str(RECOVER), *CHAIN, *words)
    first = launch(tmp_path, *command)
    assert first.returncode == 0, first.stderr
    begun = re.findall(r"stage \d+ of \d+, ([\w/-]+): starts", first.stdout)
    assert begun.index("tokens") < begun.index("answers") < begun.index("lessons")
    assert begun.index("lessons") < begun.index("train")
    again = launch(tmp_path, *command)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("complete, reused") == len(begun)


@pytest.mark.parametrize(
    "program", [(sys.executable,), pytest.param(tuple(LAUNCH), marks=pytest.mark.slow)]
)
def test_chain_started_again_reuses_everything(
    program: tuple[str, ...], undisturbed: Undisturbed
) -> None:
    folder, _ = undisturbed
    again = launch(folder, *program, str(RECOVER), *CHAIN)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("complete, reused") == 8
    assert "starts" not in again.stdout


def test_a_stopped_fresh_start_goes_on_when_it_is_repeated(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """It had set its own checkpoints aside, and a job that is queued again never ended."""
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    fresh = (*CHAIN, "--fresh", "train")
    code, output = start(tmp_path, 260, "SIGKILL", arguments=fresh)
    assert code == -signal.SIGKILL, output
    assert "train: the old one is now" in output
    assert (tmp_path / RUN / "train" / "started.json").is_file()
    # The same command, written otherwise and asked to say more.
    code, output = start(tmp_path, arguments=(*CHAIN, "--fresh=train", "--debug"))
    assert code == 0, output
    assert "train: continues where it stopped" in output
    assert not (tmp_path / RUN / "replaced" / "train-2").exists()
    assert results(tmp_path / RUN) == results(undisturbed[0] / RUN)
    code, output = start(tmp_path, arguments=fresh)  # finished: it is made again
    assert code == 0, output
    assert (tmp_path / RUN / "replaced" / "train-2").is_dir()


def test_from_a_stage_makes_it_and_the_later_ones_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Also those that do not depend on it, as the training here: --fresh leaves them."""
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    code, output = start(tmp_path, arguments=(*CHAIN, "--from", "eval/step-000000"))
    assert code == 0, output
    set_aside = set(re.findall(r"^([\w/-]+): the old one is now", output, re.MULTILINE))
    assert set_aside == {"eval/step-000000", "train", "eval/step-000008"}
    reused = set(re.findall(r"([\w/-]+): complete, reused", output))
    assert {"calibration", "mask", "model", "tokens"} <= reused
    assert results(tmp_path / RUN) == results(undisturbed[0] / RUN)


@pytest.mark.slow
def test_two_ranks_make_the_same_mask_scores_and_losses(tmp_path: Path) -> None:
    """Over a search, ten steps of training and a report."""
    chain = (*CHAIN, "--data.tokens", str(10 * 2 * 256))
    # The divergence from a teacher is a small rest of large numbers: rounding shows in more digits.
    chain = (*chain, "--train.objective", "next-token")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    code, output = start(tmp_path / "one", arguments=chain)
    assert code == 0, output
    run = launch(tmp_path / "two", *LAUNCH, *TWO, str(RECOVER), *chain)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("run folder runs/") == 1  # rank 0 alone speaks
    one, two = (tmp_path / name / RUN for name in ("one", "two"))
    assert read_mask(one / "mask/mask.json").mask == read_mask(two / "mask/mask.json").mask
    assert len(losses(two)) == 10
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    for suite in ("niah", "longbench"):
        scores = f"eval/step-000000/{suite}/scores.json"
        assert (one / scores).read_bytes() == (two / scores).read_bytes()
    assert (two / "report" / "report.html").is_file()


@pytest.mark.slow
def test_a_learned_mask_takes_its_tokens_from_the_budget(tmp_path: Path) -> None:
    """And its own settings are options of the chain."""
    chain = ("--preset", "smoke", "--method", "consa", "--mask.options", "granularity=layer")
    # At .75 both of two layers have the window, and nothing is learned.
    more = ("steps=4", "--data.tokens", "8192", "--ratio", "0.5")
    run = launch(tmp_path, sys.executable, str(RECOVER), *chain, *more)
    assert run.returncode == 0, run.stderr
    assert "3,276 of the 8,192 tokens" in run.stdout
    (folder,) = (tmp_path / "runs").glob("tiny-qwen3-2layer-consa-*")
    assert folder.name == "tiny-qwen3-2layer-consa-granularity=layer-steps=4-r0.5"
    record = read_mask(folder / "mask/mask.json")
    assert record.mask.unit == "layer"
    assert record.settings["num_steps"] == 4
    lines = (folder / "train" / "metrics.jsonl").read_text().splitlines()
    tokens = [json.loads(line)["tokens"] for line in lines]
    assert (tokens[0], max(tokens)) == (3_276, 3_276 + 9 * 512)  # nine steps fit
    rows = [json.loads(line) for line in (folder / "eval/results.jsonl").read_text().splitlines()]
    assert {row["tokens"] for row in rows if row["step"] is not None} == {tokens[0], max(tokens)}


@pytest.mark.slow
def test_chain_ends_early_once_the_model_has_recovered(tmp_path: Path) -> None:
    """The dense model itself, trained at next to no rate, is never below itself: it has recovered
    at its first checkpoint after the warm-up."""
    options = (
        "--preset smoke --ratio 0 --train.until recovered --train.peak-learning-rate 1e-9 "
        "--eval.checkpoints 0 .5 1 --eval.suites niah --eval.niah-tasks niah_single_1 "
        "--eval.samples 25"
    )
    chain = (sys.executable, str(RECOVER), *options.split())
    run = launch(tmp_path, *chain)
    assert run.returncode == 0, run.stderr
    assert "step 4: recovered; training ends at step 5" in run.stdout
    (folder,) = (tmp_path / "runs").glob("tiny-*")
    assert len(losses(folder)) == 5
    written = (folder / "report" / "results.jsonl").read_text()
    rows = [json.loads(line) for line in written.splitlines()]
    assert {row["step"] for row in rows} == {None, 0, 4, 5}
    again = launch(tmp_path, *chain)
    assert again.returncode == 0, again.stderr
    assert "starts" not in again.stdout
