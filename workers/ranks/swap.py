"""Offload a rank's device memory between its turns, and bring it back in place.

`leave` copies the storages that Python can reach to host memory and resizes them to 0. `enter`
resizes them back and fills them. Tensors keep their identity, and so do their views; code that
touches an offloaded tensor gets an error from torch, not garbage.

What stays on the device: storages that cannot be resized (numpy views them, they are shared between
processes, or they are squashed and belong to the slot), and storages that only C++ can reach, such
as activations between a forward and a backward pass.

Tensors are found through Python's garbage collector, which takes some milliseconds. So this happens
only at the first steps and at every LOOK_EVERY-th step reported to `look`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch

from workers.ranks.shared_memory import aligned
from workers.ranks.turns import Spared

SMALL_BYTES = 1024  # smaller storages are not worth moving
LOOK_EVERY = 50  # steps


class RankOffload:
    """A rank's list of its device tensors, and the host memory that takes their contents."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[int, weakref.ref[torch.Tensor]] = {}
        # storage, its bytes, and its content: an offset in `slab`, a copy, or None if not kept
        self.away: list[tuple[torch.UntypedStorage, int, int | torch.Tensor | None]] = []
        self.slab = torch.empty(0, dtype=torch.uint8)
        self.out_bytes = self.in_bytes = self.largest_bytes = self.last_bytes = 0
        self.looks = 0

    def look(self, step: int) -> None:
        """Find new tensors, at the first steps and from time to time."""
        if step > 3 and step % LOOK_EVERY:
            return
        # Torch's own classes only: asking a tenant's object for its class may run tenant code.
        found = (obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, torch.nn.Parameter))
        self.note(found)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == self.device.type and id(tensor) not in self.known:
                self.known[id(tensor)] = weakref.ref(tensor)

    def leave(self, spared: list[Spared]) -> None:
        """Offload all storages that can be moved; spared ones are dropped without a copy."""
        kept = {_key(tensor): copy for tensor, copy in spared if _is_whole(tensor)}
        at = 0
        for storage in self._storages():
            if storage.data_ptr() in kept:
                self.away.append((storage, storage.nbytes(), kept[storage.data_ptr()]))
            else:
                self.away.append((storage, storage.nbytes(), at))
                at += aligned(storage.nbytes())
        if len(self.slab) < at:
            self.slab = torch.empty(at, dtype=torch.uint8)
        for storage, size, place in self.away:
            if isinstance(place, int):
                self.slab[place : place + size].copy_(_bytes(storage))
                self.out_bytes += size
            storage.resize_(0)
        self.last_bytes = sum(size for _, size, _ in self.away)
        self.largest_bytes = max(self.largest_bytes, self.last_bytes)

    def enter(self) -> None:
        for storage, size, place in self.away:
            storage.resize_(size)
            if isinstance(place, int):
                _bytes(storage).copy_(self.slab[place : place + size])
            elif place is not None:
                _bytes(storage).copy_(_bytes_of(place))
            self.in_bytes += 0 if place is None else size
        self.away = []

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the storages that can be moved now, each once, in the order of discovery."""
        found: dict[int, torch.UntypedStorage] = {}
        for key, reference in list(self.known.items()):
            tensor = reference()
            if tensor is None:
                del self.known[key]
                continue
            for one in (tensor, tensor.grad if tensor.is_leaf else None):
                if one is not None and one.layout is torch.strided:
                    storage = one.untyped_storage()
                    if _can_move(storage) and storage.data_ptr() != self.slab.data_ptr():
                        found.setdefault(storage.data_ptr(), storage)
        return list(found.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: torch.Tensor) -> bool:
    """True if the tensor covers its whole storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _bytes_of(copy: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a dense tensor covers, in their order in memory."""
    start, size = copy.storage_offset() * copy.element_size(), copy.numel() * copy.element_size()
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(copy.untyped_storage(), start, (size,), (1,))


def _can_move(storage: torch.UntypedStorage) -> bool:
    return storage.nbytes() >= SMALL_BYTES and storage.resizable() and not storage.is_shared()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
