"""Writes the hybrid of a model folder and a mask as an ordinary Hugging Face folder, and back.

    materialize(Path("Qwen3-8B"), read_mask(Path("mask.json")), Path("hybrid"))
    unmaterialize(Path("hybrid"), Path("dense-again"))          # the original weights, bit for bit

Weights are rewritten file by file (bosch/hybrid/shards.py) under the plain family's names, so that
LoRA and quantizers work. A check then compares the logits of the new folder with those of the
source in search mode, with one model in memory at a time. config.json is written after the check,
so an unchecked folder cannot be loaded.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from bosch.hybrid import conversion, export
from bosch.hybrid.conversion import Permutation, inverse
from bosch.hybrid.models import PREFIX, check_native_window, families_with, family_of
from bosch.hybrid.shards import PROGRESS, rewrite_weights, weight_files
from bosch.hybrid.sinks import attach_sink, sink_of_hybrid
from bosch.masks.mask import MaskFile
from bosch.masks.window import own_windows
from bosch.model import (
    LOCAL,
    OTHER_WEIGHTS,
    explain_library_errors,
    find_tokenizer,
    load_model,
    read_model_config,
)
from bosch.model_files import TOKENIZER_CONFIG, read_json_object
from bosch.run.errors import UserError
from bosch.run.files import CHAT_TEMPLATES, MANIFEST, STARTED, write_atomically
from bosch.run.progress import say
from bosch.sink import NO_SINK, Sink

# Not copied: weights in any format (shards.py writes them), code, and the files we write ourselves.
# All others are: tokenizer, chat template, generation config, license.
SKIPPED = (*OTHER_WEIGHTS, ".safetensors", ".index.json", ".py")
WRITTEN_ANEW = {"config.json", export.CARD, export.PICTURE, MANIFEST, STARTED}

# The check. A short window shows a wrong order of groups more clearly, and needs only a short text.
CHECK_WINDOW = 32
CHECK_TOKENS = 128
CHECK_ROWS = 64  # compare the last logits, for which the window hides something
# Relative to the largest logit. Both models compute in float64, but transformers' norms round to
# float32, so differences are 0 or about 1e-7. Two groups in wrong places give 1e-3 and more.
CHECK_TOLERANCE = 1e-5
HEAD_ROWS = 16_384  # of the head's weight, converted at once


def materialize(source: Path, record: MaskFile, out: Path) -> None:
    """Write the hybrid. Can be restarted at any point: complete weight files are kept. The mask of
    a static sink comes with its constants (bosch.hybrid.sinks.read_constants)."""
    plain = read_plain(source)
    mask = record.mask
    config = conversion.hybrid_config(
        plain, mask.z, mask.window_tokens, mask.sink, mask=record.origin()
    )
    config.architectures = [family_of(config).model_class.__name__]
    constants = conversion.sink_parameters(mask.sink, config)
    _write(source, plain, out, config, config.bosch["permutation"], constants)
    _judge(out, source, compare_logits(source, plain, out, config))
    export.write_exports(out, config, source)
    _publish(out, config)


def unmaterialize(source: Path, out: Path) -> None:
    """Write the dense model that a hybrid was made from, with its weights bit for bit."""
    hybrid = read_hybrid(source)
    config = conversion.plain_config(hybrid)
    config.architectures = [family_of(config).plain_model_class.__name__]
    _write(source, hybrid, out, config, inverse(hybrid.bosch["permutation"]))
    _judge(out, source, compare_logits(out, config, source, hybrid))
    _publish(out, config)


def as_layer_types(source: Path, out: Path) -> None:
    """Write a hybrid of whole layers as the plain model with its family's own `layer_types`, for
    engines that heed them."""
    hybrid = read_hybrid(source)
    groups, window = hybrid.num_key_value_heads, hybrid.bosch["window"]
    plain, num_full = conversion.plain_config(hybrid), hybrid.bosch["num_full"]
    if getattr(plain, "layer_types", None) is None:
        problem = f"{source}: the family {plain.model_type} has no layer_types in transformers"
        raise UserError(f"{problem}; {', '.join(families_with('layer_types_suffice'))} have.")
    # vLLM, SGLang and llama.cpp do not heed those of Qwen2 and Qwen3 (docs/serving.md).
    if not getattr(family_of(plain), "layer_types_suffice", False):
        problem = f"{source}: in the family {plain.model_type} layers of windows have other"
        raise UserError(f"{problem} positions than full ones, so the model would change.")
    if (others := {*own_windows(hybrid)} - {window}) and 0 in num_full:
        problem = f"{source}: windows of its own are of {min(others)} tokens, those of its mask of"
        raise UserError(f"{problem} {window}, and layer types have one window for all.")
    for layer, count in enumerate(num_full):
        if count not in (0, groups):
            problem = f"{source}: layer {layer} has {count} of {groups} groups full"
            raise UserError(f"{problem}, which no layer type can say; choose whole layers.")
    if (sink := Sink.of_hybrid(hybrid)).kind != "none":
        problem = f"{source} has the sink {sink}, which layer types have not"
        raise UserError(f"{problem}; make the hybrid with --sink none.")
    kinds = ["full_attention" if count else "sliding_attention" for count in num_full]
    plain.update({"layer_types": kinds, "sliding_window": window})
    if hasattr(plain, "use_sliding_window"):
        plain.use_sliding_window = True
    if plain.model_type.startswith("qwen"):
        say(
            f"{out}: as far as we know vLLM, SGLang and llama.cpp ignore layer_types of "
            f"{plain.model_type}, and compute another model without a word (docs/serving.md)"
        )
    plain.architectures = [family_of(plain).plain_model_class.__name__]
    _write(source, hybrid, out, plain)  # groups of whole layers were never moved
    # Against transformers' own windows, computed by its plainest attention.
    own, stock = copy.deepcopy(hybrid), copy.deepcopy(plain)
    own.bosch["window"] = stock.sliding_window = min(CHECK_WINDOW, window)
    if own_windows(own):  # those that the model had itself are as long
        own.sliding_window = stock.sliding_window
    ours, _ = logits(source, own)
    theirs, _ = logits(out, stock, attention="eager")
    _judge(out, source, float((ours - theirs).abs().max() / ours.abs().max()))
    _publish(out, plain)


def export_hybrid(source: Path, out: Path, dense: Path | None = None) -> None:
    """Write a hybrid, such as a trained checkpoint, with card, picture and code. `dense`: the model
    whose queries and keys the groups on full attention get back."""
    config = read_hybrid(source)
    if dense is not None:
        conversion.refuse_fused(config, "--queries-and-keys-of")
        read_plain(dense)
    _write(source, config, out, config, dense=dense)
    export.write_exports(out, config, source)
    _publish(out, config)


def read_config(folder: Path) -> PretrainedConfig:
    read_model_config(folder)  # explains what is wrong with a folder without one
    with explain_library_errors(f"transformers cannot load {folder}"):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, **LOCAL)
    return config


def read_plain(folder: Path) -> PretrainedConfig:
    """The config of a model that can become a hybrid."""
    config = read_config(folder)
    if config.model_type.startswith(PREFIX):
        problem = f"{folder} is a hybrid already; use the model it was made from"
        command = f"bosch materialize --reverse --model {folder} --out DENSE"
        raise UserError(f"{problem}, or restore that model first: `{command}`.")
    if getattr(config, "quantization_config", None) is not None:
        problem = f"{folder} is quantized, and quantized weights cannot be reordered"
        raise UserError(f"{problem}; materialize the unquantized model and quantize the result.")
    family_of(config)  # refuses what is in none
    check_native_window(config)
    return config


def read_hybrid(folder: Path) -> PretrainedConfig:
    config = read_config(folder)
    if not config.model_type.startswith(PREFIX):
        problem = f"{folder} is a {config.model_type}, not a hybrid ({PREFIX}...)"
        raise UserError(f"{problem}, so nothing to reverse or export; to make one, pass --mask.")
    return config


def _write(
    source: Path,
    source_config: PretrainedConfig,
    out: Path,
    config: PretrainedConfig,
    permutation: Permutation | None = None,
    constants: Mapping[str, Tensor] | None = None,
    dense: Path | None = None,
) -> None:
    """Write all but the config, without which the folder cannot be loaded. `constants`: parameters
    of a hybrid's sink, which the source has not. `dense`: of `export_hybrid`."""
    if out.resolve() == source.resolve():
        raise UserError(f"{out} is the folder of the model itself; write to another one.")
    out.mkdir(parents=True, exist_ok=True)
    # First: weights half written over those of an older hybrid must not load with its config.
    (out / "config.json").unlink(missing_ok=True)
    rewrite_weights(source, out, config, permutation, constants, dense)
    copy_companions(source, out)
    if config is not source_config:
        _keep_tokenizer(source, source_config, out, config)


