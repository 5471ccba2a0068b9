"""Evaluations: settings, folders, rows, floors, what is refused, killed ones, and lm-eval's."""

import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bosch.assets import asset_folder
from bosch.config import Config, EvaluationConfig
from bosch.eval import eval_stage, runner
from bosch.eval import evaluate as evaluation
from bosch.eval.evaluate import (
    check_data,
    evaluate_folder,
    load_for_evaluation,
    plan_evaluation,
)
from bosch.eval.lm_eval_bridge import results_of
from bosch.eval.results import LM_EVAL, collect_results, make_rows, show_evaluation, write_scores
from bosch.eval.rows import read_rows
from bosch.eval.settings import FAST, EvaluationPlan, Label, SuiteRun
from bosch.eval.suites import longbench, niah
from bosch.eval.suites._interface import Request, Result
from bosch.hybrid.conversion import deploy
from bosch.hybrid.sinks import measure_static_sink, sink_of_hybrid
from bosch.recipes import evaluate_model, presets
from bosch.run import progress
from bosch.run.checkout import how_to_install
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import DamagedArtifactError
from bosch.run.fingerprint import hash_file
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact
from tests.hybrid_folders import embedded_hybrid
from tests.lm_eval_task import NAME, write_task
from tests.model_factory import assert_close, random_tokens, same_mask, tiny_model

MODEL = asset_folder("tiny-qwen3-2layer")
ROW = {"run", "step", "tokens", "suite", "task", "length", "metric", "value", "stderr", "n"}
ROW |= {"dtype"}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_hybrid(tmp_path_factory.mktemp("training"))


def complete_step(run: Path, config: Config, step: int, hybrid: Path) -> None:
    """Evaluate a step as recover.py does: step 0 is the hybrid, the others are in the training's
    folder."""
    source = Artifact.load(hybrid.parent if step else hybrid)
    with RunFolder(run) as folder:
        folder.complete(eval_stage.stage_of_step(config, run, step, 512 * step, source))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, hybrid: Path) -> Path:
    """A run whose dense model and step 4 were evaluated with the smoke preset."""
    root = tmp_path_factory.mktemp("runs")
    config, run = presets.smoke(), root / "one"
    with RunFolder(run) as folder:
        folder.complete(eval_stage.stage_of_dense(config))
    complete_step(run, config, 4, hybrid)
    return run


def test_what_is_printed_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The floor over all lengths, not that of the shortest; lm-eval's numbers on its own scale."""
    progress.set_up()
    label = Label("model", 0, 0)

    def write(suite: str, results: list[Result], floors: list[Result]) -> None:
        (tmp_path / suite).mkdir()
        floor = {"window_tokens": 64, "rows": make_rows(label, suite, floors)}
        rows = make_rows(label, suite, results)
        write_scores(tmp_path / suite, {"suite": suite, "rows": rows, "floor": floors and floor})

    lengths = {1_024: 90.0, 4_096: 10.0, 0: 50.0}
    averages = [
        Result("average", length, "right", value, None, 8) for length, value in lengths.items()
    ]
    write("own_formats", averages, averages)
    write(LM_EVAL, [Result("gsm8k_cot", 0, "exact_match", 0.5734, 0.0136, 100)], [])
    show_evaluation(tmp_path)
    shown = capsys.readouterr().out
    assert "floor of a window of 64 tokens: 50.0 on average" in shown
    assert "0.5734 ±0.0136" in shown


def test_lengths_that_the_model_cannot_read_are_refused_for_any_suite() -> None:
    settings, suites = EvaluationConfig(niah_lengths=(512, 1_024)), ("niah", "long_answers")
    assert check_data(plan_evaluation(settings, suites, 1_024), 1_024) == []
    with pytest.raises(UserError, match=r"niah, length 1024.* at most 512 .*answers, length 1024"):
        check_data(plan_evaluation(settings, suites, 512), 512)
    assert check_data(plan_evaluation(settings, suites, 512, yarn=2), 512) == []


def test_who_names_a_suite_has_all_of_its_tasks(tmp_path: Path) -> None:
    """Also of a suite that the preset of the model does not ask."""
    AutoConfig.for_model("qwen3", max_position_embeddings=8_192).save_pretrained(tmp_path)
    usual = evaluate_model.usual({"model": str(tmp_path)})
    assert usual["settings"].options == ()
    for name in ("niah", "long_answers"):
        [suite] = plan_evaluation(usual["settings"], (name,), 8_192).suites
        assert (name, len(suite.settings.tasks)) in (("niah", 6), ("long_answers", 3))


