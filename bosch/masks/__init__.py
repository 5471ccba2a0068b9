"""Masks: which groups keep full attention. Their file, other projects' formats, pictures, and what
masks have in common."""
