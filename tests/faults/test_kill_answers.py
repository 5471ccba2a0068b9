"""Answers, and a training that writes its own, killed at any point end with the same bytes."""

import random
import re
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bosch.assets import asset_folder
from bosch.recipes import prepare_tokens, presets
from bosch.run import progress
from bosch.run.fingerprint import hash_file
from tests.faults.training_program import Attempt, enter, start_ranks
from tests.kill_points import watch_operations

LENGTH, SHARE = 512, 0.2


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "tokens"
    options = f"--model {presets.SMOKE_MODEL} --tokens 8k --sequence-length {LENGTH} --workers 1"
    prepare_tokens.main([*options.split(), "--held-out-sequences", "2", "--out", str(folder)])
    progress.close()
    return folder


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks: the files of a run that is not killed, and each rank's operations."""

    @cache
    def made(world: int) -> tuple[dict[str, str], list[int]]:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        output = finish(start(folder, world, tokens=str(tokens)))
        return results(folder), [int(n) for n in re.findall(r"operations: (\d+)", output)]

    return made


@pytest.mark.faults
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("attempt", range(4))
def test_killed_anywhere_it_resumes_to_the_same_bytes(
    world: int, attempt: int, tmp_path: Path, tokens: Path, undisturbed: Any
) -> None:
    expected, operations = undisturbed(world)
    draw = random.Random(f"{world} {attempt}")
    victim = draw.randrange(world)
    # The first half of the attempts while answers are written, the others in the training.
    point = draw.randint(1, 8) if attempt < 2 else draw.randint(8, operations[victim])
    folder = tmp_path / "run"
    killed = start(folder, world, tokens=str(tokens), at=point, victim=victim)
    assert killed.wait_for_end(victim) == -signal.SIGKILL, killed.output()
    killed.kill()
    finish(start(folder, world, tokens=str(tokens)))
    assert results(folder) == expected


@pytest.mark.faults
def test_two_ranks_write_the_answers_that_one_writes(undisturbed: Any) -> None:
    one, two = (undisturbed(world)[0] for world in (1, 2))
    answers = {name: one[name] for name in one if name.startswith("answers")}
    assert len(answers) > 2
    assert answers == {name: two[name] for name in answers}


def start(folder: Path, world: int, **options: Any) -> Attempt:
    folder.mkdir(parents=True, exist_ok=True)
    return start_ranks(main, folder, world, options)


def finish(attempt: Attempt) -> str:
    assert {*attempt.wait()} == {0}, attempt.output()
    return attempt.output()


def results(folder: Path) -> dict[str, str]:
    files = [*folder.glob("answers/*.npy"), *folder.glob("train/step-*/model.safetensors")]
    assert any(file.name == "model.safetensors" for file in files)
    return {file.relative_to(folder).as_posix(): hash_file(file) for file in files}


def main(folder: Path, log: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
    """Answers, then a training in which the model answers the same questions. at: before its n-th
    operation on a file below the folder rank `victim` kills itself."""
    enter(log, environment)
    import torch

    from bosch.data import answer_files
    from bosch.data.loader import open_tokens
    from bosch.data.tokenizer_files import read_tokenizer
    from bosch.run.dist import Ranks
    from bosch.training.answers import write_answers, write_summary
    from bosch.training.loop import TrainJob, train
    from tests.plain_training import SETTINGS

    torch.set_num_threads(1)
    rank = int(environment["RANK"])
    progress.set_up(rank)
    is_victim = rank == options.get("victim", 0)
    operations = watch_operations(folder, at=options.get("at") if is_victim else None)
    model, answers = asset_folder(presets.SMOKE_MODEL), folder / "answers"
    answers.mkdir(exist_ok=True)
    answer_files.FILE_TOKENS = LENGTH  # a file for each
    hash_of = read_tokenizer(model).hash
    plain = open_tokens(Path(options["tokens"]), hash_of)
    # Every step is one in which the hybrid writes: of two ranks, a half of the batch each.
    settings = replace(SETTINGS, objective="distill", on_policy=1.0)
    settings = replace(settings, batch_sequences=2, max_steps=2, checkpoint_steps=1)
    write_answers(answers, model, plain, settings, SHARE, seed=0)
    ranks = Ranks.current()
    ranks.gather(None)  # all files are there
    ranks.from_rank_0(lambda: write_summary(answers, model, plain, SHARE))
    tokens = open_tokens(Path(options["tokens"]), hash_of, answers)
    job = TrainJob(settings, model, tokens, folder / "train", budget_tokens=4 * LENGTH)
    print(f"ended: {train(job)}; operations: {operations[0]}", flush=True)
