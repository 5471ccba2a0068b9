"""The memory of all tensors that are alive, counted while code runs: of real ones, or of fake ones,
which have a shape and no content.

Not counted: memory inside an operator, and what an allocator adds.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATED_BYTES = 512  # CUDA's allocator rounds up to a multiple of this
# What the arguments of fully_shard's own operators are for.
PURPOSES = {
    "fsdp::all_gather_copy_in": "weights",
    "fsdp::split_with_sizes_copy": "weights",
    "fsdp::chunk_cat": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}
# Answers to questions about the values of fake tensors, by operator.
ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0, torch.ops.aten.equal.default: False}


@dataclass
class Piece:
    """Memory that was in use from one moment to another."""

    num_bytes: int
    kind: str
    begin: int
    end: float = float("inf")
    is_on_host: bool = False  # where fake tensors are on the CPU, this says what would be


class LiveMemory(TorchDispatchMode):
    """Counts the tensors made inside `with LiveMemory():`. Under FakeTensorMode every question
    about a value is answered by 0 or no."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations"  # of what is made now
        self._pieces: list[Piece] = []
        self._alive: dict[int, tuple[weakref.ref[Any], Piece]] = {}  # by storage
        self._moment = 0
        self._is_paused = False
        self._patches = ExitStack()

    def peak(self) -> Counter[str]:
        """Bytes by kind at the moment when the device held most."""
        pieces = [piece for piece in self._pieces if not piece.is_on_host]
        changes = [(float(piece.begin), piece.num_bytes) for piece in pieces]
        changes += [(piece.end, -piece.num_bytes) for piece in pieces]
        now = most = 0
        top = 0.0
        for moment, change in sorted(changes):
            now += change
            if now > most:
                most, top = now, moment
        found: Counter[str] = Counter()
        for piece in pieces:
            if piece.begin <= top < piece.end:
                found[piece.kind] += piece.num_bytes
        return found

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """What is made inside is of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def name(self, kind: str, tensors: Iterable[Any], on_host: bool = False) -> None:
        """Say what tensors that were made before are for."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and (known := self._alive.get(_storage(tensor)._cdata)):
                known[1].kind = kind
                known[1].is_on_host |= on_host

    # ------------------------------------------------------------------------------------- counting

    def __enter__(self) -> "LiveMemory":
        resize, name = torch.UntypedStorage.resize_, "_propagate_tensor_meta_non_cached"
        propagate = getattr(ShardingPropagator, name)

        def resize_and_count(storage: Any, size: int) -> None:
            resize(storage, size)
            self._count(storage, "weights")

        def propagate_uncounted(*args: Any) -> object:
            before, self._is_paused = self._is_paused, True
            try:
                return propagate(*args)
            finally:
                self._is_paused = before

        # Torch has no public way to see these two. fully_shard frees gathered weights by resizing
        # their storage to 0. And to learn the shape of a result, DTensor computes it for the whole
        # model with fake tensors, which take no memory in a real run.
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_count))
        self._patches.enter_context(patch.object(ShardingPropagator, name, propagate_uncounted))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # this comes again with its local tensors
        if func in ANSWERS and active_fake_mode() is not None:
            return ANSWERS[func]
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                    self._count(_storage(tensor), self.kind)
        if kind := PURPOSES.get(func.name()):
            self.name(kind, tree_leaves((args, kwargs)))
        return result

    def _count(self, storage: Any, kind: str) -> None:
        key, blocks = storage._cdata, -(-storage.nbytes() // ALLOCATED_BYTES)
        num_bytes = blocks * ALLOCATED_BYTES
        if key in self._alive:
            if self._alive[key][1].num_bytes == num_bytes:
                return
            self._end(key)
        self._moment += 1
        piece = Piece(num_bytes, kind, self._moment)
        self._pieces.append(piece)
        self._alive[key] = weakref.ref(storage, lambda _: self._end(key)), piece

    def _end(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self._moment += 1
            known[1].end = self._moment


def _storage(tensor: Tensor) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
