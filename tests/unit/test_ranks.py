"""Ranks of a launch: they find each other by rank 0's files, and decide things together. Whole
chains of stages, and ranks that die, are in tests/faults."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bosch.methods import single_group
from bosch.recipes import presets
from bosch.run.dist import RANKS, RankFiles, RankGoneError, Ranks, start_ranks
from bosch.run.errors import UserError
from bosch.training import parking, rehearsal
from bosch.training.fitting import Fitted
from tests.attention_matrices import inputs_of
from tests.fork_server import PATIENCE, launch_environment, start
from tests.search_cases import answered_calibration, small_model


def member(folder: Path, rank: int, world: int = 2) -> RankFiles:
    """A rank that has joined."""
    member = RankFiles(folder, rank, world)
    member.join(join_seconds=PATIENCE)
    return member


def launch(program: Callable[[], str], folder: Path) -> list[str]:
    """What a program returns on two ranks."""
    ranks = [start(run_on_rank, program, folder, names) for names in launch_environment(2)]
    for rank in ranks:
        rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return [(folder / f"rank-{rank}").read_text() for rank in range(2)]


def run_on_rank(program: Callable[[], str], folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    (folder / f"rank-{environment['RANK']}").write_text(program())


class NotPickledError(Exception):
    """pickle calls it with one argument."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def fail_together() -> str:
    """Each rank's errors: what one raises, all raise."""
    start_ranks()
    ranks = Ranks.current()

    def fail_on_first(error: Exception) -> None:
        if ranks.rank == 0:
            raise error

    errors = []
    for error in (NotPickledError(4, "no key"), UserError("no ratio")):
        for call in (ranks.from_rank_0, ranks.all_succeed):
            try:
                call(lambda error=error: fail_on_first(error))
            except Exception as caught:
                errors.append(f"{type(caught).__name__} {caught}")
    return "\n".join(errors)


def test_error_of_one_rank_is_raised_on_all_even_if_it_cannot_be_pickled(tmp_path: Path) -> None:
    first, second = launch(fail_together, tmp_path)
    own, user = ["NotPickledError 4: no key"] * 2, ["UserError no ratio"] * 2
    assert first.splitlines() == own + user
    assert second.splitlines() == ["RuntimeError NotPickledError: 4: no key"] * 2 + user


def ask_transformers() -> str:
    from transformers.modeling_utils import is_fsdp_enabled

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    start_ranks()
    return str(is_fsdp_enabled())


def test_a_search_under_use_fsdp_loads_weights_on_every_rank(tmp_path: Path) -> None:
    assert launch(ask_transformers, tmp_path) == ["False", "False"]


def scores_of_groups(folder: Path) -> str:
    model = small_model()
    calibration = answered_calibration(model, (40, 33, 36))
    inputs = inputs_of(single_group, model, calibration, folder)
    return str(single_group.score_groups(inputs).groups)


def test_ranks_share_the_texts_of_single_group(tmp_path: Path) -> None:
    shared = launch(functools.partial(scores_of_groups, tmp_path / "shared"), tmp_path)
    assert shared == [scores_of_groups(tmp_path / "alone")] * 2


def fit_to(memory_gb: tuple[float, float]) -> str:
    """What a rank trains with at once, where each machine has GPUs of its own size: pretended, as
    is the rehearsal, in which each sequence takes 20 GB."""
    smoke = presets.smoke()
    train = replace(smoke.train, batch_sequences=8, micro_batch_sequences=4)

    def made_up(plan: rehearsal.Plan) -> rehearsal.Rehearsal:
        return rehearsal.Rehearsal({"loss": 20 * 10**9 * plan.micro_batch})

    rehearsal.choose_fitting = functools.partial(rehearsal.choose_fitting, rehearse=made_up)  # type: ignore[assignment]
    rehearsal.gpu_memory_gb = lambda: memory_gb[int(os.environ["RANK"])]
    try:
        fitted = Fitted(replace(smoke, train=train), 2, is_named=False).train
    except UserError as error:
        return str(error)
    return str(fitted.micro_batch_sequences)


@pytest.mark.parametrize("memory_gb", [(90.0, 85.0), (85.0, 90.0)])
def test_ranks_train_with_what_fits_the_smallest_gpu_of_all(
    memory_gb: tuple[float, float], tmp_path: Path
) -> None:
    """4 sequences would take 80 GB, and 6 are left free."""
    assert launch(functools.partial(fit_to, memory_gb), tmp_path) == ["2", "2"]


def test_what_fits_no_machine_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = launch(functools.partial(fit_to, (90.0, 20.0)), tmp_path)
    assert "it has 20. No smaller number of sequences fits" in first
    assert second == first


def test_rank_waits_for_its_own_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fixed port, an earlier launch from several machines has the same name."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    earlier = member(tmp_path, 0, 16)
    earlier.leave(failed=True)
    assert (tmp_path / RANKS).exists()
    with pytest.raises(RankGoneError, match="rank 0 to lock"):
        RankFiles(tmp_path, 8, 16).join(join_seconds=0)
    waits: list[float] = []

    def meanwhile(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            started.append(member(tmp_path, 0, 16))

    started: list[RankFiles] = []
    monkeypatch.setattr("bosch.run.dist.time.sleep", meanwhile)
    assert member(tmp_path, 8, 16).folder == started[0].folder
    assert not earlier.folder.exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")  # on one machine nobody waits for the dead
    member(tmp_path, 0, 16).leave(failed=True)
    with pytest.raises(RankGoneError, match="Rank 0 ended before rank 8 joined"):
        member(tmp_path, 8, 16)


def park_too_much() -> str:
    """Two ranks of one machine, with a byte too little for both together."""
    parking.available_host_bytes = lambda: 1199
    start_ranks()
    try:
        parking.check_parking([100, 500], Ranks.current())
    except UserError as error:
        return str(error)
    return "fits"


def test_what_all_ranks_of_a_machine_park_is_counted_together(tmp_path: Path) -> None:
    first, second = launch(park_too_much, tmp_path)
    assert "1.2 kB of " in first
    assert " for its 2 GPUs" in first
    assert second == first
