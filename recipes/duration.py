"""How long a run takes on this machine, stage by stage, said before it begins.

The work of a stage is counted from its settings, as tokens that pass the model, in FLOPs, and
divided by the speed at which this machine multiplies matrices in the stage's number format, which
is measured. `REACHED` says how much of that speed each kind of work reaches. Attention has rates of
its own where `make gpu` has measured this device.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bosch.config import Config
from bosch.data import tokens_stage
from bosch.eval.evaluate import plan_of_run
from bosch.eval.settings import SuiteRun
from bosch.methods._settings import (
    asks_calibration,
    default_settings,
    has_choice,
    learning_tokens,
    load_method,
)
from bosch.model import read_shape
from bosch.recipes import presets
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.progress import describe_seconds
from bosch.training.attention_speed import AttentionSpeed, describe_rule
from bosch.training.fitting import make_plan
from bosch.training.metrics import count_active_weights, training_flops
from bosch.training.model_start import build_on_meta
from bosch.training.parallel import choose_device
from bosch.training.rehearsal import (
    Plan,
    estimate,
    plain_config,
    training_seconds,
    validation_seconds,
    work_speed,
)
from bosch.training.train_stage import schedule_of

# Share of the speed of large products that the kinds of work reached on two CPU cores, in runs of
# the embedded model and of SmolLM2-135M whose stages were timed: with them the times are right
# within a factor of two. Masks of a search share their lower layers, so it does less than counted.
# (The embedded model reads at .46 of the speed, and its recorded searches took 18 to 20 of the 39
# passes counted; SmolLM2's took 35 of 37, as its masks end later.)
REACHED = {"calibration": 0.8, "search": 1.0, "evaluation": 0.8}
# A token that is written costs as much as so many that are read in fp32, in either format: it waits
# for weights and keys, and for Python. SmolLM2, 16 texts of 1,100 tokens at once on one core: 10 in
# fp32, 6 in bf16.
WRITTEN = 8
LONG_SECONDS = 3_600  # a run that takes longer than this is told of its shorter form
# What the seconds are of.
SEARCHING = ("search", "learning the mask")
# Of training on stored lessons: the teacher reads forward, a third of the work of a step.
LESSONS_SHARE = 1 / 4
REST = "start and report"  # and packing, rankings, loading the model for each evaluation
START_SECONDS, MODEL_SECONDS = 20.0, 5.0  # of a run, and for each model that is evaluated
UNKNOWN_EXAMPLES = 100  # of a task, where a suite reads all that its data has


def describe_time(
    preset: str | None, config: Config, zero_shot: bool, repeats: bool = False
) -> list[str]:
    """Lines on how long the whole run takes here, and on a shorter form of one that takes long.
    `preset`: what the user named; `repeats`: the settings are another run's, of no preset."""
    found = stage_seconds(config, zero_shot)
    rule = describe_rule(AttentionSpeed.here())
    lines = [f"time here, of the whole run: {describe(found)}; {rule}"]
    is_long = sum(found.values()) > LONG_SECONDS
    if is_long and not repeats and presets.name_of(preset, config) == "small":
        with suppress(UserError):  # some settings have none, as --train.until recovered
            shorter = stage_seconds(presets.in_brief(config), zero_shot)
            if sum(shorter.values()) < sum(found.values()):
                lines.append(f"a shorter form of it, by --preset brief: {describe(shorter)}")
    return lines


def describe_room(config: Config, num_gpus: int, zero_shot: bool) -> list[str]:
    """Lines on what a run downloads and writes, and parks on GPUs (training/rehearsal.py)."""
    if zero_shot:
        return estimate(config, plan_alone(config), None)
    return estimate(config, make_plan(config, num_gpus), schedule_of(config))


def plan_alone(config: Config) -> Plan:
    """A training step on one device, which refuses no batch that others could not share."""
    alone = replace(config.train, context_parallel=1, micro_batch_sequences=None)
    return make_plan(replace(config, train=alone), num_gpus=1)


