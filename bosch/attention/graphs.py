"""How many graphs torch.compile may make of one piece of code."""

from typing import Any

import torch


def allow_graphs(number: int) -> None:
    """Raise Dynamo's limit for one piece of code: after 8 graphs it would run it uncompiled."""
    limits: Any = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(limits, name, max(getattr(limits, name), number))
