"""Named setups: functions that return a config. A variant calls one and replaces two fields.

`paper` carries every value of the paper's settings that is one; a test holds them. The rest of that
page are rules that the code keeps everywhere, under any preset: an example counts when all its
answer tokens are right, prefill only, one calibration set for all methods and none of it in the
test set; candidates no more than the budget are enumerated; a static score of a group is the mean
over its query heads; training is AdamW under FSDP.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bosch.assets import asset_folder
from bosch.config import (
    CalibrationConfig,
    Config,
    DataConfig,
    EvalConfig,
    MaskConfig,
    TrainConfig,
    describe_changes,
)
from bosch.model import read_model_config
from bosch.plugins import list_plugins, suggest

TINY_MODEL = "tiny-qwen3"
SMOKE_MODEL = "tiny-qwen3-2layer"


@dataclass(frozen=True)
class ModelShape:
    """What a setup must know of a model before it is loaded."""

    num_layers: int
    num_groups: int  # KV heads a layer
    positions: int

    @property
    def groups(self) -> tuple[int, int]:
        return self.num_layers, self.num_groups


@dataclass(frozen=True)
class PaperModel:
    """A row of the paper's table of models."""

    shape: ModelShape
    billion_parameters: float
    query_heads: int
    # Sequences of 32k at once on a GPU. The paper's 8 for 1.7B fits one node of 8 GPUs: on its 16
    # they would be 128 sequences a step, not 64. Of 8B and 14B it says no number.
    micro_batch_sequences: int


PAPER_MODELS = {
    "Qwen/Qwen3-1.7B-Base": PaperModel(ModelShape(28, 8, 32_768), 1.7, 16, 8),
    "Qwen/Qwen3-8B-Base": PaperModel(ModelShape(36, 8, 32_768), 8.2, 32, 4),
    "Qwen/Qwen3-14B-Base": PaperModel(ModelShape(40, 8, 32_768), 14.8, 40, 4),
    "Qwen/Qwen3-30B-A3B-Base": PaperModel(ModelShape(48, 4, 40_960), 30.5, 32, 2),
}


def tiny(model: str = TINY_MODEL) -> Config:
    """The embedded model on a laptop: the whole chain in minutes, with settings of its own instead
    of the paper's."""
    return Config(
        model=model,
        window=64,
        calibration=CalibrationConfig(
            examples=48, length=1_024, questions_per_context=4, essays="toy"
        ),
        mask=MaskConfig(kappa=30),
        data=DataConfig(source=("toy",), tokens=786_432, sequence_length=1_024),
        # Small batches: on so few tokens the number of steps decides. Peaks of 1e-3 and 3e-3 bring
        # back as much of NIAH; of toy LongBench the smaller keeps more.
        train=TrainConfig(
            batch_sequences=2, peak_learning_rate=1e-3, precision="fp32", kernels="torch"
        ),
        eval=EvalConfig(
            checkpoints=(0.0, 1 / 3, 2 / 3, 1.0),
            niah_lengths=(512, 1_024),
            niah_samples=8,
            longbench="toy",
            longbench_rows=6,
        ),
    )


def smoke(model: str = SMOKE_MODEL) -> Config:
    """Seconds long, on the two-layer model: every stage runs, and nothing is learned. For tests of
    the chain."""
    config = tiny(model)
    return replace(
        config,
        window=32,
        calibration=replace(config.calibration, examples=4, length=256, questions_per_context=2),
        mask=replace(config.mask, kappa=4),
        data=replace(config.data, tokens=4_096, sequence_length=256),
        train=replace(config.train, batch_sequences=2),
        eval=replace(
            config.eval,
            checkpoints=(0.0, 1.0),
            niah_lengths=(256,),
            niah_samples=1,
            longbench_rows=1,
        ),
    )


