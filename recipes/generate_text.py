"""Generates text from a model, dense or hybrid, and prints the speed and the size of the KV cache.

    python recipes/generate_text.py --model DIR --prompt "Once upon a time"
    python recipes/generate_text.py --model DIR --prompt-file long.txt --prefill-chunk 8192

For a group with a sliding window, a hybrid's cache keeps at most the window.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import parse
from bosch.config import TokenCount, at_least
from bosch.masks.mask import describe_bytes
from bosch.masks.window import full_layers, own_windows
from bosch.model import fetch_model, load_model, load_tokenizer
from bosch.run import progress
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.plain_text import CONTROLS


@dataclass(frozen=True)
class Options:
    model: str  # folder of a model, dense or hybrid, or a hub id
    prompt: Annotated[str | None, "TEXT"] = None
    prompt_file: Annotated[Path | None, "FILE"] = None  # instead of --prompt
    max_tokens: TokenCount = 128  # most tokens to generate
    temperature: float = 0.0  # of sampling; 0: always the most likely token
    top_k: int = 0  # sample from this many most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    seed: int = 0  # of sampling: the same seed, the same text on the same machine
    prefill_chunk: TokenCount | None = None  # tokens of the prompt read at once; None: all

    def __post_init__(self) -> None:
        at_least(1, self, "", "max_tokens", "prefill_chunk")
        at_least(0, self, "", "temperature", "top_k", "seed")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, it must be above 0 and at most 1.")
        if (self.prompt is None) == (self.prompt_file is None):
            raise UserError("Pass either --prompt or --prompt-file.")


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments)
    progress.set_up()
    folder = fetch_model(options.model)
    tokenizer = load_tokenizer(folder)
    prompt = options.prompt
    if path := options.prompt_file:
        try:
            prompt = path.read_text("utf-8")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise MissingFileError(f"--prompt-file {path}: there is no such file.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"--prompt-file {path} is not UTF-8 text: {error}.") from error
        if "\0" in prompt:
            raise UserError(f"--prompt-file {path} holds NUL characters, so it is not text.")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if not ids.shape[1]:
        raise UserError("The prompt is empty; the model needs at least one token to start from.")
    from bosch.training.parallel import choose_device  # imports torch

    model = load_model(folder, "auto", str(choose_device(os.environ)))
    length, positions = ids.shape[1] + options.max_tokens, model.config.max_position_embeddings
    if length > positions:
        problem = f"prompt and answer may take {length:,} tokens, the model was made for"
        print(f"{problem} {positions:,}: the text beyond them may be worse", file=sys.stderr)
    generate(model, tokenizer, ids, options)


def generate(model: Any, tokenizer: Any, ids: Any, options: Options) -> None:
    import torch
    from transformers import GenerationConfig, TextStreamer

    from bosch.attention.cache import CACHE, allocated_bytes, kv_bytes
    from bosch.eval.generate import end_tokens
    from bosch.hybrid.conversion import head_size

    torch.manual_seed(options.seed)
    samples = options.temperature > 0
    times: list[float] = []  # when the prompt was passed, then of each token

    class Streamer(TextStreamer):
        on_finalized_text = staticmethod(print_text)

        def put(self, value: Any) -> None:
            times.append(time.perf_counter())
            super().put(value)

    def refuse_non_finite(ids: Any, logits_NV: Any) -> Any:
        if not logits_NV.amax(-1).isfinite().all():  # sampling would end in an error of torch
            problem = "its logits are not finite numbers. Its weights are damaged, or overflow"
            raise UserError(f"{options.model}: {problem} in their number format.")
        return logits_NV

    # Of what is not set here transformers takes the folder's settings, such as a penalty on what
    # was said before: those of a chat, and not the model's own distribution.
    ends = end_tokens(model.generation_config.eos_token_id, tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None)
    ids = ids.to(model.device)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.max_tokens,
        use_cache=True,  # configs saved in training say false
        streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        logits_processor=[refuse_non_finite],
        do_sample=samples,
        # Without sampling, values that transformers ignores: it warns of others, which the model's
        # folder may have.
        temperature=options.temperature if samples else 1.0,
        top_k=options.top_k if samples else 50,
        top_p=options.top_p if samples else 1.0,
        prefill_chunk_size=options.prefill_chunk,
    )
    began, first, *others = times  # the first token comes when the prompt has been read
    num_read, seconds = ids.shape[1], first - began
    print(f"prompt: {num_read:,} tokens in {seconds:.2f} s, {num_read / seconds:,.1f} tokens/s")
    speed = f", {len(others) / (others[-1] - first):,.1f} tokens/s" if others else ""
    print(f"answer: {1 + len(others):,} tokens{speed}")

    cache, config = result[CACHE], model.config
    held, used = int(cache.get_seq_length()), allocated_bytes(cache)
    of_layers = len(full_layers(config)) * held + sum(min(held, w - 1) for w in own_windows(config))
    entries = of_layers * config.num_key_value_heads
    dense = entries * 2 * head_size(config) * model.dtype.itemsize  # 2: keys and values
    share = f", {used / dense:.3f} of the {describe_bytes(dense)} with full attention everywhere"
    sizes = f"{used:,} bytes allocated, {kv_bytes(cache):,} in use"
    print(f"KV cache at {held:,} tokens: {sizes}{share if used < dense else ''}")


def print_text(text: str, stream_end: bool = False) -> None:
    """Control codes that a terminal would obey are written out, as `\\x1b`."""
    shown = CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    print(shown, flush=True, end="\n" if stream_end else "")


if __name__ == "__main__":
    run_main(main)
