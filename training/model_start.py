"""The model to train: built on the meta device, sharded, then each rank reads its own part and one
slice of a file at a time. Which of its weights are trained (all, some of them, or narrow matrices
beside frozen ones: LoRA), and the AdamW that changes them.

peft would rename the frozen weights, which loading, checkpoints and export look up by name; a hook
does not. An export adds the products to the weights, so that its folder looks like any other.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import bosch  # noqa: F401  registers hybrids and their attention with transformers
from bosch.attention.backends import flash
from bosch.attention.register import NAME
from bosch.config import TrainConfig
from bosch.hybrid import materialize
from bosch.hybrid.conversion import refuse_fused
from bosch.hybrid.models import family_of
from bosch.hybrid.shards import weight_files
from bosch.masks.window import full_layers, own_window
from bosch.model import explain_library_errors
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import say
from bosch.sink import is_sink_parameter
from bosch.training.loss import install_kernels
from bosch.training.parallel import own_rows, plain_name, shard_model, whole

LORA_SCALE = 2.0  # of the product that is added to a weight
DOWN, UP = "lora_down.weight", "lora_up.weight"
EXPERT = re.compile(r"\.experts\.\d+\.")


def start_model(folder: Path, settings: TrainConfig, device: torch.device) -> PreTrainedModel:
    """The model of a folder, in fp32, sharded, ready to train. Every rank calls this. The settings
    are those that `decide` returns."""
    config = read_config(folder)
    check_positions(settings, config)
    model = make_empty(build_on_meta(config), settings, device)
    if settings.trained.startswith("lora") and has_experts(model):
        say(
            f"train.trained {settings.trained}: experts and their routers stay as they are; "
            "--train.trained all trains them"
        )
    fill_model(model, folder, device)
    # The kernel that takes the place of torch's own has no dropout.
    if not getattr(model.config, "attention_dropout", 0):
        flash.use_3_in_torch()
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """From config.json. The model must be of a family that can be a hybrid."""
    config = materialize.read_config(folder)
    family_of(config)
    return config


def drop_windows(config: PretrainedConfig) -> None:
    """Make a hybrid's config that of its dense model: all groups on full attention, but in layers
    that have a window of their own."""
    if (hybrid := getattr(config, "bosch", None)) is not None:
        for layer in full_layers(config):
            hybrid["num_full"][layer] = config.num_key_value_heads


def check_positions(settings: TrainConfig, config: PretrainedConfig) -> None:
    """Refuse sequences that ranks share for a model whose layers look at more than their tokens."""
    ropes: Any = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    if settings.context_parallel > 1 and (found := kinds & {"dynamic", "longrope"}):
        problem = f"train.context_parallel {settings.context_parallel}: the positions of this model"
        raise UserError(
            f"{problem} (rope_type {found.pop()}) change with the length of the whole sequence, "
            "which no rank has. Leave the option out."
        )


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with the shapes of its weights, but no memory for them."""
    config.use_cache = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )


def make_empty(
    model: PreTrainedModel, settings: TrainConfig, device: torch.device
) -> PreTrainedModel:
    """The model to train before its weights are read."""
    choose_trained(model, settings.trained, settings.lora_rank)
    install_kernels(model, settings.kernels, in_blocks=not settings.compile)
    if settings.in_fp8:
        check_fp8(settings, device)
        use_fp8(model, settings.precision)
    return allocate(model, settings, device).train()


