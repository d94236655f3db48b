"""Offload a rank's device memory between its turns, and bring it back in place.

`leave` copies the storages that Python can reach to host memory and resizes them to 0. `enter`
resizes them back and fills them. Tensors keep their identity, and so do their views; code that
touches an offloaded tensor gets an error from torch, not garbage.

Two sorts of storages stay on the device. Other code knows the first sort by their address: numpy
views them, DLPack lent them, they are shared between processes, or they are squashed and belong to
the slot. Only C++ can reach the second sort, such as activations between a forward and a backward
pass.

Only what lasts from step to step is moved: a tensor that is there at the boundary before a step, or
after an optimizer's step. A tensor that a step makes for a while stays. It may belong to a stream
of its own, as in FSDP2. Memory that comes back belongs to the current stream, so it might be reused
while the other stream still works on the tensor. Tensors are found through Python's garbage
collector, which takes some milliseconds. So they are searched only in the first steps of the
process and at every LOOK_EVERY-th step.

An accelerator's allocator keeps what is freed for its own process. So its cache is emptied, and the
other ranks of the device find the memory free. The allocator gives back whole segments only: one
small block in use keeps its segment.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch

from workers.hardware.accelerator import Accelerator
from workers.hardware.storages import flat, follow_lending, may_leave
from workers.ranks.shared_memory import aligned
from workers.ranks.turns import Spared

SMALL_BYTES = 1024  # smaller storages are not worth moving
FIRST_STEPS, LOOK_EVERY = 3, 50  # steps


class RankOffload:
    """Tracks a rank's device tensors, and the host memory into which their contents go."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.known: dict[int, weakref.ref[torch.Tensor]] = {}
        # (storage, its bytes, where its content is): an offset in `slab`, a copy, or None if not
        # kept
        self.away: list[tuple[torch.UntypedStorage, int, int | torch.Tensor | None]] = []
        self.places: dict[int, tuple[int, int | torch.Tensor | None]] = {}  # the same, by storage
        self.slab = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.out_bytes = self.in_bytes = self.largest_bytes = self.last_bytes = 0
        self.steps = 0
        follow_lending()

    def begin_step(self) -> None:
        """Count a step of this process, and in some steps search for new tensors."""
        self.steps += 1
        if self.steps <= FIRST_STEPS or self.steps % LOOK_EVERY == 0:
            self.look()

    def after_optimizer(self, *_: object) -> None:
        """Find the state that an optimizer has made.

        Called after each of its steps; only the first steps search.
        """
        if self.steps <= FIRST_STEPS:
            self.look()

    def look(self) -> None:
        """Find all tensors of the device that have memory now."""
        # Torch's own classes only: to ask a tenant's object for its class may run tenant code.
        found = (obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, torch.nn.Parameter))
        self.note(found)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != self.accelerator.kind or tensor.layout is not torch.strided:
                continue
            known = self.known.get(id(tensor))
            is_new = known is None or known() is None  # an object may have the id of a dead one
            if is_new and tensor.untyped_storage().nbytes() >= SMALL_BYTES:
                self.known[id(tensor)] = weakref.ref(tensor)

    def leave(self, spared: list[Spared]) -> None:
        """Offload all storages that can be moved.

        The `spared` ones are not copied.
        """
        if not self.steps:
            self.look()
        self.accelerator.synchronize()  # work on any stream may still use them
        kept = {_key(tensor): copy for tensor, copy in spared if _is_whole(tensor)}
        at = 0
        for storage in self._storages():
            if storage.data_ptr() in kept:
                self.away.append((storage, storage.nbytes(), kept[storage.data_ptr()]))
            else:
                self.away.append((storage, storage.nbytes(), at))
                at += aligned(storage.nbytes())
        if len(self.slab) < at:
            self.slab = torch.empty(at, dtype=torch.uint8, device="cpu")
        for storage, size, place in self.away:
            if isinstance(place, int):
                self.slab[place : place + size].copy_(flat(storage))
                self.out_bytes += size
            storage.resize_(0)
        self.places = {storage._cdata: (size, place) for storage, size, place in self.away}
        self.accelerator.empty_cache()
        self.last_bytes = sum(size for _, size, _ in self.away)
        self.largest_bytes = max(self.largest_bytes, self.last_bytes)

    def content(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return the bytes of an offloaded storage, in host memory; None if it is in its place."""
        found = self.places.get(storage._cdata)
        if found is None:
            return None
        size, place = found
        if place is None:  # a call in progress will overwrite it, so any bytes will do
            return torch.zeros(size, dtype=torch.uint8, device="cpu")
        return self.slab[place : place + size] if isinstance(place, int) else _bytes_of(place)

    def enter(self) -> None:
        """Bring all storages back, in memory of the default stream.

        This rank may have gone to sleep in a call on a side stream. If the memory belonged to that
        stream, the allocator could reuse it once it is freed, although the default stream still
        uses it.
        """
        with self.accelerator.on_default_stream():
            for storage, size, place in self.away:
                storage.resize_(size)
                if isinstance(place, int):
                    flat(storage).copy_(self.slab[place : place + size])
                elif place is not None:
                    flat(storage).copy_(_bytes_of(place))
                self.in_bytes += 0 if place is None else size
        self.away, self.places = [], {}

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the storages that can be moved now, each once, in the order in which they were
        found.
        """
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
    """Return the bytes of a dense tensor, in the order in which they lie in memory."""
    start, size = copy.storage_offset() * copy.element_size(), copy.numel() * copy.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=copy.device)
    return whole.set_(copy.untyped_storage(), start, (size,), (1,))


def _can_move(storage: torch.UntypedStorage) -> bool:
    return storage.nbytes() >= SMALL_BYTES and may_leave(storage)
