"""Hybrid attention: the functions registered with transformers, the caches and the model classes of
our checkpoints.
"""
