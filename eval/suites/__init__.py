"""The suites that judge a model, each a file of its name; `_interface.py` says what it offers."""

NEEDS = ("Settings", "list_tasks", "sources", "build_examples", "score", "summarize")
