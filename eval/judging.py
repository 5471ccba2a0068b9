"""Evaluates one model: checks the data, loads the model, predicts and scores. Imports torch only
when a model is evaluated."""

import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bosch.config import Config
from bosch.data.calibration import check_set
from bosch.data.tokenizer_files import read_tokenizer
from bosch.eval.elsewhere import check_elsewhere, predict_elsewhere, usual_python
from bosch.eval.lm_eval_bridge import SUITE as LM_EVAL
from bosch.eval.rows import read_rows
from bosch.eval.settings import GenerationSettings, Judging, Label, SuiteRun, configure_suites
from bosch.eval.suites._interface import Request
from bosch.model import LOCAL, load_model, load_tokenizer, read_model_config, read_shape
from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError, check_all
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import follow_reference


def judging_of(config: Config) -> Judging:
    """How recover.py evaluates the models of a run."""
    calibration, settings = config.calibration, config.eval
    positions = read_shape(config.model).positions
    python, gpus = settings.engine_python, settings.engine_gpus
    if python is None and (settings.engine == "vllm" or gpus):
        python = usual_python()
    how: Any = {"batch": settings.batch, "prefill_chunk": settings.prefill_chunk}
    how |= {"engine": settings.engine, "python": python, "gpus": gpus}
    request = Request(settings, positions, calibration.essays, calibration.punkt)
    return Judging(
        configure_suites(settings.suites, request),
        precision=settings.precision,
        generation=GenerationSettings(**how),
        attention=settings.attention,
    )


def check_data(judging: Judging, model: str) -> list[str]:
    """Read the data of all suites and check their packages before anything is written. Lines on
    which data they are."""
    positions = judging.positions(read_shape(model).positions)

    def check(run: SuiteRun) -> str | None:
        check_all(
            lambda: [run.suite.sources(run.settings, task) for task in run.tasks],
            partial(run.call, "check", positions),
        )
        return run.call("describe")

    described = check_all(*(partial(check, run) for run in judging.suites))
    if judging.lm_eval_tasks and not find_spec("lm_eval"):
        raise UserError(f"lm-eval's tasks need its package: {how_to_install('lm-eval', 'lm-eval')}")
    return [line for line in described if line]


def check_calibration(config: Config, run_path: Path) -> int:
    """How many test examples, of those built so far, were compared with the calibration set of a
    run. UserError if one of them contains a needle of the set."""
    from bosch.eval.runner import describe_examples, find_file

    tokenizer_hash = read_tokenizer(config.model).hash
    shared = run_path.parent / "shared"
    texts: list[str] = []
    for run in judging_of(config).suites:
        is_compared = getattr(run.suite, "COMPARED_WITH_CALIBRATION", False)
        for task in run.tasks if is_compared else ():
            facts = describe_examples(run, task, tokenizer_hash)
            built = find_file(shared / f"examples-{fingerprint(facts)[:16]}", run.limit)
            if built is not None:
                texts += [row["prompt"] for row in read_rows(built)[: run.limit]]
    return check_set(follow_reference(run_path / "calibration"), texts)


def judge(
    folder: Path, judging: Judging, label: Label, out: Path, examples_folder: Path
) -> Callable[[], None]:
    """Write predictions of the model in `folder` to `out`. Every rank calls this. Returns what rank
    0 does when all ranks have: write the scores."""
    from bosch.eval.runner import Evaluation, evaluate, score_all  # imports torch: seconds

    rank, world = rank_and_world()
    load, tokenizer = cache(lambda: load_judged(folder, judging)), load_tokenizer(folder)
    config = read_model_config(folder)
    positions = judging.positions(config["max_position_embeddings"])
    window = judging.window_tokens or (config.get("bosch") or {}).get("window")
    if rank == 0 and tokenizer.chat_template:
        say(f"{folder.name} has a chat template, not used here; scores with it are often higher")
    subject = (load, tokenizer, judging.suites, examples_folder, label, judging.generation)
    evaluation = Evaluation(*subject, positions, window, rank, world)
    score: Callable[[], None] = partial(score_all, evaluation, out)
    if judging.generation.python is None:
        score = evaluate(evaluation, out)
    else:
        predict_elsewhere(judge, (folder, judging, label, out, examples_folder))

    def finish() -> None:
        score()
        if judging.lm_eval_tasks:
            from bosch.eval.lm_eval_bridge import run_lm_eval

            run_lm_eval(load(), tokenizer, judging, label, out / LM_EVAL, positions)
        load.cache_clear()  # or the model stays while the next files are written

    return finish


