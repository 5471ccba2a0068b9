"""Random groups on the window, drawn by the seed: the control for every method over groups.

Masks of one seed are nested: what a small ratio windows, a larger one windows too.
"""

import random

from bosch.method import Context, NoSettings, Selection

reads_calibration = False
Settings = NoSettings


def select(context: Context) -> Selection:
    groups = [(i, g) for i in range(context.num_layers) for g in range(context.num_groups)]
    random.Random(f"random_groups/{context.seed}").shuffle(groups)
    return Selection(context.mask_of(groups[: context.budget]), drawn=True)
