"""The calls of `import bosch`, for notebooks and other programs. docs/library.md shows them all.

Models are those of transformers, loaded with `attn_implementation="bosch"`. What cannot be done
raises bosch.run.errors.UserError, a ValueError, with what to change.
"""

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from bosch.attention.search_mode import MASKED
from bosch.calibration import Calibration
from bosch.command_line import take_apart
from bosch.config import CalibrationConfig, Config, EvaluationConfig, MaskConfig
from bosch.data.calibration import CalibrationSettings, build_set
from bosch.eval.evaluate import check_data, plan_evaluation
from bosch.eval.own_words import rewording
from bosch.eval.results import read_scores
from bosch.eval.rows import Row
from bosch.eval.runner import Evaluation
from bosch.eval.runner import evaluate as run_suites
from bosch.eval.settings import FAST, Label
from bosch.hybrid.conversion import deploy
from bosch.hybrid.export import MASK_KEY, info_of
from bosch.hybrid.models import check_native_window
from bosch.hybrid.sinks import attach_sink, read_constants, write_constants
from bosch.masks.mask import GroupMask, MaskFile, check_ratio, read_mask, write_mask
from bosch.masks.picture import mask_figure
from bosch.masks.ready import find_mask
from bosch.masks.window import full_layers, own_windows
from bosch.method import Inputs
from bosch.methods._choose import make_mask, write_selection
from bosch.methods._settings import (
    check_settings,
    default_settings,
    load_method,
    resolve_sink,
)
from bosch.model import (
    ModelInfo,
    find_model,
    find_tokenizer,
    load_tokenizer,
    read_model_info,
)
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.files import read_sealed_json, write_sealed_json
from bosch.run.fingerprint import fingerprint
from bosch.run.folder import RunFolder
from bosch.run.kept import forget
from bosch.run.progress import say
from bosch.run.stage import Stage
from bosch.sink import NO_SINK, Sink

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Mask(MaskFile):
    """A mask (`mask`) and where it comes from: model, method, settings."""

    @property
    def ratio(self) -> float:
        return self.mask.ratio

    def kv_bytes(self, tokens: int, bytes_per_value: int = 2) -> int:
        """Of the entries in use in the hybrid's KV cache for one text."""
        return self.mask.kv_bytes(tokens, self.model.head_dim, bytes_per_value)

    def save(self, path: str | Path) -> None:
        """As mask.json; the constants of a static sink in a second file beside it."""
        write_mask(Path(path), self)
        if self.mask.sink.constants is not None:
            write_constants(Path(path), self.mask.sink)

    def plot(self) -> "Figure":
        """A matplotlib figure: layers from the bottom up, orange for full attention."""
        figure = mask_figure(self)

        def png() -> bytes:
            figure.savefig(content := io.BytesIO(), format="png")
            return content.getvalue()

        figure._repr_png_ = png  # type: ignore[attr-defined]  # how notebooks show it
        return figure


def calibrate(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model: "PreTrainedModel | None" = None,
    seed: int = 0,
    **settings: Any,
) -> Calibration:
    """Build the examples on which masks are scored: needles to find in long texts.

    model: the dense one, for answers="own-words". settings: fields of
    bosch.config.CalibrationConfig, such as examples=48, length=4096 and
    essays="text:my-texts/", any text to hide needles in, without RULER's bytes
    (essays="PaulGrahamEssays.json"); essays="toy" needs no file, questions=FILE no essays.
    """
    forget()
    made = _settings(CalibrationSettings, CalibrationConfig, settings, seed=seed)
    if made.answers == "own-words" and model is None:
        raise UserError("answers is own-words, which takes the dense model: pass model too.")
    positions = None if model is None else model.config.max_position_embeddings
    return build_set(made, tokenizer, positions, rewording(lambda: model, tokenizer))[0]


