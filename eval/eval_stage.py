"""The stages `eval/...`: a model is evaluated once, as it is, at step 0 and at each checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bosch.config import Config
from bosch.eval.evaluate import check_attention, check_data, evaluate_folder, plan_of_run
from bosch.eval.results import collect_results
from bosch.eval.settings import EvaluationPlan, Label
from bosch.model import describe_source, fetch_model, hash_text_files, read_shape
from bosch.run.errors import Refusals
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage

Check = Callable[[], list[str]]  # of a stage (bosch/run/stage.py)
VERSION = 1  # raised when the same model and settings give other predictions


def check(plan: EvaluationPlan, model: str) -> list[str]:
    """Refuse attention that cannot run here and data that is not there. Lines on which data it
    is."""
    refusals, lines = Refusals(), list[str]()
    with refusals:
        check_attention(plan)
    with refusals:
        lines = check_data(plan, read_shape(model).positions)
    refusals.raise_all()
    return lines


def stage(
    name: str,
    model: str,
    plan: EvaluationPlan,
    label: Label,
    examples_folder: Path | None = None,
    check_texts: Check | None = None,
) -> Stage:
    """A stage that evaluates a model. Without `examples_folder` the stage itself is shared by runs,
    with the examples beside it. `check_texts`: in the place of `check`, where several stages share
    it."""
    subject = {"model": describe_source(model), "step": label.step, "tokens": label.tokens}

    def run(out: Path) -> Callable[[], None]:
        return evaluate_folder(fetch_model(model), plan, label, out, examples_folder or out.parent)

    return Stage(
        name,
        run=run,
        settings=plan.facts() | subject,
        version=VERSION,
        ranks="all",
        shared=examples_folder is None,
        model_files=hash_text_files(model),
        check=check_texts or partial(check, plan, model),
    )


def stage_of_dense(config: Config, check_texts: Check | None = None) -> Stage:
    """`eval/dense`: the original model, evaluated once for all runs."""
    label, plan = Label(Path(config.model).name), plan_of_run(config)
    return stage("eval/dense", config.model, plan, label, check_texts=check_texts)


def stage_of_step(
    config: Config,
    run_path: Path,
    step: int,
    tokens: int,
    source: Stage | Artifact,
    check_texts: Check | None = None,
) -> Stage:
    """`eval/step-NNNNNN`. `source` makes the model of that step, trained on `tokens` tokens: step 0
    is the hybrid itself, the others are exports of the training."""
    plan = plan_of_run(config)
    label = Label(run_path.name, step, tokens)

    def run(out: Path, source: Artifact) -> Callable[[], None] | None:
        folder = source.folder / f"step-{step:06d}" if step else source.folder
        if not folder.is_dir():  # the training, whose files are verified, has ended elsewhere
            say(f"eval/step-{step:06d}: left out, as the training has no model of this step")
            return None
        score = evaluate_folder(folder, plan, label, out, run_path.parent / "shared")

        def finish() -> None:
            score()
            publish(run_path)

        return finish

    return Stage(
        f"eval/step-{step:06d}",
        run=run,
        settings={**plan.facts(), "step": step, "tokens": tokens},
        inputs={"source": source},
        version=VERSION,
        ranks="all",
        check=check_texts or partial(check, plan, config.model),
    )


def publish(run_path: Path) -> None:
    """Write results.jsonl, TensorBoard's curves and the scores in the models' cards from all
    evaluations of a run."""
    # These take .4 s to import, too long for --help.
    from bosch.eval.report.tensorboard import rebuild_tensorboard
    from bosch.eval.report.verdict import write_cards

    collect_results(run_path / "eval", run_path.name)
    rebuild_tensorboard(run_path)
    write_cards(run_path)
