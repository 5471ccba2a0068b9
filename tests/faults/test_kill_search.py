"""A search killed at any evaluation finds its outcomes and ends with the same result."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.search_program import evaluations, launch, result, run, wait

MOMENTS = ("before", "torn", "written")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """The result and the evaluations of a search that is not killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder)
    return result(folder), evaluations(folder)


@pytest.mark.parametrize(
    "attempt", [*range(2), *(pytest.param(n, marks=pytest.mark.faults) for n in range(2, 22))]
)
def test_a_search_killed_at_an_evaluation_ends_in_the_same_outcomes_and_mask(
    attempt: int, tmp_path: Path, undisturbed: tuple[dict[str, Any], list[Any]]
) -> None:
    expected, lines = undisturbed
    draw = random.Random(attempt)
    number, moment = draw.randint(1, len(lines)), MOMENTS[attempt % 3]
    assert wait(launch(tmp_path, kill_at=number, moment=moment)) == [-signal.SIGKILL]
    assert evaluations(tmp_path) == lines[: number - (moment != "written")]
    run(tmp_path)
    assert result(tmp_path) == expected
    assert evaluations(tmp_path) == lines


@pytest.mark.parametrize("masks_at_once", [1, 2])
def test_two_ranks_find_what_one_does(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], list[Any]], masks_at_once: int
) -> None:
    """They share the haystacks of a mask, or masks."""
    run(tmp_path, world=2, masks_at_once=masks_at_once)
    assert (result(tmp_path), evaluations(tmp_path)) == undisturbed


@pytest.mark.faults
def test_a_search_killed_on_two_ranks_resumes_with_one(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], list[Any]]
) -> None:
    killed = wait(launch(tmp_path, world=2, kill_at=20))
    assert killed[0] == -signal.SIGKILL
    run(tmp_path, world=1)
    assert (result(tmp_path), evaluations(tmp_path)) == undisturbed
