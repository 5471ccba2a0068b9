"""A stock model as its layers one by one, so that a search can start in the middle, recombine the
attention outputs of groups, and compute the rows of the answers alone in the top layer.

The modules are the model's own and their numbers the same to the bit, as long as all rows are
computed. `Layers.check` compares with the model itself before a search begins.

Work is counted in layer-forwards: 1 is one layer over one whole text under the mask at hand. A part
of a layer counts by its share of that layer's multiplications (projections, attention over the keys
that are visible, MLP with the experts that run).
"""
# B batch (1), T tokens, N rows computed, C hidden size, H query heads, G kv heads, R heads a group,
# D head size, E heads side by side

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from bosch.backends._interface import AttentionCall, check_window
from bosch.hybrid.attention import NAME
from bosch.hybrid.dispatch import attend
from bosch.hybrid.models import family_of

OVERFLOW = (
    "The model's probabilities are not numbers: its hidden states overflow in its number format, "
    "so load it in another one."
)
Rotary = tuple[Tensor, Tensor]  # cosines and sines of a text's positions, (1, T, D) each


class Layers:
    """A dense model in search mode, in pieces."""

    def __init__(self, model: PreTrainedModel, window_tokens: int) -> None:
        family_of(model.config)  # refuses what is no family of ours
        if getattr(model.config, "bosch", None) is not None:
            raise ValueError(
                "This model is a hybrid already; search the mask of the dense model it came from."
            )
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"The model was loaded with attn_implementation="
                f"{model.config._attn_implementation!r}; load it with {NAME!r} to search a mask."
            )
        self.window_tokens = check_window(window_tokens)
        self.model = model
        self.core: Any = model.base_model
        self.layers = cast("Sequence[Any]", self.core.layers)
        self.num_groups: int = model.config.num_key_value_heads
        self.work = 0.0  # layer-forwards so far

    def embed(self, ids_T: Tensor) -> tuple[Tensor, Rotary]:
        """The hidden states that enter layer 0, and the rotary positions of the text."""
        hidden_BTC = self.core.embed_tokens(ids_T[None])
        positions_BT = torch.arange(len(ids_T), device=ids_T.device)[None]
        return hidden_BTC, self.core.rotary_emb(hidden_BTC, positions_BT)

    def open_layer(
        self, layer: int, hidden_BTC: Tensor, rotary: Rotary, rows_N: Tensor | None = None
    ) -> "GroupOutputs":
        """The attention of a layer, of which nothing but queries, keys and values is computed yet.

        rows_N: the rows whose outputs are wanted; None: all.
        """
        return GroupOutputs(self, layer, hidden_BTC, rotary, rows_N)

    def close_layer(self, layer: int, hidden_BNC: Tensor, mixed_BNE: Tensor) -> Tensor:
        """The hidden states that leave a layer, from those that entered it and its attention
        output, row by row.
        """
        module = self.layers[layer]
        hidden_BNC = hidden_BNC + module.self_attn.o_proj(mixed_BNE)
        out_BNC = module.mlp(module.post_attention_layernorm(hidden_BNC))
        if isinstance(out_BNC, tuple):  # experts that return their router's logits too
            out_BNC = out_BNC[0]
        return hidden_BNC + out_BNC

    def log_probabilities(self, hidden_BNC: Tensor) -> Tensor:
        """(N, V) in float32: the last norm and the head, on these rows only. In bfloat16 the best
        two tokens of a row often tie.
        """
        hidden_NC = self.core.norm(hidden_BNC)[0].to(self._head_weight.dtype)
        return F.linear(hidden_NC, self._head_weight, self._head_bias).log_softmax(-1)

    @cached_property
    def _head_weight(self) -> Tensor:
        weight: Tensor = self._head.weight
        return weight.to(torch.promote_types(weight.dtype, torch.float32))

    @cached_property
    def _head_bias(self) -> Tensor | None:
        bias = getattr(self._head, "bias", None)
        return None if bias is None else bias.to(self._head_weight.dtype)

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    @torch.inference_mode()
    def check(self, ids_T: Tensor) -> None:
        """Refuse a model whose own forward pass is another than its layers one by one: one that a
        later transformers builds otherwise, or that computes something around its layers.
        """
        window, self.window_tokens = self.window_tokens, min(self.window_tokens, 16)
        z = tuple(
            tuple((layer + group) % 2 for group in range(self.num_groups))
            for layer in range(len(self.layers))
        )
        hidden_BTC, rotary = self.embed(ids_T)
        for layer, row in enumerate(z):
            mixed_BTE = self.open_layer(layer, hidden_BTC, rotary).mixed(row)
            hidden_BTC = self.close_layer(layer, hidden_BTC, mixed_BTE)
        own_BTC = self.core.norm(hidden_BTC)
        told_BTC = self.core(
            ids_T[None], use_cache=False, bosch_mask=z, bosch_window=self.window_tokens
        ).last_hidden_state
        self.window_tokens, self.work = window, 0.0
        tolerance = 64 * torch.finfo(own_BTC.dtype).eps * float(told_BTC.abs().max())
        if not told_BTC.isfinite().all():
            raise ValueError(OVERFLOW)
        difference = float((own_BTC - told_BTC).abs().max())
        if not difference <= tolerance:
            raise ValueError(
                f"{type(self.model).__name__} is not its layers one after another: hidden states "
                f"differ by {difference:.2g}. The search cannot run on it with this version of "
                "transformers."
            )

    # ------------------------------------------------------------------------------------- work

    def count(self, layer: int, num_tokens: int, row: Sequence[int], part: float) -> None:
        """Add the share of a layer that `part` multiplications are."""
        weights = self.weights(layer)
        whole = num_tokens * sum(weights.values())
        whole += sum(self.pairs(num_tokens, bit) for bit in row) * self.per_pair
        self.work += part / whole

    def weights(self, layer: int) -> dict[str, float]:
        """Multiplications of one row in the parts of a layer that are matrices."""
        return self._weights[layer]

    @cached_property
    def _weights(self) -> list[dict[str, float]]:
        config = self.model.config
        experts = getattr(config, "num_experts", None)
        used = config.num_experts_per_tok / experts if experts else 1.0
        table = []
        for module in self.layers:
            attention, mlp = module.self_attn, module.mlp
            matrices = [p for p in mlp.parameters() if p.dim() > 1]
            table.append(
                {
                    "q": attention.q_proj.weight.numel(),
                    "kv": attention.k_proj.weight.numel() + attention.v_proj.weight.numel(),
                    "rest": attention.o_proj.weight.numel()
                    + sum(p.numel() * (used if p.dim() == 3 else 1.0) for p in matrices),
                }
            )
        return table

    @cached_property
    def per_pair(self) -> int:
        """Multiplications of a group's heads for one query and one key."""
        config = self.model.config
        heads: int = config.num_attention_heads // self.num_groups
        return 2 * heads * int(self.layers[0].self_attn.head_dim)

    def pairs(self, num_tokens: int, bit: int, rows: Sequence[int] | None = None) -> int:
        """Pairs of a query and a key that it sees, over a text or some of its rows."""
        reach = num_tokens if bit else self.window_tokens
        if rows is not None:
            return sum(min(row + 1, reach) for row in rows)
        full = min(num_tokens, reach)
        return full * (full + 1) // 2 + (num_tokens - full) * reach


