"""Random groups on the window, drawn by the seed: the control for methods over groups.

Masks of one seed are nested: a larger ratio windows all the groups of a smaller one."""

import random

from bosch.method import Inputs, MethodTraits, NoSettings, Selection

traits = MethodTraits(reads_calibration=False)
Settings = NoSettings


def select(inputs: Inputs) -> Selection:
    groups = [(i, g) for i in range(inputs.num_layers) for g in range(inputs.num_groups)]
    random.Random(f"random_groups/{inputs.seed}").shuffle(groups)
    return Selection(inputs.mask_of(groups[: inputs.num_windowed]), drawn=True)
