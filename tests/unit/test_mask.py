"""GroupMask, the budget rule, mask.json and its strict reader, the pictures, the commands."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from bosch.masks.__main__ import main
from bosch.masks.mask import GroupMask, num_windowed, read_mask, write_mask
from bosch.masks.picture import draw_mask, mask_lines
from bosch.run.errors import UserError
from tests.masks import MODEL, masks, record_of, small_record

MADE_FOR = asdict(MODEL)


def test_kv_bytes_worked_by_hand() -> None:
    mask = GroupMask(((1, 0, 0),), window_tokens=4)
    # 1 full group x 10 entries + 2 windowed x 3 (W-1) = 16; keys and values, 8 values of 2 bytes
    assert mask.kv_bytes(10, head_dim=8) == 16 * 2 * 8 * 2
    assert mask.kv_bytes(10, head_dim=8, bytes_per_value=1) == 16 * 2 * 8
    assert mask.kv_bytes(2, head_dim=8) == 3 * 2 * 2 * 8 * 2  # shorter than the window: all alike
    assert GroupMask(((0,),), window_tokens=1).kv_bytes(10, head_dim=8) == 0


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
        ({"schema_version": 2}, "schema_version is 2"),
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


def test_the_picture_is_the_same_each_time_and_has_the_last_layer_on_top(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_mask(small_record(), tmp_path / name)
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content == (tmp_path / "b.png").read_bytes()
    assert b"Software" not in content
    lines = [line.plain for line in mask_lines(small_record())]
    assert lines == ["layer 1  :: :: :: ##  0.750", "layer 0  ## ## :: ::  0.500"]


def test_show_prints_map_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mask(tmp_path / "mask.json", small_record())
    words = [str(tmp_path / "mask.json"), "--png", str(tmp_path / "mask.png")]
    main(["show", *words, "--context", "1024"])
    shown = capsys.readouterr().out
    assert "org/small (0123456789ab): bosch, ratio 0.625 (5/8), window 16" in shown
    # 3 full groups x 1024 + 5 windowed x 15 = 3147 entries of 64 bytes; dense: 8 x 1024 of them
    assert "1024 tokens: 201 kB of 524 kB (38.4%)" in shown
    assert (tmp_path / "mask.png").stat().st_size > 1000
