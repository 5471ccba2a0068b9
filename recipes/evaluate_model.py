"""Judges a model, dense or hybrid, by suites of tasks: NIAH, LongBench, GSM8K, lm-eval's tasks.

    python recipes/evaluate_model.py --model tiny-qwen3 --suite niah longbench --out evaluation
    accelerate launch recipes/evaluate_model.py --model DIR --lengths 4096 8192 --essays FILE
    python recipes/evaluate_model.py --model DIR --lengths 65536 --yarn 2 --essays FILE
    python recipes/evaluate_model.py --model HYBRID --window 256 --suite lm-eval:arc_easy,piqa

Run the same command again and it goes on where it stopped. Prompts are a base model's: no chat
template is put around them.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bosch.config import Config, TokenCount, at_least
from bosch.masks.mask import check_window
from bosch.model import describe_model, read_model_config
from bosch.plugins import list_plugins, suggest
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.fingerprint import fingerprint_files, hash_file, plain
from bosch.run.folder import RunFolder, home_of
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage
from eval.results import collect_results, describe_evaluation
from eval.settings import FAST, PLAIN, SUITES, GenerationSettings, Label, SuiteRun
from eval.suites import gsm8k, longbench, niah
from recipes.materialize_model import fetch_model
from recipes.presets import find_model, read_shape

VERSION = 1  # raised when the same model and settings give other predictions
TOY = "toy"
TOY_POSITIONS = 4096  # a model with fewer is judged in the toy world, unless data are named
ESSAYS = "PaulGrahamEssays.json"
LM_EVAL = "lm-eval"


@dataclass(frozen=True)
class Options:
    """Judge a model by suites of tasks."""

    model: str = "tiny-qwen3"  # a Hugging Face folder or hub id, dense or hybrid
    suite: tuple[str, ...] = ("niah",)  # niah, longbench, gsm8k, lm-eval:TASK,TASK
    out: Path = Path("evaluation")  # folder to write
    limit: int | None = None  # of each task, its first examples
    lengths: tuple[TokenCount, ...] = ()  # of NIAH; none: those of the paper that fit the model
    niah_tasks: tuple[str, ...] = niah.Settings.tasks  # RULER's
    essays: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """NIAH's haystack, RULER's essays or toy; None: toy for a model under 4,096 positions"""
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it
    longbench_data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """data.zip, a folder, a hub id, or toy; None: toy for a model under 4,096 positions"""
    categories: Literal["paper", "official"] = "paper"
    """of LongBench's averages: the paper's seven, for which --gsm8k-data is needed too, or its own
    six"""
    gsm8k_data: str = gsm8k.HUB_ID  # a folder, a file of test rows, or a hub id
    gsm8k_tasks: tuple[str, ...] = gsm8k.Settings.tasks  # prompts of the suite gsm8k
    window: TokenCount | None = None  # another window than the hybrid was made with
    yarn: float | None = None  # stretch the positions by this factor: 2 for 64k, 4 for 128k
    yarn_from: Annotated[TokenCount | None, tyro.conf.arg(metavar="POSITIONS")] = None
    """that the model was trained on, 32,768 for Qwen3; None: what its config.json says"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 on a GPU, fp32 on the CPU
    batch: int | None = None  # sequences decoded at once; None: as many as change no result
    prefill_chunk: TokenCount = 8_192  # tokens of a prompt read at once
    plain: tyro.conf.FlagCreatePairsOff[bool] = False  # without the speed-ups that change no score
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error

    def __post_init__(self) -> None:
        at_least(1, self, "", "limit", "yarn", "yarn_from", "batch", "prefill_chunk")
        if self.window is not None:
            check_window(self.window)


