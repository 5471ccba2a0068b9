"""One file for each way to compute attention; `_interface.py` says what it must define."""

NEEDS = ("unavailable", "supports", "priority", "attend")
