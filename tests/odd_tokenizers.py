"""Tokenizers that train in a moment, and tokenizer folders like those of models on the hub, where
the same files can give other ids."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.toy_tokenizer import corpus

BYTES = pre_tokenizers.ByteLevel.alphabet()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def blank_first() -> Tokenizer:
    """As in Llama 2 and Mistral 7B: a blank is put before whatever is encoded."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    blanks, ends = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), ends])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus(40, 0), trainer)
    tokenizer.pre_tokenizer = None
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[begin]
    )
    return tokenizer


def train_bpe(
    texts: Iterable[str], size: int, special: list[str], cut: tuple[str | Regex, str] | None = None
) -> Tokenizer:
    """A BPE over bytes. `cut` says where words begin: a pattern, and how a match is joined."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut is None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(*cut), byte_level]) if cut else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=BYTES, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    """As Qwen and Llama 3 have it, but with other word boundaries."""
    return train_bpe(corpus(10, 0), 600, ["<unk>", "<s>", "</s>"])


def one_token_a_byte() -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(sorted(BYTES))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, bos_token="<s>"
    )


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def save(tokenizer: Tokenizer, folder: Path, declared: str) -> None:
    """With the tokenizer class that its folder on the hub declares."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": declared} | SPECIAL
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def with_another_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a model folder whose tokenizer lacks the last of its merges."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return folder
