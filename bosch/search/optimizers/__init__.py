"""Optimizers that find the best mask of a subproblem, one file each; see `_interface.py`."""
