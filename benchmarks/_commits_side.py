"""One side of benchmarks/commits.py: a program that runs with the code of any commit. It prints the
names of what it measures, then for each name that it reads the seconds of CPU time. It calls only
what users call."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import bosch
from bosch.hybrid.conversion import deploy
from bosch.masks.mask import spread_mask

PROMPT, NEW, WINDOW, BATCH, TRAINED_LENGTH = 2048, 64, 64, 4, 512


def main() -> None:
    torch.set_num_threads(1)
    measures = {
        name: measure for sink in ("none", "static") for name, measure in measures_of(sink).items()
    }
    for measure in measures.values():
        measure()  # fills caches
    print(json.dumps(list(measures)), flush=True)
    for line in sys.stdin:
        print(json.dumps(measures[line.strip()]()), flush=True)


def measures_of(sink: str) -> dict[str, Callable[[], float]]:
    model: Any = make_hybrid(sink)
    ids = torch.randint(1000, (1, PROMPT))
    rows = torch.randint(1000, (BATCH, TRAINED_LENGTH))

    def seconds_of_answer(new: int) -> float:
        begin = time.process_time()
        # As many in any case: without an end token, all are decoded.
        model.generate(ids, do_sample=False, min_new_tokens=new, max_new_tokens=new)
        return time.process_time() - begin

    def seconds_of_step() -> float:
        begin = time.process_time()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        model.zero_grad()
        return time.process_time() - begin

    return {
        f"prefill of {PROMPT}, sink {sink}": lambda: seconds_of_answer(1),
        # Decoding cannot be timed alone: the prompt's part is subtracted.
        f"decoding, sink {sink}": lambda: seconds_of_answer(NEW + 1) - seconds_of_answer(1),
        f"training step, sink {sink}": seconds_of_step,
    }


def make_hybrid(sink: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=4096, eos_token_id=None,
    )  # fmt: skip
    dense = Qwen3ForCausalLM(config)
    arguments = [static_sink()] if sink == "static" else []
    # Through a folder, as users load a hybrid: a model that was just made is set up on another
    # road.
    with tempfile.TemporaryDirectory() as folder:
        deploy(dense, spread_mask(0.75, 6, 2), WINDOW, *arguments).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def static_sink() -> Any:
    keys_LGD, values_LGD = torch.randn(6, 2, 64), torch.randn(6, 2, 64)
    # Of an older commit there is no such file. An import would find that of an installed checkout.
    if not Path(bosch.__file__).with_name("sink.py").is_file():
        from bosch.hybrid.sinks import Sinks  # type: ignore[attr-defined]

        return Sinks(keys_LGD, values_LGD)
    from bosch.sink import Sink, SinkConstants

    return Sink("static", constants=SinkConstants(keys_LGD, values_LGD))


if __name__ == "__main__":
    main()
