"""Batches as a function of the step, for any number of ranks, against a plain reference."""

import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bosch.data.loader import IGNORED, Loader, Sequences, check_reuse, open_tokens, prefetch
from bosch.data.pack import PackConfig, pack_documents
from bosch.data.tokenizer_files import TokenizerText, describe_tokenizer
from bosch.data.toy_world.documents import ToyDocuments
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import DamagedArtifactError, seal_folder
from bosch.run.fingerprint import fingerprint
from tests.damage import flip_bit
from tests.packing import toy_tokenizer
from tests.toy_tokenizer import train_tokenizer

SEQ_LEN = 128


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerText:
    return toy_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: TokenizerText) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    # With this seed no batch at the border of two epochs contains a sequence twice.
    config = PackConfig(SEQ_LEN, SEQ_LEN * 50, held_out_sequences=5, epochs=2, seed=42, workers=1)
    pack_documents([ToyDocuments(0)], tokenizer, config, folder)
    seal_folder(folder, {"fingerprint": fingerprint("tokens")})
    return folder


@pytest.fixture
def loader(folder: Path, tokenizer: TokenizerText) -> Loader:
    return Loader(open_tokens(folder, tokenizer.hash), batch_sequences=12)


@pytest.mark.parametrize("world", [1, 3, 12])
def test_global_batch_is_the_same_for_every_number_of_ranks(world: int, loader: Loader) -> None:
    for step in range(loader.num_steps):
        whole = loader.batch(step)
        parts = [loader.batch(step, rank, world) for rank in range(world)]
        found = [zip(part.sequences, part.ids_BT.tolist(), strict=True) for part in parts]
        rows = dict(pair for pairs in found for pair in pairs)
        assert rows == dict(zip(whole.sequences, whole.ids_BT.tolist(), strict=True))
        targets = sum(part.num_targets for part in parts)
        assert targets == whole.num_targets == loader.num_targets(step)


def test_every_sequence_comes_once_an_epoch(loader: Loader) -> None:
    order = loader.tokens.order
    assert [sorted(epoch) for epoch in order.tolist()] == [list(range(50))] * 2
    assert order[0].tolist() != order[1].tolist()
    assert loader.num_steps == 8  # 2 epochs of 50 sequences in batches of 12
    loader.batch(7)
    for step in (8, -1):
        with pytest.raises(UserError, match=f"step {step}"):
            loader.batch(step)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    num_tokens=st.integers(2, 16),
    mask=st.booleans(),
    data=st.data(),
)
def test_ends_positions_and_labels_agree_with_a_plain_count(
    lengths: list[int], num_tokens: int, mask: bool, data: st.DataObject
) -> None:
    num_rows = max(1, sum(lengths) // num_tokens)
    ends = np.cumsum([*lengths, num_tokens])
    total = num_rows * num_tokens
    ids = np.arange(total, dtype=np.uint16)
    sequences = Sequences(ids.reshape(num_rows, num_tokens), ends[ends < total].astype(np.uint64))
    numbers = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5))
    batch = sequences.batch(np.array(numbers), document_mask=mask)

    positions: list[int] = []
    labels: list[int] = []
    starts: list[int] = []
    for row, number in enumerate(numbers):
        for column in range(num_tokens):
            place = number * num_tokens + column
            is_start = column == 0 or (mask and place in ends)
            if is_start:
                starts.append(row * num_tokens + column)
            positions.append(0 if is_start else positions[-1] + 1)
            ends_here = column == num_tokens - 1 or (mask and place + 1 in ends)
            labels.append(IGNORED if ends_here else place + 1)
    assert torch.equal(batch.ids_BT, torch.arange(total).view(num_rows, num_tokens)[numbers])
    assert batch.position_ids_BT.flatten().tolist() == positions
    assert batch.labels_BT.flatten().tolist() == labels
    assert batch.cu_seqlens.tolist() == [*starts, len(positions)]
    assert batch.num_targets == sum(label != IGNORED for label in labels)
    assert batch.cu_seqlens.dtype == torch.int32


def test_passages_come_back_in_a_share_of_the_training_sequences(
    tmp_path: Path, tokenizer: TokenizerText
) -> None:
    loaders = []
    for share in (0.0, 0.4):
        config = PackConfig(SEQ_LEN, SEQ_LEN * 100, held_out_sequences=5, repeats=share)
        (out := tmp_path / str(share)).mkdir()
        pack_documents([ToyDocuments(0)], tokenizer, config, out)
        loaders.append(Loader(open_tokens(out, tokenizer.hash), batch_sequences=1))
    plain, repeated = loaders
    assert (repeated.tokens.held_out.rows == plain.tokens.held_out.rows).all()
    count = 0
    for step in range(100):
        before, after = plain.batch(step), repeated.batch(step)
        (was,), (found,) = before.ids_BT.tolist(), after.ids_BT.tolist()
        assert repeated.num_targets(step) == after.num_targets
        if found == was:
            assert torch.equal(before.labels_BT, after.labels_BT)
            continue
        count += 1
        assert after.cu_seqlens.tolist() == [0, SEQ_LEN], "one document"
        assert has_passages(found, was)
    assert 25 <= count <= 55


