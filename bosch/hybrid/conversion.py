"""From a plain model in memory to its hybrid and back: config, and weights in another order.

A group is a block of rows of q_proj, k_proj and v_proj (and of their biases) and a block of columns
of o_proj. In each layer of a hybrid the full groups come first. A family whose attention has
further parameters with one part per head names them in its file, and so does one that has several
projections in one tensor. The model's function does not change, and `inverse` restores the original
bit for bit.
"""

import copy
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from bosch.hybrid.models import check_native_window, describe_stretch, family_of, head_size
from bosch.masks.window import full_layers
from bosch.run.errors import UserError
from bosch.sink import KEY, NO_SINK, VALUE, Sink, is_sink_parameter

Permutation = Sequence[Sequence[int]]  # [layer][new place] = the group's old place
# A parameter of `self_attn` -> the dimension that holds its heads, in their order; None: it has no
# parts that belong to single heads.
HeadDimensions = Mapping[str, int | None]

HEAD_DIMENSIONS: HeadDimensions = {
    **{f"{p}_proj.{kind}": 0 for p in "qkv" for kind in ("weight", "bias")},
    "o_proj.weight": 1,
    **dict.fromkeys(("o_proj.bias", KEY, VALUE)),  # sinks are in the hybrid's own order
}
ATTENTION_NAME = re.compile(r"\blayers\.(\d+)\.self_attn\.(.+)$")
PER_HEAD_NORMS = {"q_norm.weight", "k_norm.weight"}  # shared by all heads if as long as one head


def hybrid_config(
    config: PretrainedConfig,
    z: Sequence[Sequence[int]],
    window_tokens: int,
    sink: Sink = NO_SINK,
    **provenance: object,
) -> PretrainedConfig:
    """The config of the hybrid of a plain model and a mask (1: full attention). `provenance`:
    further fields of `config.bosch`."""
    check_native_window(config)
    given, layers = [[int(bit) for bit in row] for row in z], full_layers(config)
    sizes = sorted({len(row) for row in given})
    if (len(given), sizes) != (len(layers), [config.num_key_value_heads]):
        raise UserError(
            f"the mask has {len(given)} layers of {sizes} groups, but the model has "
            f"{len(layers)} of {config.num_key_value_heads}; pass a mask made for this model."
        )
    # A layer with a window of its own has no full group.
    rows = [[0] * config.num_key_value_heads for _ in range(config.num_hidden_layers)]
    for layer, row in zip(layers, given, strict=True):
        rows[layer] = row
    hybrid: dict[str, object] = {
        "window": window_tokens,
        "num_full": [sum(row) for row in rows],
        # The full groups first; the sort is stable, so each kind stays in its order.
        "permutation": [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in rows],
        **provenance,
    }
    if sink.kind != "none":  # so that hybrids without are as before there were any
        hybrid["sink"] = sink.to_json()
    if sink.kind == "static":
        hybrid["sink_rope"] = describe_stretch(config)
    made: PretrainedConfig = family_of(config).config_class(**_common_fields(config), bosch=hybrid)
    return made


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    made: PretrainedConfig = family_of(config).plain_config_class(**_common_fields(config))
    return made


def _common_fields(config: PretrainedConfig) -> dict[str, object]:
    """What a plain config and that of its hybrid have in common."""
    own = ("model_type", "architectures", "auto_map", "bosch")
    return {key: value for key, value in config.to_dict().items() if key not in own}


def deploy(
    model: PreTrainedModel,
    z: Sequence[Sequence[int]],
    window_tokens: int,
    sink: Sink = NO_SINK,
    **provenance: object,
) -> PreTrainedModel:
    """A new hybrid from a plain model in memory, with weights of its own."""
    config = hybrid_config(model.config, z, window_tokens, sink, **provenance)
    constants = sink_parameters(sink, config)
    constants = {name: x.to(model.device, model.dtype) for name, x in constants.items()}
    hybrid_class = family_of(config).model_class
    return convert(model, hybrid_class, config, config.bosch["permutation"], constants)


