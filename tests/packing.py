"""Packs small sources into token files, to the end or interrupted."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bosch.data import encode
from bosch.data.pack import PackConfig, pack_documents
from bosch.data.sources.files import FileSource
from bosch.data.sources.source import Source
from bosch.data.tokenizer_files import TokenizerText, describe_tokenizer
from tests.toy_tokenizer import train_tokenizer


def toy_tokenizer() -> TokenizerText:
    return describe_tokenizer(train_tokenizer(vocabulary_size=600, num_texts=20, seed=0))


def pack(
    out: Path, tokenizer: TokenizerText, config: PackConfig, source: Source
) -> dict[str, bytes]:
    """Pack a source; return the files written."""
    out.mkdir(exist_ok=True)
    pack_documents([source], tokenizer, config, out)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def write_texts(folder: Path, texts: list[str]) -> FileSource:
    return FileSource(write_rows(folder / "texts.jsonl", [{"text": text} for text in texts]))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class InterruptedPackingError(Exception):
    pass


@contextlib.contextmanager
def interrupted_after(count: int) -> Iterator[None]:
    """The encoder fails after `count` chunks."""
    whole = encode.encode_in_order

    def some(*arguments: Any) -> Iterator[Any]:
        for number, encoded in enumerate(whole(*arguments)):
            if number == count:
                raise InterruptedPackingError
            yield encoded

    patched = mock.patch("bosch.data.pack.encode_in_order", some)
    with patched, pytest.raises(InterruptedPackingError):
        yield