def search_mask(
    model: "PreTrainedModel",
    calibration: Calibration | None = None,
    *,
    ratio: float,
    window: int,
    method: str = "bosch",
    folder: str | Path | None = None,
    sink: str = "auto",
    seed: int = 0,
    min_full_per_layer: int = 0,
    **settings: Any,
) -> Mask:
    """The mask that a method of bosch/methods chooses. The model stays as it is.

    sink: what windows see besides their tokens: none, static or tokens=S. auto: static, or that of
    the file for from_file.
    min_full_per_layer: groups of each layer that keep full attention in any case.
    folder: gets the mask, and what a search notes to resume from: call again with the same
    arguments after an interruption.
    settings: the method's, such as kappa=30 (`bosch search --method NAME --help` lists them).
    """
    began = time.monotonic()
    _need_our_attention(model)
    ratio = _checked("ratio", ratio, float)
    window, seed = _checked("window", window, int), _checked("seed", seed, int)
    least = _checked("min_full_per_layer", min_full_per_layer, int)
    check_ratio(ratio)
    name, positions = origin_of(model), model.config.max_position_embeddings
    if ratio and window >= positions:
        raise UserError(f"window {window}: the model has {positions:,} positions; choose less.")
    usual = default_settings(method, MaskConfig(min_full_per_layer=least))
    chosen = _settings(partial(replace, usual), type(usual), settings)
    check_settings(method, chosen)
    config = resolve_sink(Config(method=method, window=window, sink=sink), chosen)

    def load_calibration() -> Calibration:
        if calibration is None:
            if load_method(method).traits.reads_calibration:
                raise UserError(f"method {method} takes examples: pass those of bosch.calibrate.")
            problem = "static sinks are measured on examples: pass those of bosch.calibrate"
            raise UserError(f'{problem}, or sink="none".')
        if calibration.longest > positions:
            problem = f"the calibration set has a text of {calibration.longest:,} tokens"
            raise UserError(f"{problem}, the model {positions:,} positions; make a shorter one.")
        return calibration

    with _evaluating(model, folder) as path:
        if folder is not None:
            _refuse_other_weights(model, path)
        inputs = Inputs(
            model_info=describe(model),
            load_model=lambda: model,
            load_calibration=load_calibration,
            window_tokens=window,
            ratio=ratio,
            seed=seed,
            settings=chosen,
            folder=path,
            # One that was made in memory has none: no folder is its own.
            load_tokenizer=lambda: find_tokenizer(Path(name)) if name else None,
            sink=Sink.parse(config.sink),
            min_full_per_layer=least,
            own_windows=own_windows(model.config),
        )
        # Off while the method works, which attaches its own; the model may be inside `masked`.
        before = attach_sink(model, NO_SINK)
        try:
            selection = make_mask(method, inputs)
            write_selection(method, inputs, selection, began)
        finally:
            attach_sink(model, before)
        return load_mask(path / "mask.json")


def _refuse_other_weights(model: "PreTrainedModel", folder: Path) -> None:
    """A model that came from a folder is known by it, whatever was done to its weights since."""
    from bosch.search.outcomes import FILE as OUTCOMES

    file, found = folder / "weights.json", {"weights": hash_weights(model)}
    if file.is_file():
        is_same = read_sealed_json(file, "weights")["weights"] == found["weights"]
    else:  # an earlier version wrote none
        is_same = not any((folder / name).exists() for name in ("mask.json", OUTCOMES))
    if not is_same:
        problem = f"{folder} is of a search with other weights of this model, or not known to be"
        raise UserError(f"{problem} with these: pass another folder for the weights as they are.")
    write_sealed_json(file, found)


def load_mask(path: str | Path, model: "PreTrainedModel | None" = None) -> Mask:
    """A mask.json, checked, with the sinks that lie beside it, or a ready mask of the package by
    its name ("smollm2-135m@0.75"). With `model`, a mask made for other weights is refused."""
    file = find_mask(Path(path))
    record = read_mask(file, None if model is None else describe(model))
    return Mask(**vars(read_constants(file, record)))


