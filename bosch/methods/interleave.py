"""Full attention in evenly spaced layers, the last of each period (INTR).

At a ratio of 0.75 layers 3, 7, 11 ... stay full, as in models trained with such a pattern. Where
the ratio does not divide the layers, periods differ by at most one layer."""

from bosch.method import Inputs, MethodTraits, NoSettings, Selection

traits = MethodTraits(unit="layer", reads_calibration=False)
Settings = NoSettings


def select(inputs: Inputs) -> Selection:
    full = full_layers(inputs.num_layers, inputs.num_layers - inputs.num_windowed_layers)
    return Selection(inputs.mask_of_layers(set(range(inputs.num_layers)) - full))


def full_layers(num_layers: int, num_full: int) -> set[int]:
    """Layer i is full if i * num_full / num_layers, the full layers due so far, passes a whole
    number at it."""
    left = num_layers - num_full
    return {layer for layer in range(num_layers) if layer * num_full % num_layers >= left}
