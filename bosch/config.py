"""Settings: a frozen dataclass for each stage, and `Config`, which holds them all. The defaults are
the paper's; presets are functions in recipes/presets.py. The comment on a field is its --help text.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from decimal import Decimal
from functools import cache
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeVar

from bosch.masks.mask import check_ratio
from bosch.masks.window import check_window
from bosch.run.errors import UserError
from bosch.run.fingerprint import speed_only
from bosch.sink import NO_SINK, Sink


def parse_count(text: str) -> int:
    """A number of tokens, written as 2.5B, 300M, 16k or 4096."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d*)?|\.\d+)([kmb]?)", text.strip().lower())
    if not match:
        raise UserError(f"{text!r} is not a number of tokens; write 2.5B, 300M, 16k or 4096.")
    # Decimal: 2.01 * 1e3 is a little less than 2010 in binary.
    count = Decimal(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]]
    if count % 1:
        raise UserError(f"{text!r} is {count} tokens; it must be a whole number.")
    return int(count)


# What bosch/command_line.py reads in `Annotated`, beside a name for the value and a function that
# reads one. FLAT: options of this dataclass have no prefix; NO_OPTION: cannot be set there; RARE: a
# long --help leaves it out, --help-all shows it.
FLAT, POSITIONAL, NO_OPTION, RARE = object(), object(), object(), object()
T = TypeVar("T")
Rarely = Annotated[T, RARE]  # `alpha: Rarely[float]`: a field that few users set
FOLLOWS = "follows"  # key of a field's metadata: the name of a more general field
NOT_GIVEN: Any = "not given"  # the default of such a field, which __post_init__ replaces
TokenCount = Annotated[int, parse_count, "TOKENS"]
Precision = Literal["auto", "bf16", "fp32"]


def follows(general: str) -> Any:
    """A field that has the value of a more general one, unless it is given itself. On a command
    line the general option also comes before what a preset says of this one."""
    return field(default=NOT_GIVEN, metadata={FOLLOWS: general})


@dataclass(frozen=True)
class CalibrationConfig:
    """The examples that masks are scored on."""

    examples: int = 64  # questions that a mask is scored on
    length: TokenCount = 32_768  # tokens of a text, its questions and answers included
    # Questions on each text; more of them are faster to score.
    questions_per_context: Rarely[int] = 1
    # Tasks, in equal shares: needles (niah_single_1), or of the text itself copy, look_up, quote,
    # continue and summarize. None given: the paper's six of needles.
    tasks: Rarely[tuple[str, ...]] = ()
    # File or folder of essays; text: made of the training text, what is held out of it;
    # text:SOURCE: of another text; toy: of the toy world.
    essays: str = "PaulGrahamEssays.json"
    punkt: Rarely[str | None] = speed_only(None)  # folder with nltk's Punkt data, to split essays
    # Your own in place of all this: .jsonl rows with text, question and answer, or text alone.
    questions: str | None = speed_only(None)
    # Texts of random tokens that come again, of which a search asks beside the questions how well
    # their copies are predicted; each counts as much as another text.
    random_texts: Rarely[int] = 0
    # What counts as right: the expected answers, or what the dense model itself writes up to them.
    answers: Rarely[Literal["expected", "own-words"]] = "expected"

    def __post_init__(self) -> None:
        at_least(1, self, "calibration", "examples", "length", "questions_per_context")
        at_least(0, self, "calibration", "random_texts")
        if self.examples % self.questions_per_context:
            problem = f"no multiple of questions_per_context {self.questions_per_context}"
            raise UserError(f"calibration.examples is {self.examples}, {problem}.")


