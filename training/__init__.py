"""Continual pretraining of a hybrid model: the loop and what it is made of."""
