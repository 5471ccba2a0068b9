"""Which backend computes an attention call. Each file of bosch/attention/backends says what it can
compute, and with what priority; on a device where windows were measured (rates.py), their rates
decide. The first one that can is taken, and every refusal is shown once.
"""

import logging
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall, Documents, SinkKeys
from bosch.attention.rates import measured_rates
from bosch.plugins import BrokenPluginError, list_plugins, load_plugin, suggest
from bosch.run.errors import UserError

AUTO = "auto"  # in settings: choose by priority
logger = logging.getLogger("bosch")


def load_backends(package: str) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The backends of a package by name, and why the others do not load."""
    loaded, broken = {}, {}
    for name in list_plugins(package):
        try:
            loaded[name] = load_plugin(package, name)
        except BrokenPluginError as error:
            broken[name] = str(error).rstrip(".")
            logger.warning("attention backend %s is left out: %s", name, error)
    return loaded, broken


BACKENDS, BROKEN = load_backends("bosch.attention.backends")
_shown: set[tuple[str, str]] = set()
_availability: dict[str, str | None] = {}


def attend(call: AttentionCall, backend: str | None = None) -> Tensor:
    """The output of a call, (B, H, T, D). `backend` names the one to use; None: by priority."""
    call = call.in_one_dtype()
    if call.documents is not None or call.needs_grad:
        return _attend_uncompiled(call, backend)
    # Before a backend is chosen: a window that hides nothing is plain attention, for which torch's
    # own function comes first.
    call = call.without_idle_window()
    return BACKENDS[choose(call, backend)].attend(call)


@torch.compiler.disable
def _attend_uncompiled(call: AttentionCall, backend: str | None) -> Tensor:
    """A compiled model would make a graph for each number of documents. And in a graph inductor
    uses memory again, also that of an output which selective checkpointing keeps for the backward.
    """
    call = call.without_idle_window()
    return BACKENDS[choose(call, backend)].attend(call)


def choose(call: AttentionCall, backend: str | None = None) -> str:
    """The backend that will compute this call. A named one that cannot is an error."""
    if backend is not None:
        if reason := refusal(backend, call):
            problem = f"the attention backend {backend} cannot compute this call"
            raise UserError(f"{problem}: {reason}. Leave it out, or name another.")
        return backend
    refused = {}
    for name in by_priority(call):  # the last is sdpa, which computes every call
        if reason := refusal(name, call):
            refused[name] = reason
            continue
        # Once for each reason, not in each layer of each step; and a line would break a graph.
        if refused and not torch.compiler.is_compiling():
            for one in sorted(refused.items() - _shown):
                logger.warning("attention backend %s is not used: %s. %s runs instead.", *one, name)
            _shown.update(refused.items())
        return name
    raise AssertionError(refused)


def by_priority(call: AttentionCall) -> list[str]:
    """The backends to ask for a call that names none, the best first."""
    priorities = {name: backend.priority(call) for name, backend in BACKENDS.items()}
    asked = [name for name, priority in priorities.items() if priority is not None]
    rates = measured_rates(call)
    # Those that were measured on this device first, the fastest of them before the others. Of equal
    # priorities by name, so that all machines choose alike.
    return sorted(asked, key=lambda name: (-rates.get(name, 0.0), -priorities[name], name))


def refusal(name: str, call: AttentionCall) -> str | None:
    return _unavailable(name) or BACKENDS[name].supports(call)


def check_backend(
    option: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    trains: bool = False,
    packed: bool = False,
    padded: bool = False,
    has_sink: bool = False,
    remedy: str = "Use auto, or name another.",
) -> None:
    """Before work begins, refuse a backend named in a setting that does not exist, or that cannot
    compute calls like these on this machine: with gradients, packed documents, a padding mask or
    sinks."""
    if name == AUTO:
        return
    if name not in BACKENDS and name not in BROKEN:
        raise UserError(f"{option} {name}: no such backend; {suggest(name, (AUTO, *BACKENDS))}")
    if (reason := _unavailable(name)) is None:
        # The backend itself is asked, about the smallest call that has all that the run's calls
        # will have. Two tokens, since one sees everything; 64 is a head size of every kernel.
        q, k, v = (torch.zeros(1, 1, 2, 64, device=device, dtype=dtype) for _ in range(3))
        documents = Documents(((0, 1, 2),), device) if packed else None
        mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device).tril() if padded else None
        call = AttentionCall(q.requires_grad_(trains), k, v, 1.0, 1, mask, documents)
        if has_sink:
            seen_BTN = torch.ones(1, 2, 1, dtype=torch.bool, device=device)
            call = replace(call, sink=SinkKeys(k[:, :, :1], v[:, :, :1], seen_BTN))
        reason = refusal(name, call)
    if reason is not None:
        raise UserError(f"{option} {name} cannot run here: {reason}. {remedy}")


# Of this machine, so a compiled model may take it for a constant: it imports packages and asks the
# driver, which cannot be traced.
@torch.compiler.assume_constant_result
def _unavailable(name: str) -> str | None:
    if name in BROKEN:
        return BROKEN[name]
    if name not in BACKENDS:
        raise UserError(f"no attention backend {name!r}; {suggest(name, tuple(BACKENDS))}")
    if name not in _availability:
        _availability[name] = BACKENDS[name].unavailable()
    return _availability[name]
