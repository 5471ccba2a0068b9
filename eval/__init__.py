"""Evaluation of models: task suites, generation, and reports that compare runs."""
