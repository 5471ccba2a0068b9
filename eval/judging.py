"""How one model is judged: which suites, with what settings, and the model as it is loaded for it.
Loads torch only when a model is judged."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from bosch.config import Config, JudgingConfig
from bosch.data.calibration import check_set
from bosch.data.needles import PAPER_TASKS
from bosch.data.tokenizer_files import read_tokenizer
from bosch.eval.rows import read_rows
from bosch.eval.settings import FAST, PLAIN, SUITES, GenerationSettings, Label, SuiteRun
from bosch.eval.suites import gsm8k, longbench, niah
from bosch.model import load_model, load_tokenizer, read_model_config, read_shape
from bosch.plugins import list_plugins, suggest
from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint, fingerprint_files, hash_file, plain
from bosch.run.plan import follow_reference
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world

TOY = "toy"
LM_EVAL = "lm-eval"


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

    def positions(self, of_config: int) -> int:
        """How many the model has, stretched as asked for."""
        return int((self.yarn_from or of_config) * self.yarn) if self.yarn else of_config


def judging_of(config: Config) -> Judging:
    """By what recover.py judges the models of a run."""
    asked, positions = essays_of(config), read_shape(config.model).positions
    punkt = config.calibration.punkt
    suites = [suite_run(name, asked, positions, punkt) for name in ("niah", "longbench")]
    generation = GenerationSettings(batch=asked.batch, prefill_chunk=asked.prefill_chunk)
    return Judging(tuple(suites), precision=asked.precision, generation=generation)


def essays_of(config: Config) -> JudgingConfig:
    """The evaluation's settings, with the calibration's essays where they name none."""
    essays = config.eval.niah_essays or config.calibration.essays
    return dataclasses.replace(config.eval, niah_essays=essays)


def suite_run(
    name: str,
    asked: JudgingConfig,
    positions: int,
    punkt: str | None = None,
    gsm8k_tasks: tuple[str, ...] = gsm8k.Settings.tasks,
) -> SuiteRun:
    """A suite with the settings asked for. `positions`: of the model, stretched or not."""
    if name == "niah":
        needles = niah.Settings(
            essays=asked.niah_essays or TOY,
            punkt=Path(punkt) if punkt else None,
            tasks=asked.niah_tasks or PAPER_TASKS,
            lengths=asked.niah_lengths,
            samples=max(niah.Settings.samples, asked.niah_samples),
        )
        return SuiteRun(name, needles, asked.niah_samples)
    if name == "longbench":
        tasks = longbench.Settings(
            data=asked.longbench_data,
            gsm8k=asked.gsm8k_data,
            categories=asked.longbench_categories,
            max_prompt_tokens=longest_prompt(positions),
            toy_rows=max(longbench.Settings.toy_rows, asked.longbench_rows or 0),
        )
        return SuiteRun(name, tasks, asked.longbench_rows)
    if name == "gsm8k":
        return SuiteRun(name, gsm8k.Settings(asked.gsm8k_data, gsm8k_tasks), asked.samples)
    known = (*list_plugins(SUITES), f"{LM_EVAL}:TASK,...")
    if name not in known:
        raise UserError(f"--suite {name}: no such suite; {suggest(name, known)}")
    raise UserError(f"--suite {name}: this command knows no options for that suite.")


def longest_prompt(positions: int) -> int:
    """Where LongBench cuts prompts: upstream's 3500, 7500, 15500 and 31500 tokens for models with
    4k to 32k positions lie on this line, and no model is given more."""
    return max(2, min(31_500, positions - positions * 3 // 128 - 500))


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
        raise UserError(f"lm-eval's tasks need its package: {how_to_install('lm-eval', 'lm-eval')}")


def check_calibration(config: Config, run_path: Path) -> int:
    """How many of the NIAH examples that a run is judged on were compared with its calibration set;
    those that an evaluation has built by now. UserError if one of them holds a needle of it.
    """
    from bosch.eval.examples import describe_examples, find_file

    tokenizer_hash = read_tokenizer(config.model).hash
    shared = run_path.parent / "shared"
    texts: list[str] = []
    for run in judging_of(config).suites:
        for task in run.suite.list_tasks(run.settings) if run.name == "niah" else ():
            facts = describe_examples(run, task, tokenizer_hash)
            built = find_file(shared / f"examples-{fingerprint(facts)[:16]}", run.limit)
            if built is not None:
                texts += [row["prompt"] for row in read_rows(built)[: run.limit]]
    return check_set(follow_reference(run_path / "calibration"), texts)


# ---------------------------------------------------------------------------------- judging it


def judge(folder: Path, judging: Judging, label: Label, out: Path, examples_folder: Path) -> None:
    """Write predictions and scores of the model in `folder` into `out`. Every rank calls it."""
    from bosch.eval.runner import Evaluation, evaluate  # loads torch and transformers: seconds

    rank, world = rank_and_world()
    load = cache(lambda: load_judged(folder, judging))
    config = read_model_config(folder)
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
        max_positions=judging.positions(config["max_position_embeddings"]),
        window_tokens=judging.window_tokens or (config.get("bosch") or {}).get("window"),
        rank=rank,
        world=world,
    )
    evaluate(evaluation, out)
    if judging.lm_eval_tasks and rank == 0:
        from bosch.eval.lm_eval_bridge import run_lm_eval

        run_lm_eval(
            load(),
            tokenizer,
            judging.lm_eval_tasks,
            label,
            out / LM_EVAL,
            evaluation.max_positions,
            judging.lm_eval_lengths,
            judging.limit,
            judging.generation.batch or 1,
        )


def load_judged(folder: Path, judging: Judging) -> Any:
    """The model on this rank's device, as it is judged."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if judging.window_tokens is not None:
        if getattr(config, "bosch", None) is None:
            raise UserError(f"--window {judging.window_tokens}: {folder} is no hybrid.")
        config.bosch = {**config.bosch, "window": judging.window_tokens}
    if judging.yarn is not None:
        stretch_positions(config, judging.yarn, folder, judging.yarn_from)
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    in_bf16 = judging.precision == "bf16" or (judging.precision == "auto" and on_gpu)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    attention = "bosch" if has_our_attention(config) else None
    return load_model(folder, dtype, device, config=config, attn_implementation=attention)


def stretch_positions(
    config: Any, factor: float, folder: Path, trained_on: int | None = None
) -> None:
    """YaRN, as the model's authors ask for it in config.json. `max_position_embeddings` stays."""
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise UserError(f"--yarn {factor:g}: {folder} has no one rope_theta that YaRN could keep.")
    if rope.get("rope_type", "default") != "default":
        raise UserError(
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


def check_lengths(lengths: Sequence[int], positions: int, model: str, stretched: bool) -> None:
    """Refuse texts of NIAH that the model does not read whole."""
    if max(lengths) > positions:
        raise UserError(
            f"--lengths {max(lengths)}: {model} has {positions:,} positions"
            f"{' with --yarn' if stretched else ''}, and NIAH is never truncated. Ask for less, or "
            "stretch the positions with --yarn."
        )