def test_every_score_is_a_row_and_follows_from_saved_predictions(run: Path) -> None:
    folder = run / "eval" / "step-000004"
    scores = json.loads((folder / "niah" / "scores.json").read_text())
    rows = [row for row in scores["rows"] if row["metric"] == "string_match_all"]
    assert all(set(row) == ROW for row in rows)
    assert {(row["run"], row["step"], row["tokens"]) for row in rows} == {("one", 4, 4 * 2 * 256)}
    predictions = read_rows(folder / "niah" / "predictions.jsonl")
    for task in ("niah_single_1", "niah_multikey_2"):
        mine = [p["scores"]["string_match_all"] for p in predictions if p["task"] == task]
        (row,) = [row for row in rows if row["task"] == task]
        assert (row["value"], row["n"]) == (100 * sum(mine) / len(mine), len(mine))
    means = {row["task"]: row["value"] for row in rows}
    assert means["average"] == pytest.approx((means["single"] + means["multikey"]) / 2)
    scores = json.loads((folder / "longbench" / "scores.json").read_text())
    assert scores["rows"][-1]["task"] == "average"


def test_another_run_reuses_evaluations_and_examples(
    run: Path, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longbench, "build_examples", None)
    monkeypatch.setattr(niah, "build_examples", None)
    said: list[str] = []
    config, other = presets.smoke(), run.parent / "two"
    with RunFolder(other, say=said.append) as folder:
        folder.complete(eval_stage.stage_of_dense(config))
    assert ["eval/dense: complete, reused from" in line for line in said] == [True]
    # Without multikey_3: whether its examples fit is only known by building them.
    tasks = config.eval.niah_tasks[:5]
    settings = replace(config.eval, niah_tasks=tasks, prefill_chunk=64)  # changes no result
    complete_step(other, replace(config, eval=settings), 0, hybrid)
    rows = collect_results(other / "eval", "two")
    assert read_rows(other / "eval" / "results.jsonl") == rows
    assert {row["run"] for row in rows} == {"two"}
    assert list(dict.fromkeys(row["step"] for row in rows)) == [None, 0]
    assert list((other / "tb").glob("events*"))


def command(*arguments: object) -> None:
    evaluate_model.main([str(argument) for argument in arguments])


