"""Packing is exact: every token is stored once and in order, or counted as dropped; the bytes do
not depend on workers or interruptions, and damage is named."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.data import encode
from bosch.data.encode import Chunk, Encoder, Position
from bosch.data.pack import PackConfig, pack_documents
from bosch.data.sources.files import FileSource
from bosch.data.sources.hub import HubSource
from bosch.data.sources.source import Source
from bosch.data.token_files import (
    DOC_ENDS,
    HELD_OUT,
    HELD_OUT_DOC_ENDS,
    ORDER,
    PROGRESS,
    SUMMARY,
    TOKENS,
)
from bosch.data.tokenizer_files import TokenizerText
from bosch.data.toy_world.documents import ToyDocuments, write_document
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import DamagedArtifactError, read_sealed_json
from tests import packing
from tests.damage import flip_bit
from tests.packing import interrupted_after, toy_tokenizer, write_rows, write_texts
from tests.toy_tokenizer import train_tokenizer

DROPPED = ("dropped_behind_held_out", "dropped_at_budget", "dropped_in_tail", "dropped_too_short")
PARTS = ("tokens_kept", "tokens_held_out", *DROPPED)


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerText:
    return toy_tokenizer()


Pack = Callable[[Path, PackConfig, Source], dict[str, bytes]]


@pytest.fixture(scope="module")
def pack(tokenizer: TokenizerText) -> Pack:
    """Pack a source; the files written."""
    return lambda out, config, source: packing.pack(out, tokenizer, config, source)


def encode_texts(tokenizer: TokenizerText, texts: list[str]) -> list[list[int]]:
    """The tokens of each document, those of a document without text being none."""
    flags = [True] * len(texts)
    encoded = Encoder(tokenizer, None).encode(Chunk(list(texts), flags, flags, Position()))
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]]


def check_exact(folder: Path, dtype: Any, documents: list[list[int]], config: PackConfig) -> None:
    """Follow the documents' tokens through what was stored: the held-out slice, a gap, the training
    tokens, the rest."""
    (counts,) = read_sealed_json(folder / "tokens.json")["sources"]
    kept = [document for document in documents if len(document) >= config.min_document_tokens]
    stream = [token for document in kept for token in document]
    ends = set(np.cumsum([len(document) for document in kept]).tolist())
    held_out = np.fromfile(folder / HELD_OUT, dtype).tolist()
    tokens = np.fromfile(folder / TOKENS, dtype).tolist()

    size = config.held_out_sequences * config.sequence_length
    assert held_out == stream[:size]
    rest = min([end for end in ends if end >= size], default=size) - size
    gap = min(rest, config.sequence_length) if size else 0
    assert counts["dropped_behind_held_out"] == gap
    start = size + gap
    assert tokens == stream[start : start + len(tokens)]
    assert len(tokens) % config.sequence_length == 0
    inside = {end - start for end in ends if start < end < start + len(tokens)}
    assert set(np.load(folder / DOC_ENDS).tolist()) == inside | {len(tokens)}
    inside = {end for end in ends if end < size} | ({size} if size else set())
    assert set(np.load(folder / HELD_OUT_DOC_ENDS).tolist()) == inside
    if config.tokens is None:
        tail = len(stream) - start - len(tokens)
        assert counts["dropped_in_tail"] == tail < config.sequence_length
        assert counts["tokens_read"] == sum(map(len, documents))
    assert counts["tokens_read"] == sum(counts[name] for name in PARTS)
    assert (counts["tokens_kept"], counts["tokens_held_out"]) == (len(tokens), size)


CONFIGS = st.builds(
    lambda seq_len, budget, *rest: PackConfig(seq_len, budget and budget * seq_len, *rest),
    *(st.integers(2, 40), st.one_of(st.none(), st.integers(1, 20))),
    *(st.integers(0, 3), st.integers(0, 30)),  # held-out sequences; tokens of the shortest document
)
TEXT_OF_ANY_SIZE = st.integers(0, 60).flatmap(
    lambda size: st.text("ab1 é\n", min_size=size, max_size=size)
)


@settings(max_examples=60)
@given(
    texts=st.lists(TEXT_OF_ANY_SIZE, min_size=1, max_size=40),
    drawn=CONFIGS,
    chunk_chars=st.sampled_from([1, 37, 500, 10**6]),
)
def test_every_token_comes_once_in_order_or_is_counted_as_dropped(
    tmp_path_factory: Any, tokenizer: Any, pack: Pack, texts: Any, drawn: Any, chunk_chars: int
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    documents = encode_texts(tokenizer, texts)
    config = replace(drawn, chunk_chars=chunk_chars, shard_chunks=3)
    seq_len, shortest = config.sequence_length, config.min_document_tokens
    there = sum(len(document) for document in documents if len(document) >= shortest)
    out = folder / "out"
    source = write_texts(folder / "in", texts)
    needed = config.held_out_sequences * seq_len + (config.tokens or seq_len)
    if there < needed:
        with pytest.raises(UserError, match="tokens"):
            pack(out, config, source)
        assert not (out / "tokens.json").exists()
    if there < needed + seq_len:  # a gap of a sequence is the most that is lost
        return
    pack(out, config, source)
    check_exact(out, tokenizer.dtype, [document for document in documents if document], config)


def test_long_documents_keep_their_tokens_and_their_one_end(
    tmp_path: Path, tokenizer: TokenizerText, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["\n".join(write_document(0, n) for n in range(6)), "short", write_document(0, 7)]
    documents = encode_texts(tokenizer, texts)
    monkeypatch.setattr(encode, "PIECE_CHARS", 300)
    config = PackConfig(sequence_length=64, held_out_sequences=2, chunk_chars=700, shard_chunks=2)
    pack(tmp_path / "out", config, write_texts(tmp_path / "in", texts))
    check_exact(tmp_path / "out", tokenizer.dtype, documents, config)


@pytest.mark.parametrize("counts", [(1, 4), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_bytes_are_the_same_for_every_number_of_workers(
    counts: tuple[int, ...], tmp_path: Path, pack: Pack
) -> None:
    text = "\n".join(write_document(1, n) for n in range(700))
    assert len(text) > encode.PIECE_CHARS // 2  # twice it is longer than one piece
    folder = tmp_path / "in"
    write_texts(folder, [write_document(0, n) for n in range(40)])
    (folder / "giant.txt").write_text(text * 2)
    found = []
    for count in counts:
        config = PackConfig(256, held_out_sequences=2, workers=count, chunk_chars=50_000)
        found.append(pack(tmp_path / str(count), config, FileSource(folder)))
    assert all(files == found[0] for files in found[1:])
    assert len(found[0]["tokens.bin"]) > 1_000_000


def test_mix_is_exact_in_tokens(tmp_path: Path, tokenizer: TokenizerText) -> None:
    source = write_texts(tmp_path / "in", [write_document(9, n) for n in range(200)])
    none = write_texts(tmp_path / "none", ["a share of no token needs no file"])
    mix = [ToyDocuments(0), source, none]
    for each, weight in zip(mix, (0.3, 0.7, 1e-9), strict=True):
        each.weight = weight
    config = PackConfig(sequence_length=100, tokens=10_099, held_out_sequences=3, chunk_chars=5000)
    pack_documents(mix, tokenizer, config, tmp_path)
    summary = read_sealed_json(tmp_path / "tokens.json")
    assert [counts["tokens_kept"] for counts in summary["sources"]] == [3000, 7000, 0]
    assert [counts["tokens_held_out"] for counts in summary["sources"]] == [90, 210, 0]
    assert 3000 in np.load(tmp_path / DOC_ENDS)  # no document continues in the next source
    for counts in summary["sources"]:
        assert counts["tokens_read"] == sum(counts[name] for name in PARTS)


def test_finished_folders_are_kept_and_others_are_refused(tmp_path: Path, pack: Pack) -> None:
    config, out = PackConfig(64, 6400, held_out_sequences=1, chunk_chars=5000), tmp_path / "a"
    before = pack(out, config, ToyDocuments(0))
    assert pack(out, config, ToyDocuments(0)) == before
    other = pack(tmp_path / "b", replace(config, seed=1), ToyDocuments(0))
    assert [name for name in before if before[name] != other[name]] == [PROGRESS, ORDER, SUMMARY]
    with pytest.raises(UserError, match=re.escape(str(out))):
        pack(out, config, ToyDocuments(1))
    (out / TOKENS).write_bytes(before[TOKENS][:-2])
    with pytest.raises(DamagedArtifactError, match=rf"{TOKENS} is damaged .* 12,800 bytes"):
        pack(out, config, ToyDocuments(0))


def test_too_small_a_source_and_bad_text_leave_nothing_done(tmp_path: Path, pack: Pack) -> None:
    source = write_texts(tmp_path / "in", ["one", "two"])
    with pytest.raises(UserError, match=r"texts\.jsonl .* 2 documents, .*720 .*20 "):
        pack(tmp_path, PackConfig(10, tokens=700, held_out_sequences=2), source)
    write_texts(tmp_path / "bad", [write_document(0, n) for n in range(9)])
    (tmp_path / "bad" / "z.txt").write_bytes(b"fine at first \xe9t\xe9")
    bad = FileSource(tmp_path / "bad")
    with pytest.raises(UserError, match=r"z\.txt: byte 14 "):
        pack(tmp_path / "out", PackConfig(64, chunk_chars=500), bad)
    assert not [*tmp_path.rglob("tokens.json")]


def test_empty_documents_count(tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": None if n % 4 == 1 else write_document(0, n)} for n in range(40)]
    path = write_rows(tmp_path / "in" / "train.jsonl", rows)
    texts = [row["text"] for row in rows if row["text"]]
    hub = pack(tmp_path / "hub", PackConfig(64), HubSource(str(path.parent)))
    plain = pack(tmp_path / "plain", PackConfig(64), write_texts(tmp_path / "texts", texts))
    assert hub["tokens.bin"] == plain["tokens.bin"]
    (counts,) = read_sealed_json(tmp_path / "hub" / "tokens.json")["sources"]
    assert (counts["documents"], counts["documents_empty"]) == (40, 10)


def test_stored_ids_need_the_right_tokenizers_name(tmp_path: Path, pack: Pack) -> None:
    stored = train_tokenizer(vocabulary_size=560, num_texts=30, seed=4)
    other = train_tokenizer(vocabulary_size=600, num_texts=20, seed=0)
    stored.save_pretrained(tmp_path / "stored")
    other.save_pretrained(tmp_path / "other")
    texts = [write_document(0, n) for n in range(60)]
    rows = [{"text": stored(text, add_special_tokens=False)["input_ids"]} for text in texts]
    path = write_rows(tmp_path / "ids.jsonl", rows)
    config = PackConfig(sequence_length=64, held_out_sequences=1)
    with pytest.raises(UserError, match=r"ids\.jsonl, line 1: .*\?tokenizer="):
        pack(tmp_path / "unnamed", config, FileSource(path))
    wrong = FileSource(path, tokenizer=str(tmp_path / "other"))
    with pytest.raises(UserError, match=re.escape(f"those of {tmp_path / 'other'}")):
        pack(tmp_path / "wrong", config, wrong)
    source = FileSource(path, tokenizer=str(tmp_path / "stored"))
    decoded = pack(tmp_path / "decoded", config, source)
    plain = pack(tmp_path / "plain", config, write_texts(tmp_path / "in", texts))
    assert decoded["tokens.bin"] == plain["tokens.bin"]


def test_every_file_is_on_the_disk_before_the_summary_vouches_for_it(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        synced.append(path.name.lstrip(".").removesuffix(".tmp"))

    monkeypatch.setattr("os.fsync", note)
    config = PackConfig(sequence_length=32, tokens=640, held_out_sequences=2)
    files = {name.lstrip(".") for name in pack(tmp_path, config, ToyDocuments(0))}
    assert files - {SUMMARY} <= set(synced[: synced.index(SUMMARY)])


LONG = PackConfig(64, 64 * 900, held_out_sequences=20, chunk_chars=2000, shard_chunks=2)


@pytest.mark.parametrize("count", [0, 1, 17])
def test_interrupted_packing_ends_in_the_same_bytes(count: int, tmp_path: Path, pack: Pack) -> None:
    expected, out = pack(tmp_path / "expected", LONG, ToyDocuments(0)), tmp_path / "out"
    with interrupted_after(count):
        pack(out, LONG, ToyDocuments(0))
    assert not (out / "tokens.json").exists()
    assert pack(out, LONG, ToyDocuments(0)) == expected


class Hub:
    """Commits of a dataset on a hub that can be reached, or in the library's cache if it cannot."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        self.main = ""
        self.offline = datasets.load_dataset_builder
        monkeypatch.setattr("datasets.load_dataset_builder", self.load)

    def commit(self, letter: str) -> None:
        """Other texts, on the main branch."""
        self.main = letter * 40
        path = self.folder / self.main / "corpus" / "train.jsonl"
        texts = [write_document(ord(letter), n) for n in range(200)]
        write_texts(path.parent, texts).path.rename(path)

    def load(self, dataset: str, name: str = "", revision: str | None = None, **_: Any) -> Any:
        commit = revision or self.main
        builder = self.offline(str(self.folder / commit / "corpus"))
        builder.hash = commit
        return builder

    def cut_off(self, cached: str) -> None:
        """Leave one commit in the cache, as `load_dataset` would, and no hub."""
        builder = self.offline(str(self.folder / (cached * 40) / "corpus"))
        builder.download_and_prepare()
        place = self.folder / "cache" / "some___corpus"
        shutil.rmtree(place, ignore_errors=True)
        shutil.move(builder.cache_dir, place / "default" / "0.0.0" / (cached * 40))
        self.monkeypatch.setattr("datasets.load_dataset_builder", self.offline)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_dataset_is_read_at_one_commit_to_the_end(
    streaming: bool, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PackConfig(sequence_length=64, held_out_sequences=2, chunk_chars=2000, shard_chunks=2)
    hub = Hub(tmp_path / "hub", monkeypatch)

    def pack_in(name: str) -> dict[str, bytes]:
        source = HubSource("some/corpus", streaming=streaming)
        return pack(tmp_path / name, config, source)

    hub.commit("a")
    expected = pack_in("whole")
    for name in ("moved on", "cached", "other in the cache"):
        with interrupted_after(9):
            pack_in(name)
    hub.commit("b")
    assert pack_in("new")["tokens.bin"] != expected["tokens.bin"]
    assert pack_in("moved on") == expected
    assert pack_in("whole") == expected
    hub.cut_off(cached="b")
    with pytest.raises(MissingFileError, match=r"some/corpus: .* a{40} .* b{40}"):
        pack_in("other in the cache")
    hub.cut_off(cached="a")
    for name in ("cached", "other in the cache", "whole"):
        assert pack_in(name) == expected


def test_damage_done_while_packing_was_interrupted_is_named(tmp_path: Path, pack: Pack) -> None:
    with interrupted_after(17):
        pack(tmp_path, LONG, ToyDocuments(0))
    flip_bit(tmp_path / TOKENS, 100)
    for _ in ("changed", "missing"):
        with pytest.raises(DamagedArtifactError, match=r"tokens\.bin is damaged"):
            pack(tmp_path, LONG, ToyDocuments(0))
        (tmp_path / TOKENS).unlink(missing_ok=True)


def test_before_the_manifest_damaged_tokens_are_named_and_all_else_is_made_again(
    tmp_path: Path, pack: Pack
) -> None:
    config = PackConfig(64, 6400, held_out_sequences=2, chunk_chars=5000)
    files = pack(tmp_path, config, ToyDocuments(0))
    for name in (DOC_ENDS, HELD_OUT_DOC_ENDS, ORDER, SUMMARY):
        flip_bit(tmp_path / name, len(files[name]) // 2)
    assert pack(tmp_path, config, ToyDocuments(0)) == files
    for name in (HELD_OUT, TOKENS):
        flip_bit(tmp_path / name, len(files[name]) // 2)
        with pytest.raises(DamagedArtifactError, match=re.escape(f"{tmp_path / name} is damaged")):
            pack(tmp_path, config, ToyDocuments(0))
