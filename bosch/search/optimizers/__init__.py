"""One file a way of finding the best mask of a subproblem; see `_interface.py`."""
