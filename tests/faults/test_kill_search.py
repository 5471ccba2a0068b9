"""A search killed at any evaluation finds its outcomes and ends with the same result."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.search_program import evaluations, launch, result, run, wait

MOMENTS = ("before", "torn", "written")
# Results, and what a kill can choose from.
Undisturbed = tuple[dict[str, Any], list[Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The result and the evaluations of a search that is not killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder)
    return result(folder), evaluations(folder)


@pytest.mark.parametrize(
    "attempt", [1, *(pytest.param(n, marks=pytest.mark.faults) for n in range(22) if n != 1)]
)
def test_a_killed_search_ends_alike(attempt: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    expected, lines = undisturbed
    draw = random.Random(attempt)
    number, moment = draw.randint(1, len(lines)), MOMENTS[attempt % 3]
    assert wait(launch(tmp_path, kill_at=number, moment=moment)) == [-signal.SIGKILL]
    assert evaluations(tmp_path) == lines[: number - (moment != "written")]
    run(tmp_path)
    assert result(tmp_path) == expected
    assert evaluations(tmp_path) == lines


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_two_ranks_find_the_same(tmp_path: Path, undisturbed: Undisturbed, at_once: int) -> None:
    """They share the haystacks of a mask, or masks."""
    run(tmp_path, world=2, masks_at_once=at_once)
    assert (result(tmp_path), evaluations(tmp_path)) == undisturbed


@pytest.mark.faults
def test_killed_on_two_ranks_it_resumes_with_one(tmp_path: Path, undisturbed: Undisturbed) -> None:
    killed = wait(launch(tmp_path, world=2, kill_at=20))
    assert killed[0] == -signal.SIGKILL
    run(tmp_path, world=1)
    assert (result(tmp_path), evaluations(tmp_path)) == undisturbed
