"""Sources: how they are named, the kinds of file, starting in the middle, and what is refused."""

import gzip
import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bosch.data.sources.files import BLOCK_BYTES, FileSource
from bosch.data.sources.hub import HubSource
from bosch.data.sources.mds import MIX_64K
from bosch.data.sources.open import open_source, open_sources
from bosch.data.sources.source import Source
from bosch.data.toy_world.documents import ToyDocuments
from bosch.run.errors import MissingFileError, UserError

TEXTS = [
    f"Document {number}.\nIt has ünïcode, {'many ' * (number % 7)}words.\n" for number in range(200)
]


def texts_of(source: Source, start: int = 0) -> list[str]:
    return ["".join(map(str, document)) for document in source.read(start)]


def write_rows(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines)
    elif path.suffix == ".parquet":
        table = pyarrow.table({"id": [1 for _ in texts], field: list(texts)})
        pyarrow.parquet.write_table(table, path, row_group_size=30)
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_kind_of_file_is_read_from_any_number_on(suffix: str, tmp_path: Path) -> None:
    source = FileSource(write_rows(tmp_path / f"rows{suffix}", TEXTS))
    assert texts_of(source) == TEXTS
    for start in (1, 29, 30, 31, 64, 199, 200):
        assert texts_of(source, start) == TEXTS[start:]


def test_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    write_rows(tmp_path / "a.jsonl", TEXTS[:5])
    (tmp_path / "b" / "one.txt").write_text(TEXTS[5], newline="")
    (tmp_path / "b" / "two.md.gz").write_bytes(gzip.compress(TEXTS[6].encode()))
    write_rows(tmp_path / "c.parquet", TEXTS[7:20])
    write_rows(tmp_path / ".hidden" / "d.jsonl", TEXTS)
    (tmp_path / "notes.pdf").write_bytes(b"not text")
    source = FileSource(tmp_path)
    for start in range(20):
        assert texts_of(source, start) == TEXTS[start:20]


def test_suffixes_may_be_large_and_linked_folders_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    write_rows(elsewhere / "c.jsonl", TEXTS[2:])
    (corpus / "link").symlink_to(elsewhere)
    (corpus / "A.TXT").write_text(TEXTS[0], newline="")
    (corpus / "B.MD.GZ").write_bytes(gzip.compress(TEXTS[1].encode()))
    with caplog.at_level("INFO", "bosch"):
        assert texts_of(FileSource(corpus)) == TEXTS[:2]
    assert f"linked folders are left out ({corpus / 'link'})" in caplog.text
    assert texts_of(FileSource(elsewhere)) == TEXTS[2:]


def test_long_text_comes_in_blocks_that_split_no_character(tmp_path: Path) -> None:
    # 10 bytes each, so that blocks end at every byte of the pattern.
    text = "x" + "é€😀\n" * (BLOCK_BYTES // 4)
    path = tmp_path / "long.txt"
    path.write_text(text, newline="")
    (document,) = FileSource(path).read(0)
    blocks = [str(block) for block in document]
    assert len(blocks) > 2
    assert "".join(blocks) == text


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("empty.txt", b"", ""),
        ("latin.txt", b"a" * (BLOCK_BYTES + 10) + b"\xe9", f"{BLOCK_BYTES + 10:,} .*UTF-8"),
        ("latin.txt.gz", gzip.compress(b"a\xe9", mtime=0), "byte 1 .*UTF-8"),
        ("torn.jsonl", b'{"text": "a"}\n{"text": "b', "line 2"),
        ("other.jsonl", b'{"txt": "a"}\n', "line 1 .*'text': did you mean 'txt'"),
        ("ids.jsonl", b'{"text": [1, 2, 3]}\n', r"line 1: 'text' .*\?tokenizer="),
        ("torn.txt.gz", gzip.compress(b"a" * 9999, mtime=0)[:-20], ""),
        ("torn.txt.zst", pyarrow.compress(b"a" * 9999, "zstd", asbytes=True)[:-9], ""),
        ("torn.parquet", b"PAR1 and nothing more", ""),
        ("half.jsonl", b'{"text": "a\\ud83d b"}\n', "line 1: 'text': character 1"),
        ("image.png", b"x", r"\.jsonl .*\.parquet"),
    ],
)
def test_bad_file_is_refused_by_name(name: str, content: bytes, value: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / name)) + f".*{value}"):
        texts_of(FileSource(tmp_path / name))


