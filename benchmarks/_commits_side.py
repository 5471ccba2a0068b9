"""One side of benchmarks/commits.py: a program that runs with the code of any commit, and prints
seconds of CPU time. It calls only what users call."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import bosch
from bosch.hybrid.conversion import deploy
from bosch.masks.mask import spread_mask

PROMPT, NEW, WINDOW, BATCH, TRAINED_LENGTH = 2048, 32, 64, 4, 512


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(measure("none") | measure("static")))


def measure(sink: str) -> dict[str, float]:
    model: Any = make_hybrid(sink)
    ids = torch.randint(1000, (1, PROMPT))

    def answer(new: int) -> None:
        # As many in any case: without an end token, all are decoded.
        model.generate(ids, do_sample=False, min_new_tokens=new, max_new_tokens=new)

    def step() -> None:
        rows = torch.randint(1000, (BATCH, TRAINED_LENGTH))
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        model.zero_grad()

    # Decoding cannot be timed alone: the prompt's part is subtracted.
    read = seconds_of(lambda: answer(1))
    return {
        f"prefill of {PROMPT}, sink {sink}": read,
        f"decoding, sink {sink}": seconds_of(lambda: answer(NEW + 1)) - read,
        f"training step, sink {sink}": seconds_of(step),
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


def seconds_of(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(3):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return median(times)


if __name__ == "__main__":
    main()
