"""Checkpoints in one process: their content, their verification, and damaged ones."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bosch.run.errors import UserError
from bosch.training.checkpoint import Checkpoints, TrainState
from bosch.training.parallel import start_world
from tests.damage import flip_bit
from tests.small_disk import small_disk

FACTS = {"learning_rate": 1e-2, "model": {"layers": 2}}


@pytest.fixture(autouse=True)
def world() -> None:
    start_world()


class History:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.total = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses, self.total = state_dict["losses"], state_dict["total"]


def make_state(seed: int = 0, width: int = 8) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1, bias=False))
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in model.parameters() if p.ndim == 1]}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=1e-2)
    return TrainState(model, optimizer, {"history": History()})


def train(state: TrainState, first: int, last: int) -> None:
    """Steps first .. last - 1. The dropout uses the global generator."""
    history: Any = state.extra["history"]
    for step in range(first, last):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = state.model(inputs).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        history.losses = [*history.losses, float(loss.detach())]
        history.total = history.total + loss.detach()


def content(state: TrainState) -> list[Tensor]:
    history: Any = state.extra["history"]
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    return [*state.model.parameters(), *moments, history.total, torch.tensor(history.losses)]


def assert_equal(state: TrainState, other: TrainState) -> None:
    torch.testing.assert_close(content(state), content(other), rtol=0, atol=0)


def saved(folder: Path) -> None:
    """Checkpoints after steps 3 and 5 of a run."""
    state, checkpoints = make_state(), Checkpoints(folder, FACTS, keep=2)
    for done, step in ((0, 3), (3, 5)):
        train(state, done, step)
        checkpoints.save(state, step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_resumed_run_ends_like_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_state()
    train(whole, 0, 9)
    saved(tmp_path)
    resumed = make_state(seed=1)
    assert Checkpoints(tmp_path, FACTS, 2).load_newest(resumed) == 5
    train(resumed, 5, 9)
    assert_equal(resumed, whole)


def test_checkpoint_before_the_first_step_resumes_to_the_same_as_none(tmp_path: Path) -> None:
    # An optimizer without a step has no state. Giving it one would count a step.
    Checkpoints(tmp_path / "one", FACTS, 2).save(make_state(), 0)
    whole = make_state()
    train(whole, 0, 3)
    for name, seed in (("one", 1), ("none", 0)):
        resumed = make_state(seed)
        assert Checkpoints(tmp_path / name, FACTS, 2).load_newest(resumed) == 0
        train(resumed, 0, 3)
        assert_equal(resumed, whole)


def test_old_checkpoints_go_and_what_a_run_came_from_stays(tmp_path: Path) -> None:
    state, checkpoints = make_state(), Checkpoints(tmp_path, FACTS, keep=2)
    for step in range(1, 8):
        train(state, step - 1, step)
        checkpoints.save(state, step)
    assert names(tmp_path) == [f"step-{n:06d}" for n in (6, 7)]
    checkpoints = Checkpoints(tmp_path, FACTS, keep=1)
    checkpoints.load_newest(state)
    for step in (8, 9):
        checkpoints.save(state, step)
    assert names(tmp_path) == [f"step-{n:06d}" for n in (7, 9)]


def test_leftovers_of_killed_saves_and_removals_go_and_a_users_copy_stays(tmp_path: Path) -> None:
    saved(tmp_path)
    shutil.copytree(tmp_path / "step-000005", tmp_path / "step-000005-copy")
    (tmp_path / ".step-000007.tmp").mkdir()
    (tmp_path / ".step-000007.tmp" / "part").write_text("x")
    assert Checkpoints(tmp_path, FACTS, 2).load_newest(make_state()) == 5
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".no_result", "step-000003", "step-000005", "step-000005-copy"]


TENSORS = [f"rank-00000-{group}.safetensors" for group in ("rest", "exp_avg", "exp_avg_sq")]
FILES = (*TENSORS, "manifest.json", "trainer.json")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip_bit(path, path.stat().st_size // 2),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damaged_checkpoint_is_set_aside_and_the_one_before_is_loaded(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    DAMAGES[damage](tmp_path / "step-000005" / file)
    expected = make_state()
    train(expected, 0, 3)
    state = make_state(seed=1)
    with caplog.at_level("INFO", "bosch"):
        assert Checkpoints(tmp_path, FACTS, 2).load_newest(state) == 3
    assert_equal(state, expected)
    assert names(tmp_path) == ["step-000003"]
    assert (tmp_path / ".step-000005.bad").is_dir()
    assert re.search(rf"step-000005 .*{tmp_path / '.step-000005.bad'}", caplog.text)


def test_all_damaged_is_an_error_and_stays_one(tmp_path: Path) -> None:
    for _ in range(2):
        saved(tmp_path)
        flip_bit(tmp_path / "step-000005" / TENSORS[0], 600)
        assert Checkpoints(tmp_path, FACTS, 2).load_newest(make_state()) == 3
    aside = {path.name for path in tmp_path.glob(".step*")}
    assert aside == {".step-000005.bad", ".step-000005-2.bad"}
    flip_bit(tmp_path / "step-000003" / TENSORS[0], 600)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{tmp_path}.*step-000003\.bad"):
            Checkpoints(tmp_path, FACTS, 2).load_newest(make_state())


def test_other_settings_and_other_models_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    more, wider, faster = make_state(), make_state(width=9), FACTS | {"learning_rate": 2e-2}
    more.model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    for state, facts, named in (
        (make_state(), faster, r"learning_rate: 0\.01 -> 0\.02"),
        (more, FACTS, "model.more is missing"),
        (wider, FACTS, "model.0.bias .*8 of float32.* 9 of float32"),
    ):
        with pytest.raises(UserError, match=f"step-000005 .*{named}"):
            Checkpoints(tmp_path, facts, 2).load_newest(state)
    assert names(tmp_path) == ["step-000003", "step-000005"]


def test_a_disk_that_fills_up_during_a_save_costs_only_that_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", kilobytes=250) as disk:
        state, checkpoints = make_state(), Checkpoints(disk, FACTS, 50)
        done: list[int] = []

        def save_until_full() -> None:
            for step in range(1, 50):
                train(state, step - 1, step)
                checkpoints.save(state, step)
                done.append(step)

        with pytest.raises(UserError, match=rf"(?i){disk}.*no space left"):
            save_until_full()
        assert names(disk) == [f"step-{step:06d}" for step in done]
        assert not list(disk.glob(".*.tmp"))
        resumed = make_state(seed=1)
        assert Checkpoints(disk, FACTS, 50).load_newest(resumed) == done[-1]
        shutil.rmtree(disk / names(disk)[0])  # makes room
        train(resumed, done[-1], done[-1] + 1)
        Checkpoints(disk, FACTS, 50).save(resumed, done[-1] + 1)
        assert len(names(disk)) == len(done)
