"""Which backend computes an attention call: asked in order, and every refusal is shown once."""

import logging
from types import ModuleType

import torch
from torch import Tensor

from bosch.backends._interface import AttentionCall
from bosch.plugins import list_plugins, load_plugin
from bosch.run.errors import UserError

logger = logging.getLogger("bosch")

# The first that neither is unavailable nor refuses the call. `sdpa` takes every call. Full
# attention of an unpacked text is SDPA's own ground: torch picks the best kernel there, and the
# result is the stock model's to the bit.
ORDER_CUDA = ("flash", "varlen", "flex", "sdpa")
ORDER_CUDA_FULL = ("sdpa",)
ORDER_ELSEWHERE = ("sdpa",)

BACKENDS: dict[str, ModuleType] = {
    name: load_plugin("bosch.backends", name) for name in list_plugins("bosch.backends")
}
_shown: set[tuple[str, str]] = set()


def attend(call: AttentionCall, backend: str | None = None) -> Tensor:
    """The output of a call, (B, H, T, D). `backend` names the one to use; None asks in order."""
    if call.documents is not None:
        return _attend_documents(call, backend)
    return _attend(call, backend)


def _attend(call: AttentionCall, backend: str | None) -> Tensor:
    call = call.without_idle_window()
    return BACKENDS[choose(call, backend)].attend(call)


# A compiled model would make a graph for each number of documents.
_attend_documents = torch.compiler.disable(_attend)


def choose(call: AttentionCall, backend: str | None = None) -> str:
    """The backend that will compute this call. A named one that cannot is an error."""
    if backend is not None:
        if backend not in BACKENDS:
            raise UserError(
                f"bosch_backend={backend!r} does not exist; the backends are {', '.join(BACKENDS)}."
            )
        reason = refusal(backend, call)
        if reason is not None:
            raise UserError(
                f"bosch_backend={backend!r} cannot compute this call: {reason}. Leave it out, or "
                "name another."
            )
        return backend
    refused: list[tuple[str, str]] = []
    for name in order(call):
        reason = refusal(name, call)
        if reason is None:
            _show(refused, name)
            return name
        refused.append((name, reason))
    raise AssertionError("the last backend of each order takes every call")


def order(call: AttentionCall) -> tuple[str, ...]:
    if call.q_BHTD.device.type != "cuda":
        return ORDER_ELSEWHERE
    return ORDER_CUDA_FULL if call.window_tokens is None and call.documents is None else ORDER_CUDA


def refusal(name: str, call: AttentionCall) -> str | None:
    return _unavailable(name) or BACKENDS[name].supports(call)


_availability: dict[str, str | None] = {}


@torch.compiler.assume_constant_result
def _unavailable(name: str) -> str | None:
    if name not in _availability:
        _availability[name] = BACKENDS[name].unavailable()
    return _availability[name]


def _show(refused: list[tuple[str, str]], instead: str) -> None:
    if torch.compiler.is_compiling():
        return
    for name, reason in refused:
        if (name, reason) not in _shown:
            _shown.add((name, reason))
            logger.warning(
                "attention backend %s is not used: %s. %s runs instead.", name, reason, instead
            )
