"""What of a tokenizer decides training tokens, as text that can be sent to worker processes and
hashed."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bosch.model import load_tokenizer
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint

DECIDES_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


@dataclass(frozen=True)
class TokenizerText:
    """A fast tokenizer with what stands before and behind each document."""

    text: str  # as in tokenizer.json
    begin_id: int | None = None
    end_id: int | None = None

    @cached_property
    def hash(self) -> str:
        """Of all that decides a document's ids. How truncation, padding or decoding are set does
        not."""
        content = json.loads(self.text)
        ids = {name: content[name] for name in DECIDES_IDS}
        return fingerprint({"tokenizer": ids, "begin": self.begin_id, "end": self.end_id})

    @cached_property
    def num_ids(self) -> int:
        return max(self.load().get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of stored tokens: two bytes where they are enough."""
        return np.dtype("<u2" if self.num_ids <= 1 << 16 else "<u4")

    def load(self) -> Tokenizer:
        """Ready to encode documents: nothing is cut, and `<|endoftext|>` inside a document is
        ordinary text."""
        tokenizer = Tokenizer.from_str(self.text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer


def describe_tokenizer(tokenizer: Any) -> TokenizerText:
    """A transformers tokenizer, as documents are encoded with it: its beginning-of-text token where
    it puts one, its end."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UserError(
            f"{getattr(tokenizer, 'name_or_path', tokenizer)} has no fast tokenizer "
            "(tokenizer.json), and packing needs one."
        )
    begin = tokenizer.bos_token_id
    if begin is not None and tokenizer("a")["input_ids"][:1] != [begin]:
        begin = None
    return TokenizerText(backend.to_str(), begin, tokenizer.eos_token_id)


def read_tokenizer(model: str | Path) -> TokenizerText:
    """Of a folder or model; a tokenizer on the hub is fetched."""
    return describe_tokenizer(load_tokenizer(model))


def read_source_tokenizer(name: str) -> TokenizerText:
    """The tokenizer whose ids a source holds: a tokenizer.json, a folder with one, or a model on
    the hub."""
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        path = fetch_tokenizer(name)
    try:
        return TokenizerText(Tokenizer.from_file(str(path)).to_str())
    except Exception as error:  # tokenizers raises no class of its own
        raise UserError(f"{path} is not a tokenizer file ({error}).") from error


def fetch_tokenizer(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # the errors of an unreachable or gated hub have no common class
        folder = name.rpartition("/")[2]
        raise MissingFileError(
            f"The tokenizer of {name} is not on this machine and cannot be fetched. Where it can "
            "(meta-llama's models ask you to "
            f"accept their license first) run `hf download {name} tokenizer.json --local-dir "
            f"{folder}`, copy the folder here and "
            f"write ?tokenizer={folder} behind the source."
        ) from error
