"""Train a few steps with every switch of the training, one at a time: time, memory, loss, graphs.

The switches are read from TrainConfig, so a new one takes part. Each must give the losses of the
settings without it. One that is refused here is skipped; graphs are those that torch.compile made.
Only the usual settings compile, and the switch that asks for it: each time takes most of a minute.
"""

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch._dynamo.utils import counters

from benchmarks import train
from benchmarks._measure import Row
from bosch.config import TrainConfig
from bosch.run.errors import UserError
from bosch.training.parallel import decide

OTHER_LOSS = ("objective", "trained", "until", "spike")  # what is learned, and when it ends
CLOSE = 0.02  # of losses, relative: half precision rounds
TITLE = train.TITLE
COLUMNS = {"switch": "switch", "seconds": "seconds:.3f", "loss": "value:.4f", "GB": "memory_gb:.1f"}
COLUMNS |= {"graphs": "graphs", "skipped": "skipped"}


Options = train.Options
GPU_OPTIONS = Options(
    model="Qwen3-0.6B", length=8192, window=1024, batch=1, steps=2, precision="bf16"
)
CPU_OPTIONS = Options(model="tiny-qwen3-2layer", length=128, window=16, batch=1, steps=1)


def measure(options: Options) -> Iterator[Row]:
    device = options.start()
    plain, wrong = list[float](), []
    with tempfile.TemporaryDirectory() as folder:
        *_, hybrid = train.save_models(options, Path(folder), device).values()
        for name, value in [("", None), *sorted(switches(), key=is_fp8)]:
            changes = ({"compile": False} | {name: value}) if name else {}
            title = f"{name.replace('_', ' ')} {value}" if name else "as usual"
            row: Row = {"name": f"{options.model}, {title}", "switch": title, "skipped": None}
            row |= dict.fromkeys(("value", "seconds", "memory_gb", "graphs"))
            # Else a switch would run what was compiled for the one before, and count its graphs.
            torch._dynamo.reset()
            counters.clear()
            try:
                steps = train.train_with_ours(options, hybrid, **changes)
            except Exception as error:  # the next one may run; a UserError is a refusal
                yield row | {"unit": "loss", "skipped": f"{type(error).__name__}: {error}"}
                if not isinstance(error, UserError):
                    wrong.append(f"{title}: {error}")
                if device.type == "cuda":
                    torch.cuda.synchronize()  # an error of the GPU itself ends this process
                continue
            finally:  # train.deterministic is for the rest of a process
                torch.use_deterministic_algorithms(False)
            losses = [step["loss"] for step in steps]
            # The first pass has the usual settings.
            plain = plain or losses
            pairs = zip(losses, plain, strict=True)
            graphs = counters["stats"]["unique_graphs"]
            row |= {"value": losses[-1], "unit": "loss", "losses": losses, "graphs": graphs}
            row["seconds"] = median(step["compute_seconds"] for step in steps[1:])
            yield row | {"memory_gb": steps[-1].get("memory_gb")}
            if not all(math.isclose(*pair, rel_tol=CLOSE) for pair in pairs):
                wrong.append(f"{title}: losses {losses}, not {plain}")
            if decide(train.settings_of(options, **changes), device).compile and not graphs:
                wrong.append(f"{title}: torch.compile made no graph")
    if wrong:
        raise ArithmeticError("; ".join(wrong))


def is_fp8(switch: tuple[str, Any]) -> bool:
    """These come last: an illegal access in such a kernel ends the process."""
    return str(switch[1]).startswith("fp8")


def switches() -> Iterator[tuple[str, Any]]:
    """Each setting with a few values, and each of these but the usual one."""
    hints = get_type_hints(TrainConfig)
    for each in dataclasses.fields(TrainConfig):
        values = values_of(hints[each.name]) if each.name not in OTHER_LOSS else []
        yield from ((each.name, value) for value in values if value != each.default)


def values_of(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    nested = (values_of(part) for part in get_args(hint))  # of a union
    return [True, False] if hint is bool else [value for part in nested for value in part]
