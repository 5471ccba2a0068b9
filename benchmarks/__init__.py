"""Benchmarks (`python -m benchmarks`) and their results."""
