"""Named setups: functions that return a config. A variant calls one and replaces two fields.

`paper` is the paper's setting as published: its method too, and every value that it gives, checked
by a test. `large` is what we would run on models of that size. The paper's other rules hold under
any preset: an example counts when all its answer tokens are right, prefill only, one calibration
set for all methods and none of it in the test set; candidates no more than the budget are
enumerated; a static score of a group is the mean over its query heads; training is AdamW under
FSDP.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from bosch.config import (
    FEWEST_TO_DECIDE,
    CalibrationConfig,
    Config,
    DataConfig,
    MaskConfig,
    RunEvaluationConfig,
    TrainConfig,
)
from bosch.data.calibration import CalibrationSettings, gather_material, least_length
from bosch.data.needle_text import TEXT, check_held_out, is_text, resolve
from bosch.data.needles import PAPER_TASKS
from bosch.data.sources.hub import is_of_network
from bosch.data.token_files import SUMMARY
from bosch.eval.evaluate import plan_of_run
from bosch.eval.suites import _gsm8k
from bosch.eval.suites.niah import GROUPS
from bosch.hybrid import model_stage
from bosch.known_models import PAPER_MODELS
from bosch.model import (
    check_length,
    check_window_fits,
    fetch_config,
    find_model,
    load_tokenizer,
    read_shape,
)
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, Refusals, UserError
from bosch.run.files import read_sealed_json
from bosch.run.fingerprint import plain
from bosch.run.hub import is_offline
from bosch.run.memory import is_old_gpu
from bosch.run.stage import differences, follow_reference

# Text to learn from that anybody may read (ODC-By): web pages, mostly shorter than 2,000 tokens,
# and for long sequences PDF files. The name says no commit: the run's own is in its files.
SHORT_TEXT = "hf:HuggingFaceFW/fineweb-edu?config=sample-10BT"
LONG_TEXT = "hf:HuggingFaceFW/finepdfs?config=eng_Latn"
HUB_TEXTS = ((SHORT_TEXT,), (LONG_TEXT,))
TINY_MODEL, SMOKE_MODEL = "tiny-qwen3", "tiny-qwen3-2layer"
SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Models with smaller weights, as the embedded ones, use the toy world.
TOY_BYTES = 100_000_000
SHORT = 4_096  # tokens of texts so short that not every task may fit
SHORTEST = 512  # into which at least one task of each group fits
# Models with fewer parameters, and all on machines without such a GPU, have the preset `small`;
# the others have `large`.
SMALL_WEIGHTS, BIG_GPU_GB = 1_500_000_000, 40
# Of the training. On SmolLM2 75 steps closed as much of the loss' gap as 150 (docs/real-model.md);
# of the bigger models of `large` nothing was measured.
SMALL_STEPS, LARGE_STEPS = 75, 150
# On SmolLM2 the search was not told apart from this ranking of half a minute where up to this share
# of the groups has a window, once both were trained; at .95 it was 20 points above it, and trained
# 21 (docs/real-model.md).
RANKING, RANKED_UP_TO = "razor", 0.875
# Of multikey_2 and 3 small models answer next to nothing, and much in words of their own.
EASY_TASKS = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")
# Needles are one template. With these beside them searches at .75 and .875 answered more in other
# formats by most sets, 2 or 3 points on average (docs/real-masks.md).
TEXT_TASKS = ("copy", "look_up", "continue")

# Sequences of 32k on a GPU at once. The paper's 8 for 1.7B fits one node of 8 GPUs: on its 16 GPUs
# it would make 128 sequences a step, not 64. For 8B and 14B the paper gives no number.
MICRO_BATCH_SEQUENCES = {"Qwen3-1.7B": 8, "Qwen3-8B": 4, "Qwen3-14B": 4, "Qwen3-30B-A3B": 2}


def tiny(model: str = TINY_MODEL) -> Config:
    """The embedded model on a laptop: the whole chain in minutes, with its own settings. For a
    model with fewer positions, in proportion."""
    length = min(1_024, read_shape(model).positions)
    shorter = 1_024 / length
    return Config(
        model=model,
        window=max(1, round(64 / shorter)),
        calibration=CalibrationConfig(
            examples=48, length=length, questions_per_context=4, tasks=PAPER_TASKS, essays="toy"
        ),
        # Without further starts: the figures of README and docs/results.md are of such searches.
        mask=MaskConfig(kappa=30, starts=()),
        # 96 steps, so that set-up and chain take six minutes on two slow cores. Half as long as the
        # longest texts of the tests: attention over whole texts is a third of a step on CPUs.
        data=DataConfig(
            source=("toy",),
            tokens=98_304,
            sequence_length=max(2, length // 2),
            held_out_sequences=8,
        ),
        # From the text alone a hybrid would need about twice the tokens (docs/results.md). Small
        # batches: with so few tokens the number of steps matters most.
        train=TrainConfig(
            batch_sequences=2 * round(shorter),
            peak_learning_rate=1e-3,
            objective="distill",
            precision="fp32",
            kernels="torch",
        ),
        eval=RunEvaluationConfig(
            checkpoints=(0.0, 0.5, 1.0),
            niah_tasks=PAPER_TASKS,
            niah_lengths=(length // 2, length) if length > 1 else (length,),
            niah_samples=10,
            longbench_data="toy",
            longbench_rows=8,
        ),
    )


def smoke(model: str = SMOKE_MODEL) -> Config:
    """Seconds on the two-layer model: every stage runs, and nothing is learned. For tests."""
    config = tiny(model)
    evaluation = replace(config.eval, checkpoints=(0.0, 1.0), niah_lengths=(256,))
    return replace(
        config,
        window=32,
        calibration=replace(config.calibration, examples=4, length=256, questions_per_context=2),
        mask=replace(config.mask, kappa=4),
        data=replace(config.data, tokens=4_096, sequence_length=256, held_out_sequences=16),
        train=replace(config.train, batch_sequences=2, peak_learning_rate=2e-3),
        eval=replace(evaluation, niah_samples=1, longbench_rows=1),
    )


def small(model: str = SMALL_MODEL) -> Config:
    """A pretrained model of up to about 1.5B parameters on a laptop or one GPU: hours, with texts
    that such a model can answer questions about, and sinks. Chosen on SmolLM2-135M-Instruct."""
    import torch

    length, in_bf16 = min(1_024, read_shape(model).positions), bf16_is_faster()
    on_gpu, window = torch.cuda.is_available(), max(1, length // 8)
    return Config(
        model=model,
        method=RANKING,
        window=window,
        calibration=CalibrationConfig(
            examples=48,
            length=length,
            questions_per_context=4,
            tasks=(*EASY_TASKS, *TEXT_TASKS),
            essays=TEXT,
            answers="own-words",
        ),
        mask=MaskConfig(kappa=6, precision="bf16" if in_bf16 else "auto"),
        data=DataConfig(
            source=(SHORT_TEXT,),
            tokens=2 * SMALL_STEPS * length,
            sequence_length=length,
            repeats=0.3,
            repeat_block=8 * window,
        ),
        # Narrow products beside frozen weights: with so few tokens all weights drift from what the
        # dense model says even of texts that fit into the window (docs/real-model.md).
        train=TrainConfig(
            batch_sequences=2,
            peak_learning_rate=8e-4,
            trained="lora",
            objective="distill",
            # The dense model computes once, and further runs on these tokens need it no more.
            stored_shares=64,
            precision="bf16" if in_bf16 else "fp32",
            compile=False,  # takes longer than these few steps (27 s on an H200, at .4 s a step)
        ),
        eval=RunEvaluationConfig(
            checkpoints=(0.0, 0.5, 1.0),  # each takes a third of the training's time
            # Needles, which the calibration and RULER have too, and formats that neither has: there
            # windows take more and training brings back less, so that needles alone flatter.
            # LongBench comes in where its data is (`for_run`). Long answers are left to the user:
            # each takes as long as several needles, and 25 lists told nothing (docs/real-model.md).
            suites=("niah", "own_formats"),
            niah_tasks=PAPER_TASKS,
            niah_lengths=(length,),
            niah_samples=25,
            # In fp32 answers depend on no batch. In bf16 long answers took .85 of the time on a
            # CPU (docs/real-model.md), and on a GPU such small models wait for Python.
            precision="fp32" if on_gpu else "auto",
        ),
    )


def brief(model: str = SMALL_MODEL) -> Config:
    """`small` in less than half of its time: half of the tokens, and fewer questions, asked of the
    dense model, before and after the training."""
    config = small(model)
    evaluation = replace(config.eval, checkpoints=(0.0, 1.0), niah_samples=10)
    data = replace(config.data, tokens=config.data.tokens // 2)
    return replace(config, data=data, eval=evaluation)


def in_brief(config: Config) -> Config:
    """A config that began as `small`, as it would be from `brief`: what options have changed
    stays."""
    usual, shorter = small(config.model), brief(config.model)
    sections = {}
    for name in ("data", "eval"):
        now, before, then = (vars(getattr(each, name)) for each in (config, usual, shorter))
        kept = {key: then[key] for key in now if now[key] == before[key]}
        sections[name] = replace(getattr(config, name), **kept)
    return replace(config, **sections)


def fit_method(config: Config, ratio: float | None) -> Config:
    """With the search in the place of a preset's ranking where the ranking keeps too little.
    `ratio` None: it is not known yet, since it follows from a number of bytes."""
    if config.method == RANKING and (ratio is None or ratio > RANKED_UP_TO):
        return replace(config, method="bosch")
    return config


def bf16_is_faster() -> bool:
    """A GPU since Ampere, or a CPU with AMX (matrix products six times as fast as in fp32) or
    AVX512-BF16 (2.3 times, a forward of SmolLM2 2.3 to 2.8 times). Asked of the processor: a
    measurement came out otherwise beside other work, and a run that had begun was refused when it
    was to go on."""
    import torch

    known = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    supported = (getattr(torch.cpu, name, bool)() for name in known)
    return not is_old_gpu() if torch.cuda.is_available() else any(supported)


def paper(model: str = "Qwen/Qwen3-1.7B-Base") -> Config:
    """The paper's setting as published: `bosch_paper`, which searches with NOMAD, no sinks, then
    all weights on the next token. For a model that is not one of its four, scaled to its
    positions."""
    config = scaled_paper(model)
    if model not in PAPER_MODELS:
        return config
    # The paper used FlashAttention-2; torch's own kernels, of the same algorithm, need no package.
    micro = MICRO_BATCH_SEQUENCES[PAPER_MODELS[model]]
    train = replace(config.train, micro_batch_sequences=micro, kernels="liger")
    return replace(config, train=train)


def large(model: str = "Qwen/Qwen3-8B-Base") -> Config:
    """What we would run on a big GPU or several: the paper's lengths and tests, our search, sinks,
    and a recovery that brings back the dense model instead of learning a text. Measured at this
    size: nothing. Each choice stands on SmolLM2-135M (docs/real-model.md) or on published recipes
    for such models (docs/own-model.md)."""
    config = scaled_paper(model)
    train, tokens_of_step = config.train, config.train.batch_sequences * config.data.sequence_length
    return replace(
        config,
        method="bosch",
        sink="static",
        mask=replace(config.mask, razor_texts=MaskConfig.razor_texts),
        # The dense model's own answers: masks that were chosen by bare numbers lost the words in
        # front of them.
        calibration=replace(
            config.calibration,
            tasks=(*config.calibration.tasks, *TEXT_TASKS),
            answers="own-words",
            essays=TEXT,
        ),
        # Of the paper's batch.
        data=replace(
            config.data,
            source=(LONG_TEXT,),
            tokens=LARGE_STEPS * tokens_of_step,
            repeats=0.3,
            repeat_block=8 * config.window,
        ),
        train=replace(
            train,
            objective="distill",
            # Beside frozen weights little is lost that was there. The rate of published
            # distillations into windows of 7B models; 135M take 8e-4.
            trained="lora",
            peak_learning_rate=1e-4,
        ),
        eval=replace(
            config.eval,
            # 2,400 needles, as many in own formats. The paper's 12,000 would take longer than the
            # training, by the hours that are computed in docs/own-model.md.
            niah_samples=100,
            suites=("niah", "own_formats", "longbench", "long_answers"),
            checkpoints=(0.0, 0.25, 0.5, 1.0),
        ),
    )


def scaled_paper(model: str) -> Config:
    """The paper's setting for any model and machine: lengths up to the model's positions, the
    window in proportion, as many tokens in a batch, and the attention backend, kernels and memory
    that are available."""
    shape, usual = read_shape(model), Config()
    longest = usual.data.sequence_length
    if model not in PAPER_MODELS:
        longest = min(longest, shape.positions)
    times_shorter = usual.data.sequence_length / longest
    lengths = tuple(round(n / times_shorter) for n in usual.eval.niah_lengths)
    lengths = tuple(n for n in lengths if n >= SHORTEST) or lengths[-1:]
    return Config(
        model=model,
        method="bosch_paper",
        sink="none",
        window=max(1, round(usual.window / times_shorter)),
        calibration=CalibrationConfig(length=longest, tasks=PAPER_TASKS),
        # At most 32 variables a subproblem: 4 layers of 8 groups, 8 layers of 4.
        mask=MaskConfig(
            max_layers=32 // shape.num_groups if model in PAPER_MODELS else None, razor_texts=1
        ),
        data=DataConfig(sequence_length=longest),
        train=TrainConfig(batch_sequences=round(usual.train.batch_sequences * times_shorter)),
        eval=RunEvaluationConfig(niah_tasks=PAPER_TASKS, niah_lengths=lengths),
    )


PRESETS: dict[str, Callable[..., Config]] = {
    preset.__name__: preset for preset in (tiny, smoke, small, brief, large, paper)
}


def choose(preset: str | None, model: str | None) -> tuple[Config, list[str]]:
    """The config for `--preset` and `--model`, both optional, and lines on what was chosen."""
    if preset is not None:
        if preset not in PRESETS:
            raise UserError(f"--preset {preset}: no such preset; {suggest(preset, tuple(PRESETS))}")
        return PRESETS[preset](*filter(None, [model])), [f"preset {preset}"]
    if model is None:
        return tiny(), ["preset tiny, since neither --model nor --preset was given"]
    preset, config = suited(model)
    if preset == "small":
        faster = "search and train in bf16, which is faster" if bf16_is_faster() else "fp32"
        about = "for models of up to 1.5B parameters, or without a big GPU"
        return config, [f"preset small, {about}; here: {faster}"]
    if preset == "tiny":
        model_stage.check(model)  # before its tokenizer is asked
        config = fit_needles(config)
    changes = differences(plain(asdict(PRESETS[preset]())), plain(asdict(config)))
    return config, [f"preset {preset}, scaled to the model; {changes}"]


def for_run(given: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The defaults of a whole run, by the options that were given, and lines on what was chosen."""
    model = given.get("config.model")
    try:
        config, lines = choose(given.get("preset"), model)
    except MissingFileError as error:
        named = model or f"the model of --preset {given.get('preset')}"
        raise explain_offline(error, named, "config.data.source" not in given) from error
    known = None if "kv_budget" in given else given.get("config.ratio", config.ratio)
    config = fit_method(config, known)
    if config.method == RANKING and "config.method" not in given:
        why = (
            f"up to {RANKED_UP_TO:g} on windows no search was surely better, once both were trained"
        )
        lines = [*lines, f"{RANKING} ranks the groups: {why} (--method bosch searches)"]
    config = without_useless(config, given)
    config = with_repeats_of_tokens(config, given)
    config, of_rate = with_rate_of_weights(config, given)
    lines = [*lines, *of_rate]
    evaluation = config.eval
    # Judged by LongBench too where its data is on this machine or is named. `paper` fetches the
    # data, `large` (the one with this suite and made haystacks) where the hub can be reached;
    # `small` and `brief` are complete without.
    has_it, is_ours = "longbench" in evaluation.suites, config.calibration.essays == TEXT
    if "config.eval.suites" in given or (has_it and not is_ours):
        return config, lines
    is_here = "config.eval.longbench_data" in given or is_on_this_machine(evaluation.longbench_data)
    decides_math = {"config.eval.gsm8k_data", "config.eval.longbench_categories"} & {*given}
    if has_it and (not is_offline() or (is_here and decides_math)):
        return config, lines
    if has_it and is_here:
        try:
            _gsm8k.sources(evaluation.gsm8k_data)
        except MissingFileError as error:
            lines = [*lines, f"GSM8K is left out of LongBench: {error}"]
            evaluation = replace(evaluation, longbench_categories="official")
        return replace(config, eval=evaluation), lines
    if not is_here:
        remedy = "--eval.longbench-data FILE (its data.zip) adds it"
        left_out = f"LongBench is left out: its data is not on this machine; {remedy}"
        suites = tuple(name for name in evaluation.suites if name != "longbench")
        return replace(config, eval=replace(evaluation, suites=suites)), [*lines, left_out]
    decides = given.get("config.train.until") == "recovered"
    evaluation = replace(
        evaluation,
        suites=(*evaluation.suites, "longbench"),
        # Of each of 21 data sets: its texts are long for a laptop.
        longbench_rows=FEWEST_TO_DECIDE if decides else 5,
        longbench_categories="official",  # without GSM8K, which is data of its own
    )
    return replace(config, eval=evaluation), lines


