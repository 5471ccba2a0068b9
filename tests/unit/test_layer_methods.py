"""Methods that choose whole layers by rule, against masks worked out by hand."""

from types import ModuleType

import pytest

from bosch.methods import begin_middle_end, interleave
from tests.convex_toy import inputs_without_model


@pytest.mark.parametrize(
    ("method", "ratio", "expected"),
    [
        (interleave, 0.75, "wwwFwwwF"),
        (interleave, 0.5, "wFwFwFwF"),
        (interleave, 0.25, "wFFFwFFF"),
        (interleave, 0.875, "wwwwwwwF"),
        (interleave, 0.75, "wwwwwwF"),  # ceil(5.25) = 6 windowed
        (interleave, 0.5, "wwFwFwF"),  # 4: full where 3 (i + 1) / 7 passes 1, 2, 3: i = 2, 4, 6
        (begin_middle_end, 0.75, "FwwwwwwF"),  # 2 full: begin and end
        (begin_middle_end, 0.5, "FFwwFwwF"),  # 4 full: 2, 1, 1; one centered in the 5 between
        (begin_middle_end, 0.25, "FFwFFwFF"),
        (begin_middle_end, 0.875, "Fwwwwwww"),
        (begin_middle_end, 0.5, "FFwwwFFwwwFF"),
        (begin_middle_end, 0, "FFF"),
        (begin_middle_end, 1, "www"),
    ],
)
def test_layers_follow_the_rule(method: ModuleType, ratio: float, expected: str) -> None:
    """F: a layer with full attention, w: with the window."""
    mask = method.select(inputs_without_model(method, (len(expected), 4), ratio, seed=0)).mask
    assert mask.unit == "layer"
    assert "".join("F" if row[0] else "w" for row in mask.z) == expected
