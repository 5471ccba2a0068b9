"""The ratio that fits a memory budget: `4GiB@128k` is at most 4 GiB of KV cache for one text of
131,072 tokens, in bf16. Entries in use count: an engine with blocks, as vLLM, allocates up to a
block more for each group, our own dynamic cache about an eighth more."""

import re
from dataclasses import replace

from bosch.config import Config
from bosch.masks.mask import GroupMask
from bosch.methods._settings import unit_of
from bosch.model import fetch_config, read_model_info, read_own_windows
from bosch.run.errors import UserError
from bosch.sink import Sink

BUDGET = re.compile(r"(\d+\.?\d*) ?([KMGT])(i?)B@(\d+)([kM]?)", re.IGNORECASE)


def with_kv_budget(
    config: Config, budget: str, settings: object, names_ratio: bool = False
) -> tuple[Config, str]:
    """The config with the smallest ratio that fits, and a line on it. `settings` of the method.
    `names_ratio`: the user gave a ratio too."""
    option = f"--kv-budget {budget}"
    if names_ratio:
        raise UserError(f"{option} and --ratio {config.ratio:g} both set the ratio; pass one.")
    if not (match := BUDGET.fullmatch(budget)):
        raise UserError(f"{option}: write bytes and the length of a text, as 4GiB@128k.")
    number, prefix, binary, length, thousands = match.groups()
    unit = f"{prefix.upper()}{binary.lower()}B"
    unit_bytes = (1024 if binary else 1000) ** ("KMGT".index(unit[0]) + 1)
    tokens = int(length) * {"": 1, "k": 1024, "m": 1024**2}[thousands.lower()]

    folder = fetch_config(config.model)
    model, own = read_model_info(folder), read_own_windows(folder)
    width = model.num_groups if unit_of(config.method, settings) == "layer" else 1
    shape = model.num_layers, model.num_groups
    groups = [(layer, group) for layer in range(shape[0]) for group in range(shape[1])]
    count = len(groups) // width
    # From the dense model on, so the first that fits has the smallest ratio. Bytes depend on how
    # many groups have a window and not on which, so any mask will do.
    for windowed in range(count + 1):
        mask = GroupMask.from_windowed(groups[: windowed * width], *shape, config.window)
        mask = replace(mask, sink=Sink.parse(config.sink), own_windows=own)
        needed = mask.kv_bytes(tokens, model.head_dim)
        size = f"{needed / unit_bytes:.3g} {unit} in use at {tokens:,} tokens"
        if needed <= float(number) * unit_bytes:
            dense = "" if windowed else ", of the dense model"
            ratio = windowed / count
            return replace(config, ratio=ratio), f"{option}: ratio {ratio:g}, {size}{dense}"
    all_windowed = f"with every group on a window of {config.window:,} tokens it needs {size}"
    raise UserError(f"{option} is too small for {config.model}: {all_windowed}.")