def test_ids_come_with_the_tokenizer_they_belong_to(tmp_path: Path) -> None:
    def source(numbers: list[Any]) -> FileSource:
        (tmp_path / "ids.jsonl").write_text(json.dumps({"ids": numbers}) + "\n")
        return FileSource(tmp_path / "ids.jsonl", field="ids", tokenizer="some/tokenizer")

    ((block,),) = source([5, 6, 7]).read(0)
    assert isinstance(block, np.ndarray)
    assert block.tolist() == [5, 6, 7]
    for wrong in ([-1], [2**32], [1] * 200 + [2.7], [1] * 200 + ["3"]):
        with pytest.raises(UserError, match=r"ids\.jsonl, line 1: 'ids'"):
            list(source(wrong).read(0))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of a dataset, with a separate cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("streaming", [True, False])
def test_hugging_face_dataset_is_read_from_any_row_on(streaming: bool, corpus: Path) -> None:
    write_rows(corpus / "train.jsonl", TEXTS[:50], field="content")
    hub = partial(HubSource, str(corpus), streaming=streaming)
    for start in (0, 7, 49, 50):
        assert texts_of(hub(field="content"), start) == TEXTS[start:50]
    with pytest.raises(UserError, match="'contents': did you mean 'content'"):
        texts_of(hub(field="contents"))


def test_rows_of_a_hub_dataset_without_text_are_empty_documents(corpus: Path) -> None:
    rows = [{"text": [1, 2]}, {"text": None}, {"id": 1}, {"text": [1, 2]}]
    (corpus / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = HubSource(str(corpus), tokenizer="some/tokenizer")
    for start in range(4):
        found = [next(iter(document)) for document in source.read(start)]
        assert [len(block) for block in found] == [2, 0, 0, 2][start:]


def test_without_network_it_says_what_to_fetch_and_where_to_put_it() -> None:
    commands = {"hf:some/corpus?config=en": r"some/corpus .*hf:corpus\?config=en;"}
    commands["prolong-64k/arxiv"] = "princeton-nlp/prolong-data-64K .*folder="
    for text, command in commands.items():
        with pytest.raises(MissingFileError, match=f"hf download --repo-type dataset {command}"):
            texts_of(open_source(text, seed=0, tokens=1000))


def test_sources_that_cannot_be_meant_are_refused() -> None:
    for texts, value in (
        (["toys"], "'toy'"),
        (["nowhere/corpus"], "hf:nowhere/corpus"),
        (["hf:some/corpus?splits=train"], "'split'"),
        (["toy", "prolong-64k/arxiv@0.5"], "toy .*prolong-64k/arxiv@0.5"),
        (["toy@0.5", "toy@0.5"], "toy"),
        (["toy@0"], "toy@0"),
    ):
        with pytest.raises(UserError, match=value):
            open_sources(texts, 0, 100)
    with pytest.raises(UserError, match="--tokens"):
        open_sources(["prolong-64k/book-65536"], 0, None)


def test_prolong_mix_is_that_of_its_first_stage() -> None:
    # Shares of train_64K.sh, spec/training.md section 5.
    assert [source.weight for source in open_sources(["toy"], 0, None)] == [1]
    assert sum(MIX_64K.values()) == pytest.approx(1)
    sources = open_sources(["prolong-64k?tokenizer=llama"], 0, 10**9)
    assert [source.weight for source in sources] == list(MIX_64K.values())
    assert {source.tokenizer for source in sources} == {"llama"}
    half = open_sources(["prolong-64k@0.5"], 0, 10**9)[0]
    assert (half.name, half.weight) == ("prolong-64k/thestackv1_concat_by_repo-65536", 0.15)
    counted = open_sources(["prolong-64k@2e9"], 0, 10**9)  # weights may be numbers of tokens
    expected = [2e9 * share for share in MIX_64K.values()]
    assert [source.weight for source in counted] == pytest.approx(expected)


def test_toy_documents_are_functions_of_their_number_and_hold_no_needle() -> None:
    source = ToyDocuments(seed=3)
    texts = ["".join(document) for document in islice(source.read(0), 300)]
    assert [*islice(source.read(120), 5)] == [(text,) for text in texts[120:125]]
    assert texts != ["".join(document) for document in islice(ToyDocuments(seed=4).read(0), 300)]
    assert "special magic" not in "\n\n".join(texts)
    assert len(set(texts)) == 300
