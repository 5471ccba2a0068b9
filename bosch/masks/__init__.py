"""Masks: which groups keep full attention. Their file, other formats, pictures, comparisons."""