def _publish(out: Path, config: PretrainedConfig) -> None:
    """The config, after all else: from here on the folder can be loaded."""
    write_atomically(out / "config.json", config.to_json_string())
    (out / PROGRESS).unlink(missing_ok=True)


def copy_companions(source: Path, out: Path) -> None:
    """Copy a model's files other than weights and config."""
    for path in sorted([*source.iterdir(), *(source / CHAT_TEMPLATES).rglob("*")]):
        # Hidden ones are the progress of a writer, or of a download.
        if path.name.startswith(".") or path.name in WRITTEN_ANEW:
            continue
        if path.is_file() and not path.name.endswith(SKIPPED):
            target = out / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, path.read_bytes())


def _keep_tokenizer(
    source: Path, source_config: PretrainedConfig, out: Path, config: PretrainedConfig
) -> None:
    """Make the folder `out`, a copy of the source's files, load the same tokenizer as the source. A
    tokenizer that does not load is left alone. The copy names no code (`auto_map`): whoever trusts
    ours would run it too.

    For some model types AutoTokenizer takes the class from a table and ignores
    tokenizer_config.json. Our types are in no table, so the same files could give other ids. The
    copy is therefore loaded and compared, and the class is written down if they differ.
    """

    def meaning(folder: Path, config: PretrainedConfig) -> tuple[object, ...] | None:
        """What decides the token ids, and the ids that begin and end a text."""
        if (loaded := find_tokenizer(folder, config=config)) is None:
            return None
        backend = getattr(loaded, "backend_tokenizer", None)
        vocabulary = loaded.get_vocab() if backend is None else backend.to_str()
        ids = loaded("a b")["input_ids"]
        return type(loaded).__name__, vocabulary, loaded.bos_token_id, loaded.eos_token_id, ids

    path = out / TOKENIZER_CONFIG
    settings = read_json_object(path) if path.is_file() else {}
    has_code = settings.pop("auto_map", None) is not None
    original = meaning(source, source_config)
    name = original[0] if original else None
    # As it is, and if it then loads differently, with the class written down.
    for changes in ({}, {"tokenizer_class": name}):
        if has_code or changes:
            text = json.dumps(settings | changes, indent=2, ensure_ascii=False)
            write_atomically(path, text + "\n")
        if original is None or original[1:] == (meaning(out, config) or ())[1:]:
            return
    raise UserError(
        f"the tokenizer of {source}, a {name}, loads differently from {out}. Save it with "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) into a copy of the model, and use "
        "that copy."
    )


