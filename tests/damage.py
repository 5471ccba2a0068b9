"""Damage to files, for tests that must find it."""

from pathlib import Path


def flip_bit(path: Path, position: int) -> bytes:
    """Flip the lowest bit of one byte; returns the new content."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    return bytes(content)
