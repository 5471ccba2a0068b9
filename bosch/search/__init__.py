"""The machinery of BOSCH: what a mask is worth, and how the best one is looked for."""

from bosch.search.ratios import allocate_ratios
from bosch.search.subproblems import Subproblem, plan_subproblems

__all__ = ["Subproblem", "allocate_ratios", "plan_subproblems"]