def with_rate_of_weights(
    config: Config, given: Mapping[str, Any], train: str = "config.train"
) -> tuple[Config, list[str]]:
    """With a rate for whole weights, and a line that says so, where options have these trained in
    the place of narrow products beside them, by whose rate they are ruined. `train`: the section of
    the options."""
    trained, usual = given.get(f"{train}.trained", config.train.trained), config.train
    is_named = f"{train}.peak_learning_rate" in given
    if is_named or trained.startswith("lora") or not usual.trained.startswith("lora"):
        return config, []
    rate = TrainConfig.peak_learning_rate
    of_lora = f"that of {usual.trained} is {usual.peak_learning_rate:g}"
    line = f"--train.peak-learning-rate {rate:g}, as whole weights are trained ({of_lora})"
    return replace(config, train=replace(usual, peak_learning_rate=rate)), [line]


def with_repeats_of_tokens(config: Config, given: Mapping[str, Any]) -> Config:
    """Tokens that were packed before have the repeats that they have."""
    if (folder := given.get("config.data.tokens_from")) is None:
        return config
    for name in ("repeats", "repeat_block", "min_document_tokens", "held_out_sequences"):
        if f"config.data.{name}" in given:
            option = name.replace("_", "-")
            raise UserError(
                f"--data.{option} changes nothing about the tokens of --data.tokens-from {folder}; "
                f"pass --{option} to `bosch tokens`, which makes them."
            )
    with suppress(UserError):  # a folder that is not there is refused with all else that is wrong
        summary = read_sealed_json(follow_reference(Path(folder)) / SUMMARY)
        data = replace(
            config.data,
            repeats=summary.get("repeats", 0.0),
            repeat_block=summary.get("repeat_block"),
            held_out_sequences=summary.get("num_held_out_sequences", 0),
        )
        return replace(config, data=data)
    return config


