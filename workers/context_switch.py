"""Take a job off the device and put it back.

`stage` is called at a safe point: it captures the job's graph and makes private copies of all
storages, so that the image stays what it was while the job goes on.  `restore` builds the same job
in another process; in the same process nothing needs to be restored, the objects are still there.
What a graph is, and what cannot be captured, is said in `capture`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from workers.accelerator import Accelerator
from workers.capture import Surroundings, capture, rebuilt, return_to
from workers.checkpoint import Block, Image
from workers.preset import fingerprint

# --- off the device -------------------------------------------------------------------------------


def stage(
    job: object, *, step: int, around: Surroundings, accelerator: Accelerator, root: str = "job"
) -> Image:
    """The image of `job` after `step`; raises Uncapturable."""
    accelerator.synchronize()
    captured = capture(job, around=around, accelerator=accelerator, root=root)
    return Image(
        step=step,
        fingerprint=fingerprint(),
        graph=captured.graph,
        blocks=tuple(_copied(storage) for storage in captured.storages),
    )


def _copied(storage: torch.UntypedStorage) -> Block:
    private = torch.UntypedStorage(storage.nbytes())
    private.copy_(storage)
    return Block(
        data=_bytes(private),
        device=storage.device.type,
        pinned=storage.device.type == "cpu" and storage.is_pinned(),
    )


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """A host storage's memory itself; the view keeps the storage alive."""
    if not storage.nbytes():
        return memoryview(bytearray())
    # Not through numpy: a storage that numpy has seen can never be resized again.
    array: Any = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    array._storage = storage
    return memoryview(array).cast("B")


# --- and back -------------------------------------------------------------------------------------


def restore(image: Image, *, around: Surroundings, accelerator: Accelerator) -> Any:
    """The job, in this process; only ever inside the tenant's walls: unpickling runs code."""
    world = _rebuilt(image, around, accelerator)
    return_to(world, accelerator)
    return world["job"]


def value(image: Image, *, around: Surroundings, accelerator: Accelerator) -> Any:
    """What was staged, and nothing else: the random number generators stay as they are."""
    return _rebuilt(image, around, accelerator)["job"]


def _rebuilt(image: Image, around: Surroundings, accelerator: Accelerator) -> dict[str, Any]:
    storages = [_filled(block, accelerator) for block in image.blocks]
    return rebuilt(image.graph, storages, around=around)


def is_exact(image: Image) -> bool:
    """Whether this process computes the same bits as the one that staged the image."""
    return image.fingerprint == fingerprint()


def _filled(saved: Block, accelerator: Accelerator) -> torch.UntypedStorage:
    host = torch.UntypedStorage(len(saved.data))
    _bytes(host)[:] = saved.data
    if saved.pinned and accelerator.kind == "cuda":
        host = host.pin_memory()
    return host if saved.device == "cpu" else host.to(device=accelerator.device)
