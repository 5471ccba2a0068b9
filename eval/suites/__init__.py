"""The suites that evaluate a model, a file for each; `_interface.py` says what it offers."""

NEEDS = ("Settings", "list_tasks", "sources", "build_examples", "score")
