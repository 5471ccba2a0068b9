"""What a training parks in host memory while a checkpoint is evaluated: it comes back bit for bit,
and its size is known, and refused where there is too little, before the first step."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from bosch.config import TrainConfig
from bosch.masks.mask import describe_bytes
from bosch.recipes import presets
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.memory import available_host_bytes, usable_cores
from bosch.training import parking, rehearsal
from bosch.training.fitting import Fitted, make_plan
from bosch.training.loop import Run
from bosch.training.model_start import read_config
from bosch.training.parking import check_parking, parked
from bosch.training.rehearsal import Plan, as_hybrid, parked_bytes, with_room_to_park
from bosch.training.train_stage import schedule_of
from tests.plain_training import SEQ_LEN, SETTINGS, Trace, model_folder, run


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of host memory, by storage, that are taken to park."""
    taken, real = list[int](), parking.host_memory

    def counted(num_bytes: int, pins: bool) -> tuple[torch.UntypedStorage, bool]:
        taken.append(num_bytes)
        return real(num_bytes, pins)

    monkeypatch.setattr(parking, "host_memory", counted)
    return taken


@pytest.mark.parametrize("pins", [False, True])
def test_parked_tensors_free_their_memory_and_come_back_as_they_were(
    pins: bool, taken: list[int]
) -> None:
    """As fully_shard needs it: the same tensors, and other views of the same memory. A CPU alone
    cannot pin memory, which is no error."""
    flat = torch.arange(12.0)
    weight, other = flat[:8].view(2, 4), torch.ones(3)
    with parked([weight, other, flat], pins):
        assert weight.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert taken == [48, 12]
    assert weight.flatten().tolist() == list(range(8))
    assert flat.tolist() == list(range(12))
    weight += 1
    assert flat[0] == 1
    assert other.tolist() == [1, 1, 1]


def test_as_much_is_pinned_as_the_system_allows_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned, given_back, empty = list[int](), [], torch.empty

    def pin_at_most_two(size: int, pin_memory: bool, **how: Any) -> Tensor:
        if len(pinned) == 2:
            raise RuntimeError("CUDA error: out of memory")
        pinned.append(size)
        return empty(size, **how)

    monkeypatch.setattr(torch, "empty", pin_at_most_two)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: given_back.append(1), raising=False)
    tensors = [torch.full((size,), float(size)) for size in (1, 2, 3, 4)]
    with parked(tensors, pins=True):
        assert not given_back
    assert pinned == [4, 8]
    assert given_back == [1]
    assert [each.tolist() for each in tensors] == [[float(n)] * n for n in (1, 2, 3, 4)]


