"""Reordering the KV groups of a layer, weight by weight: a materialized model has its full groups
first.

A group is a block of rows of q_proj, k_proj and v_proj (and of their biases) and a block of columns
of o_proj. The model's function does not change, and `inverse` gives the original back bit for bit.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from bosch.run.errors import UserError

Permutation = Sequence[Sequence[int]]  # [layer][new place] = the group's old place

ATTENTION_NAME = re.compile(r"\blayers\.(\d+)\.self_attn\.(.+)$")
GROUPED_ROWS = {f"{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")}
GROUPED_COLUMNS = {"o_proj.weight"}
UNGROUPED = {"o_proj.bias"}
PER_HEAD_SIZE = {"q_norm.weight", "k_norm.weight"}  # of all heads, if as long as one head


def groups_in_order(z: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each layer's full groups first, in their order, then the others in theirs."""
    return [sorted(range(len(row)), key=lambda g, row=row: -row[g]) for row in z]  # type: ignore[misc]


def inverse(permutation: Permutation) -> list[list[int]]:
    return [sorted(range(len(row)), key=row.__getitem__) for row in permutation]


def permute_groups(name: str, tensor: Tensor, permutation: Permutation, head_size: int) -> Tensor:
    """A parameter with its groups reordered; one that has no groups comes back as it is."""
    match = ATTENTION_NAME.search(name)
    if match is None:
        return tensor
    row, part = permutation[int(match[1])], match[2]
    if part in GROUPED_ROWS:
        return _reorder(name, tensor, row, head_size, dim=0)
    if part in GROUPED_COLUMNS:
        return _reorder(name, tensor, row, head_size, dim=1)
    if part in UNGROUPED or part.startswith("rotary_emb."):
        return tensor
    if part in PER_HEAD_SIZE and tensor.numel() == head_size:
        return tensor
    raise UserError(
        f"{name} of shape {tuple(tensor.shape)} is an attention parameter whose groups are not "
        "known here (a quantized checkpoint, or another family): it cannot be permuted. Start from "
        "the unquantized checkpoint of a known family."
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
