"""Small models as a user would bring them: a folder with random weights and a BPE tokenizer trained
on the user's own text."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.model_factory import tiny_model
from tests.odd_tokenizers import train_bpe

POSITIONS = 512


def write_own_model(folder: Path, family: str, texts: list[str], **changes: Any) -> Path:
    """A model of a family whose tokenizer was trained on these texts."""
    bpe = train_bpe(texts, 400, ["<pad>", "<bos>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    ends = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = tiny_model(family, **{"max_position_embeddings": POSITIONS} | ends | changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
