"""Tells which storages may leave their memory, and gives that memory back to the kernel.

A storage that other code knows by its address must stay: numpy views it, processes share it, or
DLPack lent it. All code that moves storages off a device asks here: `switching.offload` for a
paused job, `ranks.swap` between a rank's turns, and `graph.spill` for a graph's blocks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from workers.hardware.dirty_pages import PAGE, Range

# MADV_FREE, by which the kernel takes pages when it needs them; MADV_DONTNEED
LAZILY, AT_ONCE = 8, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_lent: dict[int, StorageWeakRef] = {}


def flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a host storage without a copy.

    The view keeps the storage alive.
    """
    if not storage.nbytes():
        return memoryview(bytearray())
    # Not through numpy: a storage that numpy has viewed can never be resized again.
    array: Any = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    array._storage = storage
    return memoryview(array).cast("B")


def may_leave(storage: torch.UntypedStorage) -> bool:
    """True if no other code knows the storage's memory by its address."""
    # torch says of every storage of an accelerator that it is shared
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    return storage.resizable() and not is_shared and not _is_lent(storage)


def release_pages(storage: torch.UntypedStorage, when: int) -> None:
    """Give the pages of a host storage back to the kernel, since malloc would keep them in its
    heap.
    """
    # The first and last page stay, where malloc keeps its own bookkeeping.
    pages = Range.inside(storage.data_ptr() + PAGE, storage.nbytes() - 2 * PAGE)
    # If madvise fails, malloc keeps the memory for later allocations.
    _libc.madvise(pages.start, pages.end - pages.start, when)


def follow_lending() -> None:
    """From now on, note which storages DLPack gives to other code: they must stay in place."""
    if getattr(torch.Tensor.__dlpack__, "_noticed", False):
        return
    lend = torch.Tensor.__dlpack__

    def lending(tensor: torch.Tensor, *how: Any, **more: Any) -> Any:
        storage = tensor.untyped_storage()
        _lent[storage._cdata] = StorageWeakRef(storage)
        return lend(tensor, *how, **more)

    lending._noticed = True  # type: ignore[attr-defined]
    torch.Tensor.__dlpack__ = lending  # type: ignore[method-assign, assignment]


def _is_lent(storage: torch.UntypedStorage) -> bool:
    known = _lent.get(storage._cdata)
    if known is not None and known.expired():
        del _lent[storage._cdata]  # the lent storage was freed, and this one reuses its address
        return False
    return known is not None
