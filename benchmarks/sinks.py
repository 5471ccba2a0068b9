"""What windows cost a model without any training, with and without sinks.

    python -m benchmarks sinks --model DIR --texts texts.jsonl      (lines of {"text": ...})

Next-token loss on the second half of each text, dense, with all groups on the window, with the
layers of `interleave` full, and with masks of your own. The sinks are the first tokens of other
texts. `key` is a static sink whose value is zero: it takes weight away and gives nothing.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks._measure import DeviceOptions, Row
from bosch.data.toy_world.documents import ToyDocuments
from bosch.hybrid.sinks import attach_sink, measure_static_sink
from bosch.masks.mask import read_mask
from bosch.model import load_model, load_tokenizer
from bosch.run.errors import UserError
from bosch.sink import Sink, SinkConstants

MEASURED = 3  # texts
TOY_DOCUMENTS = 30_000
TITLE = "{model}, {count} texts of {tokens:,} tokens, {place}"
COLUMNS = {"": "name", "loss": "value:.3f", "seconds": "seconds:.0f"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    model: Path = Path("model")  # folder of a model
    texts: Path = Path("texts.jsonl")  # lines of {"text": ...}, or toy: of the built-in toy world
    windows: tuple[int, ...] = (128, 256)  # in tokens, including the current one
    sinks: tuple[str, ...] = ("none", "static", "tokens=1", "tokens=4", "key")  # kinds of sink
    masks: tuple[Path, ...] = ()  # further masks, as mask.json files
    tokens: int = 1_024  # of each text
    count: int = 6  # texts that are judged
    every: int = 50  # take every nth text that is long enough,
    begin: int = 7  # from this one on; the first three are measured
    dtype: str = "float32"  # number format


def measure(options: Options) -> Iterator[Row]:
    device = options.start()
    dtype = getattr(torch, options.dtype)
    model = load_model(options.model, dtype, str(device), attn_implementation="bosch")
    texts, groups = read_texts(options), model.config.num_key_value_heads
    layers = range(model.config.num_hidden_layers)
    masks = {
        "dense": [[1] * groups for _ in layers],
        "all windowed": [[0] * groups for _ in layers],
        "interleave .75": [[int(layer % 4 == 3)] * groups for layer in layers],
    }
    masks |= {str(path): [list(row) for row in read_mask(path).mask.z] for path in options.masks}
    static = measure_static_sink(model, texts[:MEASURED])
    keys_LGD, values_LGD = static.known_constants()
    # Whether the constant's value does anything, or only the attention that its key draws away.
    no_values = SinkConstants(keys_LGD, torch.zeros_like(values_LGD))
    known = {"static": static, "key": Sink("static", constants=no_values)}
    for name, z in masks.items():
        is_dense = name == "dense"
        windows = options.windows[:1] if is_dense else options.windows
        for window, kind in product(windows, ("none",) if is_dense else options.sinks):
            attach_sink(model, known[kind] if kind in known else Sink.parse(kind))
            began = time.monotonic()
            loss = mean_loss(model, texts[MEASURED:], z, window)
            label = name if is_dense else f"{name}, window {window}, sink {kind}"
            row = {"name": label, "value": loss, "unit": "nats a token", "mask": name}
            row |= {"window": window, "sink": kind, "seconds": time.monotonic() - began}
            yield row


def read_texts(options: Options) -> list[Tensor]:
    """Three texts whose first tokens are measured, and those that are judged."""
    tokenizer = load_tokenizer(options.model)
    if str(options.texts) == "toy":
        documents = [text for (text,) in islice(ToyDocuments(0).read(0), TOY_DOCUMENTS)]
        texts = ["\n".join(documents[n : n + 60]) for n in range(0, TOY_DOCUMENTS, 60)]
    else:
        texts = [json.loads(line)["text"] for line in options.texts.read_text("utf-8").splitlines()]
    each = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = [torch.tensor(ids[: options.tokens]) for ids in each if len(ids) >= options.tokens]
    chosen = found[options.begin :: options.every][: MEASURED + options.count]
    if len(chosen) < MEASURED + options.count:
        problem = f"{options.texts} has {len(found)} texts of {options.tokens} tokens"
        raise UserError(f"{problem}, too few for these --count, --every and --begin.")
    return chosen


@torch.inference_mode()
def mean_loss(model: Any, texts: list[Tensor], z: list[list[int]], window: int) -> float:
    total = num_tokens = 0.0
    for ids_T in texts:
        ids_T = ids_T.to(model.device)
        output = model(ids_T[None], use_cache=False, bosch_mask=z, bosch_window=window)
        logits = output.logits[0]
        # Only tokens that stand far behind the first one: windows have lost it there.
        half = len(ids_T) // 2
        total += float(cross_entropy(logits[half - 1 : -1].float(), ids_T[half:], reduction="sum"))
        num_tokens += len(ids_T) - half
    return total / num_tokens
