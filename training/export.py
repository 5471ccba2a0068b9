"""Exports the model of one step as an ordinary Hugging Face folder, while its weights stay sharded.

The folder has the same files as the one training began with, with the same tensor names and types,
and the current weights. Rank 0 writes it file by file and holds the tensors of one file at a time.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from bosch.hybrid.export import put_scores
from bosch.hybrid.materialize import copy_companions
from bosch.hybrid.shards import save_weights, weight_files
from bosch.run import files
from bosch.run.checkout import provenance
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import say
from bosch.training.model_start import DOWN, LORA_SCALE, UP
from bosch.training.parallel import whole

# Of checkpoints of years ago: a table that transformers computes itself, and leaves in no new file.
OF_OLD_FILES = "rotary_emb.inv_freq"
TRAINED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Files that copy_companions skips, since materializing writes its own. Here we copy the source's.
ALSO_COPIED = ("config.json", "README.md", "mask.png", "model.safetensors.index.json", "*.py")


def export_model(model: PreTrainedModel, source: Path, folder: Path, ranks: Ranks) -> None:
    """Write the model to `folder`. Every rank calls this. A complete folder is left as it is; one
    that a kill left half-written, or that is damaged, is replaced."""
    temporary = folder.with_name(f".{folder.name}.tmp")

    def begin() -> bool:
        if (folder / files.MANIFEST).is_file():
            try:
                files.verify_folder(folder)
                return False
            except files.DamagedArtifactError as damage:
                say(f"{folder.name} is exported again: {damage}")
        # Removed whole, since files of another attempt may be of another step.
        for leftover in (temporary, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        return True

    def complete() -> None:
        copy_companions(source, temporary)
        for pattern in ALSO_COPIED:
            for path in source.glob(pattern):
                shutil.copyfile(path, temporary / path.name)
        put_scores(temporary)  # the source's are not this model's
        content = files.describe_files(temporary)
        manifest = {"fingerprint": fingerprint(content), "source": str(source), **provenance()}
        files.write_sealed_json(temporary / files.MANIFEST, manifest | {"files": content})
        # Last, and all at once: under this name there are complete models only.
        temporary.rename(folder)
        files.sync_directory(folder.parent)

    if not ranks.from_rank_0(begin):
        return
    weights = Weights(model, source)
    for name in weight_files(source):
        with safe_open(source / name, framework="pt") as file:
            metadata = file.metadata()
        # Every rank takes part in gathering, but one tensor after another is all that the others
        # ever hold of a file.
        tensors = weights.gather(source / name, keep=ranks.rank == 0)
        ranks.from_rank_0(partial(save_weights, tensors, temporary / name, metadata))
    ranks.from_rank_0(complete)


class Weights:
    """A sharded model's tensors under the names that they have in the folder `source`, where the
    experts of a layer may be many tensors. Making this refuses a folder whose tensors cannot be
    written back."""

    def __init__(self, model: PreTrainedModel, source: Path) -> None:
        self._model = model
        tensors: Any = get_model_state_dict(model)
        self._tensors: Mapping[str, Tensor] = tensors
        # Name in the files -> name in the model. Asked of tensors without content, since what the
        # names are depends on shapes alone.
        self._owner = {
            name: key
            for key, tensor in tensors.items()
            if not key.endswith((DOWN, UP))
            for name in revert_weight_conversion(
                model, {key: torch.empty_like(tensor, device="meta")}
            )
        }
        self._recent: dict[str, Mapping[str, Tensor]] = {}

        in_files: dict[str, Tensor] = {}  # mapped, not read
        for file in weight_files(source):
            in_files |= load_file(source / file)
        for name, tensor in in_files.items():
            if tensor.dtype not in TRAINED:
                problem = f"{source}: {name} is {tensor.dtype}, which cannot be trained"
                raise UserError(f"{problem}. Pass the model with weights in bf16, fp16 or fp32.")
        unowned = in_files.keys() - self._owner.keys()
        if unknown := sorted(name for name in unowned if not name.endswith(OF_OLD_FILES)):
            problem = f"{source} has a tensor {unknown[0]}, unknown to its config.json"
            raise UserError(f"{problem}. Save the model again.")

    def gather(self, file: Path, keep: bool) -> dict[str, Tensor]:
        """A file's tensors, whole and on the CPU; empty without `keep`. Every rank calls this."""
        tensors: dict[str, Tensor] = {}
        for name, old in sorted(load_file(file).items()):  # mapped: only types and shapes are read
            key = self._owner.get(name)
            if key is None:  # of OF_OLD_FILES
                if keep:
                    tensors[name] = old
                continue
            if key not in self._recent:
                if len(self._recent) == 2:  # a layer's experts: two tensors whose parts alternate
                    del self._recent[next(iter(self._recent))]
                merged = {key: self._merged(key, old.dtype)}
                self._recent[key] = revert_weight_conversion(self._model, merged)
            tensor = self._recent[key][name]
            assert tensor.shape == old.shape, f"{name}: {tensor.shape}, in {file} {old.shape}"
            if keep:
                tensors[name] = tensor.cpu().contiguous()
        return tensors

    def _merged(self, key: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor, with what LoRA has learned beside it."""

        def whole_of(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):  # an offloaded one is on the CPU
                tensor = tensor.to(tensor.device_mesh.device_type)
            return whole(tensor)

        own, prefix = self._tensors[key], key.removesuffix("weight")
        if (up := self._tensors.get(prefix + UP)) is None:
            return whole_of(own.to(dtype))
        down, rows = whole_of(self._tensors[prefix + DOWN]), up.shape[0]
        # Weights and product are added in fp32, and rounded to the file's type once. The first
        # rows may have no product.
        weight = whole_of(own)
        added = torch.addmm(weight[-rows:], whole_of(up), down, alpha=LORA_SCALE)
        return torch.cat([weight[:-rows], added]).to(dtype)
