"""The constants of static sinks (bosch/sink.py): measured of a dense model, attached to it for the
search, written beside a mask, read for its hybrid, whose parameters they become, and found there.
"""
# L layers, G kv heads, N texts, D head size

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from bosch.attention.cache import CACHE
from bosch.hybrid.models import head_size
from bosch.masks.mask import MaskFile, constants_file, find_constants
from bosch.masks.window import full_layers
from bosch.model import explain_library_errors
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_atomically
from bosch.sink import NO_SINK, Sink, SinkConstants


@torch.inference_mode()
def measure_static_sink(model: Any, texts: Sequence[Tensor]) -> Sink:
    """A static sink: the mean key and value of the first tokens of some texts (token ids), as the
    dense model computes them. A first token sees only itself, so nothing else of the texts is
    read."""
    ids_N1 = torch.stack([ids_T[:1] for ids_T in texts]).to(model.device)
    # Averaged in float32: a sum of many keys in bfloat16 would lose their last digits.
    layers = model(ids_N1, use_cache=True)[CACHE].layers
    layers = [layers[number] for number in full_layers(model.config)]
    # Layers may be on several devices.
    keys_LGD = torch.stack([layer.keys[:, :, 0].float().mean(0).cpu() for layer in layers])
    values_LGD = torch.stack([layer.values[:, :, 0].float().mean(0).cpu() for layer in layers])
    place = model.device, model.dtype
    constants = SinkConstants(keys_LGD.to(*place), values_LGD.to(*place))
    return Sink("static", constants=constants)


def attach_sink(model: Any, sink: Sink, device: torch.device | None = None) -> Sink:
    """From now on every mask that a dense model is called with has this sink. Returns the one it
    had before. device: that computes, if not the model's first weight is there."""
    before: Sink = getattr(model, "window_sink", NO_SINK)
    if sink.kind == "static":
        place = device or model.device
        constants = (x_LGD.to(place, model.dtype) for x_LGD in sink.known_constants())
        sink = replace(sink, constants=SinkConstants(*constants))
    # On the attention modules, since transformers hands the registered function nothing but the
    # module and its tensors.
    model.window_sink = sink
    dense = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's adapters
    for number, layer in enumerate(full_layers(model.config)):
        attention = dense.base_model.layers[layer].self_attn
        attention.window_sink = sink
        if sink.constants is not None:
            weight = next(chain(attention.parameters(), attention.buffers()))
            # A layer that is left on the disk is brought to the model's device.
            there = device or (model.device if weight.is_meta else weight.device)
            attention.window_sink_key = sink.constants.keys_LGD[number].to(there)
            attention.window_sink_value = sink.constants.values_LGD[number].to(there)
    return before


def sink_of_hybrid(model: Any) -> Sink:
    """The sink of a hybrid, the constants by its groups' old places; zeros for full groups."""
    sink: Sink = model.window_sink
    if sink.kind != "static":
        return sink
    config, layers = model.config, full_layers(model.config)
    shape = len(layers), config.num_key_value_heads, head_size(config)
    keys_LGD, values_LGD = (torch.zeros(shape, dtype=model.dtype) for _ in range(2))
    for number, layer in enumerate(layers):
        attention = model.base_model.layers[layer].self_attn
        windowed = config.bosch["permutation"][layer][config.bosch["num_full"][layer] :]
        if windowed:
            keys_LGD[number, windowed] = attention.window_sink_key.detach().cpu()
            values_LGD[number, windowed] = attention.window_sink_value.detach().cpu()
    return replace(sink, constants=SinkConstants(keys_LGD, values_LGD))


def write_constants(mask: Path, sink: Sink) -> None:
    """Beside this mask.json, which says the kind of its sink only."""
    tensors = {name: x_LGD.cpu() for name, x_LGD in sink.known_constants()._asdict().items()}
    write_atomically(constants_file(mask), save(tensors))


def read_constants(file: Path, record: MaskFile) -> MaskFile:
    """A mask with the constants of its static sink, which lie beside its file. Others need none and
    are returned as they are."""
    mask, path = record.mask, find_constants(file)
    if mask.sink.kind != "static":
        return record
    shape = mask.num_layers, mask.num_groups, record.model.head_dim
    if not path.is_file():
        problem = f"{path} does not exist, but the mask beside it has static sinks"
        raise MissingFileError(f"{problem}; copy it from where the mask was searched.")
    with explain_library_errors(f"{path} is not a file of sinks"):
        constants = SinkConstants(**load(path.read_bytes()))
    for name, x_LGD in constants._asdict().items():
        if tuple(x_LGD.shape) != shape:
            raise UserError(f"{path}: {name} is {tuple(x_LGD.shape)}; this model needs {shape}.")
        if not x_LGD.isfinite().all():
            raise UserError(f"{path}: {name} has values that are no finite numbers.")
    return replace(record, mask=replace(mask, sink=replace(mask.sink, constants=constants)))
