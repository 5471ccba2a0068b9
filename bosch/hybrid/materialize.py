"""From (model folder, mask) to an ordinary Hugging Face folder of the hybrid, and back.

    materialize(Path("Qwen3-8B"), read_mask(Path("mask.json")), Path("hybrid"))
    unmaterialize(Path("hybrid"), Path("dense-again"))          # the original weights, bit for bit

The weights go through file by file (bosch/hybrid/shards.py). A check then compares the logits
of the new folder with those of the source in search mode, one model in memory at a time;
config.json comes after it, so that a folder that was not checked loads nowhere.

Loaded as the plain family, such a folder would be a dense model that answers fluently and wrong.
Its config.json names layer types that plain families refuse, whether they are asked for by class or
by an edited model_type (bosch/hybrid/models.py). What cannot be prevented: a caller who passes a
plain config object, or a tool that never reads layer_types. The tensors' names are the plain
family's on purpose, for LoRA and quantizers.
"""

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from bosch.hybrid import export
from bosch.hybrid.models import (
    PREFIX,
    check_native_window,
    family_of,
    head_dimensions,
    head_size,
    hybrid_config,
    plain_config,
)
from bosch.hybrid.permute import Permutation, inverse
from bosch.hybrid.shards import forget_progress, rewrite_weights, weight_files
from bosch.hybrid.tokenizer import keep_tokenizer
from bosch.masks.mask import MaskFile
from bosch.model import read_model_config
from bosch.run.errors import UserError
from bosch.run.manifest import MANIFEST, STARTED, write_atomically
from bosch.run.progress import say

# Left behind: weights in any format (those we write come from shards.py), code, and what is ours to
# write. All else goes along: tokenizer, chat template, generation config, license.
SKIPPED = ".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .ot .index.json .py".split()
WRITTEN_ANEW = {"config.json", export.CARD, export.PICTURE, MANIFEST, STARTED}

# The check. A short window shows a wrong order of groups more clearly, and needs a short text only.
CHECK_WINDOW = 32
CHECK_TOKENS = 128
CHECK_ROWS = 64  # logits compared: the last ones, for which the window has hidden something
# Of the largest logit. Both sides compute in float64; transformers' norms round through float32, so
# that a difference is zero or some 1e-7. Two groups in wrong places give 1e-3 and more.
CHECK_TOLERANCE = 1e-5


def materialize(source: Path, record: MaskFile, out: Path, standalone: bool = False) -> None:
    """Write the hybrid. Runs again from any point: weight files already complete are kept.

    standalone: with the code to load it where this package is not installed.
    """
    plain = read_config(source)
    refuse_unless_plain(source, plain)
    origin = {export.MASK_KEY: record.origin()}
    config = hybrid_config(plain, record.mask.z, record.mask.window_tokens, **origin)
    config.architectures = [family_of(config).model_class.__name__]
    _write(source, out, config.bosch["permutation"], config)
    keep_tokenizer(source, plain, out, config)
    _judge(out, source, compare_logits(source, plain, out, config))
    export.write_exports(out, config, source, standalone)
    _publish(out, config)


def unmaterialize(source: Path, out: Path) -> None:
    """Write the dense model a hybrid was made from, with the hybrid's weights bit for bit."""
    hybrid = _read_hybrid(source)
    config = plain_config(hybrid)
    config.architectures = [family_of(config).plain_model_class.__name__]
    vars(config).pop("auto_map", None)  # of the code that came along with the hybrid
    _write(source, out, inverse(hybrid.bosch["permutation"]), config)
    keep_tokenizer(source, hybrid, out, config)
    _judge(out, source, compare_logits(out, config, source, hybrid))
    _publish(out, config)


def export_hybrid(source: Path, out: Path, standalone: bool = False) -> None:
    """Write a hybrid once more, a trained checkpoint say, with card, picture and perhaps code."""
    config = _read_hybrid(source)
    _write(source, out, None, config)
    export.write_exports(out, config, source, standalone)
    _publish(out, config)


def read_config(folder: Path) -> PretrainedConfig:
    """The config object of a folder on this machine."""
    read_model_config(folder)  # says what is wrong with a folder that has none
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    return config


def refuse_unless_plain(folder: Path, config: PretrainedConfig) -> None:
    """Refuse a model that can become no hybrid."""
    if config.model_type.startswith(PREFIX):
        raise UserError(
            f"{folder} is a hybrid already; take the model it was made from, or undo it first "
            "(--reverse)."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{folder} is quantized, and the groups of packed weights cannot be reordered; "
            "materialize the unquantized model and quantize the result."
        )
    family_of(config)
    check_native_window(config)


