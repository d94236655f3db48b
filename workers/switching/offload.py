"""Offloads a paused job's large storages from the device's memory, and brings them back in place.

`leave` frees the memory of storages that have their bytes in the slab; `come_back` allocates memory
for them again and fills it. The storages stay the same objects, so views, ties and bindings of an
optimizer stay valid. Code that reads an offloaded storage (only a thread of the job could) gets an
error from torch, or crashes; it never sees other bytes.

These stay: small storages, and memory that other code knows by its address (numpy views it,
processes share it, it is pinned, or it was lent by DLPack). On an accelerator, host memory stays.

Memory of a CPU device goes back to the kernel lazily (MADV_FREE): the kernel takes the pages when
it needs them. If it has not taken them, coming back costs no page faults, which take longer than
the copy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from workers.hardware.accelerator import Accelerator, Pinned
from workers.hardware.storages import LAZILY, flat, may_leave, release_pages
from workers.process.image_layout import Extent
from workers.process.slab import Slab

LEAVES_BYTES = 64 * 1024  # smaller storages stay
PIECE_BYTES = 16 * 2**20  # size of the pieces, each copied by one thread
COPIERS = 2  # threads that fill storages; a single thread does not use the full memory bandwidth

Lying = tuple[torch.UntypedStorage, Extent]  # a storage, and the place of its bytes in the slab


class CalledOff(Exception):
    """Raised when the remaining storages get no memory. Storages that have already come back
    stay.
    """


class Absence:
    """Manages the offloaded storages of one resident. Its main thread uses this while it has no
    slot.
    """

    def __init__(self, slab: Slab, accelerator: Accelerator, pinned: Pinned) -> None:
        self.slab, self.accelerator, self.pinned = slab, accelerator, pinned
        self.away: list[Lying] = []

    @property
    def bytes(self) -> int:
        return sum(extent.size for _, extent in self.away)

    def leave(self, lying: Iterable[Lying], freed: Callable[[], None]) -> None:
        """Free the memory of each storage that `lying` yields; call `freed` after each."""
        known = {storage._cdata for storage, _ in self.away}
        for storage, extent in lying:
            if storage._cdata not in known and self._can_leave(storage, extent):
                _let_go(storage)
                self.away.append((storage, extent))
                freed()
        self.accelerator.empty_cache()

    def come_back(self, room: Callable[[int], None]) -> list[Lying]:
        """Bring the storages back and return them.

        `room` waits until that many bytes may be allocated. It may raise CalledOff: then the
        remaining storages stay offloaded.
        """
        back: list[Lying] = []
        try:
            with self._copiers() as copy:
                for storage, extent in list(self.away):
                    room(extent.size)
                    storage.resize_(extent.size)
                    copy(storage, extent)
                    back.append(self.away.pop(0))
        except CalledOff:
            pass
        return back

    def _can_leave(self, storage: torch.UntypedStorage, extent: Extent) -> bool:
        if extent.device != self.accelerator.kind or extent.size < LEAVES_BYTES or extent.pinned:
            return False
        return may_leave(storage)

    def _copiers(self) -> _OnHost | _OnStream:
        if self.accelerator.is_host:
            return _OnHost(self.slab)
        self.pinned.reach(max((extent.offset + extent.size for _, extent in self.away), default=0))
        return _OnStream(self.slab, self.accelerator)


def _let_go(storage: torch.UntypedStorage) -> None:
    if storage.device.type == "cpu":
        release_pages(storage, LAZILY)
    storage.resize_(0)


# --- copying back ---------------------------------------------------------------------------------


class _OnHost:
    """Copies by threads, piece by piece; all copies are complete at exit."""

    def __init__(self, slab: Slab) -> None:
        self.slab, self.pending = slab, list[Future[Any]]()
        # On a machine with few cores, leave one to a resident that offloads or steps meanwhile.
        self.threads = ThreadPoolExecutor(COPIERS if len(os.sched_getaffinity(0)) > 2 else 1)

    def __enter__(self) -> _OnHost:
        return self

    def __call__(self, storage: torch.UntypedStorage, extent: Extent) -> None:
        to, source = storage.data_ptr(), self.slab.address + extent.offset
        for at in range(0, extent.size, PIECE_BYTES):
            size = min(PIECE_BYTES, extent.size - at)
            self.pending.append(self.threads.submit(ctypes.memmove, to + at, source + at, size))

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        for copied in self.pending:
            copied.result()


class _OnStream:
    """Has the device copy, on a stream of its own, from pinned memory.

    All copies are complete at exit: until then, nothing frees the storages that they fill.
    """

    def __init__(self, slab: Slab, accelerator: Accelerator) -> None:
        self.whole = torch.frombuffer(slab.memory, dtype=torch.uint8)
        self.accelerator, self.stream = accelerator, accelerator.new_stream()

    def __enter__(self) -> _OnStream:
        return self

    def __call__(self, storage: torch.UntypedStorage, extent: Extent) -> None:
        whole = flat(storage)
        source = self.whole[extent.offset : extent.offset + extent.size]
        # The allocator may return memory that the job's stream is still using.
        self.stream.wait_stream(self.accelerator.current_stream())
        with self.stream:
            whole.copy_(source, non_blocking=True)

    def __exit__(self, *_: object) -> None:
        self.stream.synchronize()
