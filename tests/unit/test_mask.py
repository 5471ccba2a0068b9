"""GroupMask, the budget rule, mask.json and its strict reader, the pictures, the commands; and
DuoAttention's tables: out and in again unchanged, ties, window and sinks, every refusal."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from bosch.masks.__main__ import main
from bosch.masks.formats import export_mask, import_mask
from bosch.masks.mask import GroupMask, MaskFile, num_windowed, read_mask, write_mask
from bosch.masks.picture import draw_mask, mask_lines
from bosch.model import read_model_info
from bosch.run.errors import MissingFileError, UserError
from bosch.sink import Sink
from tests.masks import MODEL, make_model, masks, record_of, small_record

MADE_FOR = asdict(MODEL)


def test_kv_bytes_worked_by_hand() -> None:
    mask = GroupMask(((1, 0, 0),), window_tokens=4)
    # 1 full group x 10 entries + 2 windowed x 3 (W-1) = 16; keys and values, 8 values of 2 bytes
    assert mask.kv_bytes(10, head_dim=8) == 16 * 2 * 8 * 2
    assert mask.kv_bytes(10, head_dim=8, bytes_per_value=1) == 16 * 2 * 8
    assert mask.kv_bytes(2, head_dim=8) == 3 * 2 * 2 * 8 * 2  # shorter than the window: all alike
    assert GroupMask(((0,),), window_tokens=1).kv_bytes(10, head_dim=8) == 0


def test_allocated_bytes_worked_by_hand() -> None:
    mask = GroupMask(((1, 0, 0),), window_tokens=257, sink=Sink("tokens", 4))
    # An eighth more, but at least a block of 16: 1 full group x (800 + 100) + 2 windowed x
    # (256 + 32 + the sink's 4); keys and values, 8 values of 2 bytes
    assert mask.allocated_bytes(800, head_dim=8) == (900 + 2 * 292) * 2 * 8 * 2
    assert mask.allocated_bytes(40, head_dim=8) == (56 + 2 * (56 + 4)) * 2 * 8 * 2
    narrow = GroupMask(((1, 0, 0),), window_tokens=1)
    assert narrow.allocated_bytes(40, head_dim=8, bytes_per_value=1) == (56 + 2 * 16) * 2 * 8


def test_rows_come_from_lists_arrays_tensors_booleans_and_strings() -> None:
    expected = GroupMask(((1, 0), (0, 1)), 8)
    rows: list[Any] = [[1, 0], [0, 1]]
    tensor = torch.tensor(rows)
    for given_rows in (rows, np.array(rows), tensor.bool(), tensor.float(), ["10", "01"]):
        mask = GroupMask.from_rows(given_rows, 8)
        assert (mask, hash(mask)) == (expected, hash(expected))
        assert all(type(bit) is int for row in mask.z for bit in row)
    assert GroupMask.from_windowed([(0, 1), (1, 0)], 2, 2, 8) == expected
    with pytest.raises(UserError, match=r"\(0, 2\)"):
        GroupMask.from_windowed([(0, 2)], 2, 2, 4)


def test_what_is_no_mask_is_refused() -> None:
    wrong: list[Any] = [
        ([[1, 0]], 0, "group", "window is 0"),
        ([[1, 0]], 2.5, "group", "window is 2.5"),
        ([[]], 4, "group", "layer"),
        ([[1, 0], [1]], 4, "group", "ayer 1 has 1 groups.* 2"),
        ([[1, 2]], 4, "group", r"Layer 0 is \(1, 2\)"),
        ([[1, 1], [1, 0]], 4, "layer", r"layer 1 .*\(1, 0\)"),
    ]
    for rows, window, unit, value in wrong:
        with pytest.raises(UserError, match=value):
            GroupMask.from_rows(rows, window, unit)


def test_the_budget_is_rounded_up_and_a_ratio_outside_0_to_1_refused() -> None:
    for ratio, layers, groups, count in (
        (0.33, 8, 8, 22),  # 21.12
        (0.75, 8, 8, 48),
        (0.0, 8, 8, 0),
        (1.0, 8, 8, 64),
        (0.07, 10, 10, 7),  # 7.000000000000001 in floats: the 1e-9 of the rule
        (1e-12, 8, 8, 0),
        (0.875, 28, 8, 196),
        (1 / 3, 3, 1, 1),
    ):
        assert num_windowed(ratio, layers, groups) == count
    for ratio in (1.2, -0.1, math.nan, math.inf):
        with pytest.raises(UserError, match=f"ratio is {ratio};"):
            num_windowed(ratio, 8, 8)


@given(masks())
def test_every_mask_comes_back_from_its_file(tmp_path_factory: Any, mask: GroupMask) -> None:
    path = tmp_path_factory.mktemp("mask") / "mask.json"
    record = record_of(mask)
    write_mask(path, record)
    assert read_mask(path, record.model) == record


def test_the_file_holds_every_field(tmp_path: Path) -> None:
    write_mask(tmp_path / "mask.json", small_record())
    content = json.loads((tmp_path / "mask.json").read_text())
    assert content.pop("window_convention").startswith("query i sees key j if 0 <= i - j < window")
    assert content == {
        "schema_version": 1,
        "mask_convention": "1: full causal attention, 0: sliding window",
        "window_tokens": 16,
        "unit": "group",
        "model": MADE_FOR,
        "ratio_asked": 0.6,
        "ratio": 0.625,
        "z": ["1100", "0001"],
        "method": "bosch",
        "settings": {"kappa": 3},
        "seed": 7,
        "score_trace": {"evaluations": 12, "first": 0.25, "last": 0.5},
        "provenance": {"commit": "abc"},
    }


def test_the_same_mask_gives_the_same_bytes_and_a_failed_write_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    write_mask(path, small_record())
    before = path.read_bytes()
    write_mask(path, small_record())
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="nan"):
        write_mask(path, replace(small_record(), settings={"kappa": math.nan}))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["mask.json"]


def test_each_damage_is_one_sentence_with_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    write_mask(path, small_record())
    whole = json.loads(path.read_text())
    damages: list[tuple[dict[str, Any], str]] = [
        ({"schema_version": 2}, "schema_version is 2.*search the mask anew"),
        ({"window_convention": "W keys before"}, "window_convention is 'W keys before'"),
        ({"window_tokens": 0}, "window is 0"),
        ({"unit": "layer"}, "unit is 'layer', but the groups of layer 0 differ"),
        ({"z": ["1100", "000"]}, "Layer 1 has 3 groups"),
        ({"ratio": 0.5}, "ratio is 0.5, but z has .* 0.625"),
        ({"ratio_asked": 0.75}, "means 6 of 8 groups.* ratio_asked"),
        ({"colour": 1}, "no such field as colour"),
        ({"method": ...}, "method is missing"),
        ({"settings": {"kappa": math.inf}}, "settings holds .*Infinity"),
        ({"model": {"id": "org/small"}}, "model.revision is missing"),
        ({"model": MADE_FOR | {"head_dim": 0}}, "head_dim is 0"),
    ]
    for change, named in damages:
        content = {name: value for name, value in (whole | change).items() if value is not ...}
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"^{path}: .*{named}"):  # `.` matches no new line
            read_mask(path)


def test_a_mask_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    write_mask(path, small_record())
    for same in (MODEL, replace(MODEL, revision=None)):  # one of the two does not say
        assert read_mask(path, same) == small_record()
    other = {"revision": "fedcba", "id": "org/other", "num_layers": 3, "num_groups": 2}
    for field, value in (other | {"num_query_heads": 16, "head_dim": 32}).items():
        with pytest.raises(UserError, match=rf"{path}: .* 2 layers x 4 groups"):
            read_mask(path, replace(MODEL, **{field: value}))


@pytest.mark.pictures
def test_the_picture_is_the_same_each_time_and_has_the_last_layer_on_top(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_mask(small_record(), tmp_path / name)
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content == (tmp_path / "b.png").read_bytes()
    assert b"Software" not in content
    lines = [line.plain for line in mask_lines(small_record())]
    assert lines == ["layer 1  :: :: :: ##  0.750", "layer 0  ## ## :: ::  0.500"]


@pytest.mark.pictures
def test_show_prints_map_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mask(tmp_path / "mask.json", small_record())
    words = [str(tmp_path / "mask.json"), "--png", str(tmp_path / "mask.png")]
    words += ["--memory", str(tmp_path / "memory.png")]
    main(["show", *words, "--context", "1024"])
    shown = capsys.readouterr().out
    assert "org/small (0123456789ab): bosch, ratio 0.625 (5/8), window 16" in shown
    # 3 full groups x 1024 + 5 windowed x 15 = 3147 entries of 64 bytes; dense: 8 x 1024 of them
    assert "1024 tokens: 201 kB of 524 kB (38.4%) in use" in shown
    # 3 x (1024 + 128) + 5 x (15 + 16) = 3611 entries
    assert "allocates up to 231 kB" in shown
    for name in ("mask.png", "memory.png"):
        assert (tmp_path / name).stat().st_size > 1000


# --- DuoAttention's tables ---


def take(path: Path, **request: Any) -> tuple[MaskFile, str]:
    """Import for MODEL; the notes as one text."""
    record, notes = import_mask(path, MODEL, 0.5, **request)
    return record, "\n".join(notes)


@given(mask=masks())
def test_a_table_keeps_a_mask(tmp_path_factory: pytest.TempPathFactory, mask: GroupMask) -> None:
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
        assert (mask.window_tokens, str(mask.sink)) == (256, "tokens=128")  # of its config.json
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
    assert (record.mask.window_tokens, str(record.mask.sink)) == (32, "tokens=24")
    assert record.settings == {"tie": None, "sink_size": 24, "recent_size": 32}
    (tmp_path / "out").mkdir()
    export_mask(record, tmp_path / "out" / "heads.tsv")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported == json.loads(beside.read_text())
    record, notes = take(path, window_tokens=16)
    assert (record.mask.window_tokens, str(record.mask.sink)) == (16, "tokens=16")
    assert "is 32, but --window 16" in notes
    assert "the window of 16 keeps 16 of them" in notes
    # What is there is not overwritten.
    assert "recent_size 16 and sink_size 16" in export_mask(record, path)
    assert json.loads(beside.read_text())["recent_size"] == 32
    (tmp_path / "new").mkdir()
    static = replace(record, mask=replace(record.mask, sink=Sink("static")))
    for note in (export_mask(static, path), export_mask(static, tmp_path / "new" / "heads.tsv")):
        assert "static sinks are lost" in note
        assert "and the sinks" not in note
    beside.write_text(json.dumps({"sink_size": -1}))
    with pytest.raises(UserError, match=r"config\.json: sink_size is -1"):
        take(path, window_tokens=8)


def test_what_is_wrong_with_a_table_is_named(tmp_path: Path) -> None:
    for text, value in (
        ("1 1 0 0\n", "has 1 lines of 4 numbers, but org/small (0123456789ab) is 2 x 4"),
        ("1 1 0 0\n1 1 0\n", "columns changed from 4 to 3"),
        ("1 1 0 0\n1 nan 0 0\n", "layer 1 is [1.0, nan, 0.0, 0.0]"),
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
    main(["import", str(tmp_path / "heads.tsv"), "--model", str(model),
          "--window", "16", "--ratio", "0.55", "--out", str(mask)])  # fmt: skip
    assert "--ratio 0.55 means 5 of 8 groups, 0.625\n" in capsys.readouterr().out
    record = read_mask(mask, read_model_info(model))
    assert (record.mask, record.method) == (small_record().mask, "import-duo")
    assert record.provenance["source"] == "heads.tsv"
    main(["export", str(mask), "--out", str(table)])
    assert table.read_text() == "1\t1\t0\t0\n0\t0\t0\t1\n"
    # Of four layers two have a window of their own, which the mask's file has too.
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 4}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
    config |= {"model_type": "qwen3", "use_sliding_window": True} | layers
    (model / "config.json").write_text(json.dumps(config))
    main(["import", str(tmp_path / "heads.tsv"), "--model", str(model),
          "--window", "16", "--ratio", "0.55", "--out", str(mask)])  # fmt: skip
    found = read_mask(mask).mask
    assert (found.z, found.own_windows) == (record.mask.z, (512, 512))