def stage_seconds(
    config: Config, zero_shot: bool = False, num_gpus: int | None = None
) -> dict[str, float]:
    """Of each stage that takes long. `zero_shot`: without a training. `num_gpus` share the work;
    None: one for each process of this launch, of which those on CPUs share the cores."""
    schedule = None if zero_shot else schedule_of(config)
    if num_gpus is None:
        num_gpus = rank_and_world()[1] if choose_device(os.environ).type == "cuda" else 1
    plan = plan_alone(config)
    dense, hybrid = plain_config(plan.model), plan.model
    # Counted once for each of the two, which are read in many lengths.
    weights_of = {id(one): count_active_weights(build_on_meta(one)) for one in (dense, hybrid)}

    has_sink = config.sink != "none"

    def reading(kind: str, model: Any, texts: float, length: int, precision: str) -> float:
        """Seconds in which `texts` of this length pass the model once, as this kind of work."""
        # Without the head, which only sees the ends of texts.
        weights = weights_of[id(model)] - model.vocab_size * model.hidden_size
        dtype, attention = number_format(precision), 0.0
        forward = training_flops(model, weights, [length]) / 3  # a step is three forward passes
        if (known := AttentionSpeed.here(dtype)) is not None:
            forward -= training_flops(model, 0, [length]) / 3
            attention = known.seconds(model, [length], gradients=False, sink=has_sink)
        return texts * (forward / (REACHED[kind] * work_speed(dtype)) + attention)

    found: dict[str, float] = {}
    calibration, evaluation = config.calibration, config.eval
    texts = calibration.examples / calibration.questions_per_context
    if (own := Path(calibration.questions or "")).is_file():  # a line a text, with one question
        texts = len(own.read_bytes().splitlines())
    of_search = texts + calibration.random_texts
    of_method = default_settings(config.method, config.mask)
    if calibration.answers == "own-words" and asks_calibration(config, of_method):
        length, precision = calibration.length, evaluation.precision
        found["calibration"] = reading("calibration", dense, texts, length, precision)
    passes, precision = search_passes(config), config.mask.precision
    found["search"] = passes * reading("search", dense, of_search, calibration.length, precision)
    examples = [each for run in plan_of_run(config).suites for each in texts_of(run, config)]
    # Step 0 is evaluated also where no checkpoint asks for it.
    models = [dense] + [hybrid] * (len({0, *schedule.evaluated_steps}) if schedule else 1)

    def answering(model: Any, texts: float, length: int, written: int, precision: str) -> float:
        """Seconds in which texts are read, and so many tokens written after each."""
        return reading("evaluation", model, texts, length, precision) + reading(
            "evaluation", model, texts * written * WRITTEN / length, length, "fp32"
        )

    found["evaluation"] = sum(
        answering(model, count, length, written, evaluation.precision)
        for model in models
        for count, length, written in examples
    )
    found = {name: seconds for name, seconds in found.items() if seconds}
    if schedule is not None:
        if config.data.answers:  # each sequence is read, and for two in five a quarter written
            length = config.data.sequence_length
            texts = config.data.answers * tokens_stage.count(config) / length
            precision = "fp32" if config.train.precision == "fp32" else "bf16"
            found["answers"] = answering(dense, texts, length, length // 10, precision)
        sequences = schedule.num_steps * schedule.batch_sequences
        seconds = training_seconds(plan, sequences, has_sink)  # what the teacher says included
        # The loss of held-out text, at step 0 the dense model's too: much beside few steps.
        read = config.data.held_out_sequences * (1 + len({0, *schedule.validated_steps}))
        held_out = validation_seconds(plan, read, has_sink)
        if config.train.stored_shares:  # of all tokens in the folder, trained on or not
            said = tokens_stage.count(config) // config.data.sequence_length
            found["lessons"] = LESSONS_SHARE * training_seconds(plan, said, has_sink)
            seconds *= 1 - LESSONS_SHARE
        found["training"] = seconds + held_out
    if used := learning_tokens(config):  # without a training too, by steps like those of one
        sequences = math.ceil(used / config.data.sequence_length)
        # All weights learn the text, as bosch/training/learner.py has them.
        settings = replace(plan.settings.without_teacher(), objective="next-token", trained="all")
        plan = replace(plan, settings=settings)
        learning = training_seconds(plan, sequences, has_sink)
        # Its losses of held-out text: at step 0, and after 1/64, 1/32, ... of its steps.
        read = 8 * config.data.held_out_sequences
        found["learning the mask"] = learning + validation_seconds(plan, read, has_sink)
    for name in found.keys() - {"calibration"}:  # whose texts one process reads
        found[name] /= num_gpus
    found[REST] = START_SECONDS + MODEL_SECONDS * len(models)
    return found


def search_passes(config: Config) -> float:
    """About how often the whole model reads the calibration set while the groups are chosen."""
    method, shape = load_method(config.method), read_shape(config.model)
    settings = default_settings(config.method, config.mask)
    groups = shape.num_layers, shape.num_groups
    if method.traits.searches and not has_choice(config.method, settings, config.ratio, groups):
        return 0.0  # nothing is searched
    if hasattr(method, "count_passes"):
        return float(method.count_passes(settings, shape.num_layers, shape.num_groups))
    if method.traits.searches:  # kappa masks for each layer, of which many end early
        return float(settings.kappa * shape.num_layers / 2)
    return 3.0 if method.traits.measures else 0.0


def texts_of(run: SuiteRun, config: Config) -> Iterator[tuple[float, int, int]]:
    """Of each task of a suite how many texts there are, how long they are, and how many tokens are
    written after each where these are many."""
    positions = read_shape(config.model).positions
    most = getattr(run.settings, "max_prompt_tokens", positions)  # longer ones lose their middle
    written = getattr(run.settings, "answer_tokens", 0)
    for task in run.tasks:
        count = run.limit or getattr(run.settings, "samples", None) or UNKNOWN_EXAMPLES
        length = min(task.length or most, positions)
        yield count, length, written


def number_format(precision: str) -> torch.dtype:
    in_bf16 = torch.cuda.is_available() if precision == "auto" else precision == "bf16"
    return torch.bfloat16 if in_bf16 else torch.float32


def describe(found: dict[str, float]) -> str:
    """`found`: of `stage_seconds`."""
    parts = ", ".join(f"{name} {describe_seconds(seconds)}" for name, seconds in found.items())
    return f"about {describe_seconds(sum(found.values()))} ({parts})"
