"""Razor attention: how much a head attends to earlier copies of a repeated random text.

Equations 20 to 22 of the paper, on a block of K random tokens that is repeated four times:

    echo      = mean over m of a(m, m - K)         on the same token, a block before
    induction = mean over m of a(m, m + 1 - K)     on the token that followed it there
    s         = max(z(echo), z(induction))         z: in standard deviations from the mean head

A small score is local. Of the haystacks only the length is used, and their tokens if the model has
no tokenizer: the score depends on what is drawn, not on what is asked. So several such texts are
read, all as long, of other tokens and in blocks of K/2 to 2 K. By blocks of K alone a head that
always looks K back passes for one that finds copies, and heads that find near copies come before
others that find far ones, which windows lose; on SmolLM2 that cost 20 points
(docs/real-masks.md)."""
# L layers, H query heads, G kv heads, T tokens, C rows of a chunk, S keys, D head size

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bosch.config import MaskConfig
from bosch.method import Inputs, MethodTraits, Scores
from bosch.methods._statistics import attention_rows, per_layer
from bosch.random_texts import REPEATS, block_lengths, draw_texts, ordinary_tokens, tokens_of
from bosch.run.errors import UserError
from bosch.run.progress import say

traits = MethodTraits()


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open, or where its text and its equation disagree."""

    # K as a share of an example's length: a quarter, as in the paper.
    razor_recent_share: float = MaskConfig.razor_recent_share
    # Random texts whose attention counts, each with blocks of another length. In the paper one.
    razor_texts: int = MaskConfig.razor_texts
    # The key that induction looks at. text: the one after the earlier occurrence, m + 1 - K, as the
    # paper's text and RazorAttention define it, and as induction heads work. equation: the one
    # before, m - 1 - K, as equation 20 prints it.
    induction: Literal["text", "equation"] = "text"
    # The heads over which z-scores are computed. model: all, because groups of all layers are
    # ranked against each other. layer: those of the same layer.
    population: Literal["model", "layer"] = "model"

    def __post_init__(self) -> None:
        if not 0 < self.razor_recent_share <= 1 / REPEATS:
            problem = f"razor_recent_share is {self.razor_recent_share}"
            raise UserError(f"{problem}, it must be above 0 and at most {1 / REPEATS}.")
        if self.razor_texts < 1:
            raise UserError(f"razor_texts is {self.razor_texts}, it must be at least 1.")


def score_groups(inputs: Inputs) -> Scores:
    settings: Settings = inputs.settings
    usual = int(settings.razor_recent_share * inputs.calibration.longest)
    if usual < 2:
        raise UserError(
            f"razor: a block of {usual} tokens is too short; the longest haystack has "
            f"{inputs.calibration.longest} tokens. Build a set with longer contexts."
        )
    blocks = block_lengths(usual, settings.razor_texts)
    if max(blocks) <= inputs.window_tokens:
        say(
            f"razor: copies at most {max(blocks):,} tokens back are in a window of "
            f"{inputs.window_tokens:,}, so the scores do not tell what it loses. Build a set with "
            "longer contexts."
        )
    texts = draw_texts(tokens_to_draw(inputs), blocks, REPEATS * usual, inputs.seed)
    means = [
        attention_to_earlier(inputs, ids_T, block_tokens)
        for ids_T, block_tokens in zip(texts, blocks, strict=True)
    ]
    mean_LH2 = torch.stack(means).mean(0)  # each text counts as much as another
    over = (0, 1) if settings.population == "model" else (1,)
    scores_LH = []
    for mean_LH in mean_LH2.unbind(-1):
        # In standard deviations of the population from its mean; 0 if all are equal.
        deviation_LH = mean_LH - mean_LH.mean(over, keepdim=True)
        spread = deviation_LH.square().mean(over, keepdim=True).sqrt()
        scores_LH.append(torch.where(spread > 0, deviation_LH / spread, 0.0))
    score_LH = torch.stack(scores_LH).amax(0)
    return replace(Scores.of_heads(score_LH, inputs.num_groups, "global"), drawn=True)


def attention_to_earlier(inputs: Inputs, ids_T: Tensor, block_tokens: int) -> Tensor:
    """(L, H, 2): the mean attention, on a text of blocks, for echo and for induction."""
    # Distance from key to query for echo and induction.
    lags = block_tokens, block_tokens + (-1 if inputs.settings.induction == "text" else 1)

    def mass_at_lags(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
        sums_H2 = torch.zeros(q_HTD.shape[0], 2, dtype=torch.float64, device=q_HTD.device)
        for rows in attention_rows(q_HTD, k_GTD, scaling, inputs.chunk_elements):
            for column, lag in enumerate(lags):
                queries_N = rows.queries_C1[:, 0]
                # None in the first block, where no token has occurred before.
                queries_N = queries_N[queries_N >= max(lag, block_tokens)]
                weights_HN = rows.weights_HCS[:, queries_N - rows.start, queries_N - lag]
                sums_H2[:, column] += weights_HN.sum(-1, dtype=torch.float64)
        return sums_H2

    sums_LH2 = per_layer(inputs, ids_T, mass_at_lags)
    counts_2 = torch.tensor([len(ids_T) - max(lag, block_tokens) for lag in lags])
    return sums_LH2 / counts_2


def tokens_to_draw(inputs: Inputs) -> Tensor:
    """Those of the tokenizer, or of the haystacks if there is none."""
    tokenizer = inputs.load_tokenizer()
    if tokenizer is None:
        known = set(torch.cat([each.ids_T for each in inputs.calibration.haystacks]).tolist())
    else:
        known = tokens_of(tokenizer)
    return ordinary_tokens(known, inputs.model.config)
