"""Evaluation suites: each file is the suite of its name. `_interface.py` shows how to write one."""

NEEDS = ("Settings", "list_tasks", "sources", "build_examples", "score", "summarize")
