"""Settings: one frozen dataclass a stage, and `Config`, which holds them all. The defaults are the
paper's; named setups are functions in recipes/presets.py. The comment behind a field is its text in
--help."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import tyro

from bosch.masks.mask import check_ratio, check_window
from bosch.plugins import suggest
from bosch.run.fingerprint import speed_only

NIAH_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
)


MORE_NIAH_TASKS = ("niah_multivalue", "niah_multiquery")


def parse_count(text: str) -> int:
    """A number of tokens as people write it: 2.5B, 300M, 16k, 4096."""
    match = re.fullmatch(r"([\d_.]+)([kmb]?)", text.strip().lower())
    try:
        if not match:
            raise ValueError
        # Decimal: 2.01 * 1e3 is a little less than 2010 in binary.
        count = Decimal(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]]
    except (ValueError, InvalidOperation):
        raise ValueError(
            f"{text!r} is not a number of tokens; write 2.5B, 300M, 16k or 4096."
        ) from None
    if count % 1:
        raise ValueError(f"{text!r} is {count} tokens, which is not a whole number.")
    return int(count)


TokenCount = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="TOKENS",
        instance_from_str=lambda args: parse_count(args[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]


@dataclass(frozen=True)
class CalibrationConfig:
    """The examples on which the search and the static methods judge a mask."""

    examples: int = 64  # an example is one question
    length: TokenCount = 32_768  # of a context
    questions_per_context: int = 1  # more make the same examples cheaper: one prefill scores all
    tasks: tuple[str, ...] = NIAH_TASKS  # in equal shares
    essays: str = "PaulGrahamEssays.json"  # RULER's haystack, a file or folder; toy: the toy world
    punkt: str | None = None  # folder of the English Punkt data, for essays that need it

    def __post_init__(self) -> None:
        at_least(1, self, "calibration", "examples", "length", "questions_per_context")
        _check_tasks("calibration.tasks", self.tasks)
        if self.examples % self.questions_per_context:
            raise ValueError(
                f"calibration.examples is {self.examples}, which calibration.questions_per_context "
                f"({self.questions_per_context}) does not divide."
            )


@dataclass(frozen=True)
class MaskConfig:
    """The search for the mask."""

    kappa: int = 100  # evaluations a layer; a subproblem with no more candidates is enumerated
    alpha: float = 100.0  # penalty for missing the quota, in the loss that NOMAD sees
    gamma: float = 0.2  # headroom of the normalized score above the dense model's
    ratio_buckets: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # what stage 2 may give a layer
    max_variables: int = 49  # of a subproblem of stage 3; NOMAD's quadratic model takes no more
    max_layers: int | None = None  # of a subproblem of stage 3; None: max(1, 32 // groups)
    razor_recent_share: float = 0.25  # of an example's length: Razor's recent tokens K
    # Of the method alone, as granularity=layer; search_mask.py --method NAME --help lists them.
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, self, "mask", "kappa", "max_variables", "max_layers")
        at_least(0, self, "mask", "alpha", "gamma", "razor_recent_share")
        for ratio in self.ratio_buckets:
            check_ratio(ratio)
        if list(self.ratio_buckets) != sorted(set(self.ratio_buckets)):
            raise ValueError(f"mask.ratio_buckets must rise, they are {self.ratio_buckets}.")


@dataclass(frozen=True)
class DataConfig:
    """The tokens the hybrid is trained on."""

    source: tuple[str, ...] = ("prolong-64k",)  # toy: no network; a mix: @weight behind each
    tokens: TokenCount = 2_500_000_000  # budget: 2.5B, 300M or a number
    sequence_length: TokenCount = 32_768  # documents are packed into sequences of this many tokens
    held_out_sequences: int = 16  # beside the budget, for the validation loss
    document_mask: bool = True  # documents packed together do not see each other
    tokens_from: str | None = None  # folder of tokens that another run packed; None: pack them

    def __post_init__(self) -> None:
        at_least(1, self, "data", "tokens", "sequence_length")
        at_least(0, self, "data", "held_out_sequences")
        if not self.source:
            raise ValueError("data.source is empty; name at least one source of text, as toy.")
        if self.tokens < self.sequence_length:
            raise ValueError(
                f"data.tokens is {self.tokens}, less than one sequence of {self.sequence_length}."
            )


@dataclass(frozen=True)
class TrainConfig:
    """Continual pretraining of the hybrid."""

    batch_sequences: int = 64  # a step, over all GPUs
    micro_batch_sequences: int | None = speed_only(None)  # at once on a GPU; None: what fits
    peak_learning_rate: float = 1e-5  # reached after the warm-up
    warmup_share: float = 0.1  # of all steps
    floor_share: float = 0.0  # of the peak, at the end
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.1  # on matrices only
    clip_norm: float = 1.0  # of the whole gradient
    precision: Literal["bf16", "fp32"] = "bf16"  # to compute in; parameters are fp32
    attention: str = "auto"  # backend: auto, or a file of bosch/backends
    kernels: Literal["auto", "liger", "torch"] = "auto"  # auto: liger on GPUs, torch elsewhere
    max_steps: int | None = None  # a shorter schedule than data.tokens gives; None: all of it
    spike: Literal["log", "skip"] = "log"  # a loss that jumps: tell it, or do not make the step
    checkpoint_steps: int = speed_only(50)  # between two checkpoints to resume from
    keep_checkpoints: int = speed_only(2)  # of these; those of evaluated steps all stay
    async_checkpoints: bool = speed_only(False)  # written while training goes on
    # None in the next three: as the accelerate config says, else as the comment.
    activation_checkpointing: bool | None = speed_only(None)  # compute blocks twice; on for GPUs
    cpu_offload: bool | None = speed_only(None)  # parameters and optimizer in host memory; off
    reshard_after_forward: bool | None = speed_only(None)  # drop a block's gathered weights; on
    sync_every_micro_batch: bool = speed_only(True)  # off: faster, and fp32 gradients stay whole
    compile: bool = speed_only(False)  # torch.compile, block by block

    def __post_init__(self) -> None:
        names = ("batch_sequences", "micro_batch_sequences", "max_steps", "checkpoint_steps")
        at_least(1, self, "train", *names, "keep_checkpoints")
        at_least(0, self, "train", "weight_decay")
        for name in ("peak_learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} is {getattr(self, name)}, it must be above 0.")
        _check_shares("train", self, "warmup_share", "floor_share")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas are {self.betas}, each must be in [0, 1).")


@dataclass(frozen=True)
class EvalConfig:
    """What the dense model, step 0 and checkpoints are judged by."""

    samples: int | None = None  # sets niah_samples and longbench_rows at once
    checkpoints: tuple[float, ...] = (0.0, 0.26, 0.52, 0.78, 1.0)  # shares of the training
    niah_tasks: tuple[str, ...] = NIAH_TASKS  # RULER's needles in a haystack
    niah_lengths: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768)  # tokens
    niah_samples: int = 500  # a task and length
    niah_essays: str | None = None  # RULER's haystack, or toy; None: calibration.essays
    longbench: Literal["full", "toy"] = "full"  # full: 21 sets and GSM8K
    longbench_rows: int | None = None  # of a data set, its first ones; None: all
    longbench_categories: Literal["paper", "official"] = "paper"  # seven, or LongBench's own six
    longbench_data: str = "zai-org/LongBench"  # of full: data.zip, a folder of its files, a hub id
    gsm8k_data: str = "openai/gsm8k"  # the paper's seventh category: file, folder or hub id
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 on a GPU, fp32 on the CPU
    # Sequences decoded at once; None: as many as change no result.
    batch: int | None = speed_only(None)
    prefill_chunk: TokenCount = speed_only(8_192)  # tokens of a prompt read at once

    def __post_init__(self) -> None:
        if self.samples is not None:
            object.__setattr__(self, "niah_samples", self.samples)
            object.__setattr__(self, "longbench_rows", self.samples)
        names = ("samples", "niah_samples", "longbench_rows", "batch", "prefill_chunk")
        at_least(1, self, "eval", *names)
        _check_tasks("eval.niah_tasks", self.niah_tasks)
        if list(self.niah_lengths) != sorted(set(self.niah_lengths)) or self.niah_lengths[:1] < (
            1,
        ):
            raise ValueError(f"eval.niah_lengths must rise from 1 on: {self.niah_lengths}.")
        if list(self.checkpoints) != sorted(set(self.checkpoints)):
            raise ValueError(f"eval.checkpoints must rise, they are {self.checkpoints}.")
        if not all(0 <= share <= 1 for share in self.checkpoints):
            raise ValueError(
                f"eval.checkpoints must be shares of the tokens, from 0 to 1: {self.checkpoints}."
            )


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run does."""

    model: str = "tiny-qwen3"  # a Hugging Face folder or hub id
    ratio: float = 0.75  # share of KV groups on the sliding window
    method: str = "bosch"  # what chooses the groups: a file of bosch/methods
    window: TokenCount = 1_024  # tokens a windowed group sees, the own one included
    seed: int = 0  # of everything random
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_window(self.window)
        at_least(0, self, "", "seed")