@dataclass(frozen=True)
class MaskConfig:
    """The search for the mask."""

    kappa: int = 100  # masks tried per layer: more take longer and find better masks
    # rankings that the method bosch starts from, besides its own probes; no name behind the option:
    # the probes alone
    starts: tuple[str, ...] = ("razor", "retrieval_head", "kvzip", "fisher")
    min_full_per_layer: int = 0  # groups of each layer that keep full attention in any case
    alpha: Rarely[float] = 100.0  # weight in NOMAD's loss of a wrong number of windowed groups
    gamma: Rarely[float] = 0.2  # headroom of the normalized score above the dense model's
    # ratios that a layer can get
    ratio_buckets: Rarely[tuple[float, ...]] = (0.0, 0.25, 0.5, 0.75, 1.0)
    # most groups in one search; NOMAD's quadratic model has this limit
    max_variables: Rarely[int] = 49
    max_layers: Rarely[int | None] = None  # most layers in one search; None: max(1, 32 // groups)
    # method razor, but not as a start of others: length of a repeated block, as a share of the
    # longest example
    razor_recent_share: Rarely[float] = 0.25
    # the same: random texts whose attention counts
    razor_texts: Rarely[int] = 8
    # Attention backend: auto, or a file of bosch/attention/backends.
    attention: Rarely[str] = "auto"
    # number format of the model; auto: fp32 on the CPU, else its own
    precision: Rarely[Precision] = "auto"
    # Settings of the chosen method, for example granularity=layer; `bosch search --method NAME
    # --help` lists them.
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, self, "mask", "kappa", "max_variables", "max_layers", "razor_texts")
        at_least(0, self, "mask", "alpha", "gamma", "razor_recent_share", "min_full_per_layer")
        for ratio in self.ratio_buckets:
            check_ratio(ratio)
        _must_rise("mask.ratio_buckets", self.ratio_buckets)


@dataclass(frozen=True)
class PackingConfig:
    """How documents become sequences of tokens."""

    sequence_length: TokenCount = 32_768  # tokens of a training sequence
    tokens: TokenCount | None = None  # tokens to pack: 2.5B, 300M or a number; None: all
    held_out_sequences: Rarely[int] = 16  # sequences for the validation loss, not counted in tokens
    min_document_tokens: Rarely[int] = 0  # leave out documents with fewer tokens
    workers: Rarely[int] = speed_only(0)  # threads that tokenize; 0: one for each core
    # Share of the training sequences whose passages come back in them, so that far text matters.
    repeats: Rarely[float] = field(default=0.0, kw_only=True)
    # They come back within blocks of at least so many tokens, of several lengths; None: within
    # whole sequences. Eight windows: a hybrid learns to read at the distances that it meets.
    repeat_block: Rarely[int | None] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        at_least(2, self, "data", "sequence_length")
        at_least(0, self, "data", "held_out_sequences", "min_document_tokens", "workers")
        check_shares("data.repeats", (self.repeats,))
        if self.repeat_block is not None:
            at_least(8, self, "data", "repeat_block")
        if self.tokens is not None and self.tokens < self.sequence_length:
            length = self.sequence_length
            raise UserError(f"data.tokens is {self.tokens}, less than one sequence of {length}.")


@dataclass(frozen=True)
class DataConfig(PackingConfig):
    """The tokens the hybrid is trained on."""

    # Text: toy (built in), prolong-64k, hf:owner/name, files; to mix several, add @WEIGHT to each.
    source: tuple[str, ...] = ("prolong-64k",)
    tokens: TokenCount = 2_500_000_000  # tokens to train on: 2.5B, 300M or a number
    document_mask: bool = True  # documents in one sequence do not attend to each other
    tokens_from: str | None = None  # use the packed tokens in this folder instead
    # Share of the training sequences that are not text, but questions on it that the dense model
    # answers; only the answers are learned.
    answers: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("data.answers", (self.answers,))
        if not self.source:
            raise UserError("data.source is empty; name a source of text, for example toy.")


