"""Scores of one prediction against one answer, 0 to 1, one idea a file.

Each equals its upstream's to the last bit of the float.
"""
