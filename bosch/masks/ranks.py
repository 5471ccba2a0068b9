"""The order of scores, where many may be equal."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def ranks_of(values: ArrayLike) -> NDArray[np.floating[Any]]:
    """The rank of each value, from 0. Equal values share the mean of theirs: a ranking gives 0 to
    most groups, and by number the lower layers would come first."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.floating[Any]] = (np.cumsum(counts) - (counts + 1) / 2)[places]
    return ranks
