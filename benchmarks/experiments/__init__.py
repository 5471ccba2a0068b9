"""The experiments of `python -m benchmarks gpu`, one file each."""

NEEDS = ("MINUTES", "points", "conclude")
"""What an experiment must answer. An experiment is a file of this folder with:

    MINUTES                       the longest that it may take; then its process is ended
    points(device) -> Points      what it measures, in this order
    conclude(rows) -> [str]       sentences on what its rows decide, of those that are there

A device without a GPU rehearses: small shapes, and points of what only a GPU has are left out.
"""
