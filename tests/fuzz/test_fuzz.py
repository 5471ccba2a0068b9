"""A part of `make fuzz` in `make slow`: a dozen chains, which no commit needs each time."""

import os
from pathlib import Path

import pytest

from tests.fuzz.fuzz_chain import FAILURES, fuzz

BLOCK = 10
NUMBERS = range(20, 80)  # of damages in every state


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states, made once for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "fuzz"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUMBERS.start, NUMBERS.stop, BLOCK))
def test_damage_is_refused_told_or_without_effect(first: int, base: Path) -> None:
    outcomes = fuzz(base, range(first, first + BLOCK))
    failed = [one for one in outcomes if one.outcome in FAILURES]
    assert not failed, failed
    assert len({one.state for one in outcomes}) > BLOCK // 2
    assert len({one.file for one in outcomes}) > BLOCK // 2
