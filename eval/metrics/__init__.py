"""Scores of one prediction, from 0 to 1, each bit-identical to the original implementation's."""