def everything(run: Run) -> Iterator[Tensor]:
    """As `Run.device_tensors` on a GPU: the same tensors, on this CPU."""
    moments = (values.values() for values in run.state.optimizer.state.values())
    teacher = run.teacher.model.parameters() if run.teacher else ()
    yield from (
        t for t in chain(run.model.parameters(), teacher, *moments) if isinstance(t, Tensor)
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        {"objective": "distill", "precision": "bf16"},
        pytest.param({"trained": "lora", "lora_rank": 2}, marks=pytest.mark.slow),
        pytest.param({"trained": "norms", "objective": "distill"}, marks=pytest.mark.slow),
    ],
)
def test_the_room_is_asked_for_before_a_step_and_is_what_parking_takes(
    changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    folder, settings = model_folder(tmp_path / "model"), replace(SETTINGS, max_steps=2, **changes)
    more: Any = {"on_checkpoint": lambda *_: None, "evaluated_shares": (1.0,)}
    run(tmp_path / "plain", folder, settings, **more)
    plan = Plan(read_config(folder), settings, SEQ_LEN, 1, "torch")
    needed = parked_bytes(plan)

    monkeypatch.setattr(Run, "device_tensors", everything)
    monkeypatch.setattr(parking, "available_host_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match=r"waits in host memory: .* Give the job more \(SLURM"):
        run(tmp_path / "refused", folder, settings, **more)
    assert not list((tmp_path / "refused").glob("*"))
    assert taken == []
    monkeypatch.setattr(parking, "available_host_bytes", lambda: needed)
    run(tmp_path / "parked", folder, settings, **more)
    assert sum(taken) == needed  # at the last step
    steps = settings.max_steps or 0
    plain, back = (Trace.of_run(tmp_path / name, steps) for name in ("plain", "parked"))
    assert back.losses == plain.losses
    assert all(torch.equal(back.weights[name], plain.weights[name]) for name in plain.weights)
    # Without an evaluation nothing is parked, so nothing is asked for.
    monkeypatch.setattr(parking, "available_host_bytes", lambda: 0)
    run(tmp_path / "alone", folder, settings)


def test_memory_is_pinned_where_its_rounded_sizes_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,025 bytes take 2,048, and 0 none."""
    sizes, alone = [1025, 0, 512], Ranks()
    for available, pins in ((2560, True), (2559, False), (1537, False), (None, False)):
        monkeypatch.setattr(parking, "available_host_bytes", lambda left=available: left)
        assert check_parking(sizes, alone) is pins
    monkeypatch.setattr(parking, "available_host_bytes", lambda: 1536)
    with pytest.raises(UserError, match=r"1\.54 kB of .* for its 1 GPUs, and only 1\.54 kB are"):
        check_parking(sizes, alone)
    monkeypatch.setattr(parking, "available_host_bytes", lambda: 2**40)
    assert check_parking([], alone) is False  # on a CPU


def wide(gpus: int, **changes: Any) -> Plan:
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "max_position_embeddings": 512}
    shape = as_hybrid(Qwen3Config(**sizes, tie_word_embeddings=False), 0.75, 64)
    settings = replace(TrainConfig(batch_sequences=16, kernels="torch"), **changes)
    return Plan(shape, settings, 512, gpus, "torch")


def test_a_machine_parks_its_share_or_the_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    whole = parked_bytes(wide(8))
    weights = rehearsal.num_weights(wide(8).model)
    assert whole == pytest.approx(12 * weights, rel=1e-4)
    assert parked_bytes(wide(16)) == whole // 2
    assert parked_bytes(wide(16, shard_within_node=True)) == whole
    assert parked_bytes(wide(8, cpu_offload=True)) == 0
    # Left open, the whole state is only for machines that can park it.
    for available, within in ((whole, None), (whole - 1, False), (None, None)):
        assert with_room_to_park(wide(16), available).settings.shard_within_node is within
    for plan in (wide(16), wide(8)):
        with pytest.raises(UserError, match="of each machine for its 8 GPUs"):
            with_room_to_park(plan, parked_bytes(plan) - 1)
    with pytest.raises(UserError, match="shard_within_node False"):
        with_room_to_park(wide(16, shard_within_node=True), whole - 1)


@pytest.mark.parametrize("changes", [{}, {"trained": "lora", "lora_rank": 2}])
def test_a_dry_run_knows_the_size_of_a_training_state(changes: Any, tmp_path: Path) -> None:
    """Frozen weights have no moments."""
    folder = model_folder(tmp_path / "model")
    settings = replace(SETTINGS, max_steps=1, keep_checkpoints=1, **changes)
    run(tmp_path / "out", folder, settings)
    files = (tmp_path / "out" / "checkpoints" / "step-000001").iterdir()
    written = sum(file.stat().st_size for file in files)
    plan = Plan(read_config(folder), settings, SEQ_LEN, 1, "torch")
    config = replace(presets.smoke(), train=settings)
    said = " ".join(rehearsal.estimate(config, plan, schedule_of(config)))
    told = re.search(r"1 training states (\S+) (kB|MB)", said)
    assert told, said
    expected = float(told[1]) * {"kB": 1e3, "MB": 1e6}[told[2]]
    # Of so small a model the files' headers are a tenth.
    assert written == pytest.approx(expected, rel=0.15)


def test_a_dry_run_counts_what_learning_a_mask_writes() -> None:
    """States of all weights, and the tokens, also where nothing is trained after it."""
    config = presets.smoke()
    config = replace(config, method="l1_gates", train=replace(config.train, trained="lora"))
    plan = make_plan(config, 1)
    every = replace(plan, settings=replace(plan.settings, trained="all"))
    states = (config.train.keep_checkpoints + 1) * rehearsal.state_bytes(every)
    while_learned, after = rehearsal.estimate(config, plan, None)
    assert while_learned.endswith(f"is learned, free after it: at most {describe_bytes(states)}")
    hybrid = re.fullmatch(r"disk: about .* \(the hybrid (.*), tokens 8.19 kB\)", after)
    assert hybrid, after
    with_weights = replace(config, mask=replace(config.mask, options=("weights=learned",)))
    *_, after = rehearsal.estimate(with_weights, plan, None)
    assert f"weights that the mask was learned with {hybrid[1]}, " in after
    ranked = replace(config, method="interleave")
    (said,) = rehearsal.estimate(ranked, plan, None)
    assert "mask" not in said
    assert "tokens" not in said


def test_recover_refuses_at_its_start_what_cannot_be_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = presets.smoke()
    needed = parked_bytes(make_plan(config, 1))
    monkeypatch.setattr(rehearsal, "gpu_memory_gb", lambda: 80.0)

    monkeypatch.setattr(rehearsal, "choose_fitting", lambda plan, *_: plan.settings)

    def fit_with(available: int) -> TrainConfig:
        monkeypatch.setattr("bosch.run.memory.available_host_bytes", lambda: available)
        return Fitted(config, 1, is_named=False).train

    assert fit_with(needed) == config.train
    with pytest.raises(UserError, match="waits in host memory"):
        fit_with(needed - 1)
    # And a dry run says it.
    monkeypatch.setattr(rehearsal, "available_host_bytes", lambda: 10**9)
    plan, schedule = make_plan(config, 1), schedule_of(config)
    said = rehearsal.estimate(config, plan, schedule)[-1]
    assert said.startswith("host memory while a checkpoint is evaluated: ")
    assert said.endswith("for 1 GPUs of a machine; 1 GB are available here")


def write(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_what_a_container_or_job_may_use_limits_the_machines_memory(tmp_path: Path) -> None:
    """In each case 1,000 kB of the machine are left; worked by hand."""
    in_all, groups = 1000 * 1024, "sys/fs/cgroup"

    def machine(name: str, cgroups: str) -> Path:
        meminfo = "MemTotal:       9000 kB\nMemFree:        10 kB\nMemAvailable:   1000 kB"
        write(tmp_path / name / "proc", meminfo=meminfo)
        write(tmp_path / name / "proc/self", cgroup=cgroups)
        return tmp_path / name

    assert available_host_bytes(tmp_path / "no Linux") is None
    assert available_host_bytes(machine("free", "0::/user")) == in_all
    # Version 2: a job's limit, which a step within it, without one, shares. Files are dropped.
    new = machine("new", "0::/slurm/job/step")
    stat = "anon 700\ninactive_file 200\nactive_file 50\nfile 260"
    write(new / groups / "slurm/job/step", memory__max="max", memory__current=9, memory__stat=stat)
    limited = {"memory__max": 1500, "memory__current": 1000, "memory__stat": stat}
    write(new / groups / "slurm/job", **limited)
    assert available_host_bytes(new) == 1500 - 1000 + 250
    write(new / groups / "slurm/job", memory__max=2**50)
    assert available_host_bytes(new) == in_all
    # Version 1, in a container, which sees its own limit at the root and the host's name.
    old = machine("old", "5:cpu,cpuacct:/\n4:memory:/docker/12ab\n0::/")
    stat = "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20"
    limited = {"memory__limit_in_bytes": 400, "memory__usage_in_bytes": 390}
    write(old / groups / "memory", **limited, memory__stat=stat)
    assert available_host_bytes(old) == 400 - 390 + 50
    write(old / groups / "memory", memory__usage_in_bytes=500)  # more than the limit for a moment
    assert available_host_bytes(old) == 0


def test_what_a_container_or_job_may_use_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usable_cores(tmp_path) == 64  # no Linux, or no cgroups
    new, groups = tmp_path / "new", "sys/fs/cgroup"
    write(new / "proc/self", cgroup="0::/slurm/job/step")
    write(new / groups / "slurm/job/step", cpu__max="max 100000")
    assert usable_cores(new) == 64
    write(new / groups / "slurm/job", cpu__max="250000 100000")  # two and a half
    assert usable_cores(new) == 3
    write(new / groups / "slurm", cpu__max="50000 100000")
    assert usable_cores(new) == 1
    # Version 1, as docker --cpus 2 has it; -1 is no limit.
    old = tmp_path / "old"
    write(old / "proc/self", cgroup="5:cpu,cpuacct:/docker/12ab\n4:memory:/docker/12ab")
    write(old / groups / "cpu", cpu__cfs_quota_us=200_000, cpu__cfs_period_us=100_000)
    assert usable_cores(old) == 2
    write(old / groups / "cpu", cpu__cfs_quota_us=-1)
    assert usable_cores(old) == 64
