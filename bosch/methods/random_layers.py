"""Random whole layers on the window (RAND), drawn by the seed; the paper averages three draws."""

import random

from bosch.method import Inputs, MethodTraits, NoSettings, Selection

traits = MethodTraits(unit="layer", reads_calibration=False)
Settings = NoSettings


def select(inputs: Inputs) -> Selection:
    draw = random.Random(f"random_layers/{inputs.seed}")
    drawn = draw.sample(range(inputs.num_layers), inputs.num_windowed_layers)
    return Selection(inputs.mask_of_layers(set(drawn)), drawn=True)
