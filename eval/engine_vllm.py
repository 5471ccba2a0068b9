"""Generation by vLLM for lists of examples. In float32 its tokens are those of eval/generate.py.

Needs vLLM and serving/vllm (docs/serving.md). It has run on CPUs only.
"""

import os
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from bosch.eval.generate import Generator, Job, Key, end_tokens, in_plain_way
from bosch.eval.settings import GenerationSettings
from bosch.eval.suites._interface import Example
from bosch.model import explain_library_errors
from bosch.run.errors import UserError

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORTION = 256  # examples that the engine gets at once; what is done is on disk after each


def check_engine() -> None:
    missing = [name for name in ("vllm", "bosch_vllm") if find_spec(name) is None]
    if missing:
        problem = f"{' and '.join(missing)} cannot be imported"
        raise UserError(f"{problem}; see docs/serving.md, or leave out --engine vllm.")


def start_engine(folder: Path, **settings: Any) -> Any:
    check_engine()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with alone_on_its_gpu(os.environ):
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            settings |= {"enforce_eager": True, "block_size": 32}
            # Its default wants nine tenths of the machine's memory free, which other programs use.
            settings.setdefault("gpu_memory_utilization", 0.4)
        with explain_library_errors(f"vLLM cannot run {folder}"):
            return vllm.LLM(str(folder), disable_log_stats=True, **settings)


@contextmanager
def alone_on_its_gpu(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Each rank of a launch has an engine of its own: on its GPU, not all on the first, and without
    the launcher's variables, which vLLM takes for its own."""
    if rank := environment.get("LOCAL_RANK"):
        # One device, where the launcher or an engine before has chosen, is the rank's.
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if len(visible) != 1:
            environment["CUDA_VISIBLE_DEVICES"] = visible[int(rank)] if visible else rank
    launched = {name: environment.pop(name) for name in LAUNCHED if name in environment}
    try:
        yield
    finally:
        environment.update(launched)


class EngineGenerator(Generator):
    """A `Generator` whose model is a vLLM engine."""

    def __init__(
        self, model: Any, tokenizer: Any, settings: GenerationSettings, max_positions: int | None
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, in_plain_way(settings)
        # It has a position for the last token too, which is never fed to the model.
        self.max_positions = None if max_positions is None else max_positions - 1
        generation_config = model.model_config.try_get_generation_config()
        self.end_ids = end_tokens(generation_config.get("eos_token_id"), tokenizer)

    @property
    def dtype(self) -> str:
        return str(self.model.model_config.dtype).removeprefix("torch.")

    def generate(self, examples: Iterable[tuple[Key, Example]]) -> Iterator[Job]:
        jobs = (self._encode(key, example) for key, example in examples)
        while portion := list(islice(jobs, PORTION)):
            prompts = [{"prompt_token_ids": job.prompt} for job in portion]
            how = [self._sampling(job.example) for job in portion]
            outputs = self.model.generate(prompts, how, use_tqdm=False)
            for job, output in zip(portion, outputs, strict=True):
                # Token by token, by the rules of eval/generate.py: the engine does not know that a
                # text which holds all answers is done, and both engines must give the same text.
                for token in output.outputs[0].token_ids:
                    if job.is_open:
                        self._append(job, token)
                yield job

    def _sampling(self, example: Example) -> Any:
        from vllm import SamplingParams

        stop = example.stop
        return SamplingParams(
            temperature=0,
            max_tokens=example.max_new_tokens,
            min_tokens=stop.min_new_tokens,
            # The end tokens of this example, in place of the engine's own.
            ignore_eos=True,
            stop_token_ids=sorted(self._ends(stop)),
            stop=list(stop.strings),
            detokenize=bool(stop.strings),
        )
