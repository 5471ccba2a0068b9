"""Hybrid attention: the functions registered with transformers, caches and model classes."""
