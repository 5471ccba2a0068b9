"""Hybrids: their model classes, conversion from and to plain models, folders, and code for them."""
