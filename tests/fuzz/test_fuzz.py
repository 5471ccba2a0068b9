"""A part of `make fuzz` in every test run, and a test of its judge."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fuzz.fuzz_chain import (
    FAILURES,
    FINISHED,
    RUN,
    Outcome,
    fuzz,
    judge,
    make_states,
    table,
)
from tests.sampled import sampled
from tests.smoke_chain import results

BLOCK = 10
NUMBERS = range(20, 80)  # of damages in every state


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states, made once for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "fuzz"


@pytest.mark.parametrize("first", sampled(range(NUMBERS.start, NUMBERS.stop, BLOCK), slice(3, 4)))
def test_damage_is_refused_told_or_without_effect(first: int, base: Path) -> None:
    outcomes = fuzz(base, range(first, first + BLOCK))
    failed = [one for one in outcomes if one.outcome in FAILURES]
    assert not failed, failed
    assert len({one.state for one in outcomes}) > BLOCK // 2
    assert len({one.file for one in outcomes}) > BLOCK // 2


def test_the_judge_tells_outcomes_apart(base: Path, tmp_path: Path) -> None:
    make_states(base / "states")
    folder, path = tmp_path / "work", RUN / "train" / "metrics.jsonl"
    shutil.copytree(base / "states" / FINISHED, folder)
    wanted = results(folder / RUN)

    def outcome(code: int, output: str) -> str:
        return judge(folder, path, code, output, wanted)[0]

    assert outcome(0, "") == "same"
    assert outcome(2, f"error: {path} is damaged.") == "refused"
    assert outcome(2, f"{path} is damaged.\nerror: Nothing is left.") == "refused"
    assert outcome(2, "metrics.jsonl\nerror: train is damaged.") == "unnamed"
    assert outcome(2, f"Traceback\nerror: {path} is damaged.") == "unnamed"
    assert outcome(1, f"error: {path} is damaged.") == "traceback"
    assert outcome(-9, "") == "traceback"
    content = (folder / path).read_text()
    (folder / path).write_text(content.replace('"tokens": 0', '"tokens": 1', 1))
    assert outcome(0, "") == "silent"
    assert outcome(0, f"left out {path}, line 1: it is damaged") == "told"
    (folder / path).unlink()
    assert outcome(0, "") == "silent"


def test_the_table_counts_every_damage_once() -> None:
    files = ("model/config.json", "runs/shared/tokens-0123456789abcdef/tokens.bin", "RANK")
    outcomes = [Outcome(0, FINISHED, file, "flip", "same") for file in files]
    lines = table([*outcomes, Outcome(1, FINISHED, files[0], "flip", "silent")]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["RANK", "0", "1", "0", "0", "0", "0"],
        ["model", "0", "1", "0", "1", "0", "0"],
        ["tokens", "0", "1", "0", "0", "0", "0"],
        ["all", "0", "3", "0", "1", "0", "0"],
    ]
