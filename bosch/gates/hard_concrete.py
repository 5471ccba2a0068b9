"""Hard-concrete gates (Louizos, Welling and Kingma, 2018): random numbers in [0, 1] that are
exactly 0 or 1 with some probability, and differentiable in their parameter alpha.

    s = sigmoid((log u - log(1 - u) + alpha) / BETA),   u uniform in (0, 1)
    z = clamp(s * (ZETA - GAMMA) + GAMMA, 0, 1)

As everywhere, z = 1 means full attention and z = 0 the window.
"""
# N gates, in any shape

import math

import torch
from torch import Tensor

# ConSA's constants (its equation 7), constant through training.
BETA = 2 / 3
ZETA = 1.1
GAMMA = -0.1
START = 5.0  # alpha of every gate at first: open, P(z > 0) = 0.9986

# logit(1e-6) is -14: noise closer to 0 or 1 would only matter for gates with alpha beyond 14.
LEAST_NOISE = 1e-6

# P(z > 0) = sigmoid(alpha - SHIFT) and P(z < 1) = sigmoid(-alpha - SHIFT): mirror images.
SHIFT = BETA * math.log(-GAMMA / ZETA)


def sample(alpha_N: Tensor, noise_N: Tensor) -> Tensor:
    """z of each gate, for noise uniform in (0, 1). Where z is 0 or 1, its gradient is 0."""
    logits_N = torch.logit(noise_N, eps=LEAST_NOISE) + alpha_N
    stretched_N = torch.sigmoid(logits_N / BETA) * (ZETA - GAMMA) + GAMMA
    return stretched_N.clamp(0, 1)


def share_open(alpha_N: Tensor) -> Tensor:
    """P(z > 0), which ConSA uses as E[z] (its equation 9). The true mean of z is lower."""
    return torch.sigmoid(alpha_N - SHIFT)


def mean(alpha_N: Tensor, num_points: int = 512) -> Tensor:
    """The true E[z]: the average over the noise, by the midpoint rule."""
    noise_P = (torch.arange(num_points, device=alpha_N.device) + 0.5) / num_points
    return sample(alpha_N[..., None], noise_P.to(alpha_N.dtype)).mean(-1)


def draw_noise(seed: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """Noise as a function of seed and step: the same on every rank, in every micro-batch of a step,
    when activations are recomputed, and after a kill."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.rand(shape, generator=generator)
