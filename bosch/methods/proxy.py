"""Proxy attention: the share of key blocks, in the order of a proxy head, that hold most of a
head's mass.

Equations 11 to 14 of the paper. Of row t, with n blocks of keys, the largest by the proxy head
first:

    m = the least number of blocks that hold gamma of the head's own mass,    s = mean over t of m/n

A small share is local. (Under equation 14 the paper calls a large share local, but then ranks in
ascending order, which fits "fewer blocks".) The share says how concentrated a head is, not how near
it looks: a head that copies from a single far block counts as local. Blocks are counted from the
start, and the last one ends at the row's own token."""
# H query heads, G kv heads, T tokens, C rows of a chunk, S keys, K blocks, D head size

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bosch.config import above_0, at_least
from bosch.method import Inputs, MethodTraits, Scores
from bosch.methods._statistics import attention_rows, mean_over_rows

traits = MethodTraits(measures=True)

PROXY_HEAD = 0  # of each layer: the paper has one, and without a criterion any is as good


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open."""

    # Tokens per block. None: an eighth of the window (128 at the paper's 1,024, the usual block of
    # sparse attention), so that the score keeps its resolution at small windows.
    block_tokens: int | None = None
    # The paper's gamma. At 0.95 a head's diffuse tail does not matter; at 1 every head would need
    # every block.
    mass_share: float = 0.95

    def __post_init__(self) -> None:
        at_least(1, self, "", "block_tokens")
        above_0(self, "", "mass_share", most=1)


def score_groups(inputs: Inputs) -> Scores:
    settings: Settings = inputs.settings
    block_tokens = settings.block_tokens or max(1, inputs.window_tokens // 8)

    def needed_shares(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
        """The share of a row's blocks, in the proxy's order, that hold `mass_share` of the mass."""
        total_H = torch.zeros(q_HTD.shape[0], dtype=torch.float64, device=q_HTD.device)
        for rows in attention_rows(q_HTD, k_GTD, scaling, inputs.chunk_elements):
            weights_HCS = rows.weights_HCS
            weights_HCN = weights_HCS[..., : inputs.sink.num_visible]
            # What a sink holds counts, and needs no block.
            by_sink_HCN = weights_HCN * rows.past(inputs.window_tokens, weights_HCN.shape[2])
            held_HC1 = by_sink_HCN.sum(-1, keepdim=True, dtype=torch.float64)
            weights_HCN -= by_sink_HCN
            missing = -weights_HCS.shape[-1] % block_tokens  # keys, to a whole number of blocks
            blocks_HCKS = F.pad(weights_HCS, (0, missing)).unflatten(-1, (-1, block_tokens))
            mass_HCK = blocks_HCKS.sum(-1, dtype=torch.float64)
            proxy_CK = mass_HCK[PROXY_HEAD]
            num_blocks_C1 = rows.queries_C1 // block_tokens + 1
            blocks_K = torch.arange(proxy_CK.shape[-1], device=proxy_CK.device)
            proxy_CK = proxy_CK.masked_fill(blocks_K >= num_blocks_C1, -1)  # after the row: last
            order_CK = proxy_CK.argsort(dim=-1, descending=True, stable=True)
            # Each head's own mass, added up in the proxy's order.
            reached_HCK = mass_HCK.gather(-1, order_CK.expand_as(mass_HCK)).cumsum(-1)
            rest_HC1 = reached_HCK[..., -1:]
            wanted_HC1 = rest_HC1 - (1 - settings.mass_share) * (rest_HC1 + held_HC1)
            needed_HC = (reached_HCK < wanted_HC1).sum(-1) + (wanted_HC1[..., 0] > 0)
            total_H += (needed_HC / num_blocks_C1[:, 0].double()).sum(-1)
        return total_H

    share_LH = mean_over_rows(inputs, "proxy", "shares", needed_shares)
    return Scores.of_heads(share_LH, inputs.num_groups, "global")
