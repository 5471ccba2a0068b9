"""--kv-budget: the ratio that fits a memory budget, in recover.py and search_mask.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bosch.masks.kv_budget import with_kv_budget
from bosch.masks.mask import read_mask
from bosch.recipes import recover, search_mask
from bosch.recipes.presets import paper
from bosch.run.errors import UserError


def test_the_smallest_ratio_that_fits_is_taken_and_said(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}
    shape |= {"num_attention_heads": 32, "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | shape))
    config = replace(paper(str(tmp_path)), method="fisher")
    for budget, method, ratio, line in (
        # Qwen3-8B: 36 layers x 8 groups of 4 * 128 bytes a token. At 131,072 tokens the dense model
        # needs 18 GiB, a group 64 MiB, and with a window of 1,024 half of one less 1/2 KiB:
        # (288 - m) / 16 + m * 1,023 / 2^21 <= 4 first holds at m = 226.
        ("4GiB@128k", "fisher", 226 / 288, "ratio 0.784722, 3.99 GiB at 131,072 tokens"),
        # Whole layers: 2 layers are 16 groups, and 29 of 36 layers are 232 groups.
        ("4GiB@128k", "interleave", 29 / 36, "ratio 0.805556, 3.61 GiB at 131,072 tokens"),
        ("20 gb@131072", "fisher", 0, "ratio 0, 19.3 GB at 131,072 tokens, of the dense model"),
    ):
        found, said = with_kv_budget(replace(config, method=method), budget, [])
        assert (found.ratio, said) == (ratio, f"--kv-budget {budget}: {line}")
    with pytest.raises(UserError, match=r"too small .* it needs 151 MB at 131,072 tokens"):
        with_kv_budget(config, "150MB@128k", [])
    # First tokens are held too: m * 2,047 / 2^21.
    found, _ = with_kv_budget(replace(config, sink="tokens=1024"), "4GiB@128k", [])
    assert found.ratio == 228 / 288


def test_recover_and_search_mask_take_it_in_place_of_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 layers x 8 groups of 4 * 16 bytes a token: 64 KiB a group, 1,984 bytes with the window."""
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "smoke", "--method", "random_groups", "--kv-budget", "512KiB@1k"]
    line = "--kv-budget 512KiB@1k: ratio 0.5625, 465 KiB at 1,024 tokens\n"
    recover.main([*words, "--dry-run"])
    assert line in capsys.readouterr().out
    with pytest.raises(UserError, match="--sink static needs calibration examples"):
        search_mask.main([*words, "--run-dir", "run"])
    search_mask.main([*words, "--run-dir", "run", "--sink", "none"])
    assert line in capsys.readouterr().out
    assert read_mask(tmp_path / "run" / "mask" / "mask.json").mask.num_windowed == 9
    for main in (recover.main, search_mask.main):
        with pytest.raises(UserError, match=r"--ratio 0\.5 both"):
            main([*words, "--ratio=0.5"])
