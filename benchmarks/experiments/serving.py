"""vLLM with this project's plug-in: whether its answers are ours, what it holds, and how fast it is
beside the dense model. It needs vLLM's environment, so serving/gpu_check.sh runs it, by name.

Agreement is of log-probabilities in bf16, which GPUs serve in, with our model in fp32: as near as
our own model in bf16 is. What a window of one token more would change is measured beside it: on
average no more than bf16 does, but more where it changes most.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import serving
from benchmarks._measure import Row, make_model, random_ids
from benchmarks.experiments._points import K, Point, Points, free_memory
from bosch.assets import asset_folder
from bosch.eval.engine_vllm import start_engine
from bosch.hybrid.conversion import deploy
from bosch.hybrid.models import head_size
from bosch.masks.mask import spread_mask
from bosch.model import LOCAL
from bosch.run.progress import show_rows
from bosch.sink import Sink, SinkConstants

MINUTES = 7.5
RATIO, WINDOW = 0.75, 64  # of the hybrids whose answers are compared
LENGTHS, NEW = (5, 64, 65, 500, 1500), 32  # tokens of the prompts, and new ones
LIMIT = 1.5  # times the errors of our own model in bf16
COLUMNS = {"name": "name", "value": "value", "unit": "unit", "dense": "dense"}


def points(device: torch.device) -> Points:
    for heads in (16, 128):
        yield Point(f"vLLM agreement, heads of {heads}", partial(compare, heads, device))
    yield Point("vLLM beside dense", partial(measure, device))


def compare(size: int, device: torch.device) -> Iterator[Row]:
    """Hybrids with heads of this size: with 16 the embedded model's, else one with random weights,
    large ones, so that attention matters."""
    hybrid = make_hybrid(size, device)
    ids = random_ids(hybrid.config, sum(LENGTHS), torch.device("cpu"))[0]
    prompts = [each.tolist() for each in ids.split(LENGTHS)]
    exact = log_probs(hybrid, prompts)
    hybrid.config.bosch["window"] = WINDOW + 1
    off_by_one = errors_of(log_probs(hybrid, prompts), exact)
    hybrid.config.bosch["window"] = WINDOW
    with TemporaryDirectory() as folder:
        hybrid.save_pretrained(folder)
        half: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        own = errors_of(log_probs(half.to(device).eval(), prompts), exact)
        del half
        begin = monotonic()
        engine = start_engine(Path(folder), **settings(device))
        seconds = monotonic() - begin
        theirs, tokens = ask(engine, prompts)
    found = errors_of(theirs, exact)
    name, facts = f"vLLM agreement, heads of {size}", versions()
    row: Row = {
        "name": f"{name}, log-probabilities",
        "value": own["mean"] / found["mean"],
        "unit": "times as near as ours in bf16",
        "error": found,
        "error_of_ours": own,
        "error_of_a_window_of_one_more": off_by_one,
        "seconds_to_start": seconds,
        **facts,
    }
    if further := [kind for kind in own if found[kind] > LIMIT * own[kind]]:
        row["failed"] = f"{further[0]} error {found[further[0]]:.4f}, of ours {own[further[0]]:.4f}"
    yield row
    same, total = count_best(hybrid, prompts, tokens)
    yield {
        "name": f"{name}, new tokens",
        "value": same / total,
        "unit": f"of {total} are the best of ours in fp32",
        **facts,
    }
    del engine
    free_memory()


def make_hybrid(size: int, device: torch.device) -> Any:
    if size == 16:
        dense: Any = AutoModelForCausalLM.from_pretrained(
            asset_folder(), dtype=torch.float32, **LOCAL
        )
    else:
        config = Qwen3Config(
            vocab_size=2048,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=size,
            max_position_embeddings=4096,
            initializer_range=0.05,
            eos_token_id=None,
        )
        dense = make_model(config, torch.device("cpu"), torch.float32, "sdpa")
    config = dense.config
    shape = config.num_hidden_layers, config.num_key_value_heads, head_size(config)
    draw = torch.Generator().manual_seed(0)
    constants = SinkConstants(*(torch.randn(shape, generator=draw) for _ in range(2)))
    z = spread_mask(RATIO, config.num_hidden_layers, config.num_key_value_heads)
    hybrid: Any = deploy(dense, z, WINDOW, Sink("static", constants=constants))
    return hybrid.to(device).eval()


def settings(device: torch.device) -> dict[str, Any]:
    like_gpus = {"additional_config": {"bosch_like_gpus": True}}
    return {
        "dtype": "bfloat16",
        "max_model_len": max(LENGTHS) + NEW,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.1,  # that much must be free as the engine starts
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 256,  # prompts are read in chunks
        **(like_gpus if device.type == "cpu" else {}),
    }


def versions() -> Row:
    import vllm

    return {"vllm": vllm.__version__}


def ask(engine: Any, prompts: Sequence[list[int]]) -> tuple[Tensor, list[list[int]]]:
    """Log-probabilities of the prompts' tokens, and new tokens."""
    from vllm import SamplingParams

    how = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(given, how, use_tqdm=False)
    found = [
        next(iter(entry.values())).logprob
        for output in outputs
        for entry in output.prompt_logprobs[1:]
    ]
    return torch.tensor(found), [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompts: Sequence[list[int]]) -> Tensor:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        logits = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        found.append(logits[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(found)


def errors_of(found: Tensor, exact: Tensor) -> dict[str, float]:
    off = (found - exact).abs()
    return {"mean": float(off.mean()), "largest": float(off.max())}


@torch.no_grad()
def count_best(
    model: PreTrainedModel, prompts: Sequence[list[int]], tokens: Sequence[list[int]]
) -> tuple[int, int]:
    """How many of the new tokens the model would have chosen after those before them."""
    same = 0
    for prompt, new in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + new], device=model.device)
        best = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
        same += int((best == ids[0, len(prompt) :]).sum())
    return same, sum(map(len, tokens))


def measure(device: torch.device) -> Iterator[Row]:
    """Memory and speed, by the benchmark `serving`."""
    if device.type == "cuda":
        sizes: dict[str, Any] = {
            "model": "Qwen3-1.7B",
            "window": K,
            "long": 64 * K,
            "prefix": 8 * K,
        }
        sizes |= {"requests": 48, "length": 16 * K, "new": 256, "room": 8, "rounds": 2}
    else:
        sizes = {"long": 1_000, "prefix": 300, "requests": 4, "length": 300, "new": 8, "room": 2}
        sizes |= {"rounds": 1}
    options = serving.Options(device=device.type, layouts=("packed",), ratio=RATIO, **sizes)
    dense, facts = None, versions()
    for row in serving.measure(options):
        found = {**row, **facts, "name": f"vLLM, {row['name']}"}
        if row["unit"] == "of dense":  # higher is better in all rows
            found |= {"value": 1 / row["value"], "unit": "times fewer KV bytes than dense"}
        if row["unit"] == "tokens/s":
            dense = dense or row["value"]  # the first side
            found["dense"] = None if row["name"].endswith("dense") else dense
        yield found


def conclude(rows: Sequence[Row]) -> list[str]:
    show_rows("vLLM", [{"dense": None, **row} for row in rows], COLUMNS)
    return [
        f"{row['name']}: {row['value'] / row['dense']:.2f} of dense's speed"
        for row in rows
        if row.get("dense")
    ]
