"""Estimate the time of continual pretraining. Computed by formula; nothing is run.

    python -m benchmarks estimate --model Qwen3-8B --gpus 16

FLOPs (training/flops.py) divided by the GPUs' peak times --mfu. The memory: `rehearse`.
"""

from dataclasses import dataclass

from benchmarks._models import SIZES, read_shape, spread_mask
from benchmarks._options import BenchmarkOptions, Row
from bosch.hybrid.models import hybrid_config
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.tables import show_rows
from bosch.training.flops import PEAK_FLOPS, count_active_weights, training_flops
from bosch.training.model_start import build_on_meta


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: tuple[str, ...] = SIZES  # known models (Qwen3-8B, ...) or model folders
    gpus: int = 8  # number of GPUs
    gpu: str = "A800"  # type of the GPUs: A800, H100, H200 and others
    mfu: float = 0.4  # share of the GPUs' peak that training reaches
    ratio: float = 0.75  # share of KV groups on the sliding window
    window: int = 1024  # window size in tokens
    seq_len: int = 32_768  # tokens in a sequence
    batch_sequences: int = 64  # sequences in a step, over all GPUs
    tokens: float = 2.5e9  # tokens to train on in total

    def __post_init__(self) -> None:
        if self.gpu not in PEAK_FLOPS:
            raise UserError(
                f"--gpu {self.gpu}: its peak is not known; {suggest(self.gpu, list(PEAK_FLOPS))}"
            )
        names = ("gpus", "mfu", "seq_len", "batch_sequences", "tokens")
        if min(getattr(self, name) for name in names) <= 0:
            raise UserError(
                "--gpus, --mfu, --seq-len, --batch-sequences and --tokens must be above 0."
            )


def measure(options: Options) -> list[Row]:
    rows = [estimate_training(model, options) for model in options.model]
    show_rows(
        f"computed, not measured: {options.gpus} x {options.gpu} at {options.mfu:.0%} of their "
        f"peak, {options.seq_len:,} tokens, ratio {options.ratio:g}",
        rows,
        {
            "model": "model",
            "step, s": "step_seconds:.1f",
            "dense step, s": "dense_step_seconds:.1f",
            f"{options.tokens / 1e9:g}B tokens, h": "value:.1f",
            "checkpoint, GB": "checkpoint_gb:.0f",
            "export, GB": "export_gb:.0f",
        },
    )
    return rows


def estimate_training(model: str, options: Options) -> Row:
    config, _ = read_shape(model)
    empty = build_on_meta(config)
    active, num_weights = count_active_weights(empty), empty.num_parameters()
    mask = spread_mask(options.ratio, config.num_hidden_layers, config.num_key_value_heads)
    hybrid = hybrid_config(config, mask, options.window)
    rate = options.gpus * PEAK_FLOPS[options.gpu] * options.mfu
    step, dense_step = (
        training_flops(shape, active, [options.seq_len] * options.batch_sequences) / rate
        for shape in (hybrid, config)
    )
    steps = options.tokens / (options.batch_sequences * options.seq_len)
    return {
        "name": f"computed: {model} training",
        "model": model,
        "value": step * steps / 3600,
        "unit": "hours",
        "step_seconds": step,
        "dense_step_seconds": dense_step,
        "checkpoint_gb": 12 * num_weights / 1e9,  # fp32 and both moments
        "export_gb": 2 * num_weights / 1e9,
    }