def _read_hybrid(folder: Path) -> PretrainedConfig:
    config = read_config(folder)
    if not config.model_type.startswith(PREFIX):
        raise UserError(
            f"{folder} is a {config.model_type}, not a hybrid of ours ({PREFIX}...), so there is "
            "nothing to undo or to export; materializing it takes a mask."
        )
    return config


def _write(
    source: Path, out: Path, permutation: Permutation | None, config: PretrainedConfig
) -> None:
    """Everything of `source` but its config: without one the folder loads nowhere."""
    if out.resolve() == source.resolve():
        raise UserError(f"{out} is the model's own folder; write to another one.")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    rewrite_weights(source, out, permutation, head_size(config), head_dimensions(config))
    copy_companions(source, out)


def _publish(out: Path, config: PretrainedConfig) -> None:
    write_atomically(out / "config.json", config.to_json_string())
    forget_progress(out)


def copy_companions(source: Path, out: Path) -> None:
    """Copy what belongs to a model beside its weights and its config."""
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in WRITTEN_ANEW:
            continue
        if path.is_file() and not path.name.endswith(tuple(SKIPPED)):
            write_atomically(out / path.name, path.read_bytes())
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)


# ---------------------------------------------------------------------------------------- the check


def compare_logits(
    plain_folder: Path, plain: PretrainedConfig, hybrid_folder: Path, hybrid: PretrainedConfig
) -> float:
    """The largest difference of the hybrid's logits from those of search mode, relative."""
    family, z = family_of(hybrid), export.mask_rows(hybrid)
    window = min(CHECK_WINDOW, hybrid.bosch["window"])
    length = min(CHECK_TOKENS, hybrid.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(hybrid.vocab_size, (1, length), generator=generator)

    shortened = copy.deepcopy(hybrid)
    shortened.bosch["window"] = window
    deployed = logits(family.model_class, hybrid_folder, shortened, ids)
    searched = logits(
        family.plain_model_class, plain_folder, plain, ids, bosch_mask=z, bosch_window=window
    )
    return float((deployed - searched).abs().max() / searched.abs().max())


def _judge(out: Path, source: Path, difference: float) -> None:
    if not difference <= CHECK_TOLERANCE:  # true for nan too
        forget_progress(out)
        raise UserError(
            f"{out} does not compute what {source} computes with its mask: logits differ by "
            f"{difference:.2g} of the largest, more than {CHECK_TOLERANCE:g}. It was not "
            "published; run again, and if the source was not changed meanwhile, report a bug."
        )
    say(f"check: logits differ from search mode by {difference:.1g} of the largest")


@torch.no_grad()
def logits(
    model_class: Any, folder: Path, config: PretrainedConfig, ids: Tensor, **kwargs: Any
) -> Tensor:
    """The last logits of a text in float64, from weights that stay in their own type."""
    model, loading = model_class.from_pretrained(
        folder,
        config=config,
        attn_implementation="bosch",
        experts_implementation="eager",  # the grouped kernel has no float64
        dtype="auto",
        output_loading_info=True,
        local_files_only=True,
    )
    if loading["missing_keys"]:
        raise UserError(f"{folder} lacks {', '.join(sorted(loading['missing_keys'])[:3])}.")
    device = _device_with_room(folder)
    model.to(device).eval()
    with _computing_in_float64(model):
        out = model(ids.to(device), use_cache=False, logits_to_keep=CHECK_ROWS, **kwargs)
    kept: Tensor = out.logits.double().cpu()
    model.to("meta")  # gives the memory back at once, for the next model
    return kept


@contextmanager
def _computing_in_float64(model: nn.Module) -> Iterator[None]:
    """Widen each module's own weights while it runs: costs the memory of one module more."""
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, args: Sequence[Any]) -> None:
        for weight in module.parameters(recurse=False):
            narrow[weight] = weight.data
            weight.data = weight.data.double()

    def restore(module: nn.Module, args: Sequence[Any], output: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = narrow.pop(weight)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(restore).remove)
        yield


def _device_with_room(folder: Path) -> str:
    """The GPU if it has room for the model now, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    needed = sum((folder / name).stat().st_size for name in weight_files(folder))
    torch.cuda.empty_cache()  # what a training in this process had
    free, _ = torch.cuda.mem_get_info()
    return "cuda" if free > 1.5 * needed else "cpu"
