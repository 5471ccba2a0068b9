"""From a plain model in memory to its hybrid and back: config and weights."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from bosch.hybrid.models import family_of
from bosch.hybrid.permute import HeadDimensions, Permutation, groups_in_order, permute_groups
from bosch.hybrid.sinks import Sinks, is_sink
from bosch.masks.window import sink_as_json
from bosch.run.errors import UserError


def hybrid_config(
    config: PretrainedConfig, z: Sequence[Sequence[int]], window_tokens: int, **provenance: object
) -> PretrainedConfig:
    """The config of the hybrid of a plain model and a mask (1: full attention)."""
    rows = [[int(bit) for bit in row] for row in z]
    shape = {(len(rows), len(row)) for row in rows}
    if shape != {(config.num_hidden_layers, config.num_key_value_heads)}:
        sizes = sorted({len(row) for row in rows})
        raise UserError(
            f"the mask has {len(rows)} layers of {sizes} groups, but the model has "
            f"{config.num_hidden_layers} of {config.num_key_value_heads}; pass a mask made for "
            "this model."
        )
    hybrid = {
        "window": window_tokens,
        "num_full": [sum(row) for row in rows],
        "permutation": groups_in_order(rows),
    }
    made: PretrainedConfig = family_of(config).config_class(
        **_values(config), bosch={**hybrid, **provenance}
    )
    return made


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the model a hybrid was made from."""
    values = _values(config)
    del values["bosch"]
    made: PretrainedConfig = family_of(config).plain_config_class(**values)
    return made


def _values(config: PretrainedConfig) -> dict[str, Any]:
    types = ("model_type", "architectures")
    return {key: value for key, value in config.to_dict().items() if key not in types}


def head_size(config: PretrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def deploy(
    model: PreTrainedModel,
    z: Sequence[Sequence[int]],
    window_tokens: int,
    sinks: Sinks | int | None = None,
    **provenance: object,
) -> PreTrainedModel:
    """A new hybrid from a plain model in memory, with weights of its own. `sinks`: constants, or a
    number of first tokens."""
    own = None
    if isinstance(sinks, Sinks):
        own = Sinks(*(x_LGD.to(model.device, model.dtype) for x_LGD in sinks))
    if sinks is not None:
        provenance["sink"] = sink_as_json("static" if own else f"tokens={sinks}")
    config = hybrid_config(model.config, z, window_tokens, **provenance)
    new = sink_parameters(own, config)
    return convert(model, family_of(config).model_class, config, config.bosch["permutation"], new)


def sink_parameters(sinks: Sinks | None, config: PretrainedConfig) -> dict[str, Tensor]:
    """Those of a hybrid, by name."""
    if sinks is None:
        return {}
    return {
        f"model.layers.{layer}.self_attn.{name}": tensor
        for layer, (row, num_full) in enumerate(
            zip(config.bosch["permutation"], config.bosch["num_full"], strict=True)
        )
        if num_full < len(row)
        for name, tensor in sinks.of_groups(layer, row[num_full:]).items()
    }


@torch.no_grad()
def convert(
    source: PreTrainedModel,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    permutation: Permutation,
    sinks: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """A model with the permuted weights of `source`, and its buffers, tied weights and settings."""
    # How experts are computed is a setting of the running model that is not saved.
    config._experts_implementation = source.config._experts_implementation
    with torch.device("meta"):
        made = model_class(config)
    size, further = head_size(config), head_dimensions(config)
    state = {
        name: permute_groups(name, tensor, permutation, size, further).detach().clone()
        for name, tensor in source.state_dict().items()
        if not is_sink(name)  # a plain model has none
    } | dict(sinks or {})
    made.load_state_dict(state, assign=True)
    buffers = dict(source.named_buffers())
    for name, buffer in list(made.named_buffers()):
        if buffer.is_meta:
            owner, _, attribute = name.rpartition(".")
            setattr(made.get_submodule(owner), attribute, buffers[name].clone())
    made.tie_weights()
    made.generation_config = copy.deepcopy(source.generation_config)
    return made.train(source.training)


def head_dimensions(config: PretrainedConfig) -> HeadDimensions:
    """Those of the family's own attention parameters, beside the usual ones."""
    return getattr(family_of(config), "head_dimensions", {})