def sink_parameters(sink: Sink, config: PretrainedConfig) -> dict[str, Tensor]:
    """The constants of a static sink as a hybrid has them, by the parameters' names: of the groups
    with a window only, in the order of the hybrid."""
    if sink.kind != "static":
        return {}
    keys_LGD, values_LGD = sink.known_constants()
    found = {}
    for number, layer in enumerate(full_layers(config)):
        row, attention = config.bosch["permutation"][layer], f"layers.{layer}.self_attn"
        if windowed := row[config.bosch["num_full"][layer] :]:
            found[f"model.{attention}.{KEY}"] = keys_LGD[number, windowed]
            found[f"model.{attention}.{VALUE}"] = values_LGD[number, windowed]
    return found


@torch.no_grad()
def convert(
    source: PreTrainedModel,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    permutation: Permutation,
    constants: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """A model with the permuted weights of `source`, and its buffers, tied weights and settings.
    `constants`: parameters of the hybrid's sink, which a plain model has not."""
    # How experts are computed is a setting of the running model that is not saved.
    config._experts_implementation = source.config._experts_implementation
    with torch.device("meta"):  # no memory: every weight is assigned below
        made = model_class(config)
    state = {
        name: permute_groups(name, tensor, permutation, config).detach().clone()
        for name, tensor in source.state_dict().items()
        if not is_sink_parameter(name)  # a plain model has none
    }
    made.load_state_dict(state | dict(constants or {}), assign=True)
    # Those that are not saved, such as the frequencies of rotary embeddings, are in no state.
    buffers = dict(source.named_buffers())
    for name, buffer in list(made.named_buffers()):
        if buffer.is_meta:
            owner, _, attribute = name.rpartition(".")
            setattr(made.get_submodule(owner), attribute, buffers[name].clone())
    made.tie_weights()
    made.generation_config = copy.deepcopy(source.generation_config)
    return made.train(source.training)


def inverse(permutation: Permutation) -> list[list[int]]:
    return [sorted(range(len(row)), key=row.__getitem__) for row in permutation]


def refuse_fused(config: PretrainedConfig, option: str) -> None:
    """Refuse a family with one matrix for queries, keys and values, for what tells them apart."""
    if getattr(family_of(config), "fused", {}):
        problem = f"{option}: models of the type {config.model_type} have one matrix for queries"
        raise UserError(f"{problem}, keys and values, and it cannot tell them apart. Leave it out.")


def permute_groups(
    name: str, tensor: Tensor, permutation: Permutation, config: PretrainedConfig
) -> Tensor:
    """A parameter with its groups reordered; one without groups is returned unchanged."""
    match = ATTENTION_NAME.search(name)
    if match is None:
        return tensor
    row, parameter = permutation[int(match[1])], match[2]
    if (fused := getattr(family_of(config), "fused", {}).get(parameter)) is not None:
        # Each projection's rows by themselves, and together again.
        heads = {"q": config.num_attention_heads, "k": len(row), "v": len(row)}
        parts = tensor.split([heads[part] * head_size(config) for part in fused])
        return torch.cat([_permute_blocks(part, row, 0) for part in parts])
    dimensions = {**HEAD_DIMENSIONS, **getattr(family_of(config), "head_dimensions", {})}
    is_shared = parameter in PER_HEAD_NORMS and tensor.numel() == head_size(config)
    if parameter not in dimensions and not (is_shared or parameter.startswith("rotary_emb.")):
        raise UserError(
            f"{name} of shape {tuple(tensor.shape)} is an attention parameter that cannot be "
            "permuted, because nothing says where its heads are. Start from an unquantized "
            "checkpoint; for a new family, name the parameter in head_dimensions of its file in "
            "bosch/families."
        )
    dim = dimensions.get(parameter)
    if dim is None:
        return tensor
    return _permute_blocks(tensor, row, dim)


def _permute_blocks(tensor: Tensor, row: Sequence[int], dim: int) -> Tensor:
    # A group's part of the dimension is one block, of one head in k_proj and v_proj and of all
    # query heads that share it in q_proj and o_proj: so one permutation of blocks serves all four.
    blocks = tensor.unflatten(dim, (len(row), -1))
    return blocks.index_select(dim, torch.tensor(row, device=tensor.device)).flatten(dim, dim + 1)
