"""Which settings an evaluation comes to, what counts among them, and the model they load."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from bosch.assets import asset_folder
from bosch.config import JudgingConfig
from bosch.eval.judging import Judging, load_judged
from bosch.eval.settings import FAST, SuiteRun
from bosch.eval.suites import longbench, niah
from bosch.eval.suites._interface import Request
from bosch.run.errors import UserError

MODEL = asset_folder("tiny-qwen3-2layer")


def test_yarn_stretches_the_positions_and_keeps_their_base(tmp_path: Path) -> None:
    model = load_judged(MODEL, Judging((), yarn=2))
    plain = AutoConfig.from_pretrained(MODEL)
    assert model.config.max_position_embeddings == plain.max_position_embeddings
    assert model.config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": plain.rope_parameters["rope_theta"],
        "factor": 2.0,
        "original_max_position_embeddings": plain.max_position_embeddings,
    }
    rope, size = model.model.rotary_emb, plain.head_dim
    assert rope.attention_scaling == pytest.approx(1.0693, abs=1e-4)  # 0.1 ln 2 + 1
    slowest = plain.rope_parameters["rope_theta"] ** (-(size - 2) / size)
    assert rope.inv_freq[0] == pytest.approx(1.0)  # left as it is
    assert rope.inv_freq[-1] == pytest.approx(slowest / 2, rel=1e-6)  # half as fast
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--yarn 3: .*yarn"):
        load_judged(tmp_path, Judging((), yarn=3))


def test_longbench_prompts_are_cut_where_longbench_cuts_them() -> None:
    # LongBench/config/model2maxlen.json: models with 4k, 8k, 16k and 32k positions.
    expected = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500, 40960: 31500}
    for positions, tokens in expected.items():
        request = Request(JudgingConfig(), positions)
        settings, _ = longbench.configure(request)
        assert settings.max_prompt_tokens == tokens


def test_only_the_batch_in_half_precision_counts_among_speed_settings() -> None:
    judging = Judging((SuiteRun("niah", niah.Settings(), 3),), precision="fp32")
    fast = replace(judging, generation=replace(FAST, batch=2, draft_answers=False))
    assert judging.facts() == fast.facts()
    assert replace(judging, precision="bf16").facts() != replace(fast, precision="bf16").facts()
    stretched = replace(judging, yarn=2.0)
    assert judging.facts() != stretched.facts() != replace(stretched, yarn_from=1024).facts()


def test_a_file_with_other_content_is_another_setting(tmp_path: Path) -> None:
    judging = Judging((SuiteRun("niah", niah.Settings(essays=str(tmp_path))),))
    (tmp_path / "a.txt").write_text("One.")
    before = judging.facts()
    assert judging.facts() == before
    (tmp_path / "a.txt").write_text("Two.")
    assert judging.facts() != before
