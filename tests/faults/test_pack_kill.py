"""Packing killed at random points resumes to the same bytes. CI kills twice, `make faults` twenty
times."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bosch.data.toy_world.documents import write_document
from tests.packing import files_of, toy_tokenizer, write_rows

PROGRAM = Path(__file__).with_name("packing_program.py")


Files = dict[str, bytes]


class Packing:
    """Runs the program into folders, with one tokenizer and the same sources."""

    def __init__(self, folder: Path):
        self.tokenizer, rows = folder / "tokenizer.json", folder / "rows.jsonl"
        self.tokenizer.write_text(toy_tokenizer().text)
        write_rows(rows, [{"text": write_document(1, n)} for n in range(120)])
        self.sources = [f"{rows}@0.6", "toy@0.4"]

    def run(self, folder: Path, **options: int) -> tuple[int, str]:
        folder.mkdir(exist_ok=True)
        settings = json.dumps({"workers": 2, "sources": self.sources} | options)
        command = [sys.executable, str(PROGRAM), str(folder), str(self.tokenizer), settings]
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
        return done.returncode, done.stdout

    def kill(self, folder: Path, point: int) -> None:
        code, output = self.run(folder, kill_at=point)
        assert code == -signal.SIGKILL, output

    def finish(self, folder: Path, **options: int) -> Files:
        code, output = self.run(folder, **options)
        assert code == 0, output
        return files_of(folder)


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Packing:
    return Packing(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, packing: Packing) -> tuple[Files, int]:
    """The files of a packing that nobody kills, and the number of points at which it can be
    killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _, output = packing.run(folder)
    return files_of(folder), int(output.split("points")[1])


KILLS = [pytest.param(n, marks=[] if n < 2 else [pytest.mark.faults]) for n in range(20)]


@pytest.mark.parametrize("attempt", KILLS)
def test_killed_packing_goes_on_to_the_same_bytes(
    attempt: int, tmp_path: Path, packing: Packing, undisturbed: tuple[Files, int]
) -> None:
    expected, num_points = undisturbed
    packing.kill(tmp_path, random.Random(attempt).randint(1, num_points))
    assert packing.finish(tmp_path, workers=1 + attempt % 3) == expected