def without_useless(config: Config, given: Mapping[str, Any]) -> Config:
    """The settings of a preset or of a run without those that are of no use beside the options that
    were given. Those that the user names are refused."""
    if given.get("config.train.objective") == "next-token":
        config = replace(config, train=config.train.without_teacher())
    suites = given.get("config.eval.suites", config.eval.suites)
    options = tuple(each for each in config.eval.options if each.split(".")[0] in suites)
    config = replace(config, eval=replace(config.eval, options=options))
    if given.get("config.method", config.method) != config.method:
        config = replace(config, mask=replace(config.mask, options=()))
    return config


def explain_offline(error: MissingFileError, model: str, needs_text: bool) -> MissingFileError:
    """Without a hub, all options that a run needs in its place, in one sentence."""
    if not is_of_network(error):
        return error
    if needs_text:
        problem = f"{model} and text to learn from are on the hub, which cannot be reached"
        remedy = "--model DIR --data.source TEXT, a model's folder and a file or folder of text"
    else:
        problem, remedy = f"{model} is on the hub, which cannot be reached", "--model DIR"
    return MissingFileError(f"{problem}: pass {remedy}.")


def is_on_this_machine(longbench_data: str) -> bool:
    """Whether LongBench is a file or folder, or lies in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    if Path(longbench_data).exists():
        return True
    cached = try_to_load_from_cache(longbench_data, "data.zip", repo_type="dataset")
    return isinstance(cached, str)


def name_of(preset: str | None, config: Config) -> str:
    """Of the preset that the settings come from."""
    if preset is not None:
        return preset
    return "tiny" if config.model == TINY_MODEL else suited(config.model)[0]


def for_stage(given: Mapping[str, Any]) -> Config:
    """The defaults of a single stage's command, by the model, which may be a hybrid."""
    config = suited(given.get("model") or TINY_MODEL)[1]
    return with_rate_of_weights(config, given, "settings.train")[0]


