"""Evaluations by processes of another interpreter: the same files as ours, whoever makes them."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bosch.assets import asset_folder
from bosch.data.tokenizer_files import describe_tokenizer
from bosch.eval.elsewhere import places
from bosch.eval.evaluate import EvaluationPlan, check_attention, evaluate_folder, plan_of_run
from bosch.eval.rows import read_rows
from bosch.eval.runner import describe_examples
from bosch.eval.settings import GenerationSettings, Label, SuiteRun
from bosch.eval.suites import niah
from bosch.model import load_tokenizer
from bosch.recipes import presets
from bosch.run.dist import FolderLock
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint
from tests.fork_server import PATIENCE

MODEL = asset_folder("tiny-qwen3-2layer")
SETTINGS = niah.Settings(lengths=(256,), tasks=("niah_single_1", "niah_single_2"))
HERE = EvaluationPlan((SuiteRun("niah", SETTINGS, 2),))
TWO_GPUS = replace(HERE, generation=GenerationSettings(python=sys.executable, gpus=("5", "7")))


def evaluated(plan: EvaluationPlan, out: Path, ends: bool = True) -> dict[str, bytes]:
    finish = evaluate_folder(MODEL, plan, Label("one", 4, 4), out, out.parent / "examples")
    if ends:
        finish()
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*.json*"))}


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_write_what_this_one_does(resumes: bool, tmp_path: Path) -> None:
    """And go on where one of them was stopped."""
    ours = evaluated(HERE, tmp_path / "ours")
    if resumes:
        begun = evaluated(TWO_GPUS, tmp_path / "theirs", ends=False)
        assert list(begun) == ["niah-0.jsonl", "niah-1.jsonl"]  # a share of each GPU
        (tmp_path / "theirs" / ".work" / "niah-1.jsonl").unlink()
    assert evaluated(TWO_GPUS, tmp_path / "theirs") == ours
    assert len(read_rows(tmp_path / "theirs" / "niah" / "predictions.jsonl")) == 4


def test_each_process_has_one_gpu_and_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 ranks on two machines: on their own GPUs, or on three others of each machine."""

    def seen(rank: int, *gpus: str) -> list[tuple[str, ...]]:
        launch = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2)}
        launch |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "there", "CUDA_VISIBLE_DEVICES": "4,6"}
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.setenv(name, launch[name])
        found = places(launch, gpus)
        assert not any({"MASTER_ADDR", "LOCAL_RANK"} & place.keys() for place in found)
        names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
        return [tuple(place[name] for name in names) for place in found]

    assert [seen(rank) for rank in (0, 3)] == [[("0", "4", "4")], [("3", "4", "6")]]
    assert seen(0, "0", "1", "2") == [("0", "6", "0"), ("2", "6", "2")]
    assert seen(3, "0", "1", "2") == [("4", "6", "1")]
    assert seen(3, "0") == []  # rank 2 has it


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """It would wait for examples that this test never builds, and holds the lock of."""
    (suite,), known_by = HERE.suites, describe_tokenizer(load_tokenizer(MODEL)).hash
    facts = describe_examples(suite, suite.tasks[0], known_by)
    shared = tmp_path / f"examples-{fingerprint(facts)[:16]}"
    job = evaluate_folder, MODEL, HERE, Label("one", 4, 4), tmp_path / "out", tmp_path
    (place,) = places({**os.environ}, ())
    command = [sys.executable, "-m", "bosch.eval.elsewhere"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with FolderLock(shared), subprocess.Popen(command, env=place, **pipes) as process:
        try:
            _, errors = process.communicate(pickle.dumps(job), timeout=PATIENCE)
        finally:
            process.kill()
    assert (process.returncode, errors) == (1, b"")


def test_what_cannot_evaluate_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = presets.smoke()

    def refused(**changes: object) -> str:
        asked = replace(config, eval=replace(config.eval, **changes))
        with pytest.raises(UserError) as caught:
            check_attention(plan_of_run(asked))
        return str(caught.value)

    python = str(tmp_path / "python")
    assert f"{python} does not run" in refused(engine_python=python)
    (tmp_path / "python").write_text("#!/bin/sh\necho vllm bosch_vllm\n")  # what it lacks
    (tmp_path / "python").chmod(0o755)
    said = refused(engine="vllm", engine_python=python)
    assert f"{python} lacks vllm, bosch_vllm: make serving" in said
    assert "eval.attention" in refused(engine="vllm", attention="sdpa")
    assert plan_of_run(config).generation.python is None
    vllm = plan_of_run(replace(config, eval=replace(config.eval, engine="vllm")))
    assert vllm.generation.python is not None
    # Engines agree in fp32. In half precision near ties may fall otherwise.
    assert "engine" not in replace(vllm, precision="fp32").facts()
    assert "engine" in replace(vllm, precision="bf16").facts()


@pytest.mark.slow
def test_a_failed_process_is_named(tmp_path: Path) -> None:
    one = GenerationSettings(python=sys.executable, gpus=("5",))
    short = replace(HERE, generation=one, yarn=0.01)  # positions for 10 tokens
    with pytest.raises(UserError, match=f"{MODEL} by {sys.executable} ended with status 2"):
        evaluated(short, tmp_path / "out")
