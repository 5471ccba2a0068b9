"""How many graphs torch.compile may make of one piece of code."""

from typing import Any

import torch


def allow_graphs(number: int) -> None:
    """After 8 of one code Dynamo would run the rest uncompiled."""
    limits: Any = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(limits, name, max(getattr(limits, name), number))
