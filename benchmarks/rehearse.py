"""Rehearse a training step without a GPU: the peak memory of one GPU, by what it is for, and the
speed of a training, by formula (`seconds_of_a_token`).

    python -m benchmarks rehearse --model Qwen3-8B --gpus 8 16

bosch/training/rehearsal.py says how, and what is not included. Each takes about a minute of one
core. Micro-batches are tried in the order given, up to the first that does not fit.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

from benchmarks._measure import BenchmarkOptions, Row, read_shape
from bosch.attention import rates
from bosch.config import TrainConfig
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.training import rehearsal
from bosch.training.attention_speed import AttentionSpeed, describe_rule
from bosch.training.metrics import PEAK_FLOPS, count_active_weights, gpu_type, training_flops
from bosch.training.model_start import build_on_meta
from bosch.training.rehearsal import KERNELS, MARGIN_GB, Plan, as_hybrid, rehearse

SIZES = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")
RECOMPUTED: dict[str, Literal[True, False, "attention", "matmuls"]] = {
    "all": True,
    "but attention": "attention",
    "but matmuls": "matmuls",
    "none": False,
}
TITLE = "rehearsed with fake tensors: {seq_len:,} tokens, ratio {ratio:g}; fits {memory_gb:g} GB "
TITLE += f"with {MARGIN_GB:g} to spare; "
TITLE += "tokens/s of a GPU, and hours for {tokens:,.0f} tokens, computed for {gpu}, {precision}, "
TITLE += "{place}, compiled: {compile}"
COLUMNS = {"model": "model", "recomputed": "recomputed", **rehearsal.COLUMNS}
COLUMNS |= {"tokens/s": "tokens_per_second:.0f", "of peak": "mfu:.0%", "hours": "hours:.1f"}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: tuple[str, ...] = SIZES  # known models (Qwen3-8B, ...) or folders with a config.json
    gpus: tuple[int, ...] = (1, 8, 16)  # numbers of GPUs
    kernels: tuple[str, ...] = KERNELS  # torch, liger
    # What the backward computes again: all, all `but attention`, `but matmuls` too, or none.
    recomputed: tuple[Literal["all", "but attention", "but matmuls", "none"], ...] = ("all",)
    micro_batch_sequences: tuple[int, ...] = (1,)  # sequences computed at once on a GPU
    batch_sequences: int = 64  # sequences in a step, over all GPUs
    seq_len: int = 32_768  # tokens in a sequence
    context_parallel: int = 1  # GPUs that share each sequence
    ratio: float = 0.75  # share of KV groups on the sliding window
    window: int = 1024  # window size in tokens
    memory_gb: float = 80.0  # memory of one GPU, in 10^9 bytes
    cpu_offload: bool = False  # keep weights and optimizer in host memory
    tokens: float = 2.5e9  # tokens to train on in total
    gpu: str = "H100"  # type of the GPUs, for the speed: A800, H100, H200 and others
    compile: bool = True  # blocks are compiled, as on GPUs by default
    # Version of flash-attn, or of what is like it in torch; None: attention by the rates that
    # `python -m benchmarks gpu` has measured on such a GPU, and as version 2 where there are none.
    flash: Literal[2, 3] | None = None
    precision: Literal["bf16", "fp8"] = "bf16"  # of linear layers

    def __post_init__(self) -> None:
        if self.gpu not in PEAK_FLOPS:
            raise UserError(
                f"--gpu {self.gpu}: its peak is not known; {suggest(self.gpu, list(PEAK_FLOPS))}"
            )

    @property
    def measured(self) -> AttentionSpeed | None:
        """Rates of a GPU of this type."""
        alike = [name for name in rates.known_devices() if gpu_type(name) == self.gpu]
        found = [AttentionSpeed.of(name) for name in alike if self.flash is None]
        return next(filter(None, found), None)

    @property
    def place(self) -> str:
        """For the title: how the time of attention is computed."""
        if self.measured is not None:
            return describe_rule(self.measured)
        return f"attention by a share of the peak, as flash-attn {self.flash or 2}"


def measure(options: Options) -> Iterator[Row]:
    for name, gpus, kernels, recomputed in itertools.product(
        options.model, options.gpus, options.kernels, options.recomputed
    ):
        model = as_hybrid(read_shape(name), options.ratio, options.window)
        seconds, mfu = seconds_of_a_token(model, options, recomputed)
        speed = {"tokens_per_second": 1 / seconds, "mfu": mfu}
        speed["hours"] = options.tokens * seconds / gpus / 3600
        for micro in options.micro_batch_sequences:
            settings = TrainConfig(
                batch_sequences=options.batch_sequences,
                context_parallel=options.context_parallel,
                micro_batch_sequences=micro,
                cpu_offload=options.cpu_offload,
                activation_checkpointing=RECOMPUTED[recomputed],
                compile=options.compile,
            )
            plan = Plan(model, settings, options.seq_len, gpus, kernels)
            about = f"rehearsed: {name} on {gpus}, {micro} at once, {kernels}"
            about += f", recomputed {recomputed}" if recomputed != "all" else ""
            row = rehearse(plan).row(plan, options.memory_gb)
            row |= {"recomputed": recomputed, "attention": options.place}
            yield {"name": about, "model": name, **row, **speed}
            # More sequences at once need more memory, so larger micro-batches need no rehearsal.
            if row["fits"] == "NO":
                break


def seconds_of_a_token(
    model: PretrainedConfig, options: Options, recomputed: str
) -> tuple[float, float]:
    """Of a GPU, and the share of its peak in bf16, by a formula that nobody has measured:

        linear layers   FLOPs / (.63 peak), by 1.45 less in fp8
        attention       FLOPs / their measured rate (bosch/attention/rates.json); where there is
                        none, / (.25 peak) with flash-attn 2, / (.39 peak) with 3
        norms, rope, residuals, activations   layers * hidden size * .23 ns, compiled .08
        softmax of the loss                   vocabulary * .09 ns

    FLOPs of a part that is recomputed count 4/3. Transfers are hidden behind them.
    """
    peak = PEAK_FLOPS[options.gpu]
    num_weights = count_active_weights(build_on_meta(model))
    flops = training_flops(model, num_weights, [options.seq_len]) / options.seq_len
    linear = 6 * num_weights / (0.63 * peak) / (1.45 if options.precision == "fp8" else 1)
    if (measured := options.measured) is not None:
        lengths, again = [options.seq_len], recomputed == "all"
        attention = measured.seconds(model, lengths, gradients=True)
        attention += measured.seconds(model, lengths, gradients=False) if again else 0.0
        attention /= options.seq_len
    else:
        attention = (flops - 6 * num_weights) / ((0.39 if options.flash == 3 else 0.25) * peak)
        attention *= 4 / 3 if recomputed == "all" else 1
    pointwise = model.num_hidden_layers * model.hidden_size * (0.08 if options.compile else 0.23)
    seconds = 1e-9 * (pointwise + 0.09 * model.vocab_size)
    seconds += linear * (4 / 3 if recomputed in ("all", "but attention") else 1) + attention
    return seconds, flops / seconds / peak