def suited(model: str) -> tuple[str, Config]:
    """The preset for a model, by its size, and its config. The paper's own models are large on any
    machine."""
    if model in PAPER_MODELS:
        return "large", large(model)
    files = (find_model(model) or Path(os.devnull)).glob("*.safetensors")
    num_bytes = sum(file.stat().st_size for file in files)
    if 0 < num_bytes < TOY_BYTES:
        return "tiny", tiny(model)
    from bosch.training.model_start import build_on_meta, read_config  # seconds
    from bosch.training.rehearsal import gpu_memory_gb

    on_big_gpu, num_weights = (gpu_memory_gb() or 0) >= BIG_GPU_GB, None
    if on_big_gpu or not num_bytes:
        # A model of no family that can be a hybrid is not counted: it may be evaluated too.
        with suppress(UserError):
            parameters = build_on_meta(read_config(fetch_config(model))).parameters()
            num_weights = sum(weight.numel() for weight in parameters)
    if not num_bytes and num_weights is not None and 2 * num_weights < TOY_BYTES:  # in bf16
        return "tiny", tiny(model)
    if not on_big_gpu or num_weights is None or num_weights < SMALL_WEIGHTS:
        return "small", small(model)
    return "large", large(model)


@cache
def fit_needles(config: Config) -> Config:
    """With NIAH lengths and questions a context that leave room for both groups of tasks."""
    length, lengths = config.calibration.length, config.eval.niah_lengths
    lengths = tuple(n for n in lengths if not lacking_group(config, n)) or lengths[-1:]
    asked = next((n for n in (4, 2) if not lacking_group(config, length, n)), 1)
    calibration = replace(config.calibration, questions_per_context=asked)
    return replace(config, calibration=calibration, eval=replace(config.eval, niah_lengths=lengths))


