"""Ranks of a launch: they find each other by rank 0's files, and decide things together. Whole
chains of stages, and ranks that die, are in tests/faults."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bosch.methods import single_group
from bosch.run.errors import UserError
from bosch.run.group import Group, joined
from bosch.run.ranks import RANKS, RankGoneError, Ranks
from tests.attention_matrices import inputs_of
from tests.fork_server import PATIENCE, launch_environment, start
from tests.search_cases import answered_calibration, small_model


def member(folder: Path, rank: int, world: int = 2) -> Ranks:
    """A rank that has joined."""
    member = Ranks(folder, rank, world)
    member.join(join_seconds=PATIENCE)
    return member


def launch(program: Callable[..., None], folder: Path) -> None:
    """Run a program on two ranks."""
    ranks = [start(program, folder, variables) for variables in launch_environment(2)]
    for rank in ranks:
        rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [0, 0]


class NotPickledError(Exception):
    """pickle calls it with one argument."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def fail_together(folder: Path, environment: dict[str, str]) -> None:
    """Each rank's errors, in a file: what one raises, all raise."""
    os.environ.update(environment)
    with joined():
        group = Group.current()

        def fail_on_first(error: Exception) -> None:
            if group.rank == 0:
                raise error

        errors = []
        for error in (NotPickledError(4, "no key"), UserError("no ratio")):
            for call in (group.from_rank_0, group.all_succeed):
                try:
                    call(lambda error=error: fail_on_first(error))
                except Exception as caught:
                    errors.append(f"{type(caught).__name__} {caught}")
    (folder / f"rank-{group.rank}").write_text("\n".join(errors))


def test_error_of_one_rank_is_raised_on_all_even_if_it_cannot_be_pickled(tmp_path: Path) -> None:
    launch(fail_together, tmp_path)
    own, user = ["NotPickledError 4: no key"] * 2, ["UserError no ratio"] * 2
    assert (tmp_path / "rank-0").read_text().splitlines() == own + user
    sent = ["RuntimeError NotPickledError: 4: no key"] * 2
    assert (tmp_path / "rank-1").read_text().splitlines() == sent + user


def ask_transformers(folder: Path, environment: dict[str, str]) -> None:
    from transformers.modeling_utils import is_fsdp_enabled

    os.environ.update(environment)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    with joined():
        answer = is_fsdp_enabled()
    (folder / f"rank-{environment['RANK']}").write_text(str(answer))


def test_a_search_under_use_fsdp_loads_weights_on_every_rank(tmp_path: Path) -> None:
    launch(ask_transformers, tmp_path)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["False", "False"]


def score_single_groups(folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    (folder / f"rank-{environment['RANK']}").write_text(str(scores_of_groups(folder / "shared")))


def scores_of_groups(folder: Path) -> list[list[float]]:
    model = small_model()
    calibration = answered_calibration(model, (40, 33, 36))
    return single_group.score_groups(inputs_of(single_group, model, calibration, folder)).groups


def test_ranks_share_the_texts_of_single_group(tmp_path: Path) -> None:
    launch(score_single_groups, tmp_path)
    expected = str(scores_of_groups(tmp_path / "alone"))
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == [expected] * 2


def test_rank_waits_for_rank_0_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fixed port, an earlier launch from several machines has the same name."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    earlier = member(tmp_path, 0, 16)
    earlier.leave(failed=True)
    assert (tmp_path / RANKS).exists()
    with pytest.raises(RankGoneError, match="rank 0 to lock"):
        Ranks(tmp_path, 8, 16).join(join_seconds=0)
    waits: list[float] = []

    def meanwhile(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            started.append(member(tmp_path, 0, 16))

    started: list[Ranks] = []
    monkeypatch.setattr("bosch.run.ranks.time.sleep", meanwhile)
    assert member(tmp_path, 8, 16).folder == started[0].folder
    assert not earlier.folder.exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")  # on one machine nobody waits for the dead
    member(tmp_path, 0, 16).leave(failed=True)
    with pytest.raises(RankGoneError, match="Rank 0 ended before rank 8 joined"):
        member(tmp_path, 8, 16)
