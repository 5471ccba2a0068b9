"""Masks of other projects: out and in again unchanged, DuoAttention's tables, every refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bosch.assets import asset_folder
from bosch.masks.__main__ import main
from bosch.masks.formats import Request, export_mask, import_mask, smallest
from bosch.masks.mask import GroupMask, MaskFile, num_windowed, read_mask
from bosch.model import read_model_info
from bosch.run.errors import MissingFileError, UserError
from tests.masks import MODEL, make_model, masks, record_of, small_record

HEADS = {"0": [1, 1, 1, 1, 0, 0, 0, 0], "1": [0, 0, 0, 0, 0, 0, 1, 1]}  # two query heads a group
FULL = ["full_attention"] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property: each example writes its file anew."""
    return tmp_path_factory.mktemp("formats")


def write_json(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def take(path: Path, format_name: str, **request: Any) -> tuple[MaskFile, str]:
    """Import for MODEL; the notes as one text."""
    record, notes = import_mask(path, format_name, MODEL, Request(**request))
    return record, "\n".join(notes)


# --- round trips ---


@given(mask=masks())
def test_a_mask_comes_back_from_a_tsv(folder: Path, mask: GroupMask) -> None:
    record = record_of(mask)
    export_mask(record, "duo", folder / "heads.tsv")
    request = Request(mask.window_tokens, mask.ratio)
    back, notes = import_mask(folder / "heads.tsv", "duo", record.model, request)
    assert back.mask == mask
    assert notes == ()
    assert back.ratio_asked == mask.ratio


@given(mask=masks(), uniform=masks(uniform=True), query_heads_per_group=st.integers(1, 8))
def test_a_mask_comes_back_from_the_formats_of_zeros_and_ones(
    folder: Path, mask: GroupMask, uniform: GroupMask, query_heads_per_group: int
) -> None:
    for made, name in ((mask, "headwise"), (uniform, "layer_types")):
        record = record_of(made, query_heads_per_group)
        export_mask(record, name, folder / "out.json")
        back, _ = import_mask(folder / "out.json", name, record.model, Request())
        assert back.mask == made


@given(mask=masks())
def test_layer_types_refuses_a_layer_that_is_mixed(folder: Path, mask: GroupMask) -> None:
    assume(any(len(set(row)) > 1 for row in mask.z))
    with pytest.raises(UserError, match=r"Layer \d.*headwise"):
        export_mask(record_of(mask), "layer_types", folder / "refused.json")
    assert not (folder / "refused.json").exists()


def test_the_model_of_a_layer_types_export_slides_as_the_mask_says(tmp_path: Path) -> None:
    """transformers' own reading of the exported fields."""
    from transformers import Qwen3Config

    mask = GroupMask.from_rows(["1111", "0000", "0000"], 64, "layer")
    export_mask(record_of(mask), "layer_types", tmp_path / "fields.json")
    fields = json.loads((tmp_path / "fields.json").read_text())
    config = Qwen3Config(num_hidden_layers=3, **fields)
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert config.sliding_window == 64


# --- DuoAttention ---


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama-3-8B-Instruct-Gradient-1048k", {"num_key_value_heads": 8}),
        ("Llama-2-7B-32K-Instruct", {}),  # every query head its own group
    ],
)
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.33, 0.5, 0.75, 0.875, 1.0])
def test_the_published_patterns_meet_every_ratio_exactly(
    shared_data: Path, tmp_path: Path, name: str, config: dict[str, int], ratio: float
) -> None:
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    write_json(tmp_path / "config.json", {"model_type": "llama"} | shape | config)
    model = read_model_info(tmp_path)
    table = shared_data / "duo_patterns" / name / "full_attention_heads.tsv"

    record, notes = import_mask(table, "duo", model, Request(ratio=ratio))

    mask = record.mask
    assert mask.num_windowed == num_windowed(ratio, 32, model.num_groups)
    assert mask.window_tokens == 256  # its config.json
    assert any("also see the first 128 tokens" in note for note in notes)
    values = [[float(text) for text in line.split("\t")] for line in table.read_text().splitlines()]
    pairs = [(v, bit) for line, row in zip(values, mask.z, strict=True)
             for v, bit in zip(line, row, strict=True)]  # fmt: skip
    full, windowed = [v for v, bit in pairs if bit], [v for v, bit in pairs if not bit]
    assert min(full, default=9.0) >= max(windowed, default=-9.0)
    assert list(record.provenance["notes"]) == list(notes)
    # In the first table, three groups share 0.9609375 at the border of one half (counted by hand).
    if ratio == 0.5 and model.num_groups == 8:
        assert record.settings["tie"] == {"value": 0.9609375, "num_tied": 3, "num_windowed": 2}
        assert record.seed == 0


