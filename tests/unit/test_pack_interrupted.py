"""Interrupted packing goes on to the same bytes, and damage is named."""

import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from bosch.data.pack import PackConfig
from bosch.data.sources.hub import HubSource
from bosch.data.token_files import DOC_ENDS, HELD_OUT, HELD_OUT_DOC_ENDS, ORDER, TOKENS
from bosch.data.tokenizer_files import TokenizerText
from bosch.data.toy_world.documents import ToyDocuments, write_document
from bosch.run.errors import MissingFileError
from bosch.run.files import DamagedArtifactError
from tests.damage import flip_bit
from tests.packing import interrupted_after, pack, toy_tokenizer, write_texts


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerText:
    return toy_tokenizer()


LONG = PackConfig(64, 64 * 900, held_out_sequences=20, chunk_chars=2000, shard_chunks=2)


@pytest.mark.parametrize("count", [0, 1, 17])
def test_interrupted_packing_goes_on_to_the_same_bytes(
    count: int, tmp_path: Path, tokenizer: TokenizerText
) -> None:
    expected, out = pack(tmp_path / "expected", tokenizer, LONG, ToyDocuments(0)), tmp_path / "out"
    with interrupted_after(count):
        pack(out, tokenizer, LONG, ToyDocuments(0))
    assert not (out / "tokens.json").exists()
    assert pack(out, tokenizer, LONG, ToyDocuments(0)) == expected


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

    def load(
        self, dataset: str, name: str | None = None, revision: str | None = None, **_: Any
    ) -> Any:
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
    streaming: bool, tmp_path: Path, tokenizer: TokenizerText, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PackConfig(sequence_length=64, held_out_sequences=2, chunk_chars=2000, shard_chunks=2)
    hub = Hub(tmp_path / "hub", monkeypatch)

    def pack_in(name: str) -> dict[str, bytes]:
        return pack(
            tmp_path / name, tokenizer, config, HubSource("some/corpus", streaming=streaming)
        )

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


def test_damage_done_while_packing_was_interrupted_is_named(
    tmp_path: Path, tokenizer: TokenizerText
) -> None:
    with interrupted_after(17):
        pack(tmp_path, tokenizer, LONG, ToyDocuments(0))
    flip_bit(tmp_path / TOKENS, 100)
    with pytest.raises(DamagedArtifactError, match=r"tokens\.bin is damaged"):
        pack(tmp_path, tokenizer, LONG, ToyDocuments(0))


@pytest.mark.parametrize("name", [TOKENS, HELD_OUT, DOC_ENDS, HELD_OUT_DOC_ENDS, ORDER])
def test_damage_done_after_packing_and_before_its_manifest_is_named(
    name: str, tmp_path: Path, tokenizer: TokenizerText
) -> None:
    config = PackConfig(64, 6400, held_out_sequences=2, chunk_chars=5000)
    files = pack(tmp_path, tokenizer, config, ToyDocuments(0))
    assert pack(tmp_path, tokenizer, config, ToyDocuments(0)) == files
    flip_bit(tmp_path / name, len(files[name]) // 2)
    with pytest.raises(DamagedArtifactError, match=re.escape(f"{tmp_path / name} is damaged")):
        pack(tmp_path, tokenizer, config, ToyDocuments(0))
