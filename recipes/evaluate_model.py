"""Evaluates a model, dense or hybrid, on suites of tasks: NIAH, LongBench, RULER, lm-eval's tasks.

    python recipes/evaluate_model.py --model tiny-qwen3 --suite niah longbench --out evaluation
    accelerate launch recipes/evaluate_model.py --model DIR --niah-lengths 4096 8192
    python recipes/evaluate_model.py --model DIR --niah-lengths 65536 --yarn 2
    python recipes/evaluate_model.py --model HYBRID --window 256 --suite lm-eval:arc_easy,piqa

Options of a suite of your own go behind `--options` (docs/extending.md). Run the same command again
to continue where it stopped. Chat templates are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from bosch import model as models
from bosch.command_line import run_stage
from bosch.config import (
    FLAT,
    JudgingConfig,
    TokenCount,
    at_least,
    shared_fields,
    show_value,
)
from bosch.eval import eval_stage
from bosch.eval.judging import LM_EVAL, Judging, check_attention, check_data
from bosch.eval.results import show_evaluation
from bosch.eval.settings import SUITES, Engine, GenerationSettings, Label, configure_suites
from bosch.eval.suites._interface import Request
from bosch.masks.window import check_window
from bosch.plugins import list_plugins
from bosch.recipes import presets
from bosch.run.errors import UserError, run_main
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Stage


@dataclass(frozen=True)
class Options:
    model: str  # a Hugging Face folder or hub id, dense or hybrid
    judging: Annotated[JudgingConfig, FLAT]
    suite: tuple[str, ...] = ("niah",)  # names of files in eval/suites, and lm-eval:TASK,TASK
    include_path: Path | None = None  # folder with lm-eval tasks of your own
    out: Path = Path("evaluation")  # folder for predictions and scores
    punkt: str | None = None  # folder with the English Punkt data, for essays that need it
    window: TokenCount | None = None  # window size in tokens; None: the hybrid's own
    yarn: float | None = None  # stretch the positions by this factor: 2 for 64k, 4 for 128k
    # Positions the model was trained on, 32,768 for Qwen3; None: as in its config.json.
    yarn_from: Annotated[TokenCount | None, "POSITIONS"] = None
    engine: Engine = "transformers"  # vllm: the same scores in fp32 (docs/serving.md)

    def __post_init__(self) -> None:
        at_least(1, self, "", "yarn", "yarn_from")
        if self.yarn_from is not None and self.yarn is None:
            raise UserError("--yarn-from is for --yarn; pass --yarn, or leave --yarn-from out.")
        if self.window is not None:
            check_window(self.window)


def main(arguments: Sequence[str]) -> None:
    config = presets.for_stage(arguments)
    essays = config.eval.niah_essays or config.calibration.essays
    values = shared_fields(JudgingConfig, config.eval) | {"niah_essays": essays}
    usual = {"model": config.model, "judging": JudgingConfig(**values)}
    options = run_stage(Options, arguments, build, usual)
    if rank_and_world()[0] == 0:
        show_evaluation(options.out.absolute())
        if options.judging.samples:
            say(describe_samples(options.judging))


def describe_samples(settings: JudgingConfig) -> str:
    line = f"scored on the first {settings.samples} examples of each task"
    particular = {"niah_samples": settings.niah_samples, "longbench_rows": settings.longbench_rows}
    others = {name: n for name, n in particular.items() if n != settings.samples}
    return line + "".join(f", {name} {show_value(n)}" for name, n in others.items())


def build(options: Options, name: str) -> Stage:
    settings, model, window = options.judging, options.model, options.window
    lm_eval = [name for name in options.suite if name.startswith(f"{LM_EVAL}:")]
    tasks = [task for name in lm_eval for task in name.split(":", 1)[1].split(",") if task]
    if not options.suite:
        raise UserError(f"--suite is empty; name one or more of {', '.join(list_plugins(SUITES))}.")
    if window is not None and not models.read_model_config(models.fetch_config(model)).get("bosch"):
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
    judging = Judging(
        (),
        lm_eval_tasks=tuple(tasks),
        lm_eval_lengths=settings.niah_lengths if tasks else (),
        lm_eval_folder=folder,
        limit=settings.samples,
        window_tokens=window,
        yarn=options.yarn,
        precision=settings.precision,
        generation=GenerationSettings(
            batch=settings.batch, prefill_chunk=settings.prefill_chunk, engine=options.engine
        ),
        yarn_from=options.yarn_from,
        attention=settings.attention,
    )
    positions = judging.positions(models.read_shape(model).positions)
    if window is not None:
        models.check_window_fits(window, model, positions)
    request = Request(settings, positions, punkt=options.punkt)
    names = [name for name in options.suite if name not in lm_eval]
    judging = replace(judging, suites=configure_suites(names, request))
    check_attention(judging)
    say(*check_data(judging, model))
    models.check_weights(model)
    if models.find_model(model):
        models.load_tokenizer(model)
    examples_folder = options.out.absolute().parent / "shared"
    return eval_stage.stage(name, model, judging, Label(name), examples_folder)


if __name__ == "__main__":
    run_main(main)
