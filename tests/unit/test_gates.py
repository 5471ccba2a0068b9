"""Gates, their constraint, and masks made of them, against closed forms and on problems whose
solution is known."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bosch.gates import (
    BETA,
    GAMMA,
    ZETA,
    ConstrainedGates,
    ScalarGates,
    branches_of,
    lowest,
    mean_of_gates,
    sample_gates,
    share_open,
)
from bosch.masks.mask import num_windowed

GRANULARITIES = ("head-all-layers", "head-per-layer", "layer")


def evenly_spaced_noise(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


# --- the hard-concrete distribution ---


@pytest.mark.parametrize("alpha", [-6.0, -1.5986, 0.0, 1.0, 5.0])
def test_the_share_of_open_gates_agrees_with_many_samples(alpha: float) -> None:
    """P(z > 0) = sigmoid(alpha + 1.5986), and P(z < 1) is its mirror image."""
    z = sample_gates(torch.tensor(alpha).double(), evenly_spaced_noise(100_000))
    expected = 1 / (1 + math.exp(-alpha - 1.5986))
    assert float((z > 0).double().mean()) == pytest.approx(expected, abs=1e-4)
    assert float(share_open(torch.tensor(alpha))) == pytest.approx(expected, abs=1e-4)
    mirrored = 1 / (1 + math.exp(alpha - 1.5986))
    assert float((z < 1).double().mean()) == pytest.approx(mirrored, abs=1e-4)


def test_the_mean_agrees_with_the_density() -> None:
    """E[z] = integral of P(z > t) over t from 0 to 1, where P(z > t) = sigmoid(alpha - BETA *
    logit((t - GAMMA) / (ZETA - GAMMA)))."""
    t = evenly_spaced_noise(20_000)
    inner = (t - GAMMA) / (ZETA - GAMMA)
    for alpha in (-3.0, 0.0, 2.5):
        expected = torch.sigmoid(alpha - BETA * torch.logit(inner)).mean()
        got = mean_of_gates(torch.tensor(alpha, dtype=torch.float64), num_points=4_096)
        assert float(got) == pytest.approx(float(expected), abs=1e-4)


# --- the constraint ---


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_penalty_is_the_lagrangian_written_out(granularity: str) -> None:
    gates = ConstrainedGates(3, 4, granularity, ratio=0.5, seed=0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for parameter in gates.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    open_rows = [[1 / (1 + math.exp(-a - 1.598597)) for a in row] for row in gates.table()]
    if granularity == "head-per-layer":
        shares = [1 - sum(row) / 4 for row in open_rows]
    else:
        every = [value for row in open_rows for value in row]
        shares = [1 - sum(every) / len(every)]
    linear, quadratic = gates.linear_C.tolist(), gates.quadratic_C.tolist()
    terms = [
        one * (share - 0.5) + two * (share - 0.5) ** 2
        for one, two, share in zip(linear, quadratic, shares, strict=True)
    ]
    assert gates.penalty().item() == pytest.approx(sum(terms), abs=1e-5)


def test_the_groups_of_a_layer_share_its_gate_and_a_cap_holds_the_multiplier() -> None:
    gates = ConstrainedGates(5, 4, "layer", 0.5, 0, quadratic_cap=1.5)
    z_LG = gates.sample(3)
    assert z_LG.shape == (5, 4)
    assert bool((z_LG == z_LG[:, :1]).all())
    gates.quadratic_C.data.fill_(2.0)
    gates.after_step()
    assert gates.quadratic_C.item() == 1.5
    z = torch.tensor([[0.0, 0.4], [1.0, 1e-7]])
    assert branches_of(z) == [[0, None], [1, None]]  # None: both, where there is a gradient


def test_scalar_gates_go_down_by_l1_and_stay_in_range() -> None:
    gates = ScalarGates(2, 3, 3, weight=0.6)
    optimizer = torch.optim.SGD(gates.parameter_groups(1.0))
    gates.penalty().backward()
    optimizer.step()
    gates.after_step()
    torch.testing.assert_close(gates.gate_U.detach(), torch.full((2, 3), 0.9))  # 0.6 / 6 less
    gates.gate_U.data[0, 0], gates.gate_U.data[1, 2] = -1.0, 2.0
    gates.after_step()
    assert gates.gate_U.tolist()[0][0] == 0
    assert gates.gate_U.tolist()[1][2] == 1


# --- from gates to masks ---


@pytest.mark.parametrize("ratio", [0.0, 0.33, 0.75, 1.0])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_ratio_is_met_exactly(granularity: Any, ratio: float) -> None:
    num_layers, num_columns = 7, 1 if granularity == "layer" else 4
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(num_layers, num_columns, generator=generator).tolist()
    units, _ = lowest(table, granularity, ratio, seed=0)
    assert len(set(units)) == len(units) == num_windowed(ratio, num_layers, num_columns)
    if granularity == "head-per-layer":
        counts = [sum(unit[0] == layer for unit in units) for layer in range(num_layers)]
        assert max(counts) - min(counts) <= 1
    else:
        closed = sorted(table[layer][column] for layer, column in units)
        assert closed == sorted(value for row in table for value in row)[: len(units)]


def test_the_remainder_comes_from_the_layers_with_the_lowest_next_gate() -> None:
    """Worked by hand: 4 of 6 groups in 3 layers are one each and one more. The second values are 5,
    3 and 4, so layer 1 gives it."""
    table = [[0.0, 5.0], [3.0, 1.0], [4.0, 2.0]]
    units, _ = lowest(table, "head-per-layer", 4 / 6, seed=0)
    assert sorted(units) == [(0, 0), (1, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_seed_breaks_ties(granularity: Any) -> None:
    table = [[1.0] * (1 if granularity == "layer" else 4)] * 6
    choices = [lowest(table, granularity, 0.6, seed) for seed in (0, 0, 1, 2, 3)]
    assert choices[0] == choices[1]
    assert all(drawn for _, drawn in choices)
    assert len({frozenset(units) for units, _ in choices}) > 1
    apart = torch.arange(24.0).view(6, 4)[:, : len(table[0])].tolist()
    assert not lowest(apart, granularity, 0.6, 0)[1]