def paper(model: str = "Qwen/Qwen3-1.7B-Base") -> Config:
    """The paper's settings, for its four models as they are, for any other scaled to the model's
    positions."""
    if model not in PAPER_MODELS:
        return scaled_paper(model)
    known = PAPER_MODELS[model]
    return Config(
        model=model,
        # At most 32 variables a subproblem: 4 layers of 8 groups, 8 layers of 4.
        mask=MaskConfig(max_layers=32 // known.shape.num_groups),
        train=TrainConfig(
            micro_batch_sequences=known.micro_batch_sequences, attention="flash", kernels="liger"
        ),
    )


def scaled_paper(model: str) -> Config:
    """The paper's settings for any model and machine: lengths no longer than the model's positions,
    the window in proportion, the same number of tokens in a batch, and whatever attention backend,
    kernels and memory there are."""
    config = Config(model=model)
    if model in PAPER_MODELS:
        return replace(paper(model), train=config.train)
    longest = min(config.data.sequence_length, read_shape(model).positions)
    times_shorter = config.data.sequence_length / longest
    lengths = tuple(round(n / times_shorter) for n in config.eval.niah_lengths)
    return replace(
        config,
        window=max(1, round(config.window / times_shorter)),
        calibration=replace(config.calibration, length=longest),
        data=replace(config.data, sequence_length=longest),
        train=replace(
            config.train, batch_sequences=round(config.train.batch_sequences * times_shorter)
        ),
        eval=replace(config.eval, niah_lengths=lengths),
    )


PRESETS: dict[str, Callable[..., Config]] = {"tiny": tiny, "smoke": smoke, "paper": paper}


def choose(preset: str | None, model: str | None) -> tuple[Config, list[str]]:
    """The setup for `--preset` and `--model`, either of which may be left out, and the lines that
    say what was chosen."""
    if preset is not None:
        return (PRESETS[preset](model) if model else PRESETS[preset]()), [f"preset {preset}"]
    if model is None:
        return tiny(), ["preset tiny, since neither --model nor --preset was given"]
    config = scaled_paper(model)
    changed = describe_changes(paper(), config)
    return config, [f"preset paper, scaled to {model}: {', '.join(changed)}"]


def check_method(name: str) -> None:
    """Refuse a method that is no file of bosch/methods."""
    known = list_plugins("bosch.methods")
    if name not in known:
        raise ValueError(f"--method {name}: no such method; {suggest(name, known)}")


def check_model(model: str) -> None:
    """Refuse, before hours are spent on it, a model that can become no hybrid."""
    if model in PAPER_MODELS:
        return
    from bosch.hybrid.materialize import read_config, refuse_unless_plain  # seconds

    folder = find_model(model) or _fetch_config(model)
    refuse_unless_plain(folder, read_config(folder))


def check_lengths(config: Config) -> None:
    """Refuse texts that are longer than the model reads."""
    fit_length("--calibration.length", config.calibration.length, config.model)
    fit_length("--data.sequence-length", config.data.sequence_length, config.model)
    fit_length("--eval.niah-lengths", max(config.eval.niah_lengths), config.model)


def fit_length(option: str, asked: int | None, model: str) -> int:
    """The length asked for, or the paper's, as far as the model reads."""
    positions = read_shape(model).positions
    if asked is None:
        return min(DataConfig.sequence_length, positions)
    if asked > positions:
        raise ValueError(f"{option} {asked}: {model} has {positions:,} positions.")
    return asked


def find_model(model: str) -> Path | None:
    """The folder of a model that is on this machine; None for a hub id. A path that leads nowhere
    is refused."""
    if Path(model).is_dir():
        return Path(model)
    if "/" not in model and (asset := asset_folder(TINY_MODEL).parent / model).is_dir():
        return asset
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise FileNotFoundError(
            f"--model {model}: there is no such folder; pass a Hugging Face model folder or a hub "
            "id (owner/name), or an embedded model (tiny-qwen3, tiny-qwen3-2layer)."
        )
    return None


def read_shape(model: str) -> ModelShape:
    """Shape of a model from its config.json, which is fetched from the hub if need be; weights are
    not."""
    folder = find_model(model)
    if folder is None and model in PAPER_MODELS:
        return PAPER_MODELS[model].shape
    config = read_model_config(folder or _fetch_config(model))
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        raise ValueError(
            f"{model}: its config.json says no max_position_embeddings ({positions!r})."
        )
    return ModelShape(config["num_hidden_layers"], config["num_key_value_heads"], positions)


def _fetch_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    with explain_hub(model):
        return Path(hf_hub_download(model, "config.json")).parent


@contextlib.contextmanager
def explain_hub(model: str) -> Iterator[None]:
    """Where a model is fetched: one sentence in place of the hub's errors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"--model {model} is no folder here, and the hub did not give it: {reason}"
        ) from error