def check_needles(config: Config) -> None:
    """Refuse short NIAH texts with no room for a group of tasks, in tokens of this model, and
    needles in text that is trained on."""
    settings = [suite.settings for suite in plan_of_run(config).suites]
    asked = [each.lengths for each in settings if is_text(getattr(each, "essays", None) or "")]
    check_held_out(config, max([config.calibration.length, *itertools.chain(*asked)]))
    for length in config.eval.niah_lengths if "niah" in config.eval.suites else ():
        if length < SHORT and (group := lacking_group(config, length)):
            problem = f"no {group} task can be built in so few tokens of {config.model}"
            raise UserError(f"--eval.niah-lengths {length}: {problem}; use a greater length.")


def lacking_group(config: Config, length: int, questions: int = 1) -> str | None:
    """A group of NIAH tasks of which none fits into texts of this length."""
    one_context = replace(
        config.calibration,
        length=length,
        examples=questions,
        questions_per_context=questions,
        essays=resolve(config.calibration.essays, config.data),
    )
    settings = CalibrationSettings(**vars(one_context))
    material, tokenizer = gather_material(settings), load_tokenizer(config.model)
    for group, tasks in GROUPS.items():
        known = set(tasks) & set(settings.tasks)
        least = [least_length(name, settings, material, tokenizer) for name in known]
        if min(least, default=0) > length:
            return group
    return None


