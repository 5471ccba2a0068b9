"""Full attention in layers at the beginning, in the middle and at the end (BME).

The paper names the heuristic without a rule. Here the full layers are split into three contiguous
blocks as evenly as possible; the first left over goes to the beginning, the second to the end. The
middle block is centered between the other two."""

from bosch.method import Inputs, MethodTraits, NoSettings, Selection

traits = MethodTraits(unit="layer", reads_calibration=False)
Settings = NoSettings


def select(inputs: Inputs) -> Selection:
    full = full_layers(inputs.num_layers, inputs.num_layers - inputs.num_windowed_layers)
    return Selection(inputs.mask_of_layers(set(range(inputs.num_layers)) - full))


def full_layers(num_layers: int, num_full: int) -> set[int]:
    middle, remainder = divmod(num_full, 3)
    begin, end = middle + (remainder >= 1), middle + (remainder == 2)
    start = begin + (num_layers - begin - end - middle) // 2
    return {*range(begin), *range(start, start + middle), *range(num_layers - end, num_layers)}
