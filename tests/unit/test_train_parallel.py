"""How training reads the environment that accelerate itself sets up."""

from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch._dynamo.utils import counters

from bosch.config import TrainConfig
from bosch.data.loader import Loader
from bosch.eval.engine_vllm import alone_on_its_gpu
from bosch.run.errors import UserError
from bosch.training import parallel
from bosch.training.loop import add_gradients, split
from bosch.training.model_start import start_model
from bosch.training.parallel import choose_device, decide, refuse_silent_traps
from tests.model_factory import tiny_model
from tests.plain_training import SETTINGS, model_folder, tokens_in_memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_launcher_and_no_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def accelerate_environment(*options: str) -> dict[str, str]:
    """The environment of a script that `accelerate launch` starts with these options."""
    known = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    arguments = launch_command_parser().parse_args([*known, *options, "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    if arguments.use_fsdp:
        return dict(prepare_multi_gpu_env(arguments))
    return dict(prepare_simple_launcher_cmd_env(arguments)[1])


ONE = ("--cpu", "--num_processes", "1")
FSDP = ("--use_fsdp", "--num_processes", "2", "--main_process_port", "0")


def test_launches_that_training_would_not_follow_are_refused() -> None:
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("--num_processes", "2"), {}, "--use_fsdp --num_processes"),
        (ONE, {"MASTER_ADDR": "node1"}, "unset MASTER_ADDR"),
        (ONE, {"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed.*--config_file"),
        (ONE, {"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16.*--mixed_precision"),
    ]
    for options, more, named in cases:
        with pytest.raises(UserError, match=named):
            refuse_silent_traps(accelerate_environment(*options) | more)
    for options in (ONE, FSDP):
        refuse_silent_traps(accelerate_environment(*options))
    refuse_silent_traps({"MASTER_ADDR": "node1"})  # a script started by hand: a cluster sets it


@pytest.mark.skipif(torch.cuda.is_available(), reason="its GPU can be used")
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    driver = {"PATH": str(tmp_path)}
    with pytest.raises(UserError, match="cannot use its GPU"):
        choose_device(driver)
    for asked in ({"ACCELERATE_USE_CPU": "true"}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert choose_device(driver | asked) == torch.device("cpu")
    assert choose_device({"PATH": str(tmp_path / "none")}) == torch.device("cpu")


def test_each_rank_has_an_engine_on_its_own_gpu() -> None:
    launched = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "PATH": "/bin"}
    for visible, gpu in (({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4,6"}, "6")):
        environment = {**launched, **visible}
        for _ in range(2):  # an engine for each checkpoint
            with alone_on_its_gpu(environment):
                assert environment == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": gpu}
            assert environment == {**launched, "CUDA_VISIBLE_DEVICES": gpu}
    alone = {"PATH": "/bin"}
    with alone_on_its_gpu(alone):
        assert alone == {"PATH": "/bin"}


def test_the_accelerate_config_counts_unless_settings_say_otherwise() -> None:
    words = "--fsdp_version 2 --fsdp_reshard_after_forward false --fsdp_offload_params true"
    words += " --fsdp_activation_checkpointing true"
    environment = accelerate_environment(*FSDP, *words.split())
    decided = decide(TrainConfig(), CPU, environment)
    assert decided.activation_checkpointing
    assert (decided.cpu_offload, decided.reshard_after_forward) == (True, False)
    settings = TrainConfig(cpu_offload=False, reshard_after_forward=True)
    decided = decide(settings, CPU, environment)
    assert (decided.cpu_offload, decided.reshard_after_forward) == (False, True)


def test_defaults_of_accelerate_do_not_count() -> None:
    """It sets FSDP_ACTIVATION_CHECKPOINTING=false if the user chose nothing."""
    environment = accelerate_environment(*FSDP, "--fsdp_version", "2")
    assert environment["FSDP_ACTIVATION_CHECKPOINTING"] == "false"
    decided = decide(TrainConfig(), torch.device("cuda"), environment)
    assert decided.activation_checkpointing
    assert decided.reshard_after_forward
    assert "ignored" not in " ".join(parallel.describe(TrainConfig(), CPU, environment))


def test_parked_tensors_free_their_memory_and_come_back_as_they_were() -> None:
    """As fully_shard needs it: the same tensors, and other views of the same memory."""
    flat = torch.arange(12.0)
    weight, other = flat[:8].view(2, 4), torch.ones(3)
    with parallel.parked([weight, other, flat]):
        assert weight.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert weight.flatten().tolist() == list(range(8))
    assert flat.tolist() == list(range(12))
    weight += 1
    assert flat[0] == 1
    assert other.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize("recomputes", [False, True])
def test_blocks_compile(recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, since the numbers are right without any graph too."""
    compile_block = torch.nn.Module.compile
    eager = partialmethod(compile_block, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    folder, device = model_folder(tmp_path / "model"), parallel.start_world()
    gradients = []
    for compiles in (False, True):
        torch.compiler.reset()
        counters.clear()
        changes = {"compile": compiles, "activation_checkpointing": recomputes}
        model = start_model(folder, replace(SETTINGS, **changes), device)
        batch = Loader(tokens_in_memory(), 2).batch(0)
        add_gradients(model, list(split(batch, 1)), 0.01, SETTINGS)
        gradients.append([parallel.whole(p.grad) for p in model.parameters() if p.grad is not None])
    assert counters["stats"]["unique_graphs"] >= 3  # of each block
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_every_block_of_a_deep_hybrid_is_compiled() -> None:
    """Each has different groups on the window, and so its own graph."""
    num_layers = 10
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = tiny_model("qwen3", **sizes)
    torch.compiler.reset()
    counters.clear()
    for block in model.model.layers:
        block.compile(backend="eager")
    parallel.allow_graphs(8 * num_layers)
    z = [[layer % 2, 1 - layer % 2] for layer in range(num_layers)]
    with torch.no_grad():
        model(torch.arange(40)[None], use_cache=False, bosch_mask=z, bosch_window=16)
    assert counters["stats"]["unique_graphs"] >= num_layers
    assert not [reason for reason in counters["unimplemented"] if "recompile limit" in reason]