def test_equal_values_at_the_border_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "heads.tsv"
    path.write_text("9\t1\t1\t1\n1\t1\t1\t0\n")
    request = {"window_tokens": 8, "ratio": 0.5}
    first, notes = take(path, "duo", seed=1, **request)
    assert first == take(path, "duo", seed=1, **request)[0]
    assert len({take(path, "duo", seed=seed, **request)[0].mask for seed in range(20)}) > 5
    assert (first.mask.z[0][0], first.mask.z[1][3]) == (1, 0)  # nothing to draw there
    assert first.mask.num_windowed == 4
    assert first.settings == {"tie": {"value": 1.0, "num_tied": 6, "num_windowed": 3}}
    assert first.seed == 1
    for part in ("6 groups", "value 1;", "seed 1", "the 3 of them"):
        assert part in notes
    for seed in range(5):  # values that differ need no draw
        assert smallest([[0.1, 0.4], [0.3, 0.2]], 2, seed) == ([(0, 0), (1, 1)], None)


def test_the_window_of_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "heads.tsv"
    path.write_text("1\t1\t0\t0\n" * 2)
    with pytest.raises(UserError, match=r"heads\.tsv .*--window"):
        take(path, "duo", ratio=0.5)
    write_json(tmp_path / "config.json", {"sink_size": 64, "recent_size": 32})
    record, notes = take(path, "duo", ratio=0.5)
    assert record.mask.window_tokens == 32
    assert "the first 64 tokens" in notes
    assert "32 tokens, from the recent_size in config.json" in notes
    record, notes = take(path, "duo", ratio=0.5, window_tokens=16)
    assert record.mask.window_tokens == 16
    assert "is 32, but --window 16" in notes


# --- rtp-llm ---


def test_rtp_llms_window_is_one_token_wider(tmp_path: Path) -> None:
    """Its swa_token_num does not count the current token."""
    config = {"sink_token_num": 4, "swa_token_num": 15, "seqlen_threshold": 100} | HEADS
    path = write_json(tmp_path / "config.json", {"headwise_config": config, "hidden_size": 8})
    record, notes = take(path, "headwise")
    assert record.mask == GroupMask.from_rows(["1100", "0001"], 16)
    assert record.settings["swa_token_num"] == 15
    for part in ("the first 4 tokens; our", "seqlen_threshold 100", "swa_token_num + 1."):
        assert part in notes
    export_mask(record, "headwise", tmp_path / "out.json")
    written = {"sink_token_num": 0, "swa_token_num": 15, "seqlen_threshold": 0} | HEADS
    assert json.loads((tmp_path / "out.json").read_text()) == {"headwise_config": written}


def test_what_a_headwise_config_leaves_out_is_as_rtp_llm_has_it(tmp_path: Path) -> None:
    path = write_json(tmp_path / "headwise.json", {"1": HEADS["1"]})
    record, notes = take(path, "headwise")
    assert record.mask == GroupMask.from_rows(["1111", "0001"], 8193)
    assert "keep full attention: 0." in notes
    record, notes = take(path, "headwise", window_tokens=64)
    assert record.mask.window_tokens == 64
    assert "8193, but --window 64" in notes


# --- Hugging Face ---


