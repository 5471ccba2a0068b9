"""A static sink's share in vLLM, from the outputs of an attention that takes a number a head: plain
torch stands for the kernels of vLLM, none of which runs here."""
# N tokens, K keys, G kv heads (here 1), R query heads (here 1), D head size

import pytest
import torch
from bosch_vllm.sink_share import LARGEST_ERROR, MARGIN, NO_SCORE, choose_numbers, sink_share
from torch import Tensor

HALF, FULL = torch.bfloat16, torch.float32
NUM_TOKENS, NUM_KEYS, HEAD_SIZE = 3_000, 64, 128


def attend(score_NK: Tensor, v_KD: Tensor, number: Tensor, out: torch.dtype, first: bool) -> Tensor:
    """`first`: the number is where the highest score starts, as in vLLM's Triton kernel. Else it
    joins the sum at the end, as in FlashAttention 3, and the numerator is the same without it."""
    highest_N1 = score_NK.amax(-1, keepdim=True)
    if first:
        highest_N1 = torch.maximum(highest_N1, number)
    p_NK = torch.exp(score_NK - highest_N1)
    sum_N1 = p_NK.sum(-1, keepdim=True) + torch.exp(number - highest_N1)
    return ((p_NK.to(out).float() @ v_KD) / sum_N1).to(out).float()


def errors(
    seed: int, spread: float, out: torch.dtype, numbers: torch.dtype, first: bool
) -> tuple[Tensor, Tensor]:
    """Of the shares, and the odds, of tokens whose lse - score is anywhere from -40 to 40, with
    scores that differ by `spread`."""
    torch.manual_seed(seed)
    above_N = torch.rand(NUM_TOKENS) * 80 - 40
    score_N = torch.rand(NUM_TOKENS) * spread + 60 * torch.rand(()) - 30
    score_NK = 2 * torch.randn(NUM_TOKENS, NUM_KEYS)
    score_NK += (score_N + above_N)[:, None] - score_NK.logsumexp(-1, keepdim=True)
    v_KD = torch.randn(NUM_KEYS, HEAD_SIZE).to(out).float()
    score_NGR, has_left_N = score_N[:, None, None], torch.ones(NUM_TOKENS, dtype=torch.bool)
    chosen_GR = choose_numbers(score_NGR, has_left_N).to(numbers).float()
    no_number = torch.tensor(NO_SCORE).to(numbers).float()
    plain_ND = attend(score_NK, v_KD, no_number, out, first)
    damped_ND = attend(score_NK, v_KD, chosen_GR[0, 0], out, first)
    shapes = (x_ND[:, None, None] for x_ND in (plain_ND, damped_ND))
    share_N = sink_share(*shapes, score_NGR, chosen_GR)[:, 0, 0]
    return (share_N - torch.sigmoid(-above_N)).abs(), above_N


@pytest.mark.parametrize("spread", [0, 8, 36])
@pytest.mark.parametrize("seed", range(3))
def test_shares_are_within_half_of_what_rounding_the_output_changes(
    seed: int, spread: float
) -> None:
    error_N, above_N = errors(seed, spread, HALF, HALF, first=False)
    assert error_N.max() <= LARGEST_ERROR < 0.53 * 2**-8
    # Where the sink hardly counts its share is not lost in the rounding of the others.
    assert error_N[above_N > 8].max() <= 1.1 * 2 * 2**-8 * (torch.exp(1 - torch.tensor(MARGIN)))
    # The numerators with and without the number are rounded apart: no bound of the formula's.
    assert errors(seed, spread, HALF, HALF, first=True)[0].max() <= LARGEST_ERROR


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("numbers", [HALF, FULL])
@pytest.mark.parametrize("spread", [0, 36])
def test_in_fp32_a_rounded_number_costs_nothing(
    spread: float, numbers: torch.dtype, first: bool
) -> None:
    """Since the odds are computed with the number that the attention got, and not with ours."""
    assert errors(0, spread, FULL, numbers, first)[0].max() < 2e-6


def test_fp16_has_no_room_for_it() -> None:
    """Which settings.py refuses for."""
    assert errors(0, 36, torch.float16, HALF, first=False)[0].max() > 0.5


def test_tokens_that_see_no_sink_or_that_nobody_computed_choose_no_number() -> None:
    score_NGR = torch.tensor([3.0, 90, float("nan"), 5, float("inf")])[:, None, None]
    has_left_N = torch.tensor([True, False, True, True, True])
    assert choose_numbers(score_NGR, has_left_N).tolist() == [[5 + MARGIN]]
    nobody_GR = choose_numbers(score_NGR, torch.zeros(5, dtype=torch.bool)).bfloat16().float()
    plain_NGRD = torch.ones(5, 1, 1, 4)
    share_NGR = sink_share(plain_NGRD, plain_NGRD, score_NGR.nan_to_num(0, 0), nobody_GR)
    assert share_NGR.flatten().tolist() == [0] * 5


def test_a_number_too_high_for_the_kernel_gives_a_share_all_the_same() -> None:
    """c - lse of 100: the damped output is 0, or NaN where splits of the keys are put together."""
    plain_NGRD = torch.ones(2, 1, 1, 4)
    damped_NGRD = torch.tensor([0.0, float("nan")])[:, None, None, None].expand_as(plain_NGRD)
    share_NGR = sink_share(
        plain_NGRD, damped_NGRD, torch.full((2, 1, 1), 96.0), torch.full((1, 1), 100.0)
    )
    assert (share_NGR > 0.999).all()