def allocate(model: Any, settings: TrainConfig, device: torch.device) -> PreTrainedModel:
    """Shard a model on the meta device and give it memory, with anything in it."""
    shard_model(model, settings, device)
    if settings.cpu_offload:
        device = torch.device("cpu")
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    if any(isinstance(each, DTensor) for each in model.parameters()):
        model._apply(lambda tensor: torch.empty_like(tensor, device=device))
    else:
        # By hand: a rehearsal's stand-ins for tensors cannot be exchanged by `_apply`, which then
        # ends in an error.
        for module in model.modules():
            for name, each in module.named_parameters(recurse=False):
                empty = torch.empty_like(each, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=each.requires_grad)
            for name, each in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(each, device=device)
    if is_tied:  # moving off the meta device makes new parameters, unless they are sharded
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def fill_model(
    model: PreTrainedModel, folder: Path, device: torch.device, head_is_embedding: bool = False
) -> None:
    """Fill each parameter's local part from the folder's safetensors files, and compute the
    buffers. head_is_embedding: the files hold one matrix for both, although the model has two."""
    with ExitStack() as stack:
        slices: dict[str, Any] = {}  # by name of the tensor
        for file_name in weight_files(folder):
            with explain_library_errors(f"{folder / file_name} is not a complete safetensors file"):
                file = stack.enter_context(safe_open(folder / file_name, framework="pt"))
            slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  no mapping
        if head_is_embedding:
            slices.setdefault("lm_head.weight", slices["model.embed_tokens.weight"])
        filled: set[Tensor] = set()
        # `keep_vars` gives the parameters themselves, to be written into; a tied one comes twice.
        state = model.state_dict(keep_vars=True)
        for name, parameter in state.items():
            if parameter in filled:  # tied to one that was read
                continue
            filled.add(parameter)
            values: Any = first_lora_values(name, parameter.shape)
            if values is None:
                values = find_values(name, list(parameter.shape), slices, folder, model)
            # This rank's rows, converted from the file's type. Of a small tensor it may have none.
            target, begin = own_rows(parameter)
            if target.dim() == 0:  # a buffer that is in the files, as Apertus's activation has
                target.copy_(values[...])
            elif target.numel():
                target.copy_(values[begin : begin + target.shape[0]])

    for prefix, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        known = {name: plain_name(f"{prefix}.{name}") for name in own}
        if not (buffers := [name for name in own if known[name] not in state]):
            continue
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:  # Gemma's embedding
            module.embed_scale = torch.tensor(scale, device=device)
            continue
        if (config := getattr(module, "config", None)) is None:
            problem = f"{type(module).__name__} has buffers that are in no file"
            raise UserError(f"{problem}, and no config to compute them from. Train another model.")
        # The tables of rotary embeddings, as in a new module. With zeros a model would still train,
        # a little worse.
        fresh = dict(type(module)(config).named_buffers(recurse=False))
        for name in buffers:
            assert bool(fresh[name].abs().sum() > 0), f"buffer {name} is all zeros"
            setattr(module, name, fresh[name].to(device))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, f"{name} was never filled"


def check_fp8(settings: TrainConfig, device: torch.device) -> None:
    reason, precision = None, settings.precision
    # The rowwise kernels were made for Hopper; torchao asks for it too.
    least, name = ((9, 0), "Hopper") if precision == "fp8-rowwise" else ((8, 9), "Ada, Hopper")
    if find_spec("torchao") is None:
        reason = "torchao is not installed (pip install torchao)"
    elif device.type != "cuda":
        reason = f"it needs a GPU, and this device is a {device.type}"
    elif torch.cuda.get_device_capability(device) < least:
        reason = "it needs a GPU of compute capability {}.{} ({}) or newer".format(*least, name)
    elif settings.trained.startswith("lora"):
        reason = f"train.trained {settings.trained} adds to linear layers that fp8 replaces"
    if reason is not None:
        raise UserError(f"train.precision {precision} cannot run here: {reason}. Use bf16.")


def use_fp8(model: nn.Module, precision: str, emulate: bool = False) -> None:
    """Products of the blocks' linear layers in fp8. Parameters, and what is kept for the backward,
    stay as they are. emulate: without such products in hardware, for tests."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_replaced(module: Any, name: str) -> bool:
        # Not the head, whose weight the loss reads itself; and fp8 kernels take multiples of 16.
        return "lm_head" not in name and not (module.in_features % 16 or module.out_features % 16)

    recipe = "rowwise" if precision == "fp8-rowwise" else "tensorwise"
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=is_replaced)


@dataclass(frozen=True)
class Experts:
    """Of a layer: one tensor in the model, with one row per expert. The files hold them one by one,
    in parts of these names, each with a place for the expert's number."""

    slices: Mapping[str, Any]  # by name of the tensor in the files
    names: Sequence[str]

    def __getitem__(self, rows: slice) -> Tensor:
        numbers = range(rows.start, rows.stop)
        parts = [[self.slices[name.format(n)][:] for name in self.names] for n in numbers]
        return torch.stack(list(map(torch.cat, parts)))


def find_values(
    name: str, shape: list[int], slices: dict[str, Any], folder: Path, model: PreTrainedModel
) -> Any:
    """What gives a parameter's rows when it is sliced."""
    names = [name]
    if name not in slices:  # in files it may have another name, or be many tensors
        tensor = torch.empty(shape, device="meta")
        names = list(revert_weight_conversion(model, {name: tensor}))
    if any(each not in slices for each in names):
        problem = f"{folder} has no weights {name!r}, which its config.json asks for"
        raise UserError(f"{problem}. It is incomplete or its config.json is that of another model.")
    if len(names) > 1:
        return Experts(slices, [*dict.fromkeys(EXPERT.sub(".experts.{}.", n) for n in names)])
    if (there := slices[names[0]].get_shape()) != shape:
        problem = f"{folder}: {name} has the shape {there}, by config.json {shape}"
        raise UserError(f"{problem}. Pass a folder whose config.json belongs to its weights.")
    return slices[names[0]]


