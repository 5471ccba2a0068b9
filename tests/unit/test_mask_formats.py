"""DuoAttention's tables: out and in again unchanged, ties, window and sinks, every refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from bosch.masks.__main__ import main
from bosch.masks.formats import export_mask, import_mask
from bosch.masks.mask import GroupMask, MaskFile, num_windowed, read_mask
from bosch.model import read_model_info
from bosch.run.errors import MissingFileError, UserError
from tests.masks import MODEL, make_model, masks, record_of, small_record


def take(path: Path, **request: Any) -> tuple[MaskFile, str]:
    """Import for MODEL; the notes as one text."""
    record, notes = import_mask(path, MODEL, 0.5, **request)
    return record, "\n".join(notes)


@given(mask=masks())
def test_masks_outlive_tables(tmp_path_factory: pytest.TempPathFactory, mask: GroupMask) -> None:
    record, path = record_of(mask), tmp_path_factory.mktemp("formats") / "heads.tsv"
    assert "config.json" in export_mask(record, path)
    back, notes = import_mask(path, record.model, mask.ratio, mask.window_tokens)
    assert (back.mask, notes, back.ratio_asked) == (mask, (), mask.ratio)
    assert import_mask(path, record.model, mask.ratio)[0].mask == mask  # the window beside it


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama-3-8B-Instruct-Gradient-1048k", {"num_key_value_heads": 8}),
        ("Llama-2-7B-32K-Instruct", {}),  # every query head its own group
    ],
)
def test_the_published_patterns_meet_every_ratio_exactly(
    shared_data: Path, tmp_path: Path, name: str, config: dict[str, int]
) -> None:
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | shape | config))
    model = read_model_info(tmp_path)
    table = shared_data / "duo_patterns" / name / "full_attention_heads.tsv"
    values = [[float(text) for text in line.split("\t")] for line in table.read_text().splitlines()]
    for ratio in (0.0, 0.25, 0.33, 0.5, 0.75, 0.875, 1.0):
        record, notes = import_mask(table, model, ratio)
        mask = record.mask
        assert mask.num_windowed == num_windowed(ratio, 32, model.num_groups)
        assert (mask.window_tokens, mask.sink) == (256, "tokens=128")  # of its config.json
        assert (record.settings["sink_size"], record.settings["recent_size"]) == (128, 256)
        pairs = [(v, bit) for line, row in zip(values, mask.z, strict=True)
                 for v, bit in zip(line, row, strict=True)]  # fmt: skip
        full, windowed = [v for v, bit in pairs if bit], [v for v, bit in pairs if not bit]
        assert min(full, default=9.0) >= max(windowed, default=-9.0)
        assert list(record.provenance["notes"]) == list(notes)
        # In the first table, three groups share 0.9609375 at the border of one half (counted by
        # hand).
        if ratio == 0.5 and model.num_groups == 8:
            assert record.settings["tie"] == {"value": 0.9609375, "num_tied": 3, "num_windowed": 2}
            assert record.seed == 0


def test_equal_values_at_the_border_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "heads.tsv"
    path.write_text("9\t1\t1\t1\n1\t1\t1\t0\n")
    first, notes = take(path, window_tokens=8, seed=1)
    assert first == take(path, window_tokens=8, seed=1)[0]
    assert len({take(path, window_tokens=8, seed=seed)[0].mask for seed in range(20)}) > 5
    assert (first.mask.z[0][0], first.mask.z[1][3]) == (1, 0)  # nothing to draw there
    assert (first.mask.num_windowed, first.seed) == (4, 1)
    assert first.settings == {"tie": {"value": 1.0, "num_tied": 6, "num_windowed": 3}}
    assert "seed 1" in notes


def test_window_and_sinks_are_those_beside_the_table_and_go_out_again(tmp_path: Path) -> None:
    path, beside = tmp_path / "heads.tsv", tmp_path / "config.json"
    path.write_text("1\t1\t0\t0\n" * 2)
    with pytest.raises(UserError, match=r"heads\.tsv .*--window"):
        take(path)
    beside.write_text(json.dumps({"sink_size": 24, "recent_size": 32}))
    record, notes = take(path)
    assert (record.mask.window_tokens, record.mask.sink) == (32, "tokens=24")
    assert record.settings == {"tie": None, "sink_size": 24, "recent_size": 32}
    (tmp_path / "out").mkdir()
    export_mask(record, tmp_path / "out" / "heads.tsv")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported == json.loads(beside.read_text())
    record, notes = take(path, window_tokens=16)
    assert (record.mask.window_tokens, record.mask.sink) == (16, "tokens=16")
    assert "is 32, but --window 16" in notes
    assert "the window of 16 keeps 16 of them" in notes
    # What is there is not overwritten.
    assert "recent_size 16 and sink_size 16" in export_mask(record, path)
    assert json.loads(beside.read_text())["recent_size"] == 32
    beside.write_text(json.dumps({"sink_size": -1}))
    with pytest.raises(UserError, match=r"config\.json: sink_size is -1"):
        take(path, window_tokens=8)


def test_what_is_wrong_with_a_table_is_named(tmp_path: Path) -> None:
    for text, value in (
        ("1 1 0 0\n", "has 1 lines, but org/small (0123456789ab) has 2 layers"),
        ("1 1 0 0\n1 1 0\n", "layer 1 has 3 values, but org/small"),
        ("1 1 0 0\n1 nan 0 0\n", "layer 1 is ['1', 'nan', '0', '0']"),
    ):
        (tmp_path / "heads.tsv").write_text(text)
        with pytest.raises(UserError, match=re.escape(value)):
            take(tmp_path / "heads.tsv", window_tokens=8)
    for path in (tmp_path / "no.tsv", tmp_path):
        with pytest.raises(MissingFileError, match=str(path)):
            take(path, window_tokens=8)


def test_import_and_export_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "small")
    (tmp_path / "heads.tsv").write_text("0.9\t0.8\t0.1\t0.2\n0.3\t0.4\t0.5\t1.0\n")
    mask, table = tmp_path / "mask.json", tmp_path / "out.tsv"
    main(["import", str(tmp_path / "heads.tsv"), "--format", "duo", "--model", str(model),
          "--window", "16", "--ratio", "0.55", "--out", str(mask)])  # fmt: skip
    assert "--ratio 0.55 means 5 of 8 groups, 0.625\n" in capsys.readouterr().out
    record = read_mask(mask, read_model_info(model))
    assert (record.mask, record.method) == (small_record().mask, "import-duo")
    assert record.provenance["source"] == "heads.tsv"
    main(["export", str(mask), "--out", str(table)])
    assert table.read_text() == "1\t1\t0\t0\n0\t0\t0\t1\n"