@dataclass(frozen=True)
class Judging:
    """By what a model is judged, and how it is run."""

    suites: tuple[SuiteRun, ...]
    lm_eval_tasks: tuple[str, ...] = ()
    lm_eval_lengths: tuple[int, ...] = ()  # of its NIAH
    limit: int | None = None  # of lm-eval's tasks; suites have their own
    window_tokens: int | None = None  # None: the hybrid's own
    yarn: float | None = None
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    generation: GenerationSettings = FAST
    yarn_from: int | None = None

    def facts(self) -> dict[str, Any]:
        """All that decides scores. Texts are known by their content where they are here."""
        told: dict[str, Any] = plain(dataclasses.replace(self, generation=PLAIN))
        del told["generation"]
        if self.yarn_from is None:
            del told["yarn_from"]  # as runs that were begun earlier have it
        if self.generation.batch is not None and self.precision != "fp32":
            told["batch"] = self.generation.batch  # in half precision it decides near ties
        told["suites"] = {run.pop("name"): run for run in told["suites"]}
        contents = {name: self.content_of(name) for name in ("essays", "data", "gsm8k")}
        # Of essays an empty list too, as runs that were begun earlier have it.
        return told | {name: found for name, found in contents.items() if found or name == "essays"}

    def content_of(self, setting: str) -> list[str]:
        """Hashes of the files or folders that the suites name in this setting."""
        named = (getattr(run.settings, setting, None) for run in self.suites)
        paths = [Path(name) for name in named if name and name != TOY]
        return [
            fingerprint_files(path) if path.is_dir() else hash_file(path)
            for path in paths
            if path.exists()
        ]


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="evaluate_model.py", description=__doc__)
    rank, world = rank_and_world()
    progress.set_up(rank)
    judging = choose_judging(options)
    check_data(judging)
    out = options.out.absolute()
    stage = make_stage(out.name, options.model, judging, Label(out.name), out.parent / "shared")
    with RunFolder(out.parent, rank, world, say, home=home_of(out)) as run:
        run.complete(stage)
    if rank == 0:
        for line in describe_evaluation(out):
            say(line)
        if options.limit:
            say(f"of each task the first {options.limit} examples")
        say(f"predictions and scores in {options.out}")


# ----------------------------------------------------------------------------- in recover.py


def build(config: Config) -> Stage:
    """The stage `eval/dense` of recover.py: the model as it was before, for all runs once."""
    positions = read_shape(config.model).positions
    judging = judging_of(config, positions)
    return make_stage("eval/dense", config.model, judging, Label(Path(config.model).name))


def build_step(
    config: Config, run_path: Path, step: int, tokens: int, source: Stage | Artifact
) -> Stage:
    """The stage `eval/step-NNNNNN` of recover.py. `source` makes the model of that step, which
    took so many tokens: step 0 is the hybrid itself, the others are folders of the training."""
    judging = judging_of(config, read_shape(config.model).positions)
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
    from eval.report.tensorboard import project_evaluations

    collect_results(run_path / "eval", run_path.name)
    project_evaluations(run_path)


def check_data(judging: Judging) -> None:
    """Refuse data and packages that are not there before anything is written, and say which data
    they are."""
    for run in judging.suites:
        for task in run.suite.list_tasks(run.settings):
            run.suite.sources(run.settings, task)  # reads them
        if run.name == "longbench":
            say(longbench.describe_data(run.settings))
            longbench.check_packages(run.settings)
    if judging.lm_eval_tasks and not find_spec("lm_eval"):
        raise ValueError("lm-eval's tasks need its package: pip install 'bosch-hybrid[lm-eval]'")


def judging_of(config: Config, positions: int) -> Judging:
    """What EvalConfig says."""
    asked = config.eval
    needles = niah.Settings(
        essays=asked.niah_essays or config.calibration.essays,
        punkt=Path(config.calibration.punkt) if config.calibration.punkt else None,
        tasks=asked.niah_tasks,
        lengths=asked.niah_lengths,
        samples=max(niah.Settings.samples, asked.niah_samples),
    )
    tasks = longbench.Settings(
        data=TOY if asked.longbench == "toy" else asked.longbench_data,
        gsm8k=asked.gsm8k_data,
        categories=asked.longbench_categories,
        max_prompt_tokens=longest_prompt(positions),
        toy_rows=max(longbench.Settings.toy_rows, asked.longbench_rows or 0),
    )
    return Judging(
        (
            SuiteRun("niah", needles, asked.niah_samples),
            SuiteRun("longbench", tasks, asked.longbench_rows),
        ),
        precision=asked.precision,
        generation=GenerationSettings(batch=asked.batch, prefill_chunk=asked.prefill_chunk),
    )


