"""Tasks of lm-evaluation-harness on our models, for cross-checks and for tasks no suite has.

Its NIAH and LongBench differ from RULER's and LongBench's own: it builds shorter prompts, truncates
long ones on the left and strips predictions, so its scores differ from our suites'. Values are as
lm-eval reports them, most of them from 0 to 1. Runs in one process only.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bosch.eval.results import LM_EVAL, make_rows, write_scores
from bosch.eval.rows import write_rows
from bosch.eval.settings import EvaluationPlan, Label
from bosch.eval.suites._interface import Result
from bosch.model import names_code
from bosch.run.checkout import how_to_install
from bosch.run.errors import MissingFileError, UserError
from bosch.run.hub import prepare_hub


def run_lm_eval(
    model: Any,
    tokenizer: Any,
    plan: EvaluationPlan,
    label: Label,
    folder: Path,
    most: int | None = None,
) -> None:
    """Write scores.json with our rows and samples.jsonl with lm-eval's. Longer prompts than
    `most` tokens are truncated on the left by lm-eval."""
    with explain_missing():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    # lm-eval's NIAH loads the tokenizer with trust_remote_code=True.
    for name in ("config.json", "tokenizer_config.json"):
        if names_code(path := Path(tokenizer.name_or_path) / name):
            raise UserError(
                f"{path} names code (auto_map), which lm-eval would run; remove it from a copy."
            )
    metadata: dict[str, Any] = {"tokenizer": tokenizer.name_or_path}
    if plan.lm_eval_lengths:  # of its NIAH
        metadata["max_seq_lengths"] = list(plan.lm_eval_lengths)
    tasks, manager = list(plan.lm_eval_tasks), check_tasks(plan, metadata)
    batch, limit = plan.generation.batch or 1, plan.limit
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=most)
    prepare_hub()
    try:
        results = simple_evaluate(
            model=harness, tasks=tasks, task_manager=manager, limit=limit, log_samples=True
        )
    except ConnectionError as error:
        raise MissingFileError(
            f"lm-eval cannot fetch the data of {', '.join(tasks)}: {error}. Let HF_HOME name it."
        ) from error
    samples = [
        {"task": task} | json.loads(json.dumps(sample, default=str))
        for task, members in results["samples"].items()
        for sample in members
    ]
    write_rows(folder / "samples.jsonl", samples)
    facts = {"suite": LM_EVAL, "version": results["lm_eval_version"], "limit": limit}
    write_scores(folder, facts | {"rows": make_rows(label, LM_EVAL, results_of(results))})


@contextmanager
def explain_missing() -> Iterator[None]:
    try:
        yield
    except ImportError as error:  # or of a package that it needs
        how = how_to_install("lm-eval", "lm-eval")
        raise UserError(f"lm-eval cannot be loaded ({error}). Install it: {how}") from error


def check_tasks(plan: EvaluationPlan, metadata: Mapping[str, Any] | None = None) -> Any:
    """lm-eval's TaskManager. UserError if it does not know one of the tasks."""
    with explain_missing():
        from lm_eval.tasks import TaskManager
    include = plan.lm_eval_folder
    manager = TaskManager(metadata=metadata, include_path=include and str(include))
    for task in plan.lm_eval_tasks:
        if task not in manager.all_tasks:
            raise UserError(f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists them.")
    return manager


def results_of(results: Mapping[str, Any]) -> Iterator[Result]:
    """Of what simple_evaluate returns. A metric that is a number is a match at that length."""
    for task, numbers in results["results"].items():
        n = results["n-samples"].get(task, {}).get("effective", 0)  # task groups have none
        for name, value in numbers.items():
            # lm-eval names a metric and a filter in one key, `exact_match,strict-match`.
            metric, _, filter_name = name.partition(",")
            if not filter_name or metric.endswith("_stderr") or value == -1:
                continue  # -1: of a length that NIAH, with a metric for each, was not run in
            stderr = numbers.get(f"{metric}_stderr,{filter_name}")
            error = float(stderr) if isinstance(stderr, int | float) else None
            length = int(metric) if metric.isdigit() else 0
            full_name = metric if filter_name == "none" else f"{metric} {filter_name}"
            known_as = "string_match_all" if length else full_name
            yield Result(task, length, known_as, float(value), error, n)
