"""Evaluates one model: checks the data, loads the model, predicts and scores. Imports torch only
when a model is evaluated."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bosch.config import Config, EvaluationConfig
from bosch.data.calibration import check_disjoint
from bosch.data.needle_text import resolve
from bosch.data.tokenizer_files import read_tokenizer
from bosch.eval.elsewhere import check_elsewhere, predict_elsewhere, usual_python
from bosch.eval.lm_eval_bridge import check_tasks
from bosch.eval.results import LM_EVAL
from bosch.eval.rows import read_rows
from bosch.eval.settings import (
    SHORTER_OR_STRETCHED,
    Engine,
    EvaluationPlan,
    GenerationSettings,
    Label,
    configure_suites,
)
from bosch.eval.suites._interface import Request
from bosch.model import LOCAL, load_model, load_tokenizer, read_model_config, read_shape
from bosch.run.checkout import how_to_install
from bosch.run.dist import rank_and_world
from bosch.run.errors import Refusals, UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.memory import has_gpu, is_old_gpu
from bosch.run.progress import say
from bosch.run.stage import follow_reference
from bosch.sink import KEY, Sink


def plan_evaluation(
    settings: EvaluationConfig,
    suites: Sequence[str],
    positions: int,
    *,
    essays: str | None = None,
    punkt: str | None = None,
    window_tokens: int | None = None,
    yarn: float | None = None,
    yarn_from: int | None = None,
    engine: Engine = "transformers",
    python: str | None = None,
    gpus: tuple[str, ...] = (),
    lm_eval_tasks: tuple[str, ...] = (),
    lm_eval_folder: Path | None = None,
    lm_eval_limit: int | None = None,
) -> EvaluationPlan:
    """What a model is evaluated on, and how: of a command, of a run and of a call from Python.

    positions: how many tokens the model reads without YaRN. essays: the needle tasks' where the
    settings name none. The other arguments are described at EvaluationPlan and its generation."""
    plan = EvaluationPlan(
        suites=(),
        lm_eval_tasks=lm_eval_tasks,
        lm_eval_lengths=settings.niah_lengths if lm_eval_tasks else (),
        lm_eval_folder=lm_eval_folder,
        limit=lm_eval_limit,
        window_tokens=window_tokens,
        yarn=yarn,
        precision=settings.precision,
        generation=GenerationSettings(
            batch=settings.batch,
            prefill_chunk=settings.prefill_chunk,
            engine=engine,
            python=python,
            gpus=gpus,
        ),
        yarn_from=yarn_from,
        attention=settings.attention,
    )
    # A suite refuses texts that are too long, so it has to know how far YaRN stretches.
    request = Request(settings, plan.positions(positions), essays, punkt)
    return replace(plan, suites=configure_suites(suites, request))


def plan_of_run(config: Config) -> EvaluationPlan:
    """How `bosch recover` evaluates the models of a run."""
    settings, python = config.eval, config.eval.engine_python
    if settings.niah_essays is not None:
        settings = replace(settings, niah_essays=resolve(settings.niah_essays, config.data))
    if python is None and (settings.engine == "vllm" or settings.engine_gpus):
        python = usual_python()
    return plan_evaluation(
        settings,
        settings.suites,
        read_shape(config.model).positions,
        essays=resolve(config.calibration.essays, config.data),
        punkt=config.calibration.punkt,
        engine=settings.engine,
        python=python,
        gpus=settings.engine_gpus,
    )


def check_data(plan: EvaluationPlan, positions: int) -> list[str]:
    """Read the data of all suites and check their packages before anything is written. Lines on
    which data they are. `positions`: of the model, without YaRN."""
    positions = plan.positions(positions)
    refusals, described = Refusals(), list[str | None]()
    for run in plan.suites:
        with refusals:
            # Missing files show in `sources`, packages and impossible settings in `check`: a user
            # mends all of them at once, before hours are spent.
            if not run.tasks:
                raise UserError(
                    f"suite {run.name} has no task by these settings: name others, or the files "
                    "that its tasks need."
                )
            of_suite = Refusals()
            with of_suite:
                for task in run.tasks:
                    run.suite.sources(run.settings, task)
            longest = max(task.length for task in run.tasks)
            with of_suite:
                if longest > positions:
                    raise UserError(
                        f"suite {run.name}, length {longest}: the model reads at most "
                        f"{positions:,} tokens. {SHORTER_OR_STRETCHED}"
                    )
            with of_suite:
                run.call("check", positions)
            of_suite.raise_all()
            described.append(run.call("describe"))  # reads the data, which is there
    refusals.raise_all()
    if plan.lm_eval_tasks:
        if not find_spec("lm_eval"):
            how = how_to_install("lm-eval", "lm-eval")
            raise UserError(f"lm-eval's tasks need its package: {how}")
        check_tasks(plan)
    return [line for line in described if line]


def check_calibration(config: Config, run_path: Path) -> int:
    """How many test examples, of those built so far, were compared with the calibration set of a
    run. UserError if one of them contains a needle of the set."""
    from bosch.eval.runner import describe_examples, find_file

    tokenizer_hash = read_tokenizer(config.model).hash
    shared = run_path.parent / "shared"
    texts: list[str] = []
    for run in plan_of_run(config).suites:
        is_compared = getattr(run.suite, "COMPARED_WITH_CALIBRATION", False)
        for task in run.tasks if is_compared else ():
            facts = describe_examples(run, task, tokenizer_hash)
            built = find_file(shared / f"examples-{fingerprint(facts)[:16]}", run.limit)
            if built is not None:
                texts += [row["prompt"] for row in read_rows(built)[: run.limit]]
    return check_disjoint(follow_reference(run_path / "calibration"), texts)


def evaluate_folder(
    folder: Path, plan: EvaluationPlan, label: Label, out: Path, examples_folder: Path
) -> Callable[[], None]:
    """Write predictions of the model in `folder` to `out`. Every rank calls this. Returns what rank
    0 does when all ranks have: write the scores."""
    from bosch.eval.runner import Evaluation, evaluate, score_all  # imports torch: seconds

    rank, world = rank_and_world()
    # Once, by whoever needs it first: a resumed evaluation may lack no prediction, and then no
    # model is loaded at all.
    load = cache(lambda: load_for_evaluation(folder, plan))
    tokenizer = load_tokenizer(folder)
    if rank == 0 and tokenizer.chat_template:
        say(f"{folder.name} has a chat template, not used here; scores with it are often higher")
    config = read_model_config(folder)
    positions = plan.positions(config["max_position_embeddings"])
    # The window is for the floor alone: the model reads its own in its config.
    evaluation = Evaluation(
        load_model=load,
        tokenizer=tokenizer,
        suites=plan.suites,
        examples_folder=examples_folder,
        label=label,
        generation=plan.generation,
        max_positions=positions,
        window_tokens=plan.window_tokens or (config.get("bosch") or {}).get("window"),
        rank=rank,
        world=world,
    )
    # Processes of another interpreter only predict. Scores are made here, by this code's suites.
    if plan.generation.python is None:
        score = evaluate(evaluation, out)
    else:
        predict_elsewhere(evaluate_folder, folder, plan, label, out, examples_folder)
        score = partial(score_all, evaluation, out)

    def finish() -> None:
        score()
        if plan.lm_eval_tasks:
            from bosch.eval.lm_eval_bridge import run_lm_eval

            run_lm_eval(load(), tokenizer, plan, label, out / LM_EVAL, positions)
        load.cache_clear()  # or the model stays while the next files are written

    return finish


# ---------------------------------------------------------------------------------- the model


def load_for_evaluation(folder: Path, plan: EvaluationPlan) -> Any:
    """The model on this rank's device, with the window, positions and precision asked for; or
    vLLM's engine, which has loaded it."""
    from bosch.kernels import fuse_forward

    config = changed_config(folder, plan)
    device, dtype = device_and_type(plan)
    # YaRN makes keys larger, also that of a first token: a static sink holds what it was without.
    is_hybrid = hasattr(config, "bosch")
    stretches_sinks = plan.yarn and is_hybrid and Sink.of_hybrid(config).kind == "static"
    if plan.generation.engine == "vllm":
        if stretches_sinks:
            raise UserError("--yarn and --engine vllm: not with static sinks. Leave one out.")
        from bosch.eval.engine_vllm import start_engine

        # The engine reads config.json itself, and is told what differs from it.
        names = ("bosch", "rope_parameters")
        changed = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return start_engine(folder, dtype=dtype, hf_overrides=changed)
    attention = attention_for(folder, config, plan)
    model = load_model(
        folder, dtype, device, plan.attention, config=config, attn_implementation=attention
    )
    if attention is not None:  # a model of our families
        fuse_forward(model)
    if stretches_sinks:
        stretch_sinks(model)
    return model


