"""A sink's share of attention, from the outputs of an attention that takes a number a head. Needs
no vLLM.

The number c counts as a score with value zero, and so only makes the output smaller: by the factor
x = 1 / (1 + exp(c - lse)). With the output without c, x is the ratio of the two, and the sink's
odds, exp(score - lse), are (1 - x) / x * exp(score - c). c is a head's alone, and score and lse are
a token's, so c is taken from the batch: MARGIN above the highest score.

What rounding does: outputs whose entries are off by u (2^-8 in bf16) give an x that is off by 2u,
relatively, and so a share that is off by

    2u (r + o) / (1 + o)^2    with o = exp(score - lse) and r = exp(score - c)

Up to 2u where c is the highest score itself, and that where the sink hardly counts (o near 0, x
near 1, where 1 - x cancels); with r below exp(-3), at most .53 u anywhere: LARGEST_ERROR, half of
what the rounding of the output itself may change. It needs the c that the kernel used, which is
rounded as well. And it holds where c joins the sum at the end, as in FlashAttention 3; kernels that
start from c, as Triton's, round each probability twice: .0009 was the most seen, and is no bound.

c must not be too high either: exp(c - lse) has to fit in fp32, so c - lse may be up to 80. Scores
of a batch may then differ by 36 where their sinks' lse - score is anywhere from -40 to 40. In fp16
the output itself vanishes from c - lse = 10 on, which is why settings.py refuses it.
"""
# N tokens, G kv heads with a window, R query heads of a kv head, D head size

import math

import torch
from torch import Tensor

# Rounding c to bf16 takes at most 1 from it, up to scores of 512.
MARGIN = 4.0
LARGEST_ERROR = 2 * 2**-8 / (4 * (1 - math.exp(1 - MARGIN)))  # in bf16: .0021
NO_SCORE = -1e30  # of a number that makes nothing smaller
LEAST = 1.2e-38  # fp32 has smaller numbers, but GPUs' fast arithmetic takes them for 0


def choose_numbers(score_NGR: Tensor, has_left_N: Tensor) -> Tensor:
    """c of each head. Only tokens that see the sink count. CUDA graphs fill a batch up with tokens
    that nobody computed: one NaN among their scores would otherwise reach all tokens."""
    counts_NGR = has_left_N[:, None, None] & score_NGR.isfinite()
    return score_NGR.masked_fill(~counts_NGR, NO_SCORE).amax(0) + MARGIN


def sink_share(
    plain_NGRD: Tensor, damped_NGRD: Tensor, score_NGR: Tensor, numbers_GR: Tensor
) -> Tensor:
    """From the outputs without and with `numbers_GR`, which are those that the kernel used."""
    # The plain output divided first: products of two small numbers would vanish.
    weights_NGRD = plain_NGRD / plain_NGRD.square().sum(-1, keepdim=True).clamp_min(LEAST)
    x_NGR = (damped_NGRD * weights_NGRD).sum(-1).nan_to_num(0).clamp(LEAST, 1)
    # Logarithms cannot overflow where a score is far below c. x = 1 gives -inf, and a share of 0.
    return torch.sigmoid(torch.log1p(-x_NGR) - x_NGR.log() + score_NGR - numbers_GR)
