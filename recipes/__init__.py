"""Programs, one a file, each named after what it does: `accelerate launch recipes/NAME.py`."""
