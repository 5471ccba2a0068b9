"""Encoding: where long texts are cut, that threads change nothing, and that stored ids are
decoded."""

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from transformers import PreTrainedTokenizerFast

from bosch.data import encode
from bosch.data.encode import Chunk, Encoder, Position, as_texts, cut_document
from bosch.data.pack import LEAST_REPRODUCED
from bosch.data.tokenizer_files import TokenizerText, describe_tokenizer, read_source_tokenizer
from bosch.data.toy_world.documents import write_document
from bosch.run.errors import UserError
from tests.odd_tokenizers import train_bpe

# Digits one by one as in Qwen, or by threes as in Llama 3: two tokenizers that agree on little.
WORDS = (
    r"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [write_document(seed=5, number=number) for number in range(60)]


def train(digits: str, size: int, begin: bool = False) -> PreTrainedTokenizerFast:
    special = ["<|begin|>", "<|end|>"] if begin else ["<|end|>"]
    words = Regex(WORDS.format(digits=digits))
    tokenizer = train_bpe(TEXTS, size, special, (words, "isolated"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def model() -> TokenizerText:
    """The tokenizer of the model that is trained."""
    return describe_tokenizer(train("", 700))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TokenizerText:
    """The tokenizer of stored ids."""
    folder = tmp_path_factory.mktemp("llama")
    train("{1,3}", 1000, begin=True).save_pretrained(folder)
    return read_source_tokenizer(str(folder))


def ids_of(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)


def chunk_of(blocks: list[str] | list[np.ndarray]) -> Chunk:
    return Chunk(list(blocks), [True] * len(blocks), [True] * len(blocks), Position(len(blocks)))


@given(
    text=st.text(alphabet="ab \n\r\t.é", max_size=300),
    limit=st.integers(4, 40),
    blocks=st.lists(st.integers(1, 50), max_size=20),
)
def test_pieces_do_not_depend_on_the_blocks(text: str, limit: int, blocks: list[int]) -> None:
    ends = [0, *np.cumsum(blocks).tolist(), len(text)]
    parts = [text[a:b] for a, b in pairwise(ends) if a < b]
    with mock.patch.object(encode, "PIECE_CHARS", limit):
        pieces, of_one_block = list(cut_document(parts)), list(cut_document([text]))
    assert "".join(str(piece) for piece, _ in pieces) == text
    assert all(len(piece) <= limit for piece, _ in pieces)
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces == of_one_block


def test_pieces_have_all_the_tokens(model: TokenizerText, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n\n".join(TEXTS[:20])
    whole = Encoder(model, None).encode(chunk_of([text])).ids
    monkeypatch.setattr(encode, "PIECE_CHARS", 500)
    pieces = [str(piece) for piece, _ in cut_document([text])]
    assert len(pieces) > 20
    rest = [False] * (len(pieces) - 1)
    chunk = Chunk(list(pieces), [True, *rest], [*rest, True], Position(1))
    np.testing.assert_array_equal(Encoder(model, None).encode(chunk).ids, whole)


def test_documents_get_their_end_token_and_empty_ones_nothing(model: TokenizerText) -> None:
    encoded = Encoder(model, None).encode(chunk_of(["one", "", "two <|end|> three"]))
    tokenizer = model.load()
    assert encoded.lengths[1] == 0
    first, last = encoded.ids[: encoded.lengths[0]], encoded.ids[encoded.lengths[0] :]
    assert tokenizer.decode(first.tolist(), skip_special_tokens=False) == "one<|end|>"
    # The end token's name inside a document is text, not an end.
    assert last.tolist().count(model.end_id) == 1
    assert tokenizer.decode(last.tolist()) == "two <|end|> three"
    with_begin = TokenizerText(model.text, begin_id=3, end_id=0)
    ids = Encoder(with_begin, None).encode(chunk_of(["one"])).ids
    assert (ids[0], ids[-1]) == (3, 0)
    assert with_begin.hash != model.hash


def test_foreign_ids_are_encoded_again(model: TokenizerText, llama: TokenizerText) -> None:
    stored = llama.load()
    begin, end = np.uint32([0]), np.uint32([1])
    ids = [np.concatenate([begin, ids_of(stored, text), end]) for text in TEXTS[:8]]
    encoded = Encoder(model, llama).encode(chunk_of(ids))
    expected = Encoder(model, None).encode(chunk_of(TEXTS[:8]))
    np.testing.assert_array_equal(encoded.ids, expected.ids)


def test_a_cut_within_a_character_loses_only_its_rest(llama: TokenizerText) -> None:
    tokenizer = llama.load()
    ids = ids_of(tokenizer, "naïve 😀 end")
    parts = [ids[a:b] for a in range(len(ids)) for b in range(a + 1, len(ids))]
    assert all("\ufffd" not in (t[:1], t[-1:]) for t in as_texts(parts, tokenizer))
    assert as_texts([ids], tokenizer) == ["naïve 😀 end"]


def test_ids_of_another_tokenizer_are_found(model: TokenizerText, llama: TokenizerText) -> None:
    right, other = llama.load(), model.load()
    ids = [ids_of(right, text) for text in TEXTS[:8]]
    assert encode.share_reproduced(right, ids) == 1
    small = [part[part < 700] for part in ids]  # even where every id exists in the other one
    assert encode.share_reproduced(other, small) < LEAST_REPRODUCED
    with pytest.raises(UserError, match=r"\?tokenizer="):
        encode.share_reproduced(other, ids)
