"""Sequences that ranks share (train.context_parallel): equal to one rank that has them whole."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bosch.assets import asset_folder
from bosch.config import TrainConfig
from bosch.data.loader import IGNORED, Loader
from bosch.hybrid.conversion import deploy, head_size
from bosch.masks.mask import spread_mask
from bosch.recipes import prepare_tokens, presets, train_model
from bosch.run.errors import UserError
from bosch.run.tensorboard import read_metrics
from bosch.sink import Sink, SinkConstants
from bosch.training import schedule
from bosch.training.loop import split, train
from bosch.training.model_start import check_positions
from bosch.training.parallel import SequenceGroup, share_sequences, start_world
from bosch.training.teacher import write_lessons
from tests.fork_server import PATIENCE, launch_environment, start
from tests.model_factory import tiny_model
from tests.plain_training import (
    SETTINGS,
    job_of,
    launch_two,
    model_folder,
    save,
    tokens_in_memory,
)

FEW_FULL = ((1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 0, 0))  # a layer of full groups, one without any
# Ranks that share a sequence of 48 tokens, window, sink, whether it has several documents. In a
# dense model the window is that of a layer of its own.
CASES: dict[str, tuple[int, int, str, bool]] = {
    "window in a piece, static sink": (4, 5, "static", True),
    "window over several pieces, first tokens": (4, 16, "tokens=3", True),
    "first tokens of one document": (2, 5, "tokens=3", False),
    "no sink": (2, 16, "none", True),
    "window of one token, static sink": (4, 1, "static", False),
    "window over everything": (2, 4096, "static", True),
    "dense model": (4, 7, "none", True),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "text": {"activation_checkpointing": "attention", "micro_batch_sequences": 2},
    "distilled": {"objective": "distill", "distill_weight": 0.5, "micro_batch_sequences": 4},
    "lessons": {"objective": "distill", "stored_shares": 4, "micro_batch_sequences": 2},
}
FIGURES = {"loss", "grad_norm", "flops", "lesson_flops"}
FIGURES |= {f"validation_loss{each}" for each in ("", "_by_sequence", "_by_position")}


def make_model(window: int, kind: str, is_dense: bool) -> Any:
    if is_dense:
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        return tiny_model("ministral", layer_types=layers, sliding_window=window)
    plain: Any = tiny_model("qwen3")
    draw = torch.Generator().manual_seed(0)
    shape = len(FEW_FULL), len(FEW_FULL[0]), head_size(plain.config)
    constants = SinkConstants(*(torch.randn(shape, generator=draw) for _ in range(2)))
    sink = Sink.parse(kind) if kind != "static" else Sink("static", constants=constants)
    return deploy(plain, FEW_FULL, window, sink)


def compare(environment: dict[str, str], out: Path) -> None:
    """Of every case the loss and the gradients by one rank and by ranks together, in float64."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    start_world(environment)
    found: dict[str, dict[str, float]] = {}
    for name, (size, window, kind, has_documents) in CASES.items():
        model = make_model(window, kind, is_dense=name == "dense model").double()
        loader = Loader(tokens_in_memory(), 2, has_documents)

        def gradients(
            shared: SequenceGroup, number: int, total: int, model: Any = model, loader: Any = loader
        ) -> list[Any]:
            model.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for inputs, labels, _ in split(loader.batch(0, number, total), 2, shared=shared):
                logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
                part = F.cross_entropy(
                    logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                part.backward()
                loss += part.detach()
            # All have one, on all ranks: a sharded model would wait for some.
            return [loss, *(p.grad.clone() for p in model.parameters())]

        shared = share_sequences(TrainConfig(context_parallel=size))
        together = gradients(shared, dist.get_rank() // size, dist.get_world_size() // size)
        for tensor in together:
            dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            alone = gradients(SequenceGroup(), 0, 1)
            names = ["loss", *(name for name, _ in model.named_parameters())]
            found[name] = {
                each: float((one - other).abs().max() / one.abs().max().clamp_min(1e-3))
                for each, one, other in zip(names, alone, together, strict=True)
            }
            found[name]["largest"] = float(max(x.abs().max() for x in alone[1:]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def start_ranks(program: Any, world: int, *arguments: object) -> None:
    """Run a program on so many ranks, to its end."""
    ranks = [start(program, each, *arguments) for each in launch_environment(world)]
    for rank in ranks:
        rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [0] * world


def test_ranks_that_share_sequences_compute_what_one_does(tmp_path: Path) -> None:
    """Four ranks; where two share a sequence, two groups have different ones."""
    start_ranks(compare, 4, tmp_path / "found")
    for name, errors in json.loads((tmp_path / "found").read_text()).items():
        assert errors.pop("largest") > 0.1, name
        assert max(errors.values()) < 1e-9, (name, max(errors, key=errors.__getitem__))


def train_all(environment: dict[str, str], folder: Path) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    for name in TRAININGS:
        train_one(folder, name, int(environment["WORLD_SIZE"]))


def train_one(folder: Path, name: str, sharing: int, out: str = "") -> str | None:
    changes = TRAININGS[name] | {"context_parallel": sharing, "max_steps": 2}
    settings = replace(SETTINGS, **changes)
    lessons = folder / "lessons" if settings.stored_shares else None
    where = folder / (out or f"{name} {sharing}")
    return train(job_of(where, folder / "model", settings, lessons=lessons))


@pytest.mark.slow
def test_two_ranks_train_on_parts_of_sequences_as_one_does_on_all(tmp_path: Path) -> None:
    """Up to sums in another order; with a teacher that is asked, and with stored lessons. The first
    training is stopped after a step and goes on on one rank."""
    model, lessons = model_folder(tmp_path / "model"), tmp_path / "lessons"
    lessons.mkdir()
    write_lessons(lessons, model, tokens_in_memory(), replace(SETTINGS, stored_shares=4), True)
    (tmp_path / "text 2").mkdir()
    (tmp_path / "text 2" / "STOP").touch()
    start_ranks(train_all, 2, tmp_path)
    assert len(read_metrics(tmp_path / "text 2" / "metrics.jsonl")) == 2
    train_one(tmp_path, "text", 1, out="text 2")
    for name in TRAININGS:
        train_one(tmp_path, name, 1)
        rows = [read_metrics(tmp_path / f"{name} {world}" / "metrics.jsonl") for world in (1, 2)]
        assert len(rows[0]) == 3
        for alone, together in zip(*rows, strict=True):
            for figure in sorted(FIGURES & alone.keys()):
                expected = pytest.approx(alone[figure], rel=1e-4)
                assert together[figure] == expected, (name, alone["step"], figure)


def test_what_ranks_cannot_share_is_refused() -> None:
    shared = TrainConfig(context_parallel=4)
    for world, length, named in (
        (6, 32_768, "4 does not divide the 6 processes"),
        (4, 1_020, r"8 equal pieces.* 1,020 tokens.*--data.sequence-length to 1016"),
    ):
        with pytest.raises(UserError, match=named):
            schedule.check_sharing(shared, length, world)
    with pytest.raises(UserError, match=r"64 sequences .* over 3 groups of 4 .* multiple of 3"):
        schedule.choose_micro_batch(shared, 32_768, 12, "cpu")
    assert schedule.choose_micro_batch(shared, 32_768, 8, "cuda") == 4  # of 8,192 tokens a rank
    for name in ("layer_weight", "on_policy"):
        changes: Any = {"objective": "distill", name: 0.5}
        with pytest.raises(
            UserError, match=rf"context_parallel is 4, but train\.{name} .* leave out"
        ):
            replace(shared, **changes)
    config: Any = tiny_model("llama").config
    check_positions(shared, config)
    config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(UserError, match=r"rope_type dynamic.*Leave the option out"):
        check_positions(shared, config)
    check_positions(TrainConfig(), config)


@pytest.mark.slow
def test_launched_command_trains_alike_on_two_ranks(tmp_path: Path) -> None:
    """The embedded model as a hybrid that keeps first tokens, on documents of the toy world."""
    asset, model = asset_folder(presets.SMOKE_MODEL), tmp_path / "model"
    dense: Any = AutoModelForCausalLM.from_pretrained(asset, attn_implementation="bosch")
    config = dense.config
    z = spread_mask(0.75, config.num_hidden_layers, config.num_key_value_heads)
    shutil.copytree(asset, model)
    (model / "model.safetensors").unlink()
    save(deploy(dense, z, 16, Sink.parse("tokens=2")), model)
    packed = f"--model {model} --tokens 16k --sequence-length 512 --held-out-sequences 2 --out"
    prepare_tokens.main([*packed.split(), str(tmp_path / "tokens")])
    given = f"--model {model} --tokens-from {tmp_path / 'tokens'} --batch-sequences 4 --max-steps 4"
    given += f" --precision fp32 --kernels torch --out {tmp_path}"
    train_model.main(f"{given}/alone".split())
    launch_two("../recipes/train_model.py", *f"{given}/together --context-parallel 2".split())
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "together")]
    for alone, together in zip(*rows, strict=True):
        for figure in sorted(FIGURES & alone.keys()):
            assert together[figure] == pytest.approx(alone[figure], rel=1e-4), figure
