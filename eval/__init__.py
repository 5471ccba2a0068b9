"""Judging a model: task suites, generation, and the comparison of runs."""
