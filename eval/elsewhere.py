"""Predictions by processes of another interpreter, for `eval.engine vllm`: one for each GPU, of the
training's ranks or of those named. They write the files that a rank writes (runner.py)."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from bosch.eval.settings import SUITES, EvaluationPlan, Label
from bosch.plugins import list_plugins
from bosch.run.checkout import ROOT, is_checkout
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError, exit_on_user_error
from bosch.run.progress import set_up

# evaluate_folder, which the process calls too: evaluate.py imports this file, not the other way.
Evaluate = Callable[[Path, EvaluationPlan, Label, Path, Path], object]


def usual_python() -> str:
    """Of the environment that `make serving` makes, else this one."""
    served = ROOT / ".venv-serving" / "bin" / "python"
    return str(served) if served.is_file() else sys.executable


def check_elsewhere(plan: EvaluationPlan) -> None:
    """Refuse an interpreter that cannot evaluate."""
    python, engine = plan.generation.python, plan.generation.engine
    if engine == "vllm" and plan.attention != "auto":
        raise UserError("eval.engine vllm cannot have eval.attention; leave one of the two out.")
    needed = ["bosch", *(["vllm", "bosch_vllm"] if engine == "vllm" else [])]
    way_out = "make serving makes one (docs/serving.md); or name another, --eval.engine-python"
    try:
        missing = lacking(str(python), needed)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"eval.engine-python {python} does not run ({error}): {way_out}.") from None
    if missing:
        raise UserError(f"eval.engine {engine}: {python} lacks {', '.join(missing)}: {way_out}.")


def lacking(python: str, packages: Sequence[str]) -> list[str]:
    """Those that this interpreter does not find."""
    program = "from importlib.util import find_spec as find"
    program += f"; print(*[name for name in {list(packages)} if find(name) is None])"
    environment = with_this_code(os.environ)
    return subprocess.check_output([python, "-c", program], env=environment, text=True).split()


def predict_elsewhere(
    evaluate_folder: Evaluate,
    folder: Path,
    plan: EvaluationPlan,
    label: Label,
    out: Path,
    examples_folder: Path,
) -> None:
    """Make this rank's share of the predictions in processes of their own, and wait for them."""
    generation = plan.generation
    # Of the other process: it predicts itself, on the GPU that its environment shows it.
    inner = replace(plan, generation=replace(generation, python=None, gpus=()))
    message = pickle.dumps((evaluate_folder, folder, inner, label, out, examples_folder))
    processes = []
    with ExitStack() as running:  # which closes their stdin after an error, so that they end
        for environment in places(os.environ, generation.gpus):
            command = [str(generation.python), "-m", "bosch.eval.elsewhere"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            processes.append(running.enter_context(process))
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: its status says so
                process.stdin.write(message)
                process.stdin.flush()
        statuses = [process.wait() for process in processes]
    if status := next(filter(None, statuses), 0):
        problem = f"the evaluation of {folder} by {generation.python} ended with status {status}"
        raise UserError(f"{problem}; see above. The same command resumes it.")


def places(launch: Mapping[str, str], gpus: Sequence[str]) -> list[dict[str, str]]:
    """The environment of each process that this rank starts. GPUs that are named, on each machine,
    are shared out among its ranks. In it RANK and WORLD_SIZE are those of the evaluation."""
    from bosch.eval.engine_vllm import alone_on_its_gpu  # imports torch

    rank, world = rank_and_world()
    local, num_local = (int(launch.get(name) or 0) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    num_local = num_local or world
    # Without named GPUs each rank starts one process, on its own GPU.
    found, shares = [], [(rank, world, "")]
    if gpus:
        # Machines are counted by whole groups of ranks: the shares of those before this one come
        # first.
        first, total = (n // num_local * len(gpus) for n in (rank, world))
        shares = [(first + i, total, gpus[i]) for i in range(local, len(gpus), num_local)]
    for share, of, gpu in shares:
        environment = with_this_code(launch) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        with alone_on_its_gpu(environment):
            found.append(environment | {"RANK": str(share), "WORLD_SIZE": str(of)})
    return found


def with_this_code(environment: Mapping[str, str]) -> dict[str, str]:
    """A checkout's own code comes first; an installed package's folder holds others too."""
    path = [str(ROOT) if is_checkout() else "", environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def main() -> None:
    list_plugins(SUITES)  # first, so that suites of folders of one's own can be imported
    # Of the process that started this one.
    evaluate_folder, folder, plan, label, out, examples_folder = pickle.load(sys.stdin.buffer)

    def end_with_parent() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing comes; stdin's buffer has a lock, held too long
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    set_up(rank_and_world()[0])
    evaluate_folder(folder, plan, label, out, examples_folder)


if __name__ == "__main__":
    exit_on_user_error(main, debug=False)