def test_the_command_shows_a_table_and_continues_where_it_stopped(
    hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated, narrow = tmp_path / "evaluated", tmp_path / "narrow"
    options = ("--model", hybrid, "--suite", "niah", "longbench", "--niah-lengths", 256)
    options = (*options, "--samples", 1, "--niah-tasks", "niah_single_2", "--out")
    command(*options, evaluated)
    said = capsys.readouterr().out
    assert re.search(r"niah_single_2 +│ +string_match_all", said)
    assert "floor of a window of 64 tokens" in said
    assert "the first 1 examples of each task" in said
    command(*options, evaluated)
    assert "evaluated: complete, reused" in capsys.readouterr().out
    with pytest.raises(UserError, match="limit: 1 -> 2"):
        command(*options, evaluated, "--samples", 2)
    command(*options, narrow, "--window", 8)
    first, second = (hash_file(out / "niah" / "predictions.jsonl") for out in (evaluated, narrow))
    assert first != second
    scores = json.loads((narrow / "niah" / "scores.json").read_text())
    assert scores["floor"]["window_tokens"] == 8


def test_predictions_of_one_model_are_not_used_for_another(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--niah-tasks", "niah_single_1", "niah_single_2", "--niah-lengths", 256)
    options = (*options, "--samples", 1, "--out", tmp_path / "evaluated")
    monkeypatch.setattr(runner, "write_rows", raise_killed)
    with pytest.raises(RuntimeError, match="killed"):
        command("--model", hybrid, *options)
    monkeypatch.undo()
    with pytest.raises(UserError, match="evaluated"):
        command("--model", MODEL, *options)
    command("--model", hybrid, *options)
    assert len(read_rows(tmp_path / "evaluated" / "niah" / "predictions.jsonl")) == 2


@pytest.fixture
def begun(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An evaluation that was killed before a call of a function of the runner."""
    settings = niah.Settings(lengths=(256,), tasks=("niah_single_1",))
    plan = EvaluationPlan((SuiteRun("niah", settings, 2),))

    def begin(killed_before: str) -> tuple[Path, Any]:
        def evaluate() -> None:
            evaluate_folder(
                hybrid, plan, Label("one", 4, 4), tmp_path / "out", tmp_path / "examples"
            )()

        with monkeypatch.context() as patch:
            patch.setattr(runner, killed_before, raise_killed)
            with pytest.raises(RuntimeError, match="killed"):
                evaluate()
        return tmp_path / "out", evaluate

    return begin


def raise_killed(*_: Any) -> None:
    raise RuntimeError("killed")


def test_a_damaged_prediction_is_made_again(begun: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, evaluate = begun("write_rows")
    evaluate()
    wanted = (folder / "niah" / "predictions.jsonl").read_bytes()
    shutil.rmtree(folder)
    begun("write_rows")
    (path,) = (folder / ".work").glob("niah-*.jsonl")
    first, second = path.read_text().splitlines(keepends=True)
    row = json.loads(second)
    changed = json.dumps(row | {"prediction": "42"}) + "\n"
    path.write_text(first + changed + "[" * 50_000 + "\n" + '{"task": []}\n' + first)
    with caplog.at_level("INFO", "bosch"):
        evaluate()
    assert f"{path}, line 2" in caplog.text
    assert (folder / "niah" / "predictions.jsonl").read_bytes() == wanted


def test_answers_begun_in_one_number_format_are_not_ended_in_another(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by --precision auto on a GPU, and on a CPU after a kill."""
    folder, evaluate = begun("write_rows")
    evaluate()  # the examples are there now, so that the next one answers before it is killed
    shutil.rmtree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "device_and_type", lambda plan: ("cpu", torch.bfloat16))
        begun("write_rows")
    (path,) = (folder / ".work").glob("niah-*.jsonl")
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=r"answers in bfloat16, and .* go on in float32"):
        evaluate()
    shutil.rmtree(folder / ".work")
    evaluate()
    rows = json.loads((folder / "niah" / "scores.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32"}


def test_damaged_predictions_of_an_unfinished_evaluation_are_named(begun: Any) -> None:
    folder, evaluate = begun("write_rows")
    evaluate()  # all is scored, but no manifest protects it yet
    path = folder / "niah" / "predictions.jsonl"
    content = path.read_text()
    first, _ = content.splitlines(keepends=True)
    for damaged in (content.replace('"prediction": "', '"prediction": "4', 1), first):
        path.write_text(damaged)
        with pytest.raises(DamagedArtifactError, match=str(path)):
            evaluate()
    path.unlink()
    evaluate()
    assert path.read_text() == content


def test_yarn_stretches_the_positions_and_keeps_their_base(tmp_path: Path) -> None:
    model = load_for_evaluation(MODEL, EvaluationPlan((), yarn=2))
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
        load_for_evaluation(tmp_path, EvaluationPlan((), yarn=3))


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "glm", "hunyuan_v1_dense", "cohere2"])
def test_yarn_stretches_what_a_family_rotates(family: str, tmp_path: Path) -> None:
    """SmolLM3 and Cohere2 do not rotate all layers, GLM half of a head; HunYuan has norms of keys
    behind the rotation, which undo the factor."""
    model = tiny_model(family)
    texts = [random_tokens(1, 4, seed=seed)[0] for seed in range(4)]
    deploy(model, same_mask(0, model), 8, measure_static_sink(model, texts)).save_pretrained(
        tmp_path
    )
    stretched = load_for_evaluation(tmp_path, EvaluationPlan((), yarn=4))
    rope = stretched.config.rope_parameters
    assert rope == model.config.rope_parameters | rope
    own = tiny_model(family, rope_parameters=rope)
    own.load_state_dict(model.state_dict())
    expected = measure_static_sink(own, texts).known_constants()
    assert_close(sink_of_hybrid(stretched).known_constants(), expected)


