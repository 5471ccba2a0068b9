"""Random whole layers on the window (RAND), drawn by the seed; the paper averages three."""

import random
from dataclasses import dataclass

from bosch.masks.mask import Unit
from bosch.methods._interface import Context, Selection

unit: Unit = "layer"
reads_calibration = False


@dataclass(frozen=True)
class Settings:
    """There is nothing to set."""


def select(context: Context) -> Selection:
    drawn = random.Random(f"random_layers/{context.seed}").sample(
        range(context.num_layers), context.layer_budget
    )
    return Selection(context.mask_of_layers(set(drawn)), drawn=True)