def load_judged(folder: Path, judging: Judging) -> Any:
    """The model on this rank's device, with the window, positions and precision asked for."""
    from transformers import AutoConfig

    from bosch.hybrid.models import check_native_window, family_of
    from bosch.hybrid.sinks import KEY, kind_of
    from bosch.kernels import fuse_forward

    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: transformers cannot read its config.json ({error}).") from error
    device, dtype = device_and_type(judging)
    if judging.window_tokens is not None:
        config.bosch = {**config.bosch, "window": judging.window_tokens}
    if judging.yarn is not None:
        # As Qwen's documentation does; `max_position_embeddings` stays.
        rope = getattr(config, "rope_parameters", None) or {}
        kind, problem = rope.get("rope_type", "default"), ""
        if "rope_theta" not in rope:
            problem = "config.json has no single rope_theta, which YaRN needs"
        elif kind != "default":
            problem = f"positions are already stretched by {kind}"
        if problem:
            raise UserError(f"--yarn {judging.yarn:g}: {folder}: its {problem}. Leave --yarn out.")
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": rope["rope_theta"],
            "factor": float(judging.yarn),
            "original_max_position_embeddings": judging.yarn_from or config.max_position_embeddings,
        }
    stretches_sinks = judging.yarn and hasattr(config, "bosch") and kind_of(config) == "static"
    if judging.generation.engine == "vllm":
        if stretches_sinks:
            raise UserError("--yarn and --engine vllm: not with static sinks. Leave one out.")
        from bosch.eval.engine_vllm import start_engine

        names = ("bosch", "rope_parameters")
        changed = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return start_engine(folder, dtype=dtype, hf_overrides=changed)
    attention: str | None = "bosch"  # reads long prompts in chunks without a full T x T mask
    try:
        family_of(config)
        check_native_window(config)
    except UserError:  # neither a hybrid nor a dense model of a supported family
        attention = None
        if judging.attention != "auto":
            problem = f"--attention {judging.attention}: {folder} is a {config.model_type}"
            raise UserError(f"{problem}, which transformers computes; leave it out.") from None
    more = {"config": config, "attn_implementation": attention}
    model: Any = load_model(folder, dtype, device, judging.attention, **more)
    if attention is not None:  # a model of our families
        fuse_forward(model)
    if stretches_sinks:  # YaRN makes keys larger, also that of a first token
        scaling = model.base_model.rotary_emb.attention_scaling
        for name, sink in model.named_parameters():
            if name.endswith(KEY):
                sink.data *= scaling
    return model


def device_and_type(judging: Judging) -> tuple[str, Any]:
    """Where this rank's model is, and in which number format."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    in_bf16 = judging.precision == "bf16" or (judging.precision == "auto" and on_gpu)
    return device, torch.bfloat16 if in_bf16 else torch.float32


def check_attention(judging: Judging) -> None:
    """Refuse, before work begins, an attention backend or an interpreter that was named and cannot
    run here."""
    if judging.generation.python is not None:
        check_elsewhere(judging)
    if judging.attention == "auto":
        return
    import torch

    from bosch.attention.dispatch import check_backend

    device, dtype = device_and_type(judging)
    check = partial(check_backend, "eval.attention", judging.attention, torch.device(device))
    check(dtype)
    if judging.generation.batch != 1:  # texts of different lengths are padded
        check(dtype, padded=True, remedy="Set eval.batch to 1, or name another.")
