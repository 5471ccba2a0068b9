"""How a checkpoint's tensor names become a model's, where they differ.

transformers keeps such conversions by model_type: the experts of a Qwen3-MoE lie one by one in its
files and as one tensor in its modules. A hybrid's files are the plain family's, and so must be its
conversions, in loading and in saving.
"""

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)


def share_conversions(plain_type: str, hybrid_type: str) -> None:
    """Give one model_type the conversions of another."""
    conversions = get_checkpoint_conversion_mapping(plain_type)
    if conversions is not None:
        register_checkpoint_conversion_mapping(hybrid_type, conversions, overwrite=True)