# Settings of the training that only count with the objective `distill`.
OF_TEACHER = (
    *("distill_weight", "temperature", "stored_shares", "layer_weight", "teacher"),
    *("on_policy", "reverse_weight"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Continual pretraining of the hybrid."""

    batch_sequences: int = 64  # sequences in a step, over all GPUs together
    micro_batch_sequences: int | None = speed_only(None)  # sequences on a GPU at once; None: as fit
    peak_learning_rate: float = 1e-5  # learning rate after the warmup
    warmup_share: Rarely[float] = 0.1  # share of the steps with a rising learning rate
    floor_share: Rarely[float] = 0.0  # learning rate at the end, as a share of the peak
    betas: Rarely[tuple[float, float]] = (0.9, 0.95)  # AdamW's betas
    weight_decay: Rarely[float] = 0.1  # AdamW's weight decay, on matrices only
    clip_norm: Rarely[float] = 1.0  # the gradient is clipped to this norm
    # Number format of the computation; fp8: bf16, but products of linear layers, by torchao, with a
    # scale for each tensor; fp8-rowwise: for each of its rows.
    precision: Literal["bf16", "fp32", "fp8", "fp8-rowwise"] = "bf16"
    # Attention backend: auto, or a file of bosch/attention/backends.
    attention: Rarely[str] = "auto"
    # liger: fused ones, on a GPU, for the loss and blocks that are not compiled.
    kernels: Rarely[Literal["auto", "liger", "torch"]] = "auto"
    # What is learned: the text, or the dense model's distribution of every token.
    objective: Literal["next-token", "distill"] = "next-token"
    # share of the dense model's distribution; the rest: next-token
    distill_weight: Rarely[float] = 1.0
    temperature: Rarely[float] = 1.0  # of the teacher's and the student's distribution
    # Next tokens of the teacher that are stored once, for all runs: the likeliest, and a sample of
    # the others; None: it is asked at every step.
    stored_shares: Rarely[int | None] = None
    # Weight of the squared distance between the attention outputs of layers with a window and the
    # teacher's, relative to the teacher's square; 0: off.
    layer_weight: Rarely[float] = 0.0
    # model to learn from, without its windows; None: the one to train
    teacher: Rarely[str | None] = None
    # Share of the steps in which the hybrid answers the questions of data.answers itself, and the
    # dense model says what it would have written in the place of each token.
    on_policy: Rarely[float] = 0.0
    # share, in these steps, of the divergence of the dense model from the hybrid (reverse KL)
    reverse_weight: Rarely[float] = 0.5
    # What is trained: all weights, attention, that of layers with a window, norms, or a product of
    # two narrow matrices beside each frozen one; lora-keep-qk: but not beside the queries and keys
    # of groups on full attention.
    trained: Rarely[
        Literal["all", "attention", "windowed-attention", "norms", "lora", "lora-keep-qk"]
    ] = "all"
    lora_rank: Rarely[int] = 16  # rank of lora's matrices
    max_steps: Rarely[int | None] = None  # at most this many steps; None: as the tokens give
    # `recovered`: end a tenth of the steps after a checkpoint, evaluated after the warm-up, that is
    # surely less than 2 points below the dense model on every suite.
    until: Literal["budget", "recovered"] = "budget"
    spike: Rarely[Literal["log", "skip"]] = "log"  # when the loss jumps: log it, or skip the step
    checkpoint_steps: Rarely[int] = speed_only(50)  # steps between checkpoints to resume from
    keep_checkpoints: Rarely[int] = speed_only(2)  # checkpoints to resume from that are kept
    # Recompute activations to save memory: all (True), all but `attention`, or all but that and
    # `matmuls`; None: as the accelerate config says, else as much as a GPU's memory asks for.
    activation_checkpointing: Literal[True, False, "attention", "matmuls"] | None = speed_only(None)
    # Keep weights and optimizer in CPU memory; None: as the accelerate config says, else no.
    cpu_offload: Rarely[bool | None] = speed_only(None)
    # Free a block's gathered weights after its forward pass; None: as accelerate says, else yes.
    reshard_after_forward: Rarely[bool | None] = speed_only(None)
    # Reduce gradients after every micro-batch; without it training is faster and needs more memory.
    sync_every_micro_batch: Rarely[bool] = speed_only(True)
    # Shard over the GPUs of a node, so that less is sent between nodes, and each has the whole
    # state; None: if that fits.
    shard_within_node: Rarely[bool | None] = speed_only(None)
    # Neighboring GPUs that share each sequence, for long ones: each computes a part of its tokens.
    context_parallel: Rarely[int] = speed_only(1)
    compile: Rarely[bool | None] = speed_only(None)  # torch.compile each block; None: on GPUs
    # on GPUs too, the same bits when resumed; slower
    deterministic: Rarely[bool] = speed_only(False)

    def without_teacher(self) -> "TrainConfig":
        """With what only has to do with a teacher as it is by default."""
        usual = TrainConfig()
        return replace(self, **{name: getattr(usual, name) for name in OF_TEACHER})

    @property
    def asks_teacher(self) -> bool:
        """Whether a training has the teacher in memory."""
        is_stored = self.stored_shares is not None and not self.on_policy
        return self.objective == "distill" and not is_stored

    @property
    def in_fp8(self) -> bool:
        return self.precision.startswith("fp8")

    def __post_init__(self) -> None:
        at_least(1, self, "train", "batch_sequences", "micro_batch_sequences", "max_steps")
        at_least(1, self, "train", "checkpoint_steps", "keep_checkpoints")
        at_least(1, self, "train", "stored_shares", "lora_rank", "context_parallel")
        at_least(0, self, "train", "weight_decay", "layer_weight")
        above_0(self, "train", "peak_learning_rate", "clip_norm", "temperature")
        for name in (
            "warmup_share",
            "floor_share",
            "distill_weight",
            "on_policy",
            "reverse_weight",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"train.{name} is {getattr(self, name)}; it must be from 0 to 1.")
        for name in ("teacher", "stored_shares"):  # heads in another order, and no attention
            if self.layer_weight and getattr(self, name) is not None:
                raise UserError(f"train.layer_weight or train.{name}: leave out one of the two.")
        if self.context_parallel > 1:
            for name, what in (
                ("layer_weight", "compares whole sequences"),
                ("on_policy", "writes"),
            ):
                if getattr(self, name):
                    problem = f"train.context_parallel is {self.context_parallel}, but train.{name}"
                    raise UserError(f"{problem} {what} on each rank; leave out one of the two.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"train.betas are {self.betas}; each must be in [0, 1).")


NIAH_SAMPLES = 500  # examples of each needle task and length, the paper's
# Suites that take the count of needles; longbench has its own, and the others take `samples`.
COUNTED_AS_NEEDLES = ("niah", "ruler", "own_formats", "long_answers")


@dataclass(frozen=True)
class EvaluationConfig:
    """How a model is evaluated."""

    # Examples of each task, for every suite; niah_samples and longbench_rows come before it.
    samples: int | None = None
    # needle-in-a-haystack tasks; none given: the paper's six
    niah_tasks: Rarely[tuple[str, ...]] = ()
    # lengths of the texts of niah, ruler, own_formats and long_answers
    niah_lengths: tuple[TokenCount, ...] = (4_096, 8_192, 16_384, 32_768)
    niah_samples: int = follows("samples")  # examples of each task of these, at each length
    # The text of these suites: essays, or text:SOURCE, toy, or in a run text; None: the
    # calibration's.
    niah_essays: Rarely[str | None] = None
    # LongBench: its data.zip, a folder of its files, a hub id, or toy for similar built-in tasks.
    longbench_data: str = "zai-org/LongBench"
    # The first examples of each data set; None: all.
    longbench_rows: int | None = follows("samples")
    # Average over the paper's seven categories (with GSM8K), or over LongBench's own six.
    longbench_categories: Rarely[Literal["paper", "official"]] = "paper"
    gsm8k_data: Rarely[str] = "openai/gsm8k"  # GSM8K: a file of test rows, a folder or a hub id
    options: tuple[str, ...] = ()  # settings of suites, as mine.rows=5 (eval/suites/mine.py)
    # number format of the model; auto: bf16 on a GPU, else fp32
    precision: Rarely[Precision] = "auto"
    # attention backend: auto, or a file of bosch/attention/backends
    attention: Rarely[str] = "auto"
    # Answers generated at once; None: 16. In bf16 near ties then depend on which; 1: they do not.
    batch: Rarely[int | None] = speed_only(None)
    prefill_chunk: Rarely[TokenCount] = speed_only(8_192)  # prompt tokens read at once

    def __post_init__(self) -> None:
        for name, usual in (("niah_samples", NIAH_SAMPLES), ("longbench_rows", None)):
            if getattr(self, name) is NOT_GIVEN:
                value = usual if self.samples is None else self.samples
                object.__setattr__(self, name, value)
        at_least(1, self, "eval", "samples", "niah_samples", "longbench_rows")
        at_least(1, self, "eval", "batch", "prefill_chunk")
        _must_rise("eval.niah_lengths", self.niah_lengths)
        if min(self.niah_lengths, default=0) < 1:
            raise UserError(f"eval.niah_lengths must be at least 1, not {self.niah_lengths}.")


@dataclass(frozen=True)
class RunEvaluationConfig(EvaluationConfig):
    """How the dense model, step 0 and the checkpoints are evaluated."""

    checkpoints: tuple[float, ...] = (0.0, 0.26, 0.52, 0.78, 1.0)  # when, as shares of training
    # niah, own_formats, long_answers, longbench, longbench_v2, ruler, or a file of your own
    suites: tuple[str, ...] = ("niah", "longbench")
    # What generates. vllm: in processes of their own, from another environment (docs/serving.md).
    engine: Rarely[Literal["transformers", "vllm"]] = speed_only("transformers")
    # their interpreter; None: that of make serving
    engine_python: Rarely[str | None] = speed_only(None)
    # their GPUs on a machine; none: the training's
    engine_gpus: Rarely[tuple[str, ...]] = speed_only(())

    def __post_init__(self) -> None:
        if not self.suites:
            raise UserError("eval.suites is empty; name at least one suite, as niah.")
        super().__post_init__()
        check_shares("eval.checkpoints", self.checkpoints)

    def fewest_examples(self) -> int | None:
        """Of a task, over the suites that are evaluated; None: all that there are."""
        counts = {"longbench": self.longbench_rows}
        counts |= dict.fromkeys(COUNTED_AS_NEEDLES, self.niah_samples)
        of_suites = [counts.get(suite, self.samples) for suite in self.suites]
        return min(filter(None, of_suites), default=None)


FEWEST_TO_DECIDE = 25  # examples of each task, for whether a model has recovered


@dataclass(frozen=True)
class Dials:
    """What a mask is chosen for."""

    model: str = "tiny-qwen3"  # a Hugging Face folder or hub id, or an embedded model
    ratio: float = 0.75  # share of the model's KV groups that get the sliding window
    method: str = "bosch"  # what chooses these groups: a file of bosch/methods
    window: TokenCount = 1_024  # window size in tokens, including the current token
    seed: int = 0  # seed of everything random
    # What a group sees of the text before its window: static, a constant key and value in the place
    # of the first token; tokens=4, the first four tokens of the text; or none. auto: static, or
    # that of the file for from_file.
    sink: str = "auto"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        sink = NO_SINK if self.sink == "auto" else Sink.parse(self.sink)
        check_window(self.window, sink.num_tokens)
        at_least(0, self, "", "seed")


@dataclass(frozen=True)
class Config(Dials):
    """All settings of a run."""

    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: RunEvaluationConfig = field(default_factory=RunEvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.on_policy and not self.data.answers:
            problem = f"train.on_policy is {self.train.on_policy}, but there are no questions"
            raise UserError(f"{problem}; pass --data.answers 0.3.")
        fewest = self.eval.fewest_examples() or FEWEST_TO_DECIDE
        if self.train.until == "recovered" and fewest < FEWEST_TO_DECIDE:
            problem = f"takes {FEWEST_TO_DECIDE} examples a task, not {fewest}"
            raise UserError(f"train.until recovered {problem}; raise --eval.samples.")


def shared_fields(part: type[Any], whole: object) -> dict[str, Any]:
    """The values in `whole` of the fields that the class `part` has too."""
    return {f.name: getattr(whole, f.name) for f in fields(part) if hasattr(whole, f.name)}


def fill_in(stored: Mapping[str, object]) -> dict[str, Any]:
    """A config as a run stored it, with defaults for settings that are newer than the run."""
    config: dict[str, Any] = json.loads(json.dumps(asdict(Config())))
    config["sink"] = "none"  # before there were any
    for name, value in stored.items():
        known = config.get(name)
        if isinstance(known, dict):  # a section
            value = known | value if isinstance(value, dict) else known
        config[name] = value
    # Removed; they changed no result. Archives of benchmarks/results have them.
    config["train"].pop("async_checkpoints", None)
    config["eval"].pop("gsm8k_tasks", None)
    if config["train"].get("top_k", 0) is None:  # was switched off; now `stored_shares`
        del config["train"]["top_k"]
    return config


def describe_config(config: Config) -> list[str]:
    """Every setting as the option that gives it, the dials first and then each section."""
    dials = {name: value for name, value in vars(config).items() if not is_dataclass(value)}
    sections = {name: value for name, value in vars(config).items() if name not in dials}
    lines = []
    for section, owner in {"": config, **sections}.items():
        values = vars(owner) if section else dials
        prefix = f"{section}." if section else ""
        lines += wrap_options([as_option(f"{prefix}{name}", v) for name, v in values.items()])
    return lines


def wrap_options(options: Sequence[str], indent: str = "") -> list[str]:
    """Lines of options, each with its value in one line. `indent`: of all lines but the first."""
    hard = "\N{NO-BREAK SPACE}"  # `wrap` leaves an option with its value
    text = " ".join(option.replace(" ", hard) for option in options)
    lines = wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(hard, " ") for line in lines]


def as_option(setting: str, value: object) -> str:
    """A setting of a run as it is typed: `--train.clip-norm 1`, `--train.no-deterministic`."""
    start, dot, name = setting.replace("_", "-").rpartition(".")
    prefix = f"--{start}{dot}"
    if isinstance(value, bool) and setting in switches():
        return f"{prefix}{name if value else f'no-{name}'}"
    values = value if isinstance(value, tuple | list) else [value]
    return " ".join([f"{prefix}{name}", *(shlex.quote(show_exactly(each)) for each in values)])


@cache
def switches() -> frozenset[str]:
    """The settings that are typed without a value."""
    config, found = Config(), set[str]()
    sections = {f"{name}.": part for name, part in vars(config).items() if is_dataclass(part)}
    for prefix, owner in {"": config, **sections}.items():
        for each in fields(owner):
            # One that may be left open (None) is given by a word: `--train.compile False`.
            if isinstance(getattr(owner, each.name), bool) and "None" not in str(each.type):
                found.add(f"{prefix}{each.name}")
    return frozenset(found)


def show_exactly(value: object) -> str:
    """With all digits of a number such as 1/3, since the option is to give the same run."""
    if isinstance(value, tuple | list):
        return " ".join(map(show_exactly, value)) or "none"
    if isinstance(value, float) and float(f"{value:g}") != value:
        return repr(value)
    return show_value(value)


def show_value(value: object) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(show_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def at_least(low: int, config: object, section: str, *names: str) -> None:
    """Refuse fields that are below `low` or not finite. None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value < math.inf:
            option = f"{section}.{name}" if section else name
            raise UserError(f"{option} is {value}, it must be at least {low}.")


def above_0(config: object, section: str, *names: str, most: float | None = None) -> None:
    """Refuse fields that are not above 0 and finite, or more than `most`. None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (0 < value < math.inf and (most is None or value <= most)):
            option = f"{section}.{name}" if section else name
            limit = "" if most is None else f" and at most {most:g}"
            raise UserError(f"{option} is {value}; it must be above 0{limit}.")


def check_shares(option: str, shares: Sequence[float]) -> None:
    """Refuse shares of the training that do not rise or are not from 0 to 1."""
    _must_rise(option, shares)
    if not all(0 <= share <= 1 for share in shares):
        raise UserError(f"{option} must be shares of the training from 0 to 1, not {shares}.")


def _must_rise(option: str, values: Sequence[float]) -> None:
    if not values or list(values) != sorted(set(values)):
        raise UserError(f"{option} must be in rising order, not {values}.")
