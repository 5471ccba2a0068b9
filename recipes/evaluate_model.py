"""Judges a model, dense or hybrid, by suites of tasks: NIAH, LongBench, GSM8K, lm-eval's tasks.

    python recipes/evaluate_model.py --model tiny-qwen3 --suite niah longbench --out evaluation
    accelerate launch recipes/evaluate_model.py --model DIR --lengths 4096 8192 --essays FILE
    python recipes/evaluate_model.py --model DIR --lengths 65536 --yarn 2 --essays FILE
    python recipes/evaluate_model.py --model HYBRID --window 256 --suite lm-eval:arc_easy,piqa

`--limit`, `--lengths`, `--essays` and `--categories` are short for --samples, --niah-lengths,
--niah-essays and --longbench-categories. Run the same command again and it goes on where it
stopped. Prompts are a base model's: no chat template is put around them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from bosch.command_line import parse
from bosch.config import Config, JudgingConfig, TokenCount, at_least, shared_fields
from bosch.eval.judging import (
    LM_EVAL,
    Judging,
    check_attention,
    check_data,
    check_lengths,
    essays_of,
    judge,
    judging_of,
    suite_run,
)
from bosch.eval.results import collect_results, describe_evaluation
from bosch.eval.settings import PLAIN, SUITES, GenerationSettings, Label
from bosch.eval.suites import gsm8k
from bosch.masks.mask import check_window
from bosch.model import describe_source, fetch_model, find_model, read_model_config, read_shape
from bosch.plugins import list_plugins
from bosch.recipes import presets
from bosch.run import progress
from bosch.run.errors import UserError, exit_on_user_error
from bosch.run.folder import RunFolder, home_of
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage

VERSION = 1  # raised when the same model and settings give other predictions
SHORT = {
    "--limit": "--samples",
    "--lengths": "--niah-lengths",
    "--essays": "--niah-essays",
    "--categories": "--longbench-categories",
}


@dataclass(frozen=True)
class Options:
    """Judge a model by suites of tasks."""

    model: str  # a Hugging Face folder or hub id, dense or hybrid
    judging: Annotated[JudgingConfig, tyro.conf.arg(name="")]
    suite: tuple[str, ...] = ("niah",)  # niah, longbench, gsm8k, lm-eval:TASK,TASK
    out: Path = Path("evaluation")  # folder to write
    punkt: str | None = None  # folder of the English Punkt data, for essays that need it
    gsm8k_tasks: tuple[str, ...] = gsm8k.Settings.tasks  # prompts of the suite gsm8k
    window: TokenCount | None = None  # another window than the hybrid was made with
    yarn: float | None = None  # stretch the positions by this factor: 2 for 64k, 4 for 128k
    # Positions that the model was trained on, 32,768 for Qwen3; None: what its config.json says.
    yarn_from: Annotated[TokenCount | None, tyro.conf.arg(metavar="POSITIONS")] = None
    plain: tyro.conf.FlagCreatePairsOff[bool] = False  # without the speed-ups that change no score
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error

    def __post_init__(self) -> None:
        at_least(1, self, "", "yarn", "yarn_from")
        if self.window is not None:
            check_window(self.window)


def main(arguments: Sequence[str]) -> None:
    config = presets.for_stage(arguments)
    asked = JudgingConfig(**shared_fields(JudgingConfig, essays_of(config)))
    options = parse(Options, arguments, Options(config.model, asked), SHORT)
    rank, world = rank_and_world()
    progress.set_up(rank)
    judging = choose_judging(options)
    check_attention(judging)
    check_data(judging)
    out = options.out.absolute()
    stage = make_stage(out.name, options.model, judging, Label(out.name), out.parent / "shared")
    with RunFolder(out.parent, rank, world, say, home=home_of(out)) as run:
        run.complete(stage)
    if rank == 0:
        for line in describe_evaluation(out):
            say(line)
        if options.judging.samples:
            say(f"of each task the first {options.judging.samples} examples")
        say(f"predictions and scores in {options.out}")


def choose_judging(options: Options) -> Judging:
    """What the options ask for, refused here if it cannot be done."""
    asked = options.judging
    if not options.suite:
        raise UserError(f"--suite names nothing; say one of {', '.join(list_plugins(SUITES))}.")
    if options.window is not None:
        check_window_can_change(options.model, options.window)
    if options.plain:
        generation = replace(PLAIN, prefill_chunk=asked.prefill_chunk)
    else:
        generation = GenerationSettings(batch=asked.batch, prefill_chunk=asked.prefill_chunk)
    lm_eval = [name for name in options.suite if name.startswith(f"{LM_EVAL}:")]
    tasks = [task for name in lm_eval for task in name.split(":", 1)[1].split(",") if task]
    if lm_eval and not tasks:
        raise UserError(f"--suite {lm_eval[0]}: no task is named; say {LM_EVAL}:TASK,TASK.")
    judging = Judging(
        (),
        lm_eval_tasks=tuple(tasks),
        lm_eval_lengths=asked.niah_lengths if tasks else (),
        limit=asked.samples,
        window_tokens=options.window,
        yarn=options.yarn,
        precision=asked.precision,
        generation=generation,
        yarn_from=options.yarn_from,
        attention=asked.attention,
    )
    positions = judging.positions(read_shape(options.model).positions)
    if "niah" in options.suite:
        check_lengths(asked.niah_lengths, positions, options.model, options.yarn is not None)
    suites = [
        suite_run(name, asked, positions, options.punkt, options.gsm8k_tasks)
        for name in options.suite
        if name not in lm_eval
    ]
    return replace(judging, suites=tuple(suites))


def check_window_can_change(model: str, window: int) -> None:
    folder = find_model(model)
    if folder is not None and not read_model_config(folder).get("bosch"):
        raise UserError(
            f"--window {window}: {model} is no hybrid, so it has no window to change; make one "
            "with recipes/materialize_model.py."
        )


# ---------------------------------------------------------------------------------- the stages


def build(config: Config) -> Stage:
    """The stage `eval/dense` of recover.py: the model as it was before, for all runs once."""
    label = Label(Path(config.model).name)
    return make_stage("eval/dense", config.model, judging_of(config), label)


def build_step(
    config: Config, run_path: Path, step: int, tokens: int, source: Stage | Artifact
) -> Stage:
    """The stage `eval/step-NNNNNN` of recover.py. `source` makes the model of that step, which
    took so many tokens: step 0 is the hybrid itself, the others are folders of the training."""
    judging = judging_of(config)
    label = Label(run_path.name, step, tokens)

    def run(out: Path, source: Artifact) -> None:
        folder = source.folder / f"step-{step:06d}" if step else source.folder
        judge(folder, judging, label, out, run_path.parent / "shared")
        if rank_and_world()[0] == 0:
            publish(run_path)

    return Stage(
        f"eval/step-{step:06d}",
        run=run,
        settings={**judging.facts(), "step": step, "tokens": tokens},
        inputs={"source": source},
        version=VERSION,
        ranks="all",
    )


def publish(run_path: Path) -> None:
    """Show what has been evaluated: results.jsonl, and TensorBoard's curves made anew from it."""
    from bosch.eval.report.tensorboard import project_evaluations

    collect_results(run_path / "eval", run_path.name)
    project_evaluations(run_path)


def make_stage(
    name: str, model: str, judging: Judging, label: Label, examples_folder: Path | None = None
) -> Stage:
    """Judge a model. Without `examples_folder` the stage itself is shared, beside the examples."""
    told = {"model": describe_source(model), "step": label.step, "tokens": label.tokens}

    def run(out: Path) -> None:
        judge(fetch_model(model), judging, label, out, examples_folder or out.parent)

    return Stage(
        name,
        run=run,
        settings=judging.facts() | told,
        version=VERSION,
        ranks="all",
        shared=examples_folder is None,
    )


if __name__ == "__main__":
    exit_on_user_error(partial(main, sys.argv[1:]), debug="--debug" in sys.argv)
