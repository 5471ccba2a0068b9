"""Random whole layers on the window (RAND), drawn by the seed; the paper averages three."""

import random

from bosch.masks.mask import Unit
from bosch.method import Context, NoSettings, Selection

unit: Unit = "layer"
reads_calibration = False
Settings = NoSettings


def select(context: Context) -> Selection:
    drawn = random.Random(f"random_layers/{context.seed}").sample(
        range(context.num_layers), context.layer_budget
    )
    return Selection(context.mask_of_layers(set(drawn)), drawn=True)