@contextlib.contextmanager
def masked(model: "PreTrainedModel", mask: MaskFile | GroupMask) -> "Iterator[PreTrainedModel]":
    """Inside, every call of the model and `generate` use the mask. The KV cache stays that of the
    dense model: `materialize` saves memory, this saves copying the weights."""
    _need_our_attention(model)
    chosen = _mask_of(model, mask)

    def add_mask(module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, {"bosch_mask": chosen.z, "bosch_window": chosen.window_tokens} | named

    sink_before = attach_sink(model, chosen.sink)  # first: it refuses one without its constants
    # In front of an outer mask's: what the inner one sets stays.
    hook = model.register_forward_pre_hook(add_mask, prepend=True, with_kwargs=True)
    before = getattr(model, MASKED, None)
    setattr(model, MASKED, chosen)
    try:
        yield model
    finally:
        attach_sink(model, sink_before)
        setattr(model, MASKED, before)
        hook.remove()


def materialize(model: "PreTrainedModel", mask: MaskFile | GroupMask) -> "PreTrainedModel":
    """The hybrid, with weights of its own: `save_pretrained` writes an ordinary folder."""
    _need_loaded(model)
    if getattr(model, "peft_config", None):
        raise UserError("The model has an adapter: merge it first (peft's merge_and_unload()).")
    for name, weight in model.named_parameters():
        # Other kinds of weights have heads that no permutation finds.
        if type(weight.data) is not Tensor or not weight.is_floating_point():
            remedy = "materialize the model before that, and quantize the hybrid"
            raise UserError(f"{name} is not a plain tensor of numbers: {remedy}.")
    if len(places := {weight.device for weight in model.parameters()}) > 1:
        listed = ", ".join(sorted(map(str, places)))  # `meta` is what is left on the disk
        remedy = "load it on one, or run `bosch materialize` on its folder, which takes no memory"
        raise UserError(f"The model's weights are on several devices ({listed}): {remedy}.")
    check_native_window(model.config)
    chosen = _mask_of(model, mask)
    origin = {MASK_KEY: mask.origin()} if isinstance(mask, MaskFile) else {}
    hybrid = deploy(model, chosen.z, chosen.window_tokens, chosen.sink, **origin)
    hybrid.config.name_or_path = model.config.name_or_path
    return hybrid


def evaluate(
    model: "PreTrainedModel",
    suites: Sequence[str] = ("niah",),
    lengths: Sequence[int] = (),
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    folder: str | Path | None = None,
    **settings: Any,
) -> list[Row]:
    """Scores of the model, dense, hybrid or `masked`: rows with suite, task, length, metric, value,
    stderr and n.

    lengths: text lengths of NIAH, in tokens. tokenizer: None takes that of the folder the model
    came from. folder: keeps predictions, and resumes from them. It belongs to one model, with its
    weights and mask as they are now: after training, or with other sinks, it is refused, so that
    no old score is taken for a new one. Pass a folder for each, such as scores/step-100.
    settings: fields of bosch.config.EvaluationConfig, such as samples=50 and niah_essays="toy", but
    precision and attention: the model is evaluated as it was loaded.
    """
    _need_loaded(model)
    forget()
    suites = (suites,) if isinstance(suites, str) else suites
    if lengths:
        settings["niah_lengths"] = tuple(lengths)
    positions = model.config.max_position_embeddings
    chosen = _settings(EvaluationConfig, EvaluationConfig, settings)
    for name in ("precision", "attention"):
        if getattr(chosen, name) != "auto":
            raise UserError(f"{name}: the model is evaluated as it was loaded; leave {name} out.")
    plan = plan_evaluation(chosen, suites, positions)
    check_data(plan, positions)
    name = origin_of(model)
    if tokenizer is None and not name:
        raise UserError("The model came from no folder, so pass its tokenizer: tokenizer=...")
    hybrid = getattr(model.config, "bosch", None) or {}
    with _evaluating(model, folder) as path:
        evaluation = Evaluation(
            load_model=lambda: model,
            tokenizer=tokenizer or load_tokenizer(name),
            suites=plan.suites,
            examples_folder=path / "examples",
            label=Label(Path(name).name or type(model).__name__),
            max_positions=positions,
            generation=plan.generation,
            window_tokens=hybrid.get("window"),
        )
        mask: GroupMask | None = getattr(model, MASKED, None)
        known = {"model": describe(model), "hybrid": hybrid, "mask": None}
        if mask is not None:
            known["mask"] = vars(mask) | {"sink": str(mask.sink)}
        if folder is not None:  # only what is kept can be taken for another model's
            known |= {"weights": hash_weights(model), "sinks": hash_sinks(model)}
        quantized = getattr(model.config, "quantization_config", None)
        known["numbers"] = f"{model.dtype} {quantized}"
        # Whatever the batch: the numbers of the model are not the plan's.
        facts = replace(plan, generation=FAST).facts() | known
        stage = Stage(path.name, partial(run_suites, evaluation), facts)
        with RunFolder(path.parent, say=say, home=path) as run_folder:
            run_folder.complete(stage)
        return [
            row
            for run in plan.suites
            for row in read_scores(path / run.name / "scores.json")["rows"]
        ]


def origin_of(model: "PreTrainedModel") -> str:
    """The folder or hub id the model was loaded from; "" for one made in memory."""
    return model.config.name_or_path or ""


def describe(model: "PreTrainedModel") -> ModelInfo:
    """Shape and identity. A model that came from no folder is known by its weights in memory."""
    config, name = model.config, origin_of(model)
    if name and (folder := find_model(name)) is not None:
        return read_model_info(folder)
    revision = getattr(config, "_commit_hash", None)
    weight_hash = None if revision else hash_weights(model)
    return info_of(config, name or type(model).__name__, revision, weight_hash)


def hash_weights(model: "PreTrainedModel") -> str:
    """Of the weights and buffers as they are in memory."""
    # By one core, 5 MB (tiny-qwen3) in .9 ms and 1 GB in .12 s.
    return fingerprint({name: _hash_tensor(x) for name, x in model.state_dict().items()})


def hash_sinks(model: "PreTrainedModel") -> str | None:
    """Of the static sinks inside `masked`, which are no weights of the model; None: it has none.
    Those of a number of first tokens are facts of the mask."""
    constants = getattr(model, "window_sink", NO_SINK).constants
    if constants is None:
        return None
    return fingerprint({name: _hash_tensor(x) for name, x in constants._asdict().items()})


def _hash_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)  # as quantized models have among their weights
    if hasattr(value, "__tensor_flatten__"):  # another kind of weight, made of plain tensors
        names, _ = value.__tensor_flatten__()
        return {name: _hash_tensor(getattr(value, name)) for name in names}
    if value.is_meta:  # left on disk, in files of the model's folder
        return f"{value.dtype} {tuple(value.shape)}"
    content: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxh3_128_hexdigest(content)