def test_layer_types_give_a_mask_of_whole_layers(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    path = write_json(tmp_path / "config.json", {"layer_types": types, "sliding_window": 64})
    record, notes = take(path, "layer_types", ratio=0.4)  # 0.8 of 2 layers: 1
    assert record.mask == GroupMask.from_rows(["1111", "0000"], 64, "layer")
    assert "64 tokens, from the file's sliding_window." in notes
    assert take(path, "layer_types", window_tokens=32)[0].mask.window_tokens == 32


# --- refusals ---


@pytest.mark.parametrize(
    ("text", "request_", "value"),
    [
        ("1 1 0 0\n", {"ratio": 0.5}, "has 1 lines, but org/small (0123456789ab) has 2 layers"),
        ("1 1 0 0\n1 1 0\n", {"ratio": 0.5}, "layer 1 has 3 values, but org/small"),
        ("1 1 0 0\n1 x 0 0\n", {"ratio": 0.5}, "layer 1 has 'x'"),
        ("1 1 0 0\n1 nan 0 0\n", {"ratio": 0.5}, "layer 1 has 'nan'"),
        ("1 1 0 0\n\xff", {"ratio": 0.5}, "heads.tsv"),
        ("1 1 0 0\n" * 2, {}, "pass --ratio"),
        ("1 1 0 0\n" * 2, {"ratio": 1.2}, "ratio is 1.2"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(
    tmp_path: Path, text: str, request_: dict[str, float], value: str
) -> None:
    (tmp_path / "heads.tsv").write_text(text, "latin-1")
    with pytest.raises(UserError, match=re.escape(value)):
        take(tmp_path / "heads.tsv", "duo", window_tokens=8, **request_)


@pytest.mark.parametrize(
    ("content", "request_", "value"),
    [
        (HEADS | {"1": [0] * 4}, {}, "layer 1 must list the 8 query heads of org/small"),
        (HEADS | {"1": [0] * 7 + [2]}, {}, "0, 0, 2]"),
        (HEADS | {"1": [0] * 7 + [1]}, {}, "layer 1, group 3 are [0, 1]"),
        (HEADS | {"2": [0] * 8}, {}, "'2'"),
        (HEADS | {"swa_token_num": "15"}, {}, "swa_token_num is '15'"),
        (HEADS | {"sink_token_num": -1}, {}, "sink_token_num is -1"),
        (HEADS, {"ratio": 0.75}, "5 of 8 groups on the window, but --ratio 0.75 means 6 of 8"),
        ({"swa_token_num": 15}, {}, "headwise_config"),
        ({"headwise_config": 3}, {}, "not 3"),
        ({"layer_types": FULL[:1]}, {}, "the 2 layers"),
        ({"layer_types": [*FULL[:1], "linear_attention"]}, {}, "layer 1 is 'linear_attention'"),
        ({"layer_types": FULL, "sliding_window": None}, {}, "--window"),
        ({"layer_types": FULL, "sliding_window": 0}, {}, "sliding_window is 0"),
        ({"layer_types": FULL, "sliding_window": 8}, {"ratio": 0.75}, "2 of 2 layers"),
    ],
)
def test_what_is_wrong_with_zeros_and_ones_is_named(
    tmp_path: Path, content: dict[str, Any], request_: dict[str, float], value: str
) -> None:
    path = write_json(tmp_path / "config.json", content)
    with pytest.raises(UserError, match=re.escape(value)) as error:
        take(path, "layer_types" if "layer_types" in content else "headwise", **request_)
    assert str(error.value).startswith(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.tsv", tmp_path):
        with pytest.raises(MissingFileError, match=str(path)):
            take(path, "duo", window_tokens=8, ratio=0.5)


# --- the commands ---


def test_import_and_export_from_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "small")
    (tmp_path / "heads.tsv").write_text("0.9\t0.8\t0.1\t0.2\n0.3\t0.4\t0.5\t1.0\n")
    mask = tmp_path / "mask.json"
    main(["import", str(tmp_path / "heads.tsv"), "--format", "duo", "--model", str(model),
          "--window", "16", "--ratio", "0.55", "--out", str(mask)])  # fmt: skip
    shown = capsys.readouterr().out
    assert "--ratio 0.55 means 5 of 8 groups, 0.625\n" in shown
    assert f"wrote {mask}\n" in shown
    record = read_mask(mask, read_model_info(model))
    assert record.mask == small_record().mask
    assert record.method == "import-duo"
    assert record.provenance["source"] == "heads.tsv"
    assert len(record.provenance["source_xxh3"]) == 32
    assert "packages" in record.provenance

    for format_name in ("duo", "headwise"):
        main(["export", str(mask), "--format", format_name, "--out", str(tmp_path / format_name)])
        assert f"wrote {tmp_path / format_name}\n" in capsys.readouterr().out
    assert (tmp_path / "duo").read_text() == "1\t1\t0\t0\n0\t0\t0\t1\n"
    with pytest.raises(SystemExit) as stop:
        main(["export", str(mask), "--format", "layer_types", "--out", str(tmp_path / "x")])
    assert stop.value.code == 2
    assert "Layer 0" in capsys.readouterr().err


def test_an_embedded_model_goes_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "heads.tsv").write_text("\t".join("10101010") + "\n" + "\t".join("01010101") + "\n")
    mask = tmp_path / "mask.json"
    main(["import", str(tmp_path / "heads.tsv"), "--format", "duo", "--model", "tiny-qwen3-2layer",
          "--window", "16", "--ratio", "0.5", "--out", str(mask)])  # fmt: skip
    assert read_mask(mask, read_model_info(asset_folder("tiny-qwen3-2layer"))).mask.ratio == 0.5
