"""The part of a tokenizer that determines training tokens, as text that can be hashed and loaded
once in each thread."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from bosch.data.sources.source import first_line
from bosch.model import explain_library_errors, load_tokenizer
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.hub import prepare_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DECISIVE = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # parts of tokenizer.json


@dataclass(frozen=True)
class TokenizerText:
    """A fast tokenizer, and the tokens before and after each document."""

    text: str  # the content of tokenizer.json
    begin_id: int | None = None
    end_id: int | None = None

    @cached_property
    def hash(self) -> str:
        """Of everything that determines ids, so not of truncation, padding or decoding."""
        content = json.loads(self.text)
        ids = {name: content[name] for name in DECISIVE}
        return fingerprint({"tokenizer": ids, "begin": self.begin_id, "end": self.end_id})

    @cached_property
    def num_ids(self) -> int:
        return max(self.load().get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of stored tokens: two bytes if the vocabulary fits in them."""
        return np.dtype("<u2" if self.num_ids <= 1 << 16 else "<u4")

    def load(self) -> Tokenizer:
        """The tokenizer, without truncation or padding; `<|endoftext|>` inside a document is
        ordinary text."""
        tokenizer = Tokenizer.from_str(self.text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Else a document that mentions a special token, as pages on language models do, would end
        # in its middle.
        tokenizer.encode_special_tokens = True
        return tokenizer


def fast_backend(tokenizer: "PreTrainedTokenizerBase") -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        name = getattr(tokenizer, "name_or_path", tokenizer)
        raise UserError(f"{name} has no fast tokenizer (tokenizer.json), which is needed here.")
    return backend


def describe_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> TokenizerText:
    """How documents are encoded with a transformers tokenizer: with its begin token, if it adds one
    itself, and its end token."""
    text = fast_backend(tokenizer).to_str()
    # By an example, as tokenizers say in different places what they add.
    adds_begin = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    begin = tokenizer.bos_token_id if adds_begin else None
    return TokenizerText(text, begin, tokenizer.eos_token_id)


def read_tokenizer(model: str | Path) -> TokenizerText:
    """The tokenizer of a model folder or of a model on the hub, from where it is downloaded."""
    return describe_tokenizer(load_tokenizer(model))


def read_source_tokenizer(name: str) -> TokenizerText:
    """The tokenizer whose ids a source holds: a tokenizer.json, a folder with one, or a model on
    the hub."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if Path(name).is_dir() and not path.is_file():
        raise MissingFileError(f"{path} does not exist; name a folder that holds one.")
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        prepare_hub()
        try:
            path = Path(hf_hub_download(name, "tokenizer.json"))
        except Exception as error:  # the errors of an unreachable or gated hub: no common class
            folder = name.rpartition("/")[2]
            raise MissingFileError(
                f"The tokenizer {name} is not on this machine and cannot be fetched "
                f"({first_line(error)}). On a machine with a network (for meta-llama's models, "
                f"accept their license) run `hf download {name} tokenizer.json --local-dir "
                f"{folder}`, copy the folder here and add ?tokenizer={folder} to the source."
            ) from error
    with explain_library_errors(f"{path} is not a tokenizer file"):
        return TokenizerText(Tokenizer.from_file(str(path)).to_str())
