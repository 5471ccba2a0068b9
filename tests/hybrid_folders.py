"""Model folders and masks on disk, for the tests of what is made from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bosch.assets import asset_folder
from bosch.hybrid.materialize import materialize
from bosch.masks.mask import GroupMask, MaskFile, write_mask
from bosch.model import read_model_info
from tests.model_factory import MIXED, tiny_model

WINDOW = 16


def plain_folder(
    folder: Path,
    family: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    shard_size: str | int = "1GB",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A tiny random model, saved, with a tokenizer beside it."""
    model: Any = tiny_model(family, seed, **changes)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Letters and signs of ASCII, one token each; the first three tokens are special."""
    signs = [chr(code) for code in range(32, 32 + 96 - 3)]  # as many as tiny_model has
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "<unk>", *signs])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )


def record_for(
    folder: Path, z: Sequence[Sequence[int]] = MIXED, window_tokens: int = WINDOW
) -> MaskFile:
    return MaskFile(
        GroupMask.from_rows(z, window_tokens),
        read_model_info(folder),
        "bosch",
        settings={"kappa": 3},
        seed=7,
        provenance={"commit": "abc"},
    )


def embedded_hybrid(folder: Path) -> Path:
    """The embedded two-layer model with a window of 64 in six of its eight groups, as step 4 of a
    training exports it."""
    source = asset_folder("tiny-qwen3-2layer")
    mask = GroupMask.from_rows([[1, 1] + [0] * 6] * 2, 64)
    record = MaskFile(mask, read_model_info(source), "by hand", settings={}, seed=0, provenance={})
    materialize(source, record, folder / "step-000004")
    return folder / "step-000004"


def mask_file(path: Path, folder: Path, **changes: Any) -> Path:
    write_mask(path, record_for(folder, **changes))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, byte for byte. Manifests are without the time and the commit, which
    ends in -dirty if the checkout has changes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or "/." in f"/{name}":
            continue
        found[name] = path.read_bytes()
        if path.name == "manifest.json":
            manifest = json.loads(found[name])
            for key in ("wall_seconds", "checksum", "commit"):
                manifest.pop(key, None)
            found[name] = json.dumps(manifest).encode()
    return found
