"""Evaluates a model, dense or hybrid, on suites of tasks: NIAH, LongBench, RULER, lm-eval's tasks.

    python recipes/evaluate_model.py --model tiny-qwen3 --suite niah longbench --out evaluation
    accelerate launch recipes/evaluate_model.py --model DIR --niah-lengths 4096 8192
    python recipes/evaluate_model.py --model DIR --niah-lengths 65536 --yarn 2
    python recipes/evaluate_model.py --model HYBRID --window 256 --suite lm-eval:arc_easy,piqa
    python recipes/evaluate_model.py --model HYBRID --out hybrid --against evaluation

Options of a suite of your own go behind `--options` (docs/extending.md). Run the same command again
to continue where it stopped. Chat templates are not used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import run_stage
from bosch.config import (
    FLAT,
    EvaluationConfig,
    TokenCount,
    at_least,
    shared_fields,
    show_value,
)
from bosch.data.needle_text import resolve
from bosch.eval import eval_stage
from bosch.eval.evaluate import LM_EVAL, plan_evaluation
from bosch.eval.results import SCORES, show_evaluation
from bosch.eval.settings import SUITES, Engine, Label
from bosch.masks.window import check_window
from bosch.model import (
    check_weights,
    check_window_fits,
    fetch_config,
    find_model,
    load_tokenizer,
    read_model_config,
    read_shape,
)
from bosch.plugins import list_plugins
from bosch.recipes import presets
from bosch.run.dist import rank_and_world
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.progress import say
from bosch.run.stage import Stage, follow_reference


@dataclass(frozen=True)
class Options:
    model: str  # a Hugging Face folder or hub id, dense or hybrid
    settings: Annotated[EvaluationConfig, FLAT]
    # niah, own_formats, long_answers, longbench, longbench_v2, ruler, lm-eval:TASK,TASK, or a file
    # of your own
    suite: tuple[str, ...] = ("niah",)
    include_path: Path | None = None  # folder with lm-eval tasks of your own
    out: Path = Path("evaluation")  # folder for predictions and scores
    punkt: str | None = None  # folder with the English Punkt data, for essays that need it
    window: TokenCount | None = None  # window size in tokens; None: the hybrid's own
    yarn: float | None = None  # stretch the positions by this factor: 2 for 64k, 4 for 128k
    # Positions the model was trained on, 32,768 for Qwen3; None: as in its config.json.
    yarn_from: Annotated[TokenCount | None, "POSITIONS"] = None
    # Folders of other evaluations of the same examples, as the dense model's: differences from
    # each are printed, with intervals.
    against: tuple[Path, ...] = ()
    engine: Engine = "transformers"  # vllm: the same scores in fp32 (docs/serving.md)

    def __post_init__(self) -> None:
        at_least(1, self, "", "yarn", "yarn_from")
        if self.yarn_from is not None and self.yarn is None:
            raise UserError("--yarn-from is for --yarn; pass --yarn, or leave --yarn-from out.")
        if self.window is not None:
            check_window(self.window)


def main(arguments: Sequence[str]) -> None:
    options = run_stage(Options, arguments, build, usual)
    if rank_and_world()[0] == 0:
        show_evaluation(options.out.absolute())
        for other in options.against:
            show_differences(options.out.absolute(), other)
        if options.settings.samples:
            say(describe_samples(options.settings))


def show_differences(folder: Path, other: Path) -> None:
    from bosch.eval.report.paired import (  # takes .4 s, too long for --help
        differing_dtypes,
        pair_evaluations,
    )
    from bosch.eval.report.tables import align, paired_table

    table = paired_table(f"beside {other}", pair_evaluations(folder, other))
    if not table.rows:
        say(f"{other} has no examples of these suites")
    else:
        say(f"{table.title}:", *align(table), table.note)
        say(*(f"warning: {line}" for line in differing_dtypes(folder, other)))


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    config = presets.for_stage(given)
    settings = EvaluationConfig(**shared_fields(EvaluationConfig, config.eval))
    essays = resolve(config.eval.niah_essays or config.calibration.essays, config.data)
    return {"model": config.model, "settings": replace(settings, niah_essays=essays)}


def describe_samples(settings: EvaluationConfig) -> str:
    line = f"scored on the first {settings.samples} examples of each task"
    particular = {"niah_samples": settings.niah_samples, "longbench_rows": settings.longbench_rows}
    others = {name: n for name, n in particular.items() if n != settings.samples}
    return line + "".join(f", {name} {show_value(n)}" for name, n in others.items())


def build(options: Options, name: str) -> Stage:
    settings, model, window = options.settings, options.model, options.window
    lm_eval = [name for name in options.suite if name.startswith(f"{LM_EVAL}:")]
    tasks = [task for name in lm_eval for task in name.split(":", 1)[1].split(",") if task]
    if not options.suite:
        raise UserError(f"--suite is empty; name one or more of {', '.join(list_plugins(SUITES))}.")
    if window is not None and not read_model_config(fetch_config(model)).get("bosch"):
        raise UserError(f"--window {window}: {model} is not a hybrid; leave --window out.")
    if lm_eval and not tasks:
        raise UserError(f"--suite {lm_eval[0]}: no task is named; write {LM_EVAL}:TASK,TASK.")
    if (folder := options.include_path) and not (lm_eval and folder.is_dir()):
        problem = f"is for a folder of task files, with --suite {LM_EVAL}:TASK"
        raise UserError(f"--include-path {folder} {problem}.")
    if options.engine == "vllm":
        from bosch.eval.engine_vllm import check_engine  # imports torch

        check_engine()
        if settings.attention != "auto" or tasks or rank_and_world()[1] > 1:
            problem = "cannot have --attention, lm-eval's tasks or more than one process"
            raise UserError(f"--engine vllm {problem}; leave it or them out.")
    for other in options.against:
        if not any(follow_reference(other).glob(f"*/{SCORES}")):
            problem = "holds no evaluation; name a folder that `bosch evaluate` or a run wrote"
            raise MissingFileError(f"--against {other} {problem}, such as runs/NAME/eval/dense.")
    positions = read_shape(model).positions
    plan = plan_evaluation(
        settings,
        [name for name in options.suite if name not in lm_eval],
        positions,
        punkt=options.punkt,
        window_tokens=window,
        yarn=options.yarn,
        yarn_from=options.yarn_from,
        engine=options.engine,
        lm_eval_tasks=tuple(tasks),
        lm_eval_folder=folder,
        lm_eval_limit=settings.samples,
    )
    if window is not None:
        check_window_fits(window, model, plan.positions(positions))
    check_weights(model)
    if find_model(model):
        load_tokenizer(model)
    examples_folder = options.out.absolute().parent / "shared"
    return eval_stage.stage(name, model, plan, Label(name), examples_folder)


if __name__ == "__main__":
    run_main(main)