def test_yarn_stretches_static_sinks_as_the_first_key(tmp_path: Path) -> None:
    model = load_for_evaluation(MODEL, EvaluationPlan(()))
    ids = [torch.arange(20, 40)]
    num_layers, num_groups = model.config.num_hidden_layers, model.config.num_key_value_heads
    mask = [[0] * num_groups] * num_layers
    hybrid = tmp_path / "hybrid"
    deploy(model, mask, 8, measure_static_sink(model, ids)).save_pretrained(hybrid)
    stretched = load_for_evaluation(hybrid, EvaluationPlan((), yarn=2))
    dense = load_for_evaluation(MODEL, EvaluationPlan((), yarn=2))
    expected = measure_static_sink(dense, ids).known_constants().keys_LGD[0]
    found = stretched.model.layers[0].self_attn.window_sink_key
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    by_vllm = replace(FAST, engine="vllm")
    with pytest.raises(UserError, match="not with static sinks"):
        load_for_evaluation(hybrid, EvaluationPlan((), yarn=2, generation=by_vllm))


def test_longbench_prompts_are_cut_where_longbench_cuts_them() -> None:
    # LongBench/config/model2maxlen.json: models with 4k, 8k, 16k and 32k positions.
    expected = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500, 40960: 31500}
    expected |= {131072: 31500, 262144: 31500}  # and never more
    for positions, tokens in expected.items():
        request = Request(EvaluationConfig(), positions)
        settings, _ = longbench.configure(request)
        assert settings.max_prompt_tokens == tokens


def test_only_the_batch_in_half_precision_counts_among_speed_settings() -> None:
    plan = EvaluationPlan((SuiteRun("niah", niah.Settings(), 3),), precision="fp32")
    fast = replace(plan, generation=replace(FAST, batch=2, draft_answers=False))
    assert plan.facts() == fast.facts()
    assert replace(plan, precision="bf16").facts() != replace(fast, precision="bf16").facts()
    stretched = replace(plan, yarn=2.0)
    assert plan.facts() != stretched.facts() != replace(stretched, yarn_from=1024).facts()


def test_a_file_with_other_content_is_another_setting(tmp_path: Path) -> None:
    plan = EvaluationPlan((SuiteRun("niah", niah.Settings(essays=str(tmp_path))),))
    (tmp_path / "a.txt").write_text("One.")
    before = plan.facts()
    assert plan.facts() == before
    (tmp_path / "a.txt").write_text("Two.")
    assert plan.facts() != before


def test_lm_eval_s_numbers_become_rows() -> None:
    """Output of lm-eval 0.4.13 for these two tasks, shortened."""
    needles = {"alias": "x", "4096,none": -1, "1024,none": 0.5, "1024_stderr,none": 0.1}
    sums = {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"}
    counts = {"niah_single_1": {"effective": 4}, "gsm8k": {"effective": 8}}
    found = {"results": {"niah_single_1": needles, "gsm8k": sums}, "n-samples": counts}
    assert list(results_of(found)) == [
        Result("niah_single_1", 1024, "string_match_all", 0.5, 0.1, 4),
        Result("gsm8k", 0, "exact_match strict-match", 0.25, None, 8),
    ]


def test_lm_eval_runs_a_task_or_is_named_as_missing(tmp_path: Path) -> None:
    arguments = ["--model", "tiny-qwen3-2layer", "--suite", "lm-eval:niah_single_1"]
    arguments += ["--samples", "1", "--out", str(tmp_path / "evaluated")]
    if find_spec("lm_eval") is None:
        with pytest.raises(UserError, match=how_to_install("lm-eval", "lm-eval")):
            evaluate_model.main(arguments)
        return
    tasks = write_task(tmp_path / "tasks", "one two three", " four")
    own = ["--suite", f"lm-eval:{NAME}", "--include-path", str(tasks), "--samples", "1"]
    evaluate_model.main([*arguments[:2], *own, "--out", str(tmp_path / "owned")])
    (row,) = json.loads((tmp_path / "owned" / "lm-eval" / "scores.json").read_text())["rows"]
    assert (row["task"], row["n"]) == (NAME, 1)
    with pytest.raises(MissingFileError, match=r"the data of hellaswag: .*HF_HOME"):
        evaluate_model.main([*arguments[:2], "--suite", "lm-eval:hellaswag", *arguments[-2:]])
    evaluate_model.main([*arguments, "--niah-lengths", "256"])
    (row,) = json.loads((tmp_path / "evaluated" / "lm-eval" / "scores.json").read_text())["rows"]
    assert (row["task"], row["length"], row["n"]) == ("niah_single_1", 256, 1)