def warnings(config: Config) -> list[str]:
    """Of texts no longer than the window, which measure nothing, of texts longer than any that
    calibration and training read, and of as much training as the paper's without a GPU."""
    import torch

    found, window, tokens = [], config.window, config.data.tokens
    lengths = {
        "calibration.length": config.calibration.length,
        "data.sequence_length": config.data.sequence_length,
        "eval.niah_lengths": max(config.eval.niah_lengths),
    }
    short = [f"{name} {length:,}" for name, length in lengths.items() if length <= window]
    if short and config.ratio:
        found.append(f"warning: a window of {window:,} tokens covers all of {', '.join(short)}")
    judged = max(config.eval.niah_lengths)
    read = max(config.calibration.length, config.data.sequence_length)
    if config.ratio and judged > read:
        # Trained on 1,024 tokens, SmolLM2 kept 54 % of its answers at 4,096, and 77 to 95 % when it
        # was trained on as long texts (docs/real-model.md).
        problem = f"warning: texts of {judged:,} tokens are asked about, but calibration and "
        problem += f"training read only {read:,}, and beyond that far more is lost; "
        problem += f"--data.sequence-length {judged} --calibration.length {judged}"
        found.append(problem)
    if not torch.cuda.is_available() and tokens >= 100_000_000:
        problem = f"warning: without a GPU, training on {tokens:,} tokens takes days or longer"
        found.append(f"{problem}; --data.tokens 1M or --hours trains on fewer, --zero-shot on none")
    return found


def check_lengths(config: Config) -> None:
    """Refuse texts that are longer than the model's positions, and a window that is not shorter."""
    model, refusals = config.model, Refusals()
    with refusals:
        check_length("--calibration.length", config.calibration.length, model)
    for learning in filter(None, (model, config.train.teacher)):
        with refusals:
            check_length("--data.sequence-length", config.data.sequence_length, learning)
    with refusals:
        check_length("--eval.niah-lengths", max(config.eval.niah_lengths), model)
    if config.ratio:
        with refusals:
            check_window_fits(config.window, model)
    refusals.raise_all()
