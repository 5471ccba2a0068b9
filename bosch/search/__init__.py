"""The search of BOSCH: scoring masks, and searching for the best one."""

from bosch.search.ratios import allocate_ratios
from bosch.search.subproblems import Subproblem, plan_subproblems

__all__ = ["Subproblem", "allocate_ratios", "plan_subproblems"]
