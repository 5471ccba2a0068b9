"""A training step's floating-point operations as ConSA counts them (arXiv 2606.18056, table 4).

Its rule for attention gives every query half of what it may see: s / 2 keys of s with full
attention, which is right, and w / 2 keys of a window of w, where all but the first w queries see w.
It is here to be compared with that table; training/flops.py counts what is computed.
"""


def consa_step_flops(
    num_weights: int,
    num_heads: int,  # query heads, of all layers
    head_size: int,
    ratio: float,
    num_tokens: int,
    sequence_tokens: int,
    window_tokens: int,
) -> float:
    """Of forward and backward. num_weights: those that multiply, the head's once, no norms."""
    keys_seen = ((1 - ratio) * sequence_tokens + ratio * window_tokens) / 2
    return num_tokens * (6 * num_weights + 12 * head_size * num_heads * keys_seen)