# ------------------------------------------------------------------------- on the command line


def choose_judging(options: Options) -> Judging:
    """What the options ask for, refused here if it cannot be done."""
    if not options.suite:
        raise ValueError(f"--suite names nothing; say one of {', '.join(list_plugins(SUITES))}.")
    if options.window is not None:
        check_window_can_change(options)
    suites: list[SuiteRun] = []
    lm_eval_tasks: list[str] = []
    positions = count_positions(read_shape(options.model).positions, options)
    for name in options.suite:
        if name.startswith(f"{LM_EVAL}:"):
            named = [task for task in name.removeprefix(f"{LM_EVAL}:").split(",") if task]
            if not named:
                raise ValueError(f"--suite {name}: no task is named; say {LM_EVAL}:TASK,TASK.")
            lm_eval_tasks += named
        else:
            settings = suite_settings(name, options, positions)
            suites.append(SuiteRun(name, settings, options.limit))
    generation = GenerationSettings(batch=options.batch, prefill_chunk=options.prefill_chunk)
    if options.plain:
        generation = dataclasses.replace(PLAIN, prefill_chunk=options.prefill_chunk)
    return Judging(
        tuple(suites),
        tuple(lm_eval_tasks),
        options.lengths,
        options.limit,
        options.window,
        options.yarn,
        options.precision,
        generation,
        options.yarn_from,
    )


def count_positions(of_config: int, asked: Options | Judging) -> int:
    """How many there are, stretched as asked for."""
    return int((asked.yarn_from or of_config) * asked.yarn) if asked.yarn else of_config


def check_window_can_change(options: Options) -> None:
    folder = find_model(options.model)
    if folder is not None and not read_model_config(folder).get("bosch"):
        raise ValueError(
            f"--window {options.window}: {options.model} is no hybrid, so it has no window to "
            "change; make one with recipes/materialize_model.py."
        )


def suite_settings(name: str, options: Options, positions: int) -> Any:
    default = TOY if positions < TOY_POSITIONS else None
    if name == "niah":
        essays = options.essays or default or ESSAYS
        lengths = niah.TOY_LENGTHS if essays == TOY else niah.PAPER_LENGTHS
        chosen = options.lengths or tuple(n for n in lengths if n <= positions)
        check_lengths(chosen, positions, options)
        samples = max(niah.Settings.samples, options.limit or 0)
        return niah.Settings(essays, options.punkt, options.niah_tasks, chosen, samples)
    if name == "longbench":
        data = options.longbench_data or default or "zai-org/LongBench"
        return longbench.Settings(
            data,
            options.gsm8k_data,
            categories=options.categories,
            max_prompt_tokens=longest_prompt(positions),
            toy_rows=max(longbench.Settings.toy_rows, options.limit or 0),
        )
    if name == "gsm8k":
        return gsm8k.Settings(options.gsm8k_data, options.gsm8k_tasks)
    known = (*list_plugins(SUITES), f"{LM_EVAL}:TASK,...")
    if name not in known:
        raise ValueError(f"--suite {name}: no such suite; {suggest(name, known)}")
    raise ValueError(f"--suite {name}: this command knows no options for that suite.")


def check_lengths(lengths: Sequence[int], positions: int, options: Options) -> None:
    if not lengths:
        raise ValueError(
            f"{options.model} has {positions:,} positions, fewer than any usual length of NIAH; "
            "say --lengths, or --essays toy."
        )
    if max(lengths) > positions:
        raise ValueError(
            f"--lengths {max(lengths)}: {options.model} has {positions:,} positions"
            f"{' with --yarn' if options.yarn else ''}, and NIAH is never truncated. Ask for less, "
            "or stretch the positions with --yarn."
        )


