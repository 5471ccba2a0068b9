"""Random groups on the window, drawn by the seed: the control for every method over groups.

Masks of one seed are nested: what a small ratio windows, a larger one windows too.
"""

import random
from dataclasses import dataclass

from bosch.methods._interface import Context, Selection

reads_calibration = False


@dataclass(frozen=True)
class Settings:
    """There is nothing to set."""


def select(context: Context) -> Selection:
    groups = [(i, g) for i in range(context.num_layers) for g in range(context.num_groups)]
    random.Random(f"random_groups/{context.seed}").shuffle(groups)
    return Selection(context.mask_of(groups[: context.budget]), drawn=True)
