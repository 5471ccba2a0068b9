"""Masks: which groups keep full attention. Their file, the formats of other projects, pictures, and
comparisons."""
