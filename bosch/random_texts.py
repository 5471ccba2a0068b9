"""Texts of random tokens that come again: of such a text a model can only know what it copies from
far back, so they tell what windows lose without a word of any language.

    block      of so many random tokens, again and again, up to the text's length

`razor` reads how much each head attends to earlier copies. The search asks under each mask how well
the tokens of later copies are predicted (`Haystack.is_random`)."""
# T tokens

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

REPEATS = 4  # of a block of the usual length


def block_lengths(usual: int, num_texts: int) -> list[int]:
    """That of each text: the usual one for one, and for several between half and twice as much, in
    equal ratios: how far back a copy stands decides which groups find it."""
    exponents = [(2 * text + 1 - num_texts) / num_texts for text in range(num_texts)]
    return [round(usual * 2**exponent) for exponent in exponents]


def draw_texts(tokens: "Tensor", blocks: Sequence[int], length: int, seed: int) -> "list[Tensor]":
    """For each block length a text of so many of these tokens."""
    import torch  # here: the file of a calibration set is read without

    generator = torch.Generator().manual_seed(seed * 1_000_003)
    drawn = [torch.randint(len(tokens), (block,), generator=generator) for block in blocks]
    return [tokens[places].repeat(length // len(places) + 1)[:length] for places in drawn]


def ordinary_tokens(known: set[int], of: Any) -> "Tensor":
    """Those of a vocabulary that occur in text: without what begins, ends and pads one, and without
    ids that the model does not have. of: the model's config, or a tokenizer."""
    import torch

    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        special = getattr(of, name, None)
        known = known - (set(special) if isinstance(special, list) else {special})
    return torch.tensor([token for token in sorted(known) if token < of.vocab_size])


def tokens_of(tokenizer: Any) -> set[int]:
    """A vocabulary has more, which a model has hardly learned: control tokens, reserved tokens and
    padding rows."""
    return set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
