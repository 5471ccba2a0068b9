"""How training reads the environment that accelerate itself sets up."""

from collections import Counter
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from bosch.attention.graphs import allow_graphs
from bosch.config import TrainConfig
from bosch.data.loader import Loader
from bosch.eval.engine_vllm import alone_on_its_gpu
from bosch.run.errors import UserError
from bosch.training import model_start, parallel, train_stage
from bosch.training.loop import add_gradients, split
from bosch.training.model_start import check_fp8, start_model, use_fp8
from bosch.training.parallel import choose_device, decide, start_world
from tests.model_factory import tiny_model
from tests.plain_training import SETTINGS, Trace, model_folder, run, tokens_in_memory

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
            start_world(accelerate_environment(*options) | more)
    for options in (ONE, FSDP):
        assert start_world(accelerate_environment(*options)) == CPU
    start_world({"MASTER_ADDR": "node1"})  # a script started by hand: a cluster sets it


def test_such_a_launch_is_refused_before_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="mixed precision fp16"):
        train_stage.check(TrainConfig(), document_mask=False, model="tiny-qwen3")


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


def test_blocks_are_compiled_on_gpus_unless_settings_say_otherwise() -> None:
    for changes, on_gpu in (
        ({}, True),
        ({"compile": False}, False),
        ({"deterministic": True}, False),
        ({"objective": "distill", "layer_weight": 0.5}, False),
    ):
        settings = TrainConfig(**changes)
        assert decide(settings, torch.device("cuda"), {}).compile is on_gpu
        assert decide(settings, CPU, {}).compile is False
    assert decide(TrainConfig(compile=True), CPU, {}).compile is True


