"""Takes a value off the device as an image of its own, and restores a job or a value.

`stage` makes private copies of all storages, for a job's results at its end. `staging` makes the
image of a job that continues; `restored` builds the same job in another process, from a slab. In
the same process nothing needs to be restored: the objects still exist, and at most their memory is
offloaded (`offload`). `capture` describes graphs, and what cannot be captured.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from workers.capture.capture import Surroundings, capture
from workers.capture.restore import rebuilt, return_to
from workers.hardware.accelerator import Accelerator
from workers.hardware.preset import fingerprint
from workers.hardware.storages import memory_of
from workers.process.image_layout import Extent, Layout, from_json
from workers.process.slab import Slab
from workers.switching.image_file import ALIGN_BYTES, Image, ImageBlock
from workers.switching.offload import COPIERS, Lying

SPARE_BYTES = 64 * 2**20
_HUGE = 2 * 2**20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.malloc_trim.argtypes = [ctypes.c_size_t]

# --- off the device -------------------------------------------------------------------------------


class Spare:
    """Keeps the host memory of values that were sent, for reuse: new memory costs page faults."""

    def __init__(self) -> None:
        self._free = list[torch.UntypedStorage]()

    def take(self, size: int) -> torch.UntypedStorage:
        for n, storage in enumerate(self._free):
            if storage.nbytes() == size:
                return self._free.pop(n)
        return _new(size)

    def give_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._free.extend(storages)
        while sum(storage.nbytes() for storage in self._free) > SPARE_BYTES:
            del self._free[0]

    def let_go(self) -> None:
        """Free the memory that was kept for the next image, and return unused heap memory to the
        kernel.
        """
        self._free.clear()
        _libc.malloc_trim(0)


def stage(
    job: object,
    *,
    step: int,
    around: Surroundings,
    accelerator: Accelerator,
    root: str = "job",
    new: Callable[[int], torch.UntypedStorage] | None = None,
) -> Image:
    """Return the image of `job` after `step`, in `new` memory; raises Uncapturable."""
    accelerator.synchronize()
    captured = capture(job, around=around, accelerator=accelerator, root=root, whole=root == "job")
    return Image(
        step=step,
        fingerprint=fingerprint(accelerator),
        graph=captured.graph,
        blocks=tuple(_copied(storage, new or _new) for storage in captured.storages),
    )


def _copied(
    storage: torch.UntypedStorage, new: Callable[[int], torch.UntypedStorage]
) -> ImageBlock:
    private = new(storage.nbytes())
    private.copy_(storage)
    return ImageBlock(
        data=memory_of(private),
        device=storage.device.type,
        pinned=storage.device.type == "cpu" and storage.is_pinned(),
    )


class WrongKind(Exception):
    """Raised when a job was on another kind of device than this process has.

    Its random numbers could not continue, as each kind draws them in its own way.
    """


# --- and back -------------------------------------------------------------------------------------


def restore(image: Image, *, around: Surroundings, accelerator: Accelerator) -> Any:
    """Return the job of an image, restored in this process.

    Call it only in the tenant's sandbox: unpickling runs code. Raises WrongKind.
    """
    _must_serve((block.device for block in image.blocks), accelerator)
    storages = [_filled(block, accelerator) for block in image.blocks]
    world = rebuilt(image.graph, storages, around=around)
    return_to(world, accelerator)
    return world["job"]


def restored(
    slab: Slab,
    layout: dict[str, Any],
    *,
    around: Surroundings,
    accelerator: Accelerator,
    then: Callable[[Iterable[Lying], Layout], None] = lambda lying, layout: None,
) -> Any:
    """Return the job whose image is in the slab, restored in this process.

    Raises BadLayout and WrongKind.

    `then` gets each storage with the extent of the slab from which it was filled.
    """
    placed = from_json(layout, limit_bytes=slab.limit_bytes)
    _must_serve((part.device for part in placed.storages), accelerator)
    with ThreadPoolExecutor(COPIERS) as copiers:
        copied = copiers.map(lambda part: _out_of(slab, part, accelerator), placed.storages)
        storages = list(copied)
    graph = slab.view(placed.graph.offset, placed.graph.size)
    world = rebuilt(graph, storages, around=around)
    return_to(world, accelerator)
    then(zip(storages, placed.storages, strict=True), placed)
    return world["job"]


def _must_serve(devices: Iterable[str], accelerator: Accelerator) -> None:
    for device in devices:
        if device not in ("cpu", accelerator.kind):
            raise WrongKind(
                f"the image lay on {device}; this device worker serves {accelerator.kind}"
            )


def _out_of(slab: Slab, part: Extent, accelerator: Accelerator) -> torch.UntypedStorage:
    host = _new(part.size)
    if part.size:  # memmove lets the other copiers run, unlike a copy of a view
        ctypes.memmove(host.data_ptr(), slab.address + part.offset, part.size)
    return _in_place(host, part.device, part.pinned, accelerator)


def value(
    image: Image, *, around: Surroundings, accelerator: Accelerator, mapped: bool = False
) -> Any:
    """Return the staged value; unlike `restore`, it leaves the random number generators as they
    are.

    With `mapped` the value uses the image's own memory where possible, and the kernel copies a page
    when it is first written to. That avoids the page faults of new memory. But the image's memory
    is not freed as long as any part of it is used.
    """
    fill = _as_it_lies if mapped else _filled
    storages = [fill(block, accelerator) for block in image.blocks]
    return rebuilt(image.graph, storages, around=around)["job"]


def _as_it_lies(saved: ImageBlock, accelerator: Accelerator) -> torch.UntypedStorage:
    if not accelerator.is_host or not len(saved.data):
        return _filled(saved, accelerator)
    lies = torch.frombuffer(saved.data, dtype=torch.uint8).untyped_storage()
    return lies if lies.data_ptr() % ALIGN_BYTES == 0 else _filled(saved, accelerator)


def _filled(saved: ImageBlock, accelerator: Accelerator) -> torch.UntypedStorage:
    host = _new(len(saved.data))
    memory_of(host)[:] = saved.data
    return _in_place(host, saved.device, saved.pinned, accelerator)


def _new(size: int) -> torch.UntypedStorage:
    """Return host memory that is about to be filled, in huge pages where the host gives them.

    For new memory most of the time goes into page faults: 8 MB took 3.5 ms, and 1.7 ms with huge
    pages.
    """
    storage = torch.UntypedStorage(size)
    address = storage.data_ptr()
    begin, end = -(-address // _HUGE) * _HUGE, (address + size) // _HUGE * _HUGE
    # huge pages only where the memory fills them, so that it takes no more than requested
    if begin < end:
        _libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return storage


def _in_place(
    host: torch.UntypedStorage, device: str, pinned: bool, accelerator: Accelerator
) -> torch.UntypedStorage:
    if pinned and not accelerator.is_host:
        host = host.pin_memory()
    return host if device == "cpu" else host.to(device=accelerator.device)