def longest_prompt(positions: int) -> int:
    """Where LongBench cuts prompts: upstream's 3500, 7500, 15500 and 31500 tokens for models with
    4k to 32k positions lie on this line, and no model is given more."""
    return max(2, min(31_500, positions - positions * 3 // 128 - 500))


# ---------------------------------------------------------------------------------- the stage


def make_stage(
    name: str, model: str, judging: Judging, label: Label, examples_folder: Path | None = None
) -> Stage:
    """Judge a model. Without `examples_folder` the stage itself is shared, beside the examples."""
    folder = find_model(model)
    told = describe_model(folder) if folder else model  # no download before the run
    settings = {"model": told, **judging.facts(), "step": label.step, "tokens": label.tokens}

    def run(out: Path) -> None:
        judge(fetch_model(model), judging, label, out, examples_folder or out.parent)

    is_shared = examples_folder is None
    return Stage(name, run=run, settings=settings, version=VERSION, ranks="all", shared=is_shared)


def judge(folder: Path, judging: Judging, label: Label, out: Path, examples_folder: Path) -> None:
    from eval.runner import Evaluation, evaluate  # loads torch and transformers: seconds
    from recipes.generate_text import load_tokenizer

    rank, world = rank_and_world()
    load = load_once(partial(load_model, folder, judging))
    config = read_model_config(folder)
    hybrid = config.get("bosch") or {}
    tokenizer = load_tokenizer(folder)
    if rank == 0 and tokenizer.chat_template:
        say(
            f"{folder.name} has a chat template, which is not used: scores of a chat model are "
            "lower than published ones, where its prompts were put into it"
        )
    evaluation = Evaluation(
        load_model=load,
        tokenizer=tokenizer,
        suites=judging.suites,
        examples_folder=examples_folder,
        label=label,
        generation=judging.generation,
        max_positions=count_positions(config["max_position_embeddings"], judging),
        window_tokens=judging.window_tokens or hybrid.get("window"),
        rank=rank,
        world=world,
    )
    evaluate(evaluation, out)
    if judging.lm_eval_tasks and rank == 0:
        from eval.lm_eval_bridge import run_lm_eval

        run_lm_eval(
            load(),
            evaluation.tokenizer,
            judging.lm_eval_tasks,
            label,
            out / LM_EVAL,
            evaluation.max_positions,
            judging.lm_eval_lengths,
            judging.limit,
            judging.generation.batch or 1,
        )


def load_once(load: Callable[[], Any]) -> Callable[[], Any]:
    loaded: list[Any] = []

    def get() -> Any:
        if not loaded:
            loaded.append(load())
        return loaded[0]

    return get


def load_model(folder: Path, judging: Judging) -> Any:
    """The model on this rank's device, as it is judged."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import bosch  # noqa: F401  makes transformers know the hybrids

    config = AutoConfig.from_pretrained(folder)
    if judging.window_tokens is not None:
        if getattr(config, "bosch", None) is None:
            raise ValueError(f"--window {judging.window_tokens}: {folder} is no hybrid.")
        config.bosch = {**config.bosch, "window": judging.window_tokens}
    if judging.yarn is not None:
        stretch_positions(config, judging.yarn, folder, judging.yarn_from)
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    in_bf16 = judging.precision == "bf16" or (judging.precision == "auto" and on_gpu)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.bfloat16 if in_bf16 else torch.float32,
        attn_implementation="bosch" if has_our_attention(config) else None,
    )
    return model.to(device).eval()


def stretch_positions(
    config: Any, factor: float, folder: Path, trained_on: int | None = None
) -> None:
    """YaRN, as the model's authors ask for it in config.json. `max_position_embeddings` stays."""
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise ValueError(f"--yarn {factor:g}: {folder} has no one rope_theta that YaRN could keep.")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"--yarn {factor:g}: the positions of {folder} are stretched already "
            f"({rope['rope_type']}); leave --yarn out."
        )
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": float(factor),
        "original_max_position_embeddings": trained_on or config.max_position_embeddings,
    }


def has_our_attention(config: Any) -> bool:
    """Whether attention that reads a long prompt in pieces without a mask of all pairs serves this
    model: hybrids, and plain models of the families they are made from."""
    from bosch.hybrid.models import check_native_window, family_of

    try:
        family_of(config)
        check_native_window(config)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    exit_on_user_error(partial(main, sys.argv[1:]), debug="--debug" in sys.argv)
