"""BOSCH with what its review found better: layers judged by whole-layer probes, groups by swaps
from a static ranking, a last search across layers, and a smoother objective.

It may spend as many evaluations as `bosch`: the probes and rankings are fewer than stage 1 takes
there, and the last search gets the rest, or kappa if that is more.
"""

from dataclasses import dataclass
from typing import Literal

from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods._guided import GuidedSettings, check_guides, guides_of
from bosch.methods.bosch import run_stages
from bosch.search.settings import StageSettings

traits = MethodTraits(searches=True)
check = check_guides


@dataclass(frozen=True)
class Settings(GuidedSettings, StageSettings):
    """Those of a search with a start, and what differs from the paper's stages."""

    importance: Literal["stage1", "whole_layer"] = "whole_layer"  # how layers are judged
    # Evaluations a layer of the last search, across layers; None: what stage 1 of the paper leaves.
    polish: int | None = None


def select(inputs: Inputs) -> Selection:
    return run_stages(inputs, len(inputs.settings.rankings), guides_of(inputs))
