"""Reorders the KV groups of a layer, weight by weight. A materialized model has its full groups
first.

A group is a block of rows of q_proj, k_proj and v_proj (and of their biases) and a block of columns
of o_proj. A family whose attention has further parameters with one part per head names them in its
file. The model's function does not change, and `inverse` restores the original bit for bit.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bosch.run.errors import UserError

Permutation = Sequence[Sequence[int]]  # [layer][new place] = the group's old place
# A parameter of `self_attn` -> the dimension that holds its heads, in their order; None: it has no
# parts that belong to single heads.
HeadDimensions = Mapping[str, int | None]

HEAD_DIMENSIONS: HeadDimensions = {
    **{f"{p}_proj.{kind}": 0 for p in "qkv" for kind in ("weight", "bias")},
    "o_proj.weight": 1,
    "o_proj.bias": None,
    "window_sink_key": None,  # in the hybrid's own order (bosch/hybrid/sinks.py)
    "window_sink_value": None,
}
ATTENTION_NAME = re.compile(r"\blayers\.(\d+)\.self_attn\.(.+)$")
PER_HEAD_NORMS = {"q_norm.weight", "k_norm.weight"}  # shared by all heads if as long as one head


def groups_in_order(z: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each layer's full groups first, in their order, then the others in theirs."""
    return [sorted(range(len(row)), key=lambda g, row=row: -row[g]) for row in z]  # type: ignore[misc]


def inverse(permutation: Permutation) -> list[list[int]]:
    return [sorted(range(len(row)), key=row.__getitem__) for row in permutation]


def permute_groups(
    name: str,
    tensor: Tensor,
    permutation: Permutation,
    head_size: int,
    further: HeadDimensions | None = None,
) -> Tensor:
    """A parameter with its groups reordered; one without groups is returned unchanged. `further`:
    head dimensions of the family, beside HEAD_DIMENSIONS."""
    match = ATTENTION_NAME.search(name)
    if match is None:
        return tensor
    row, parameter = permutation[int(match[1])], match[2]
    dimensions = {**HEAD_DIMENSIONS, **(further or {})}
    if parameter in dimensions:
        dimension = dimensions[parameter]
        return tensor if dimension is None else _reorder(name, tensor, row, head_size, dimension)
    is_shared = parameter in PER_HEAD_NORMS and tensor.numel() == head_size
    if is_shared or parameter.startswith("rotary_emb."):
        return tensor
    raise UserError(
        f"{name} of shape {tuple(tensor.shape)} is an attention parameter that cannot be permuted, "
        "because nothing says where its heads are. Start from an unquantized checkpoint; for a new "
        "family, name the parameter in head_dimensions of its file in bosch/families."
    )


def _reorder(name: str, tensor: Tensor, row: Sequence[int], head_size: int, dim: int) -> Tensor:
    size, num_groups = tensor.shape[dim], len(row)
    if size % (num_groups * head_size):
        raise UserError(
            f"{name} has {size} entries along dimension {dim}, not a multiple of {num_groups} "
            f"heads of {head_size}."
        )
    blocks = tensor.unflatten(dim, (num_groups, size // num_groups))
    return blocks.index_select(dim, torch.tensor(row, device=tensor.device)).flatten(dim, dim + 1)