def compare_logits(
    plain_folder: Path, plain: PretrainedConfig, hybrid_folder: Path, hybrid: PretrainedConfig
) -> float:
    """The largest difference of the hybrid's logits from those of search mode, relative to the
    largest logit."""
    # Both are loaded with this window instead of their own, and from the same random text.
    shortened = copy.deepcopy(hybrid)
    window_tokens = min(CHECK_WINDOW, hybrid.bosch["window"])
    shortened.bosch["window"] = window_tokens
    deployed, sink = logits(hybrid_folder, shortened)
    z = export.full_groups(hybrid)
    searched, _ = logits(plain_folder, plain, sink, bosch_mask=z, bosch_window=window_tokens)
    return float((deployed - searched).abs().max() / searched.abs().max())


def _judge(out: Path, source: Path, difference: float) -> None:
    if not difference <= CHECK_TOLERANCE:  # true for nan too
        (out / PROGRESS).unlink(missing_ok=True)  # so that the next run writes all files anew
        raise UserError(
            f"{out} does not compute the same as {source} with the mask: logits differ by "
            f"{difference:.2g} of the largest one, more than {CHECK_TOLERANCE:g}. It has no "
            "config.json, so it cannot be loaded. Run the command again; if the source did not "
            "change meanwhile, report a bug."
        )
    say(f"check: logits differ from search mode by {difference:.1g} of the largest")


@torch.no_grad()
def logits(
    folder: Path,
    config: PretrainedConfig,
    sink: Sink = NO_SINK,
    attention: str = "bosch",
    **kwargs: Any,
) -> tuple[Tensor, Sink]:
    """The last logits of a random text in float64, from weights that stay in their own type, and
    the model's sink. `sink`: of a dense model."""
    device = _device_with_room(folder)
    model: Any = load_model(
        folder,
        "auto",
        device,
        config=config,
        attn_implementation=attention,
        experts_implementation="eager",  # the grouped kernel has no float64
        # Not used here. Where a folder has none, transformers reads config.json, which is written
        # after this check.
        generation_config=GenerationConfig(),
    )
    if config.model_type.startswith(PREFIX):
        sink = sink_of_hybrid(model)
    else:
        attach_sink(model, sink)
    _compute_in_float64(model)
    num_tokens = min(CHECK_TOKENS, config.max_position_embeddings)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, num_tokens), generator=random)
    out = model(ids.to(device), use_cache=False, logits_to_keep=CHECK_ROWS, **kwargs)
    result: Tensor = out.logits.double().cpu()
    model.to("meta")  # frees the memory at once, for the next model
    return result, sink


def _compute_in_float64(model: PreTrainedModel) -> None:
    """From now on each module's weights are converted while it runs, which takes the memory of one
    more module; of the two largest, embedding and head, only what is used, and a part after the
    other."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, args: object) -> None:
        for weight in module.parameters(recurse=False):
            narrow[weight] = weight.data
            weight.data = weight.data.double()

    def restore(module: nn.Module, args: object, output: object) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = narrow.pop(weight)

    def apply_head(hidden: Tensor) -> Tensor:  # a bias would be the same in both models
        return torch.cat([hidden @ part.double().T for part in head.weight.split(HEAD_ROWS)], -1)

    # Embedding and head are not widened as a whole: a vocabulary of 150,000 would take gigabytes.
    head.forward = apply_head
    embedding.register_forward_hook(lambda *call: call[2].double())
    for module in model.modules():
        if module not in (embedding, head):
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(restore)


def _device_with_room(folder: Path) -> str:
    """The GPU if it has room for the model now, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    needed = sum((folder / name).stat().st_size for name in weight_files(folder))
    torch.cuda.empty_cache()  # memory of a training in this process
    free, _ = torch.cuda.mem_get_info()
    return "cuda" if free > 1.5 * needed else "cpu"