# --------------------------------------------------------------------------- what is trained


def choose_trained(model: PreTrainedModel, trained: str, lora_rank: int) -> None:
    """On the meta device. `trained` and `lora_rank` are those of TrainConfig."""
    has_window = windowed_layers(model.config)
    # model.layers.7.self_attn.q_proj.weight: the third part is the layer.
    for name, parameter in model.named_parameters():
        is_attention = ".self_attn." in name
        parameter.requires_grad_(
            {
                "all": True,
                "attention": is_attention,
                "windowed-attention": is_attention and has_window[int(name.split(".")[2])],
                "norms": "norm" in name,
                "lora": False,
                "lora-keep-qk": False,
            }[trained]
        )
    if trained == "lora-keep-qk":
        refuse_fused(model.config, "--train.trained lora-keep-qk")
    if trained.startswith("lora"):
        for name, module in list(model.get_submodule("model.layers").named_modules()):
            if type(module) is nn.Linear:
                rows = module.out_features
                if trained == "lora-keep-qk":
                    rows -= rows_of_full_groups(f"model.layers.{name}", rows, model.config)
                if rows == 0:  # all of them stay as they are
                    continue
                small = partial(nn.Linear, bias=False, dtype=module.weight.dtype, device="meta")
                module.lora_down = small(module.in_features, lora_rank)
                module.lora_up = small(lora_rank, rows)
                module.register_forward_hook(add_product)
    if not trained_parameters(model):
        raise UserError(
            f"train.trained is {trained}, and those of this model have no weights to train. Pass "
            "--train.trained attention, or another of its values."
        )


def has_experts(model: nn.Module) -> bool:
    """Whether it is a mixture whose experts are one tensor for all of a layer: no linear layers,
    which lora adds to. Nor is what chooses among them."""
    return any(".experts." in name and p.ndim == 3 for name, p in model.named_parameters())


def rows_of_full_groups(name: str, rows: int, config: PretrainedConfig) -> int:
    """Of a projection to queries or keys with so many rows: how many are those of groups on full
    attention, which come first. Of other layers none."""
    if not name.endswith(("q_proj", "k_proj")):
        return 0
    groups, layer = config.num_key_value_heads, int(name.split(".")[2])
    hybrid = getattr(config, "bosch", None) or {"num_full": [groups] * config.num_hidden_layers}
    return rows // groups * int(hybrid["num_full"][layer])


def add_product(linear: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    product = LORA_SCALE * linear.lora_up(linear.lora_down(given[0]))
    if (kept := output.shape[-1] - product.shape[-1]) == 0:
        return output + product
    return torch.cat([output[..., :kept], output[..., kept:] + product], dim=-1)


def first_lora_values(name: str, shape: torch.Size) -> Tensor | None:
    """The same on all ranks; the products begin as zeros. None for a weight of the model itself."""
    if name.endswith(UP):
        return torch.zeros(shape)
    if not name.endswith(DOWN):
        return None
    # By name, so that every rank draws the whole matrix alike, whichever rows are its own, and no
    # matrix is like another. The bound is that of nn.Linear.
    generator = torch.Generator().manual_seed(int(fingerprint(name)[:12], 16))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def windowed_layers(config: PretrainedConfig) -> list[bool]:
    """Of each layer, whether it has groups with a window. Where none has, as in the control and a
    dense model, all count."""
    hybrid = getattr(config, "bosch", None) or {"num_full": []}
    found = [
        count < config.num_key_value_heads and own_window(config, layer) is None
        for layer, count in enumerate(hybrid["num_full"])
    ]
    return found if any(found) else [True] * config.num_hidden_layers


def make_optimizer(model: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on norms, biases and sinks. Call it before any
    forward: after one, the root module holds other parameters than the sharded ones, which the
    optimizer needs."""
    parameters = trained_parameters(model)
    # With bf16 weights and a learning rate of 1e-5 most updates are rounded away: AdamW changes
    # only 14 % of the weights in 50 steps (measured).
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    constants = {p for name, p in model.named_parameters() if p.ndim < 2 or is_sink_parameter(name)}
    decayed = [p for p in parameters if p not in constants]
    others = [p for p in parameters if p in constants]
    groups = [(decayed, settings.weight_decay), (others, 0.0)]
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in groups if params],
        lr=settings.peak_learning_rate,
        betas=settings.betas,
        fused=True,
    )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the model's order: the last bit of the gradient norm depends on it."""
    return [p for p in model.parameters() if p.requires_grad]


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Norm of the whole gradient, the same number on every rank."""
    return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
