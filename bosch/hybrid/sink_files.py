"""Static sinks (bosch/hybrid/sinks.py) on their way: measured of a dense model, written beside a
mask, read for its hybrid."""
# L layers, G kv heads, N texts, D head size

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from bosch.attention.cache import CACHE
from bosch.hybrid.conversion import head_size
from bosch.hybrid.sinks import KEY, VALUE, Sinks, kind_of
from bosch.masks.mask import SINKS, MaskFile
from bosch.masks.window import sink_tokens
from bosch.model import explain_library_errors
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_atomically


@torch.inference_mode()
def measure_sinks(model: Any, texts: Sequence[Tensor]) -> Sinks:
    """The mean key and value of the first tokens of some texts (token ids), as the dense model
    computes them. A first token sees only itself, so nothing else of the texts is read."""
    ids_N1 = torch.stack([ids_T[:1] for ids_T in texts]).to(model.device)
    layers = model(ids_N1, use_cache=True)[CACHE].layers
    means = (
        torch.stack([getattr(layer, name)[:, :, 0].float().mean(0) for layer in layers])
        for name in ("keys", "values")
    )
    return Sinks(*(x_LGD.to(model.dtype).clone() for x_LGD in means))


def sinks_of(model: Any) -> Sinks | int | None:
    """Those of a hybrid, by its groups' old places; zeros for full groups. A number of first
    tokens, or None if it has none."""
    config = model.config
    if kind_of(config) != "static":
        return sink_tokens(kind_of(config)) or None
    shape = config.num_hidden_layers, config.num_key_value_heads, head_size(config)
    sinks = Sinks(*(torch.zeros(shape, dtype=model.dtype) for _ in range(2)))
    for layer, block in enumerate(model.base_model.layers):
        windowed = config.bosch["permutation"][layer][config.bosch["num_full"][layer] :]
        if windowed:
            for x_LGD, name in zip(sinks, (KEY, VALUE), strict=True):
                x_LGD[layer, windowed] = getattr(block.self_attn, name).detach().cpu()
    return sinks


def write_sinks(folder: Path, sinks: Sinks) -> None:
    write_atomically(folder / SINKS, save({name: x.cpu() for name, x in sinks._asdict().items()}))


def read_sinks(folder: Path, record: MaskFile) -> Sinks:
    path, mask = folder / SINKS, record.mask
    shape = mask.num_layers, mask.num_groups, record.model.head_dim
    if not path.is_file():
        problem = f"{path} does not exist, but the mask beside it has static sinks"
        raise MissingFileError(f"{problem}; copy it from where the mask was searched.")
    with explain_library_errors(f"{path} is not a file of sinks"):
        sinks = Sinks(**load(path.read_bytes()))
    for name, x_LGD in sinks._asdict().items():
        if tuple(x_LGD.shape) != shape:
            raise UserError(f"{path}: {name} is {tuple(x_LGD.shape)}; this model needs {shape}.")
        if not x_LGD.isfinite().all():
            raise UserError(f"{path}: {name} has values that are no finite numbers.")
    return sinks
