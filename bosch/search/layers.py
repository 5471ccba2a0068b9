"""What a search computes itself instead of the model: what enters the layers, the top layer in the
rows of the answers alone, and the probabilities.

All other layers are the model's own blocks, called as the model calls them (score.py), so results
are bit-identical as long as all rows are computed. `Layers.check` compares with the model itself
before a search begins.

Work is counted in layer-forwards: 1 is one layer over one whole haystack under the current mask.
Part of a layer counts by its share of that layer's multiplications (projections, attention over
the visible keys, MLP with the active experts)."""
# B batch (1), T tokens, N rows computed, C hidden size, H query heads, G kv heads, R heads a group,
# D head size, E heads side by side

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.attention.call import AttentionCall
from bosch.attention.dispatch import attend, refusal
from bosch.attention.register import NAME
from bosch.attention.sink_keys import keys_beyond
from bosch.hybrid.models import apply_norm, family_of, logit_factor
from bosch.kernels import rotation_of
from bosch.masks.mask import Z
from bosch.masks.window import check_window, full_layers
from bosch.run.errors import UserError
from bosch.sink import NO_SINK

OVERFLOW = (
    "The model's probabilities are not numbers: its hidden states overflow in its number format. "
    "Load it in another one."
)
MOST_ROUNDING = 0.05  # of hidden states, relative, in any number format
Rotary = tuple[Tensor, Tensor]  # cosines and sines of a haystack's positions, (1, T, D) each
Arguments = dict[str, Any]  # of a block, by name, besides the hidden states
# What a model also gives a block, and a search without a cache or packed documents does not need.
NOT_NEEDED = ("position_ids", "cache", "past_key_values", "use_cache", "cache_position")


