"""Packing killed at random points resumes to the same bytes. CI kills twice, `make faults` twenty
times."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bosch.data.tokenizer_files import describe_tokenizer
from bosch.data.toy_world.documents import write_document
from bosch.data.toy_world.tokenizer import train_tokenizer

PROGRAM = Path(__file__).with_name("packing_program.py")


def run(folder: Path, tokenizer: Path, sources: list[str], **options: int) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    settings = {"workers": 2, "sources": sources} | options
    command = [sys.executable, str(PROGRAM), str(folder), str(tokenizer), json.dumps(settings)]
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    return done.returncode, done.stdout


def finish(folder: Path, tokenizer: Path, sources: list[str], **options: int) -> dict[str, bytes]:
    code, output = run(folder, tokenizer, sources, **options)
    assert code == 0, output
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(
        describe_tokenizer(train_tokenizer(vocabulary_size=600, num_texts=20, seed=0)).text
    )
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("corpus") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": write_document(1, n)}) + "\n" for n in range(120)))
    return [f"{path}@0.6", "toy@0.4"]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, sources: list[str]
) -> tuple[dict[str, bytes], int]:
    """The files of a packing that nobody kills, and the number of points at which it can be
    killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _, output = run(folder, tokenizer, sources)
    return finish(folder, tokenizer, sources), int(output.split("points")[1])


KILLS = [pytest.param(n, marks=[] if n < 2 else [pytest.mark.faults]) for n in range(20)]


@pytest.mark.parametrize("attempt", KILLS)
def test_killed_packing_goes_on_to_the_same_bytes(
    attempt: int,
    tmp_path: Path,
    tokenizer: Path,
    sources: list[str],
    undisturbed: tuple[dict[str, bytes], int],
) -> None:
    expected, num_points = undisturbed
    point = random.Random(attempt).randint(1, num_points)
    code, output = run(tmp_path, tokenizer, sources, kill_at=point)
    assert code == -signal.SIGKILL, output
    assert finish(tmp_path, tokenizer, sources, workers=1 + attempt % 3) == expected


@pytest.mark.faults
def test_packing_killed_at_each_of_its_last_points_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer: Path, sources: list[str], undisturbed: tuple[dict[str, bytes], int]
) -> None:
    """The last steps rename files and remove the progress file."""
    expected, num_points = undisturbed
    for point in range(num_points - 14, num_points + 1):
        folder = tmp_path / str(point)
        code, output = run(folder, tokenizer, sources, kill_at=point)
        assert code == -signal.SIGKILL, output
        assert finish(folder, tokenizer, sources) == expected


@pytest.mark.faults
def test_packing_killed_again_and_again_ends_in_the_same_bytes(
    tmp_path: Path, tokenizer: Path, sources: list[str], undisturbed: tuple[dict[str, bytes], int]
) -> None:
    expected, num_points = undisturbed
    moments = random.Random(5)
    for _ in range(10):
        run(tmp_path, tokenizer, sources, kill_at=moments.randint(20, num_points // 2))
    assert finish(tmp_path, tokenizer, sources) == expected
