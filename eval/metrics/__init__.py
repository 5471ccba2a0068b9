"""Scores of one prediction, 0 to 1. Each equals its upstream's to the last bit of the float."""
