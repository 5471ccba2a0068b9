"""Keeps a model's tokenizer when the model becomes a hybrid, or a hybrid the model again.

For some model types AutoTokenizer takes the class from a table and ignores tokenizer_config.json.
Our types are in no table, so the same files could give other ids. The copy is therefore loaded and
compared with the original, and its class is written down if they differ.
"""

import json
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from bosch.model import find_tokenizer
from bosch.model_files import TOKENIZER_CONFIG, read_json_object
from bosch.run.errors import UserError
from bosch.run.files import write_atomically


def keep_tokenizer(
    source: Path, source_config: PretrainedConfig, out: Path, config: PretrainedConfig
) -> None:
    """Make the folder `out`, a copy of the source's files, load the same tokenizer as the source. A
    tokenizer that does not load is left alone. The copy names no code (`auto_map`): whoever trusts
    ours would run it too."""
    path = out / TOKENIZER_CONFIG
    settings = read_json_object(path) if path.is_file() else {}
    if settings.pop("auto_map", None) is not None:
        _write(path, settings)
    original = find_tokenizer(source, config=source_config)
    if original is None or describe(original) == describe(find_tokenizer(out, config=config)):
        return
    _write(path, settings | {"tokenizer_class": type(original).__name__})
    if describe(original) != describe(find_tokenizer(out, config=config)):
        raise UserError(
            f"the tokenizer of {source}, a {type(original).__name__}, loads differently from "
            f"{out}. Save it with AutoTokenizer.from_pretrained(...).save_pretrained(...) into a "
            "copy of the model, and use that copy."
        )


def _write(path: Path, settings: dict[str, object]) -> None:
    write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def describe(tokenizer: PreTrainedTokenizerBase | None) -> tuple[object, ...] | None:
    """What decides the token ids, and the ids that begin and end a text."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if backend is None else backend.to_str()
    return vocabulary, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer("a b")["input_ids"]