class Layers:
    """A dense model in search mode, layer by layer."""

    def __init__(self, model: PreTrainedModel, window_tokens: int) -> None:
        if getattr(model.config, "bosch", None) is not None:
            raise UserError(
                "This model is already a hybrid; search a mask for the dense model it came from."
            )
        if model.config._attn_implementation != NAME:
            problem = f"The model has attn_implementation={model.config._attn_implementation!r}"
            raise UserError(f"{problem}; load it with {NAME!r} to search a mask.")
        self.window_tokens = check_window(window_tokens)
        self.model = model
        self.core: Any = model.base_model
        self.blocks: Any = self.core.layers
        self.num_groups: int = model.config.num_key_value_heads
        # The layers up to each that is a mask's. Those between have windows of their own; behind
        # the last one they belong to it.
        last, steps = model.config.num_hidden_layers - 1, full_layers(model.config)
        ends = [*steps[:-1], last]
        self.steps = [range(first + 1, end + 1) for first, end in pairwise([-1, *ends])]
        self.backend: str | None = getattr(model.config, "bosch_backend", None)
        self.block_norms = getattr(family_of(model.config), "block_norms", None)
        # Single rows need a family that names its norms, and a mask in their attention, which not
        # every named backend takes.
        x_BHTD = torch.zeros(1, 1, 2, 64, device=model.device, dtype=model.dtype)
        mask_BNTS = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=model.device)
        call = AttentionCall(x_BHTD, x_BHTD, x_BHTD, 1.0, mask_BNTS=mask_BNTS)
        takes_masks = self.backend is None or refusal(self.backend, call) is None
        self.takes_rows = self.block_norms is not None and takes_masks and steps[-1] == last

    def embed(self, ids_T: Tensor) -> tuple[Tensor, list[Arguments]]:
        """The hidden states that enter layer 0, and the arguments that each layer gets."""
        # By the model's own forward, without its layers: some scale what they embed, and some have
        # other rotary positions in some layers.
        recorders = [_Recorder() for _ in self.blocks]
        self.core.layers = nn.ModuleList(recorders)
        try:
            self.core(ids_T[None], use_cache=False)
        finally:
            self.core.layers = self.blocks
        return recorders[0].hidden_BTC, [recorder.arguments for recorder in recorders]

    def answer_rows(
        self, layer: int, hidden_BTC: Tensor, given: Arguments, row: Sequence[int], rows_N: Tensor
    ) -> Tensor:
        """(1, N, C): the output of a layer in these rows, under this row of a mask. Keys and values
        are computed for all tokens; queries, attention and MLP for the rows only."""
        block, norms, rotary = self.blocks[layer], self.block_norms, given["position_embeddings"]
        assert norms is not None  # as `takes_rows` says
        entering_BTC = apply_norm(block, norms.before_attention, hidden_BTC)
        mixed_BNE = self._attention(block.self_attn, entering_BTC, rotary, row, rows_N)
        attended_BNC = block.self_attn.o_proj(mixed_BNE)
        hidden_BNC = hidden_BTC[:, rows_N] + apply_norm(block, norms.after_attention, attended_BNC)
        out_BNC = block.mlp(apply_norm(block, norms.before_mlp, hidden_BNC))
        if isinstance(out_BNC, tuple):  # experts that return their router's logits too
            out_BNC = out_BNC[0]
        return hidden_BNC + apply_norm(block, norms.after_mlp, out_BNC)

    def _attention(
        self, attention: Any, x_BTC: Tensor, rotary: Rotary, row: Sequence[int], rows_N: Tensor
    ) -> Tensor:
        """(1, N, H * D): the input of the output projection."""
        # The model's own function, which rotates queries and keys together. Here they have other
        # positions, so it is called for each of them, with one head of zeros for the other.
        rotate = rotation_of(attention)
        k_BGTD, v_BGTD = _heads(attention, "k", x_BTC), _heads(attention, "v", x_BTC)
        q_BHND = _heads(attention, "q", x_BTC[:, rows_N])
        cos_BTD, sin_BTD = rotary
        no_keys, no_queries = torch.zeros_like(q_BHND[:, :1]), torch.zeros_like(k_BGTD[:, :1])
        q_BHND, _ = rotate(q_BHND, no_keys, cos_BTD[:, rows_N], sin_BTD[:, rows_N])
        _, k_BGTD = rotate(no_queries, k_BGTD, cos_BTD, sin_BTD)
        # Which keys each row sees, on the window and in full: `visible_NT[bit]`. Rows are few and
        # anywhere, so no kernel's idea of causal or of a window fits; a mask says it.
        distance_NT = rows_N[:, None] - torch.arange(x_BTC.shape[1], device=rows_N.device)
        full_NT = distance_NT >= 0
        visible_NT = full_NT & (distance_NT < self.window_tokens), full_NT
        q_BGRND = q_BHND.unflatten(1, (self.num_groups, -1))
        parts_BNRD: dict[int, Tensor] = {}  # by group
        has_sink = getattr(attention, "window_sink", NO_SINK).kind != "none"
        for bit in (1, 0):
            groups = [group for group, value in enumerate(row) if value == bit]
            if not groups:
                continue
            call = AttentionCall(
                _pick(q_BGRND, groups).flatten(1, 2),
                _pick(k_BGTD, groups),
                _pick(v_BGTD, groups),
                scaling=attention.scaling,
                mask_BNTS=visible_NT[bit][None, None],
            )
            # A text within the window sees no sink, as in the model itself.
            if not bit and has_sink and x_BTC.shape[1] > self.window_tokens:
                beyond_BN = (rows_N - self.window_tokens)[None]
                sink = keys_beyond(attention, beyond_BN, k_BGTD, v_BGTD)
                call = replace(call, sink=sink.of_groups(groups))
            out_BNGRD = attend(call, self.backend).transpose(1, 2).unflatten(2, (len(groups), -1))
            parts_BNRD |= zip(groups, out_BNGRD.unbind(2), strict=True)
        return torch.cat([parts_BNRD[group] for group in range(self.num_groups)], dim=2).flatten(2)

    def log_probabilities(self, hidden_BNC: Tensor) -> Tensor:
        """(N, V) in float32, from the final norm and the head. In bfloat16 the two best tokens of a
        row often tie."""
        weight, bias = self._head
        hidden_NC = self.core.norm(hidden_BNC)[0].to(weight.dtype)
        logits_NV = F.linear(hidden_NC, weight, bias)
        if (factor := logit_factor(self.model.config)) != 1:
            logits_NV *= factor
        return logits_NV.log_softmax(-1)

    @cached_property
    def _head(self) -> tuple[Tensor, Tensor | None]:
        head: Any = self.model.get_output_embeddings()
        exact = torch.promote_types(head.weight.dtype, torch.float32)
        bias = getattr(head, "bias", None)
        return head.weight.to(exact), None if bias is None else bias.to(exact)

    @torch.inference_mode()
    def check(self, ids_T: Tensor, run: Callable[[Z], Tensor]) -> None:
        """Refuse a model whose forward pass differs from its layers in sequence: because another
        version of transformers builds it differently, or because it computes more around them.
        run: the hidden states above the top layer, as a search computes them for these tokens."""
        # So small a window that a mask matters in so short a text; and a mask with both kinds of
        # group in every layer.
        of_search, self.window_tokens = self.window_tokens, min(self.window_tokens, 16)
        layers, groups = range(len(self.steps)), range(self.num_groups)
        z = tuple(tuple((layer + group) % 2 for group in groups) for layer in layers)
        layered_BTC = self.core.norm(run(z))
        expected_BTC = self.core(
            ids_T[None], use_cache=False, bosch_mask=z, bosch_window=self.window_tokens
        ).last_hidden_state
        self.window_tokens = of_search
        # Of sums in another order the format's own rounding remains, some of it added up.
        tolerance = min(64 * torch.finfo(layered_BTC.dtype).eps, MOST_ROUNDING)
        if not expected_BTC.isfinite().all():
            raise UserError(OVERFLOW)
        difference = float((layered_BTC - expected_BTC).norm() / expected_BTC.norm())
        if not difference <= tolerance:  # nor nan
            problem = f"{type(self.model).__name__} computes more than its layers in sequence"
            raise UserError(f"{problem}: they differ by {difference:.1%}. It cannot be searched.")

    def share(self, layer: int, num_tokens: int, row: Sequence[int], rows: list[int]) -> float:
        """The share of the layer's multiplications that the computed rows take."""
        weights, heads = self._weights[layer], self.model.config.num_attention_heads
        # Multiplications of a group's heads per query and key.
        per_pair = 2 * (heads // self.num_groups) * self.blocks[0].self_attn.head_dim
        part = num_tokens * weights["kv"] + len(rows) * (weights["q"] + weights["rest"])
        whole = num_tokens * sum(weights.values())
        for bit in row:
            reach = num_tokens if bit else min(num_tokens, self.window_tokens)
            part += sum(min(at + 1, reach) for at in rows) * per_pair
            # Pairs of all rows: a triangle while the window fills, then as many as it holds.
            #     1  2  3 .. reach  reach  reach ..
            every_row = reach * (reach + 1) // 2 + (num_tokens - reach) * reach
            whole += every_row * per_pair
        return part / whole

    @cached_property
    def _weights(self) -> list[dict[str, float]]:
        """For each layer, the multiplications per row in its weight matrices."""
        config = self.model.config
        experts = getattr(config, "num_experts", getattr(config, "num_local_experts", None))
        used = config.num_experts_per_tok / experts if experts else 1.0
        table = []
        for block in self.blocks:
            matrices = [p for p in block.mlp.parameters() if p.dim() > 1]
            mlp = sum(p.numel() * (used if p.dim() == 3 else 1.0) for p in matrices)
            attention = block.self_attn
            q, k, v, out = (getattr(attention, f"{name}_proj").weight.numel() for name in "qkvo")
            table.append({"q": q, "kv": k + v, "rest": out + mlp})
        return table


class _Recorder(nn.Module):
    """In the place of a block: keeps what the model gives it, and computes nothing."""

    def forward(self, hidden_BTC: Tensor, **arguments: Any) -> Tensor:
        self.hidden_BTC = hidden_BTC
        self.arguments = {k: v for k, v in arguments.items() if k not in NOT_NEEDED}
        return hidden_BTC


def _heads(attention: Any, name: str, x_BTC: Tensor) -> Tensor:
    """(1, heads, T, D): one projection, with its norm where the family has one: over each head, or
    over all of them."""
    states: Tensor = getattr(attention, f"{name}_proj")(x_BTC)
    norm = getattr(attention, f"{name}_norm", None)
    if norm is not None and norm.weight.numel() == states.shape[-1]:
        states, norm = norm(states), None
    states = states.unflatten(-1, (-1, attention.head_dim))
    return (states if norm is None else norm(states)).transpose(1, 2)


def _pick(x_BG: Tensor, groups: list[int]) -> Tensor:
    """These groups; adjacent groups as a view."""
    if groups[-1] - groups[0] == len(groups) - 1:
        return x_BG[:, groups[0] : groups[-1] + 1]
    return torch.cat([x_BG[:, g : g + 1] for g in groups], dim=1)  # 4 times as fast as indexing
