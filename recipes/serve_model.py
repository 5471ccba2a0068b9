"""Serves a hybrid, or its dense model, by vLLM and this project's plug-in: OpenAI's interface.

    bosch serve --model HYBRID
    bosch serve --model HYBRID --port 8001 --max-model-len 32768

Further options are vLLM's. It runs in this environment if vLLM and the plug-in are installed in it,
else in the one that `make serving` makes (docs/serving.md).
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from bosch.command_line import parse
from bosch.eval.elsewhere import lacking, usual_python, with_this_code
from bosch.model import fetch_config, find_model, read_model_config
from bosch.run.checkout import is_checkout
from bosch.run.errors import UserError, run_main
from bosch.run.memory import for_launchers

SERVER = "vllm.entrypoints.openai.api_server"
FOR_CPU = {"--dtype": ["float32"], "--enforce-eager": [], "--block-size": ["32"]}


@dataclass(frozen=True)
class Options:
    model: str  # folder of a model, dense or hybrid, or a hub id


def main(arguments: Sequence[str]) -> None:
    rest: list[str] = []  # options of vLLM
    model = parse(Options, arguments, rest=rest).model
    read_model_config(fetch_config(model))  # that there is one
    python = find_python()
    import torch  # after what is wrong was said: it takes seconds

    # The name that requests have is the one that was typed, also of a model of the package.
    words = ["--model", str(find_model(model) or model), "--served-model-name", model, *rest]
    if not torch.cuda.is_available():
        given = {word.partition("=")[0].replace("_", "-") for word in rest}
        words += [
            word for name, value in FOR_CPU.items() if name not in given for word in (name, *value)
        ]
    environment = with_this_code(for_launchers(os.environ))
    os.execve(python, [python, "-m", SERVER, *words], environment)


def find_python() -> str:
    """An interpreter with vLLM and the plug-in: this one, or that of `make serving`."""
    needed = ["bosch", "vllm", "bosch_vllm"]
    for python in dict.fromkeys((sys.executable, usual_python())):
        with suppress(OSError, subprocess.CalledProcessError):  # an environment that is damaged
            if not lacking(python, needed):
                return python
    missing = ", ".join(lacking(sys.executable, needed))
    problem = f"this environment lacks {missing}, which serve hybrids"
    way = "beside vLLM 0.31 or 0.32 pip install xxhash, then --no-deps CLONE CLONE/serving/vllm"
    if is_checkout():
        way = f"`make serving` makes .venv-serving with them; elsewhere {way}"
    raise UserError(f"{problem}: {way} (docs/serving.md).")


if __name__ == "__main__":
    run_main(main)
