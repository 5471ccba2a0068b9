"""BOSCH: the paper's stages with whole-layer probes, swaps, and a last search over all layers.

Layers are judged by probes of whole layers, groups by swaps that start from a static ranking, and
the objective is smoother. It may use as many evaluations as `bosch_paper`, the search as published:
probes and rankings take fewer than stage 1, and the last search gets the rest, or kappa per layer
if that is more.
"""

from dataclasses import dataclass
from typing import Literal

from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods._guided import GuidedSettings, check_guides, guides_of
from bosch.methods.bosch_paper import run_stages
from bosch.search.settings import StageSettings

traits = MethodTraits(searches=True)
check = check_guides


@dataclass(frozen=True)
class Settings(GuidedSettings, StageSettings):
    """Those of a guided search, and the changes to the paper's stages."""

    importance: Literal["stage1", "whole_layer"] = "whole_layer"  # how stage 1 judges layers
    # Evaluations per layer of the last search, across layers. None: those left of the paper's stage
    # 1.
    polish: int | None = None


def select(inputs: Inputs) -> Selection:
    return run_stages(inputs, len(inputs.settings.rankings), guides_of(inputs))
