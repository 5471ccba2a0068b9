"""Keeps a model's tokenizer when the model becomes a hybrid, or a hybrid the model again.

AutoTokenizer takes the class from a table by model_type where it trusts it more than what
tokenizer_config.json names, and our types are in no table: the same files could give other ids. So
the copy is loaded, compared with the original, and told its class where they differ.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically

CONFIG = "tokenizer_config.json"


def keep_tokenizer(
    source: Path, source_config: PretrainedConfig, out: Path, config: PretrainedConfig
) -> None:
    """Make `out`, which has the source's files, load the source's tokenizer under its own config.
    A source whose tokenizer does not load is left as it is."""
    original = load(source, source_config)
    if original is None or describe(original) == describe(load(out, config)):
        return
    path = out / CONFIG
    told = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    told["tokenizer_class"] = type(original).__name__
    write_atomically(path, json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    if describe(original) != describe(load(out, config)):
        raise UserError(
            f"{source} loads its tokenizer as {type(original).__name__}, which {out} cannot be "
            f"made to do. Save the tokenizer as transformers has it loaded "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) into a copy of the model, "
            "and take that one."
        )


def load(folder: Path, config: PretrainedConfig) -> Any:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True)
    except (OSError, ValueError):
        return None
    return tokenizer if len(tokenizer) > 1 else None  # some classes need no files


def describe(tokenizer: Any) -> Any:
    """What decides the ids, and those that begin and end a text."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if backend is None else backend.to_str()
    return vocabulary, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer("a b")["input_ids"]