@contextlib.contextmanager
def _evaluating(model: "PreTrainedModel", folder: str | Path | None) -> Iterator[Path]:
    was_training = model.training
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary if folder is None else folder)
        path.mkdir(parents=True, exist_ok=True)
        model.eval()
        try:
            yield path
        finally:
            model.train(was_training)


def _need_loaded(model: Any) -> None:
    if isinstance(model, str | Path):
        call = f'AutoModelForCausalLM.from_pretrained("{model}", attn_implementation="bosch")'
        problem = f"{str(model)!r} is a path, and this takes a loaded model"
        raise UserError(f"{problem}: {call}. `bosch --help` has commands for folders.")


def _need_our_attention(model: "PreTrainedModel") -> None:
    _need_loaded(model)
    used = model.config._attn_implementation
    if used != "bosch" or getattr(model.config, "bosch", None) is not None:
        found = "is a hybrid already" if used == "bosch" else f"computes attention by {used!r}"
        remedy = 'load the dense model with from_pretrained(..., attn_implementation="bosch")'
        raise UserError(f"This model {found}, which takes no masks: {remedy}.")


def _mask_of(model: "PreTrainedModel", mask: MaskFile | GroupMask) -> GroupMask:
    """Without its origin. One of another shape than the model is refused."""
    chosen = mask.mask if isinstance(mask, MaskFile) else mask
    layers, groups = len(full_layers(model.config)), model.config.num_key_value_heads
    if (chosen.num_layers, chosen.num_groups) != (layers, groups):
        found = f"{chosen.num_layers} layers x {chosen.num_groups} groups"
        raise UserError(f"The mask has {found}, the model {layers} x {groups}; pass its own mask.")
    return chosen


def _settings(made: Any, known: Any, values: dict[str, Any], **further: Any) -> Any:
    """`made` from these values, lists as tuples and paths as text. A name that `known` lacks is a
    user's mistake."""
    names, hints = tuple(known.__dataclass_fields__), get_type_hints(known, include_extras=True)
    for name, value in values.items():
        if name not in names:
            raise UserError(f"{name}: no such setting; {suggest(name, names)}")
        takes_many = isinstance(known.__dataclass_fields__[name].default, tuple)
        if isinstance(value, Path):
            further[name] = str(value)
        elif takes_many and isinstance(value, str):
            further[name] = (value,)  # not its letters
        else:  # [512] and (512,) are the same setting
            further[name] = tuple(value) if isinstance(value, list) else value
        further[name] = _checked(name, further[name], hints[name])
    return made(**further)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value, a number of numpy as Python's own, which JSON takes. Text in the place of a number
    and the like is refused. What is not named here the settings check themselves."""
    kind, takes_none, _ = take_apart(hint)
    if value is None and takes_none:
        return None
    if get_origin(kind) is tuple:
        values = value if isinstance(value, tuple) else (value,)
        return tuple(_checked(name, each, get_args(kind)[0]) for each in values)
    wanted = {int: (Integral, "a whole number"), float: (Real, "a number"), str: (str, "text")}
    if kind in wanted:
        of_kind, described = wanted[kind]
        if not isinstance(value, of_kind) or isinstance(value, bool):
            raise UserError(f"{name}: {value!r} is not {described}.")
        if not isinstance(value, int | float | str):
            return kind(value)
    return value