def changed_config(folder: Path, plan: EvaluationPlan) -> Any:
    """The model's config with the plan's window and positions."""
    from transformers import AutoConfig

    from bosch.hybrid.models import describe_stretch

    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: transformers cannot read its config.json ({error}).") from error
    if plan.window_tokens is not None:
        # In memory only, and as a new dict: the folder keeps its window.
        config.bosch = {**config.bosch, "window": plan.window_tokens}
    if plan.yarn is not None:
        config.rope_parameters = with_yarn(folder, config, plan)
        if hasattr(config, "bosch"):  # whose static sinks are stretched too
            config.bosch = {**config.bosch, "sink_rope": describe_stretch(config)}
    return config


def with_yarn(folder: Path, config: Any, plan: EvaluationPlan) -> dict[str, Any]:
    """The parameters of the model's rotary positions, stretched as Qwen's documentation does;
    `max_position_embeddings` stays."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind, problem = rope.get("rope_type", "default"), ""
    if "rope_theta" not in rope:
        problem = "config.json has no single rope_theta, which YaRN needs"
    elif kind != "default":
        problem = f"positions are already stretched by {kind}"
    if problem:
        raise UserError(f"--yarn {plan.yarn:g}: {folder}: its {problem}. Leave --yarn out.")
    # The rest stays, as how much of a head is rotated.
    return {
        **rope,
        "rope_type": "yarn",
        "factor": float(plan.yarn or 1),
        "original_max_position_embeddings": plan.yarn_from or config.max_position_embeddings,
    }


def attention_for(folder: Path, config: Any, plan: EvaluationPlan) -> str | None:
    """Ours, which reads long prompts in chunks without a full T x T mask, for hybrids and dense
    models of a supported family. None: that of transformers, for all others."""
    from bosch.hybrid.models import check_native_window, family_of

    try:
        family_of(config)
        check_native_window(config)
    except UserError:
        if plan.attention != "auto":
            problem = f"--attention {plan.attention}: {folder} is a {config.model_type}"
            raise UserError(f"{problem}, which transformers computes; leave it out.") from None
        return None
    return "bosch"


def stretch_sinks(model: Any) -> None:
    """Scale the keys of static sinks as YaRN scales those of the first token, which they stand for.
    They were measured without, and never pass the rotation."""
    from bosch.masks.window import full_layers

    # Which numbers of a key are scaled is each family's own: some rotate a part of a head or not
    # every layer, or have a norm behind it. A first token sees only itself, so its keys are all
    # that the factor changes.
    rotary = model.base_model.rotary_emb
    scaling, stretched = rotary.attention_scaling, size_of_first_keys(model)
    rotary.attention_scaling = 1.0
    usual = size_of_first_keys(model)
    rotary.attention_scaling = scaling
    for number, layer in enumerate(full_layers(model.config)):
        is_scaled_D = stretched[number] > usual[number] * (1 + scaling) / 2
        key_GD = getattr(model.base_model.layers[layer].self_attn, KEY, None)
        if key_GD is not None:  # some group of the layer has a window
            key_GD.data[:, is_scaled_D] *= scaling


def size_of_first_keys(model: Any) -> list[Any]:
    """Of each layer with groups, how large each number of a key is, over some first tokens."""
    import torch

    from bosch.attention.cache import CACHE
    from bosch.masks.window import full_layers

    ids_N1 = torch.linspace(0, model.config.vocab_size - 1, 8, device=model.device).long()[:, None]
    with torch.inference_mode():
        layers = model(ids_N1, use_cache=True)[CACHE].layers
    # A hybrid's layer has keys of its full groups and of those with a window; either will do.
    keys = [layers[layer].keys for layer in full_layers(model.config)]
    parts = [each[0] if isinstance(each, tuple) else each for each in keys]
    return [key_NG1D.float().abs().sum((0, 1, 2)) for key_NG1D in parts]


def device_and_type(plan: EvaluationPlan) -> tuple[str, Any]:
    """Where this rank's model is, and in which number format."""
    import torch

    # A rank has the GPU of its place on this machine.
    on_gpu = has_gpu()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    in_bf16 = plan.precision == "bf16"
    if plan.precision == "auto":
        in_bf16 = on_gpu and not is_old_gpu()
    return device, torch.bfloat16 if in_bf16 else torch.float32


def check_attention(plan: EvaluationPlan) -> None:
    """Refuse, before work begins, an attention backend or an interpreter that was named and cannot
    run here."""
    if plan.generation.python is not None:
        check_elsewhere(plan)
    if plan.attention == "auto":
        return
    import torch

    from bosch.attention.dispatch import check_backend

    device, dtype = device_and_type(plan)
    check = partial(check_backend, "eval.attention", plan.attention, torch.device(device))
    check(dtype)
    if plan.generation.batch != 1:  # texts of different lengths are padded
        check(dtype, padded=True, remedy="Set eval.batch to 1, or name another.")
