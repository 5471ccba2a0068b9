"""Cases of which every run takes some, and `make slow` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], fast: slice) -> list[Any]:
    """pytest's parameters: those that `fast` picks, and the others marked slow."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    kept = range(len(listed))[fast]
    marks = [() if i in kept else (pytest.mark.slow,) for i in range(len(listed))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(listed, marks, strict=True)]