def has_passages(found: list[int], was: list[int]) -> bool:
    """`found` is a, b, a, c, b of a text a, b, c."""
    size = len(was)
    splits = ((a, b) for a in range(size // 3) for b in range(size // 6, size // 2))
    return any(
        found == was[: a + b] + was[:a] + was[a + b : size - a - b] + was[a : a + b]
        for a, b in splits
    )


def test_passages_come_back_within_blocks_of_several_lengths(
    tmp_path: Path, tokenizer: TokenizerText
) -> None:
    texts = {}
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "whole": {"repeats": 1.0},
        "blocks": {"repeats": 1.0, "repeat_block": 32},
        "no room": {"repeats": 1.0, "repeat_block": 65},
    }
    for name, settings in variants.items():
        config = PackConfig(SEQ_LEN, SEQ_LEN * 40, held_out_sequences=0, **settings)
        (out := tmp_path / name).mkdir()
        pack_documents([ToyDocuments(0)], tokenizer, config, out)
        loader = Loader(open_tokens(out, tokenizer.hash), batch_sequences=1)
        texts[name] = [loader.batch(step).ids_BT[0].tolist() for step in range(40)]
    assert texts["no room"] == texts["whole"]
    counts: Counter[int] = Counter()
    for was, found in zip(texts["plain"], texts["blocks"], strict=True):
        numbers = [
            number
            for number in (1, 2, 4)
            if all(
                has_passages(found[begin : begin + size], was[begin : begin + size])
                for size in [SEQ_LEN // number]
                for begin in range(0, SEQ_LEN, size)
            )
        ]
        counts[numbers[0]] += 1
    assert set(counts) == {1, 2, 4}
    assert min(counts.values()) >= 5


def test_held_out_slice_is_split_completely_and_never_trained_on(loader: Loader) -> None:
    def key(row: torch.Tensor) -> bytes:
        return row.numpy().tobytes()

    whole = [key(row) for batch in loader.held_out(2) for row in batch.ids_BT]
    shares = (batch for rank in range(3) for batch in loader.held_out(2, rank, 3))
    parts = [key(row) for batch in shares for row in batch.ids_BT]
    assert len(whole) == 5
    assert sorted(parts) == sorted(whole)
    trained = {key(row) for step in range(loader.num_steps) for row in loader.batch(step).ids_BT}
    assert not trained & set(whole)


def test_misfit_tokens_are_named(folder: Path, tokenizer: TokenizerText, tmp_path: Path) -> None:
    other = describe_tokenizer(train_tokenizer(vocabulary_size=601, num_texts=20, seed=0)).hash
    check_reuse(folder, tokenizer.hash, SEQ_LEN, 100)
    for seq_len, count, named in ((256, 1, "128 .*256"), (SEQ_LEN, 101, "100 sequences")):
        with pytest.raises(UserError, match=f"{folder}.*{named}"):
            check_reuse(folder, tokenizer.hash, seq_len, count)
    with pytest.raises(UserError, match=f"{folder}.*tokenizer"):
        open_tokens(folder, other)
    with pytest.raises(MissingFileError, match=re.escape(str(tmp_path))):
        open_tokens(tmp_path, tokenizer.hash)


def test_damaged_tokens_are_named(folder: Path, tokenizer: TokenizerText, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    flip_bit(copy / "tokens.bin", 1000)
    with pytest.raises(UserError, match=r"tokens\.bin"):
        check_reuse(copy, tokenizer.hash, SEQ_LEN, 1)
    for name in ("tokens.bin", "doc_ends.npy", "held_out_doc_ends.npy", "order.npy"):
        path, content = copy / name, (folder / name).read_bytes()
        for damaged in (b"", content[:-1], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(DamagedArtifactError, match=re.escape(str(path))):
                open_tokens(copy, tokenizer.hash)
        path.write_bytes(content)


def test_prefetch_yields_the_same_batches_and_ends_its_thread(loader: Loader) -> None:
    batches = prefetch(loader.batch, range(3, 10))
    for step in range(3, 8):
        number, batch = next(batches)
        assert number == step
        assert torch.equal(batch.ids_BT, loader.batch(step).ids_BT)
    with pytest.raises(UserError, match="step 8"):
        next(batches)
    assert [step for step, _ in prefetch(loader.batch, range(3, 7))] == [3, 4, 5, 6]
    before = threading.active_count()
    batches = prefetch(loader.batch, range(8))
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before
