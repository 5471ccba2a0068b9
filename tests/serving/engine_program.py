"""Runs vLLM in a process of its own, on one folder after another: most of its time is starting.

    python engine_program.py REQUESTS.json ANSWERS.json

REQUESTS  a list of {"folder", "engine": arguments of vllm.LLM, "passes": a list of {"prompts",
          "new", "scored"}}
ANSWERS   of each, for each pass: tokens, log_probs of the prompts if scored, cached prompt tokens;
          the bytes of KV blocks held at its last step, the most requests at once, steps;
          preemptions. Or, where one of several failed, the error
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that its accounting can be read
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

USUAL = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 128,  # prompts are read in chunks
    "block_size": 32,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
}


@contextmanager
def refusing_as_flash_attention_3() -> Iterator[None]:
    """Before the CPU's attention: what that refuses of numbers for each head (hopper/flash_api)."""
    from vllm import _custom_ops as ops

    attend = ops.cpu_attention_with_kv_cache

    def check(*arguments: Any, **named: Any) -> Any:
        import torch

        numbers = named["s_aux"]
        if numbers is not None:
            assert numbers.dtype == torch.bfloat16, "We only support bf16 dtype for S aux."
            assert named["query"].shape[1] <= 64, "We only support query heads <= 64 with S aux"
        return attend(*arguments, **named)

    ops.cpu_attention_with_kv_cache = check
    try:
        yield
    finally:
        ops.cpu_attention_with_kv_cache = attend


def run(request: dict[str, Any]) -> dict[str, Any]:
    asked = request["engine"].get("additional_config", {})
    like_gpus = asked.get("bosch_like_gpus", False)
    with refusing_as_flash_attention_3() if like_gpus else nullcontext():
        return run_engine(request)


def run_engine(request: dict[str, Any]) -> dict[str, Any]:
    import vllm

    llm = vllm.LLM(request["folder"], **(USUAL | request["engine"]))
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    pool, preempted = scheduler.kv_cache_manager.block_pool, []
    preempt = scheduler._preempt_request

    def count(*arguments: Any, **named: Any) -> Any:
        preempted.append(1)
        return preempt(*arguments, **named)

    scheduler._preempt_request = count
    driver = getattr(core.model_executor, "driver_worker", None)  # None: processes of their own
    caches = driver.worker.model_runner.kv_caches if driver else []
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    total_bytes = sum(storage.nbytes() for storage in storages.values())
    block_bytes = total_bytes / scheduler.kv_cache_config.num_blocks

    def answer(number: int, prompts: list[list[int]], new: int, scored: bool) -> dict[str, Any]:
        how = vllm.SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if scored else None,
        )
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, how)
        done, held_blocks, most_running, steps = {}, 0, 0, 0
        free = pool.get_num_free_blocks()
        while engine.has_unfinished_requests():
            steps += 1
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id.split("-")[1])] = output
            if scheduler.running:
                held_blocks = free - pool.get_num_free_blocks()
            most_running = max(most_running, len(scheduler.running))
        outputs = [done[index] for index in range(len(prompts))]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "log_probs": [
                [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
                for output in outputs
                if scored
            ],
            "held_bytes": held_blocks * block_bytes,
            "most_running": most_running,
            "steps": steps,
        }

    passes = [answer(number, **each) for number, each in enumerate(request["passes"])]
    return {"passes": passes, "preemptions": len(preempted)}


def main(requests: list[dict[str, Any]]) -> list[Any]:
    if len(requests) == 1:
        return [run(requests[0])]
    register_classes()
    answers: list[Any] = []
    for request in requests:
        try:
            answers.append(run(request))
        except Exception:  # the others may run
            answers.append(traceback.format_exc())
        gc.collect()  # the engine's cache and weights
    return answers


def register_classes() -> None:
    """In the place of their names: vLLM starts a process for each class that it knows by name, to
    look at it, when it meets it first."""
    import vllm
    from bosch_vllm import FAMILIES, is_served, models
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for architecture in filter(is_served, FAMILIES):
        vllm.ModelRegistry.register_model(architecture, getattr(models, architecture))


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