class GroupOutputs:
    """Attention outputs of a layer for one text: each group's full and windowed one, computed when
    it is first wanted and kept for every mask after it. The output projection is linear, so that a
    mask's output is those of its groups side by side.
    """

    def __init__(
        self,
        layers: Layers,
        layer: int,
        hidden_BTC: Tensor,
        rotary: Rotary,
        rows_N: Tensor | None,
    ) -> None:
        self.layers, self.layer = layers, layer
        self.num_tokens, self.rows_N = hidden_BTC.shape[1], rows_N
        module = layers.layers[layer]
        attention = self.attention = module.self_attn
        normed_BTC = module.input_layernorm(hidden_BTC)
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        q_BNC, q_rotary = normed_BTC, rotary
        if rows_N is not None:
            q_BNC, q_rotary = normed_BTC[:, rows_N], (rotary[0][:, rows_N], rotary[1][:, rows_N])
        q_BHND = _heads(attention, "q", q_BNC)
        k_BGTD = _heads(attention, "k", normed_BTC)
        v_BGTD = _heads(attention, "v", normed_BTC)
        if rows_N is None:
            q_BHND, k_BGTD = rotate(q_BHND, k_BGTD, *rotary)
        else:
            q_BHND, _ = rotate(q_BHND, q_BHND, *q_rotary)
            k_BGTD, _ = rotate(k_BGTD, k_BGTD, *rotary)
        self.q_BHND: Tensor | None = q_BHND
        self.k_BGTD: Tensor | None = k_BGTD
        self.v_BGTD: Tensor | None = v_BGTD
        self.outputs: dict[tuple[int, int], Tensor] = {}  # (group, bit): (1, N, R, D)
        # What it may grow to: both outputs of every group, beside queries, keys and values.
        self.bytes = 3 * q_BHND.nbytes + k_BGTD.nbytes + v_BGTD.nbytes
        self._uncounted = self._projections()

    def mixed(self, row: Sequence[int]) -> Tensor:
        """(1, N, H * D): the attention output under this row of a mask."""
        self._count(row)
        for bit in (1, 0):
            missing = [g for g, b in enumerate(row) if b == bit and (g, bit) not in self.outputs]
            if missing:
                self._attend(missing, bit)
        parts = [self.outputs[group, bit] for group, bit in enumerate(row)]
        return torch.cat(parts, dim=2).flatten(2)

    def _attend(self, groups: list[int], bit: int) -> None:
        assert self.q_BHND is not None
        assert self.k_BGTD is not None
        assert self.v_BGTD is not None
        q_BHND = _pick(self.q_BHND.unflatten(1, (self.layers.num_groups, -1)), groups).flatten(1, 2)
        call = AttentionCall(
            q_BHND,
            _pick(self.k_BGTD, groups),
            _pick(self.v_BGTD, groups),
            scaling=self.attention.scaling,
            window_tokens=None if bit or self.rows_N is not None else self.layers.window_tokens,
            mask_BNTS=None if self.rows_N is None else self._visible(bit),
        )
        out_BNHD = attend(call).transpose(1, 2)
        out_BNGRD = out_BNHD.unflatten(2, (len(groups), -1))
        for place, group in enumerate(groups):
            self.outputs[group, bit] = out_BNGRD[:, :, place]
        if len(self.outputs) == 2 * self.layers.num_groups:
            self.q_BHND = self.k_BGTD = self.v_BGTD = None

    def _visible(self, bit: int) -> Tensor:
        """(1, 1, N, T): which keys the rows see."""
        assert self.rows_N is not None
        keys_T, rows_N1 = torch.arange(self.num_tokens, device=self.rows_N.device), self.rows_N
        distance_NT = rows_N1[:, None] - keys_T
        visible_NT = distance_NT >= 0
        if not bit:
            visible_NT &= distance_NT < self.layers.window_tokens
        return visible_NT[None, None]

    def _projections(self) -> float:
        weights, num_rows = self.layers.weights(self.layer), self._num_rows
        return self.num_tokens * weights["kv"] + num_rows * weights["q"]

    def _count(self, row: Sequence[int]) -> None:
        """The work of a call of `mixed`, with the rest of the layer that follows it."""
        layers = self.layers
        new = [bit for group, bit in enumerate(row) if (group, bit) not in self.outputs]
        rows = None if self.rows_N is None else self.rows_N.tolist()
        part = self._uncounted + self._num_rows * layers.weights(self.layer)["rest"]
        for bit in set(new):
            pairs = layers.pairs(self.num_tokens, bit, rows)
            part += new.count(bit) * pairs * layers.per_pair
        layers.count(self.layer, self.num_tokens, row, part)
        self._uncounted = 0.0

    @property
    def _num_rows(self) -> int:
        return self.num_tokens if self.rows_N is None else len(self.rows_N)


def _heads(attention: Any, name: str, x_BTC: Tensor) -> Tensor:
    """(1, heads, T, D): one projection, with the norm over each head where the family has one."""
    states: Tensor = getattr(attention, f"{name}_proj")(x_BTC)
    states = states.unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return (states if norm is None else norm(states)).transpose(1, 2)


def _pick(x_BG: Tensor, groups: list[int]) -> Tensor:
    """These groups; neighbors as a view."""
    if groups[-1] - groups[0] == len(groups) - 1:
        return x_BG[:, groups[0] : groups[-1] + 1]
    return torch.cat([x_BG[:, g : g + 1] for g in groups], dim=1)  # 4 times as fast as indexing