class Counted(TorchDispatchMode):
    """How often each operator is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def of(self, part: str) -> int:
        return sum(n for name, n in self.operators.items() if part in name and "back" not in name)


def test_what_is_kept_is_computed_once_with_the_same_gradients(tmp_path: Path) -> None:
    """A hybrid with sinks on packed documents. Nothing kept: twice."""
    folder, device = model_folder(tmp_path / "model"), parallel.start_world()
    batch, attention, matmuls = Loader(tokens_in_memory(), 2).batch(0), {}, {}
    gradients: dict[Any, Any] = {}
    for recompute in (False, True, "attention", "matmuls"):
        changes: Any = {"activation_checkpointing": recompute, "precision": "bf16"}
        model = start_model(folder, replace(SETTINGS, **changes), device)
        with Counted() as counted:
            add_gradients(model, list(split(batch, 1)), 0.01, SETTINGS)
        attention[recompute], matmuls[recompute] = counted.of("attention"), counted.of("aten.mm.")
        gradients[recompute] = [parallel.whole(p.grad) for p in model.parameters()]
    assert attention[True] == 2 * attention[False] > 0
    assert attention["attention"] == attention["matmuls"] == attention[False]
    assert matmuls[True] == matmuls["attention"] > matmuls["matmuls"] == matmuls[False]
    for recompute in (True, "attention", "matmuls"):
        torch.testing.assert_close(gradients[recompute], gradients[False], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize("recomputes", [False, True, "attention", "matmuls"])
def test_blocks_compile(recomputes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, since the numbers are right without any graph too."""
    compile_block = torch.nn.Module.compile
    eager = partialmethod(compile_block, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    folder, device = model_folder(tmp_path / "model"), parallel.start_world()
    gradients = []
    for compiles in (False, True):
        torch.compiler.reset()
        counters.clear()
        changes: Any = {"compile": compiles, "activation_checkpointing": recomputes}
        model = start_model(folder, replace(SETTINGS, **changes), device)
        batch = Loader(tokens_in_memory(), 2).batch(0)
        add_gradients(model, list(split(batch, 1)), 0.01, SETTINGS)
        gradients.append([parallel.whole(p.grad) for p in model.parameters() if p.grad is not None])
    assert counters["stats"]["unique_graphs"] >= 3  # of each block
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_fp8_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tensorwise = torch.device("cuda"), replace(SETTINGS, precision="fp8")
    rowwise = replace(SETTINGS, precision="fp8-rowwise")
    has_torchao, capability = False, (8, 0)
    monkeypatch.setattr(model_start, "find_spec", lambda _: has_torchao or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(UserError, match=r"cannot run here: torchao is not installed .*Use bf16"):
        check_fp8(tensorwise, gpu)
    has_torchao = True
    with pytest.raises(UserError, match="this device is a cpu"):
        check_fp8(tensorwise, CPU)
    with pytest.raises(UserError, match=r"compute capability 8\.9"):
        check_fp8(tensorwise, gpu)
    capability = (8, 9)
    check_fp8(tensorwise, gpu)
    with pytest.raises(UserError, match=r"precision fp8-rowwise .* capability 9\.0 \(Hopper\)"):
        check_fp8(rowwise, gpu)
    capability = (9, 0)
    check_fp8(rowwise, gpu)
    for settings in (tensorwise, rowwise):
        with pytest.raises(UserError, match="lora"):
            check_fp8(replace(settings, trained="lora"), gpu)


def test_fp8_trains_as_bf16_does_but_for_its_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated: torchao rounds to fp8 and multiplies in bf16."""
    pytest.importorskip("torchao")
    replaced = dict[str, list[Any]]()

    def emulated(model: Any, precision: str) -> None:
        use_fp8(model, precision, emulate=True)
        modules = (m for m in model.modules() if type(m).__name__ == "Float8Linear")
        replaced[precision] = [m.config.cast_config_weight.scaling_granularity for m in modules]

    monkeypatch.setattr(model_start, "use_fp8", emulated)
    monkeypatch.setattr(model_start, "check_fp8", lambda *_: None)
    folder = model_folder(tmp_path / "model")
    found = {}
    for precision in ("bf16", "fp8", "fp8-rowwise"):
        settings: Any = {"precision": precision, "activation_checkpointing": "attention"}
        run(tmp_path / precision, folder, replace(SETTINGS, **settings))
        found[precision] = Trace.of_run(tmp_path / precision, 5)
    assert {name: [x.value for x in kinds] for name, kinds in replaced.items()} == {
        "fp8": ["tensorwise"] * 7 * 3,
        "fp8-rowwise": ["axiswise"] * 7 * 3,
    }
    for precision in replaced:
        assert found[precision].losses != found["bf16"].losses
        assert found[precision].losses == pytest.approx(found["bf16"].losses, rel=0.02)
        assert found[precision].weights.keys() == found["bf16"].weights.keys()
    assert found["fp8"].losses != found["fp8-rowwise"].losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor's
@pytest.mark.parametrize("masks_documents", [True, False])
def test_what_is_kept_survives_compiled_graphs(masks_documents: bool, tmp_path: Path) -> None:
    """By inductor, which writes into memory that a graph needs no more: with attention in a graph,
    the gradients of what was kept were wrong by 9 % without a word."""
    folder, device = model_folder(tmp_path / "model"), parallel.start_world()
    gradients = []
    for changes in ({}, {"compile": True, "activation_checkpointing": "attention"}):
        torch.compiler.reset()
        model = start_model(folder, replace(SETTINGS, **changes), device)
        batch = Loader(tokens_in_memory(), 2, masks_documents).batch(0)
        add_gradients(model, list(split(batch, 1)), 0.01, SETTINGS)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_every_block_of_a_deep_hybrid_is_compiled() -> None:
    """Each has different groups on the window, and so its own graph."""
    num_layers = 10
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = tiny_model("qwen3", **sizes)
    torch.compiler.reset()
    counters.clear()
    for block in model.model.layers:
        block.compile(backend="eager")
    allow_graphs(8 * num_layers)
    z = [[layer % 2, 1 - layer % 2] for layer in range(num_layers)]
    with torch.no_grad():
        model(torch.arange(40)[None], use_cache=False, bosch_mask=z, bosch_window=16)
    assert counters["stats"]["unique_graphs"] >= num_layers
    assert not [reason for reason in counters["unimplemented"] if "recompile limit" in reason]
