"""The MDS reader against a writer that was written from the format's description and shares no code
with the reader."""

import json
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch.assets import asset_folder
from bosch.data.sources.mds import BYTES_PER_ID, MARGIN, ProLongSource
from bosch.data.sources.source import Document
from bosch.recipes import prepare_tokens
from bosch.recipes.presets import SMOKE_MODEL
from bosch.run.errors import MissingFileError, UserError


def pack_array(values: list[Any], code: str, encoding: str) -> bytes:
    """An array in the column's encoding; `code` is struct's letter for its type."""
    flat = [x for row in values for x in row] if values and isinstance(values[0], list) else values
    shape = [len(values), len(values[0])] if flat is not values else [len(values)]
    body = struct.pack(f"<{len(flat)}{code}", *flat)
    head, told = b"", encoding.count(":")
    if told < 1:
        head += bytes([{"H": 16, "i": 33, "I": 32, "q": 65, "B": 8}[code]])
    if told < 2:
        width, letter = (0, "B") if max(shape) < 256 else (1, "H")
        head += bytes([len(shape) * 4 + width]) + struct.pack(f"<{len(shape)}{letter}", *shape)
    return head + body


def write_shard(
    folder: Path, samples: Any, columns: Any, name: str = "shard.00000.mds", **changed: Any
) -> dict[str, Any]:
    """Write one shard; return what the index says of it. A column is (encoding, size if it is
    fixed)."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = []
    for sample in samples:
        sizes = [len(sample[c]) for c, (_, size) in columns.items() if size is None]
        packed.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(map(sample.get, columns)))
    config = json.dumps({"columns": list(columns)}).encode()
    position = 4 + 4 * (len(packed) + 1) + len(config)
    offsets = [position]
    for data in packed:
        offsets.append(offsets[-1] + len(data))
    content = struct.pack(f"<I{len(offsets)}I", len(packed), *offsets) + config + b"".join(packed)
    (folder / name).write_bytes(content)
    return {
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_names": list(columns),
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
        "samples": len(packed),
        "version": 2,
    } | changed


def write_index(folder: Path, shards: list[dict[str, Any]]) -> None:
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


COLUMNS: dict[str, tuple[str, int | None]] = {
    "input_ids": ("ndarray:uint32", None),
    "indices": ("ndarray:uint16", None),
    "domain": ("str", None),
    "length": ("int", 8),
}


def sample_of(documents: list[list[int]]) -> dict[str, bytes]:
    ids = [i for document in documents for i in document]
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    spans = [list(span) for span in pairwise(ends)]
    return {
        "input_ids": pack_array(ids, "I", "ndarray:uint32"),
        "indices": pack_array(spans, "H", "ndarray:uint16"),
        "domain": b"arxiv",
        "length": struct.pack("<q", len(ids)),
    }


def write_domain(folder: Path, documents: list[list[int]]) -> None:
    """Three documents a sample, two samples a shard."""
    samples = [sample_of(documents[i : i + 3]) for i in range(0, len(documents), 3)]
    starts = range(0, len(samples), 2)
    names = {i: f"shard.{i:05}.mds" for i in starts}
    shards = [write_shard(folder, samples[i : i + 2], COLUMNS, names[i]) for i in starts]
    write_index(folder, shards)


def documents_in(folder: Path, start: int = 0) -> list[list[int]]:
    address = f"prolong-64k/{folder.name}"
    return as_lists(ProLongSource(address, None, folder=str(folder.parent)).read(start))


def as_lists(documents: Iterable[Document]) -> list[list[int]]:
    return [np.asarray(block).tolist() for (block,) in map(list, documents)]


DOCUMENTS = [[number * 1000 + i for i in range(1 + number % 5 * 70)] for number in range(20)]


def test_documents_come_back_from_any_number_on(tmp_path: Path) -> None:
    write_domain(tmp_path / "proc01-64", DOCUMENTS[12:])
    write_domain(tmp_path / "proc00-64", DOCUMENTS[:12])
    for start in (0, 1, 5, 6, 12, 19, 20):
        assert documents_in(tmp_path, start) == DOCUMENTS[start:]


KINDS = ("ndarray", "ndarray:uint32", "ndarray:int32", "ndarray:uint16", "fixed")
IDS = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=700)


@given(ids=IDS, kind=st.sampled_from(KINDS))
def test_every_way_to_store_an_array_is_read(tmp_path_factory: Any, ids: Any, kind: str) -> None:
    """Without indices it is one document."""
    folder = tmp_path_factory.mktemp("mds")
    encoding = f"ndarray:int32:{len(ids)}" if kind == "fixed" else kind
    codes = {"ndarray:int32": "i", "ndarray:uint16": "H", "fixed": "i", "ndarray": "q"}
    data = pack_array(ids, codes.get(kind, "I"), encoding)
    columns = {"input_ids": (encoding, len(data) if kind == "fixed" else None)}
    write_index(folder, [write_shard(folder, [{"input_ids": data}], columns)])
    assert documents_in(folder) == [ids]


def test_damage_in_a_shard_is_refused_by_name(tmp_path: Path) -> None:
    write_domain(tmp_path, DOCUMENTS)
    shard = tmp_path / "shard.00000.mds"
    whole = shard.read_bytes()
    first = struct.unpack_from("<I", whole, 4)[0]
    # The table of samples; then the sizes of two columns and the array's own head.
    for position in (0, 4, 9, first, first + 4, first + 12):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF if position < first else 0x0F
        shard.write_bytes(damaged)
        where = "sample 0" if position >= first else ""
        with pytest.raises(UserError, match=rf"shard\.00000\.mds .*{where}"):
            documents_in(tmp_path)
    for size in (0, 10, len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(UserError, match=rf"shard\.00000\.mds .*{size:,} bytes"):
            documents_in(tmp_path)


def test_shards_of_another_kind_are_refused(tmp_path: Path) -> None:
    pickled: Any = {"column_encodings": ["pkl"] * 4}
    for value, changed in (("zstd", {"compression": "zstd"}), ("pickle", pickled)):
        write_index(tmp_path, [write_shard(tmp_path, [sample_of([[1]])], COLUMNS, **changed)])
        with pytest.raises(UserError, match=rf"shard\.00000\.mds.*{value}"):
            documents_in(tmp_path)


def test_no_more_shards_are_chosen_than_the_budget_needs_and_all_are_read(tmp_path: Path) -> None:
    documents = [[number] * 1000 for number in range(120)]
    for proc in range(4):
        own = documents[proc * 30 : proc * 30 + 30]
        write_domain(tmp_path / "arxiv" / f"proc{proc:02}-64", own)
    shard_tokens = 6_000  # two samples of three documents
    for tokens in (1, 10_000, 60_000):
        shards = ProLongSource("prolong-64k/arxiv", tokens, folder=str(tmp_path)).shards
        chosen = sum(shard.num_bytes for shard in shards)
        needed = tokens * MARGIN
        assert needed * BYTES_PER_ID <= chosen <= (needed + shard_tokens) * BYTES_PER_ID * 1.05
        assert len({shard.path for shard in shards}) == len(shards)
    source = ProLongSource("prolong-64k/arxiv", None, folder=str(tmp_path))
    assert len(source.shards) == 20
    assert as_lists(source.read(0)) == documents
    before, shard = source.facts(), source.shards[0].path
    shard.write_bytes(shard.read_bytes()[:-4] + b"\7\0\0\0")  # other ids, as many
    assert ProLongSource("prolong-64k/arxiv", None, folder=str(tmp_path)).facts() != before
    with pytest.raises(UserError, match=r"'arxive'.*'arxiv'"):
        _ = ProLongSource("prolong-64k/arxive", 1, folder=str(tmp_path)).shards


def test_a_cached_snapshot_is_read_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--princeton-nlp--prolong-data-64K"
    for commit in ("a" * 40, "b" * 40):
        snapshot = repository / "snapshots" / commit
        write_domain(snapshot / "arxiv" / "proc00-64", DOCUMENTS if commit[0] == "a" else [[1]])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    source = ProLongSource("prolong-64k/arxiv", 10**9)
    assert as_lists(source.read(0)) == [[1]]
    assert source.commit == source.facts()["commit"] == "b" * 40
    source = ProLongSource("prolong-64k/arxiv", 10**9)
    source.pin("a" * 40)
    assert as_lists(source.read(0)) == DOCUMENTS
    (snapshot / "arxiv" / "proc00-64" / "shard.00000.mds").unlink()
    with pytest.raises(MissingFileError, match=r"shard\.00000\.mds"):
        as_lists(ProLongSource("prolong-64k/arxiv", 10**9).read(0))


def test_shards_of_the_held_out_tokens_are_chosen_too(tmp_path: Path) -> None:
    """Packing stopped with too little, though the folder had more."""
    tokenizer = asset_folder(SMOKE_MODEL)
    documents = [[5 + number] * 500 for number in range(60)]  # 30,000 ids
    write_domain(tmp_path / "arxiv" / "proc00-64", documents)
    words = ["--model", SMOKE_MODEL, "--tokens", "10240", "--sequence-length", "1024"]
    words += ["--source", f"prolong-64k/arxiv?folder={tmp_path}&tokenizer={tokenizer}"]
    prepare_tokens.main([*words, "--held-out-sequences", "12", "--out", str(tmp_path / "tokens")])
    summary = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert (summary["num_sequences"], summary["num_held_out_sequences"]) == (10, 12)