def fill_in(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A config as a run has kept it, with the defaults of settings that are newer than the run."""
    config = json.loads(json.dumps(asdict(Config())))
    for name, value in stored.items():
        known = config.get(name)
        both = isinstance(known, dict) and isinstance(value, dict)
        config[name] = known | value if both else value
    return config


def describe_config(config: Config) -> list[str]:
    """Every setting, a line a section."""
    dials = [dial.name for dial in fields(config) if not _is_section(dial)]
    lines = [", ".join(f"{name} {_show(getattr(config, name))}" for name in dials)]
    for section in fields(config):
        if not _is_section(section):
            continue
        values = vars(getattr(config, section.name)).items()
        shown = ", ".join(f"{name} {_show(value)}" for name, value in values)
        lines.append(f"{section.name}: {shown}")
    return lines


def warn_of_window(config: Config) -> list[str]:
    """A warning if there are texts that end within the window: there no group loses anything."""
    lengths = {
        "calibration.length": config.calibration.length,
        "data.sequence_length": config.data.sequence_length,
        "eval.niah_lengths": max(config.eval.niah_lengths),
    }
    within = [f"{name} {tokens:,}" for name, tokens in lengths.items() if tokens <= config.window]
    if not within or not config.ratio:
        return []
    return [f"warning: a window of {config.window:,} tokens hides nothing from {', '.join(within)}"]


def describe_changes(before: Config, after: Config) -> list[str]:
    """The settings in which two configs differ, as `window 1024 -> 64`. Models do not count."""
    changed = []
    for dial in fields(before):
        name, old, new = dial.name, getattr(before, dial.name), getattr(after, dial.name)
        pairs = [(name, old, new)]
        if _is_section(dial):
            keys = vars(old)
            pairs = [(f"{name}.{key}", getattr(old, key), getattr(new, key)) for key in keys]
        changed += [f"{n} {_show(a)} -> {_show(b)}" for n, a, b in pairs if a != b and n != "model"]
    return changed


def _is_section(dial: "Field[Any]") -> bool:
    return is_dataclass(dial.default_factory)


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_show, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def at_least(low: int, config: Any, section: str, *names: str) -> None:
    """Refuse fields below `low`, and those that are no finite number. None is "off" and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value < math.inf:
            option = f"{section}.{name}" if section else name
            raise ValueError(f"{option} is {value}, it must be at least {low}.")


def _check_shares(section: str, config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            option = f"{section}.{name}"
            raise ValueError(f"{option} is {getattr(config, name)}, a share is from 0 to 1.")


def _check_tasks(option: str, tasks: Iterable[str]) -> None:
    if not tasks:
        raise ValueError(f"{option} is empty; name at least one of {', '.join(NIAH_TASKS)}.")
    known = NIAH_TASKS + MORE_NIAH_TASKS
    for task in tasks:
        if task not in known:
            raise ValueError(f"{option}: {task!r} is no NIAH task; {suggest(task, known)}")
