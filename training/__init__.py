"""Continual pretraining of a hybrid model: the loop and its parts."""
