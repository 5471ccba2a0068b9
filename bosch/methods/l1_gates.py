"""Scalar gates learned with an L1 term, the lowest get the window: the control in ConSA's paper.

    out = z * full attention + (1 - z) * attention in the window,    loss + l1_weight * mean of z

Like ConSA, but a gate is a plain number between 0 and 1, nothing ties the gates to the ratio, and
they are only ranked (its ablation "w/o L0-Lagrangian", after LoZA; the weight of the term is
DuoAttention's). The paper found such gates almost equal in all layers."""

from dataclasses import dataclass

from bosch.config import above_0, at_least
from bosch.gates import ScalarGates
from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods._gates import GateSettings, learn

traits = MethodTraits(reads_calibration=False, learns_from_tokens=True)


@dataclass(frozen=True)
class Settings(GateSettings):
    gate_learning_rate: float = 0.02  # peak; DuoAttention's, since the paper gives none
    l1_weight: float = 0.05  # weight of the mean gate, added to the loss

    def __post_init__(self) -> None:
        super().__post_init__()
        above_0(self, "", "gate_learning_rate")
        at_least(0, self, "", "l1_weight")


def select(inputs: Inputs) -> Selection:
    settings = inputs.settings
    columns = 1 if settings.unit == "layer" else inputs.num_groups
    gates = ScalarGates(inputs.num_layers, columns, inputs.num_groups, settings.l1_weight)
    groups = gates.parameter_groups(settings.gate_learning_rate)
    return learn(inputs, gates, groups)
