"""Copies a job's state into its slab while the next step already runs.

`begin` is called at a safe point, and returns when the job may continue; `join` returns when the
image is complete in the slab. Captured storages are copied as follows:

* small storages, and buffers, which the next forward pass may change, are copied at once;
* storages that only an optimizer writes to (parameters and its state), and gradients, which the
  next step frees, are copied by a thread beside the next forward and backward pass; no optimizer
  steps before that thread is done;
* a storage that was not written to since it was copied to the same place is not copied again.

The last two are not assumed but watched (`dirty_pages`): the kernel reports written pages. If a
page was written to before its copy was done (a weight clipped in forward, an average kept by hand),
the image is `spoiled`: it is not reported, and later images copy that storage at once.

Where memory cannot be watched, everything is copied at once. Memory of an accelerator is never
watched: it is copied within the device first, if there is room for it. If a rank has `offloaded` a
storage between its turns, the content on the host is copied: the rank need not come back to the
device for an image.

While nothing steps, `bring` makes an image storage by storage, for a job that will be offloaded
(`offload`). `lies` records that storages equal their bytes in the slab, because they were filled
from there.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workers.capture.capture import Captured
from workers.hardware.accelerator import Accelerator, Pinned
from workers.hardware.dirty_pages import Range, Watch
from workers.hardware.storages import flat
from workers.process.image_layout import Extent, Layout, laid_out
from workers.process.slab import Slab
from workers.switching.offload import Lying

WATCHED_BYTES = 64 * 1024  # smaller storages are copied at once: watching them would take longer
PIECE_BYTES = 16 * 2**20  # copied without checking that the storage still has this memory
_GRAPH_ROOM = 64 * 1024  # room for the graph to grow, so that storages keep their places

_copy = ctypes.memmove  # lets other threads run while it copies
# keeps the interpreter lock, which is faster for small copies
_copy_small = ctypes.PyDLL(None).memcpy
_copy_small.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_small.restype = ctypes.c_void_p


class ImageTooLarge(Exception):
    """The image does not fit into the slab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePart:
    """Describes a large storage of host memory that must be copied to `offset` of the slab."""

    storage: torch.UntypedStorage
    address: int
    size: int
    offset: int
    pages: Range  # pages that hold only bytes of this storage
    is_passing: bool = False  # True for a gradient: its memory will soon be used for other data


@dataclass(slots=True)
class _Known:
    """Remembers a storage from one image to the next, while the storage lives.

    `is_copied`: the storage has been watched since its last copy. `is_hot`: it was once written to
    while it was watched, so watching it is of no use. `is_passing`: it was a gradient in the last
    image.
    """

    alive: StorageWeakRef
    place: tuple[int, int, int]  # address, size, offset in the slab
    is_copied: bool = False
    is_hot: bool = False
    is_passing: bool = False
    images: int = 0  # number of images that it was in, with the one in progress

    @property
    def pages(self) -> Range:
        return Range.inside(self.place[0], self.place[1])


@dataclass
class _Plan:
    """Says how each storage is copied; small storages are copied already."""

    small: list[torch.UntypedStorage] = field(default_factory=list)
    now: list[StoragePart] = field(default_factory=list)
    later: list[StoragePart] = field(default_factory=list)
    again: list[StoragePart] = field(default_factory=list)  # to be copied only if it was written to
    device: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)


class Staging:
    """Stages the images of one resident. Only the copying may run in another thread."""

    def __init__(self, slab: Slab, watch: Watch | None, accelerator: Accelerator) -> None:
        self.slab, self.watch, self.accelerator = slab, watch, accelerator
        self.spoiled = False
        self.copied_bytes = 0  # bytes that were copied for the last image
        self.waited_s = 0.0  # total wait of optimizers and safe points, in seconds
        self._known: dict[int, _Known] = {}
        # keys of `_known`: storages that are watched, and to which an optimizer will soon write
        self._guarded: set[int] = set()
        self._layout = Layout(graph=Extent(offset=0, size=0), storages=())
        self._work: queue.SimpleQueue[tuple[Callable[[], None], ...]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._done.set()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._process = os.getpid()
        self._side: torch.Stream | None = None  # on which copies leave the device
        self.pinned = Pinned(slab.address, slab.memory, accelerator)
        # returns the content of a storage whose device memory was freed; None for other storages
        self.offloaded: Callable[[torch.UntypedStorage], torch.Tensor | None] = lambda storage: None
        register_optimizer_step_pre_hook(self._before_optimizer)

    def begin(self, captured: Captured, then: Callable[[Layout], None]) -> Layout:
        """Make an image; `then` is called once it is complete in the slab, by any thread.

        `then` must not raise. Raises TooLarge.
        """
        layout = self._begun(captured)
        plan = self._planned(captured.storages, layout)
        event = self._leave_device(plan.device, layout)
        self._copy_now(plan)
        if plan.later or event is not None:
            self._aside(lambda: self._copy_later(plan.later, event), lambda: then(layout))
        else:
            then(layout)
        return layout

    def bring(self, captured: Captured) -> tuple[Layout, Iterator[Lying]]:
        """Make an image while nothing steps; yield each storage when its bytes are in the slab.

        The image is complete when all have been yielded. Raises TooLarge.
        """
        layout = self._begun(captured)
        plan = self._planned(captured.storages, layout)
        extents = dict(zip(map(_number, captured.storages), layout.storages, strict=True))
        return layout, self._brought(plan, layout, extents)

    def lies(self, lying: Iterable[Lying], layout: Layout | None = None) -> None:
        """Record that these storages equal their bytes in the slab: until they are written to, they
        need no copy.

        `layout` is the layout of an image that another process made.
        """
        if layout is not None:
            self._layout = layout
            self.slab.used(layout.end)
        stable, filled = self._stable(), list[_Known]()
        for storage, extent in lying:
            if storage.device.type != "cpu" or extent.size < WATCHED_BYTES or self.watch is None:
                continue
            known = self._seen(_part(storage, extent))
            self._known[storage._cdata] = known
            known.is_copied = not known.is_hot and not known.is_passing
            if known.is_copied:
                filled.append(known)
                self._guarded |= {storage._cdata} & stable
        if self.watch is not None:
            self.watch.protect(known.pages for known in filled)

    def _begun(self, captured: Captured) -> Layout:
        self.join()
        self.spoiled = False
        layout = self._layout = self._fitting(captured)
        self.slab.used(layout.end)
        size = layout.graph.size
        self.slab.view(0, size)[:] = captured.graph
        self.copied_bytes = size
        return layout

    def must_fit(self, captured: Captured) -> int:
        """Return the bytes of the slab that the image takes; raises TooLarge."""
        return self._fitting(captured).end

    def _fitting(self, captured: Captured) -> Layout:
        layout, limit = self._placed(captured), self.slab.limit_bytes
        if layout.end > limit:
            told = f"its state needs {layout.end} bytes; this device can keep at most {limit}"
            raise ImageTooLarge(told)
        return layout

    @property
    def is_copying(self) -> bool:
        return not self._done.is_set()

    def join(self) -> None:
        """Wait until the image is complete in the slab, or spoiled."""
        if not self._done.is_set():
            began_s = time.perf_counter()
            self._done.wait()
            self.waited_s += time.perf_counter() - began_s

    def _aside(self, copy: Callable[[], None], then: Callable[[], None]) -> None:
        # one thread for the whole life of the resident, as starting a thread takes a while
        if self._thread is None:
            self._thread = threading.Thread(target=self._help, name="staging", daemon=True)
            self._thread.start()
        self._done.clear()
        self._work.put((copy, then))

    def _help(self) -> None:
        while True:
            copy, then = self._work.get()
            try:
                copy()
            except Exception:
                traceback.print_exc()  # goes to the job's log; the next image is another attempt
                self.spoiled = True
            spoiled = self.spoiled
            self._done.set()  # before `then`, so that `join` need not wait for the report
            if not spoiled:
                then()
            del copy, then  # this also frees the storages that they held

    def _placed(self, captured: Captured) -> Layout:
        """Return the layout of an image.

        Storages keep their places as long as their number and sizes are the same.
        """
        graph = Extent(offset=0, size=len(captured.graph))
        may_pin = not self.accelerator.is_host
        sizes = [
            _extent(storage, self.offloaded(storage), may_pin=may_pin)
            for storage in captured.storages
        ]
        before = self._layout.storages
        if sizes == [(part.size, part.device, part.pinned) for part in before] and (
            not before or graph.size <= before[0].offset
        ):
            return replace(self._layout, graph=graph)
        room = _GRAPH_ROOM
        while room < graph.size:
            room *= 2
        return replace(laid_out(room, sizes), graph=graph)

    # --- how each storage is copied ---

    def _planned(self, storages: Iterable[torch.UntypedStorage], layout: Layout) -> _Plan:
        """Copy the small and the offloaded storages now, and decide how each large one is
        copied.
        """
        plan, known = _Plan(), dict[int, _Known]()
        stable, passing = self._stable(), self._passing()
        base, watched = self.slab.address, self.watch is not None
        for storage, extent in zip(storages, layout.storages, strict=True):
            size = extent.size
            if (content := self.offloaded(storage)) is not None:
                _copy(base + extent.offset, content.data_ptr(), size)
                self.copied_bytes += size
                plan.small.append(storage)
            elif extent.device != "cpu":
                plan.device.append((storage, extent.offset))
            elif size < WATCHED_BYTES:
                _copy_small(base + extent.offset, storage.data_ptr(), size)
                plan.small.append(storage)
            else:
                part = _part(storage, extent)
                if not watched:
                    plan.now.append(part)
                    continue
                seen = known[storage._cdata] = self._seen(part)
                seen.is_passing = storage._cdata in passing
                seen.images += 1
                if seen.is_copied:
                    plan.again.append(part)
                elif storage._cdata in stable and not seen.is_hot:
                    plan.later.append(part)
                elif seen.is_passing and not seen.is_hot:
                    plan.later.append(replace(part, is_passing=True))
                else:
                    plan.now.append(part)
        self._known = known
        self._guarded &= known.keys()
        return plan

    def _seen(self, part: StoragePart) -> _Known:
        place = (part.address, part.size, part.offset)
        seen = self._known.get(part.storage._cdata)
        if seen is None or seen.alive.expired():
            seen = _Known(alive=StorageWeakRef(part.storage), place=place)
        elif seen.place != place:
            seen.place, seen.is_copied = place, False
        return seen

    def _stable(self) -> set[int]:
        """Return the storages that only an optimizer is expected to write to."""
        found = set[int]()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(_storages(p for p in group["params"] if p.requires_grad))
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    found.update(_storages(state.values()))
        return found

    def _passing(self) -> set[int]:
        found = set[int]()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(_storages(p.grad for p in group["params"]))
        return found

    def _copy_now(self, plan: _Plan) -> None:
        """Copy all that must be copied before the job continues. From then on the rest is
        watched.
        """
        if self.watch is not None:
            written = self.watch.written(part.pages for part in plan.again)
            for part in plan.again:
                if part.pages in written:
                    self._is_hot(part)
                    plan.now.append(part)
            cold = [part for part in plan.now if self._may_be_frozen(part)]
            self.watch.protect(part.pages for part in (*cold, *plan.later))
            self._guarded.update(p.storage._cdata for p in plan.later if not p.is_passing)
            for part in cold:
                self._known[part.storage._cdata].is_copied = True
            for part in (*plan.later, *plan.again):
                self._copy_edges(part)
        for part in plan.now:
            _copy(self.slab.address + part.offset, part.address, part.size)
            self.copied_bytes += part.size

    def _may_be_frozen(self, part: StoragePart) -> bool:
        """True unless the storage is new: to protect it for only one step costs more page faults
        than it saves.
        """
        known = self._known[part.storage._cdata]
        return known.images > 1 and not known.is_hot

    def _copy_edges(self, part: StoragePart) -> None:
        """Copy the bytes of a storage on pages that it shares with other memory."""
        pages, to = part.pages, self.slab.address + part.offset
        if before := pages.start - part.address:
            _copy_small(to, part.address, before)
        if after := part.address + part.size - pages.end:
            _copy_small(to + part.size - after, pages.end, after)

    # --- beside the next step ---

    def _copy_later(self, parts: list[StoragePart], event: Any) -> None:
        assert self.watch is not None or not parts
        if event is not None:
            event.synchronize()
        moved = [part for part in parts if not self._copied(part)]
        if self.watch is not None and parts:
            written = self.watch.written(part.pages for part in parts)
            moved += [part for part in parts if part.pages in written]
            self.watch.release(part.pages for part in parts if part.is_passing)
        for part in moved:
            self._is_hot(part)
        self.spoiled = bool(moved)
        if not self.spoiled:
            for part in parts:
                self._known[part.storage._cdata].is_copied = not part.is_passing

    def _copied(self, part: StoragePart) -> bool:
        pages = part.pages
        to = self.slab.address + part.offset - part.address
        for at in range(pages.start, pages.end, PIECE_BYTES):
            if part.storage.data_ptr() != part.address:
                return False  # the storage was resized, and this memory belongs to another one
            _copy(to + at, at, min(PIECE_BYTES, pages.end - at))
        self.copied_bytes += part.size
        return True

    def _is_hot(self, part: StoragePart) -> None:
        known = self._known[part.storage._cdata]
        known.is_hot, known.is_copied = True, False

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if os.getpid() != self._process:
            # this is a child process of the job: the thread and the watch belong to its parent
            return
        self.join()
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._guarded |= self._known.keys() & self._stable()
        if self._guarded and self.watch is not None:
            # Otherwise the first write to each page would take a fault.
            guarded = [self._known[number] for number in self._guarded]
            self.watch.release(known.pages for known in guarded)
            for known in guarded:
                known.is_copied = False
        self._guarded = set()

    # --- from an accelerator ---

    def _leave_device(self, parts: list[tuple[torch.UntypedStorage, int]], layout: Layout) -> Any:
        """Copy device storages on a stream of their own; return an event for the end, or None if
        there are none.

        Device memory cannot be watched. If the device has room, the state is first copied within
        the device, which takes a fiftieth of the time, and that copy is sent to the slab. Otherwise
        the job waits until its state is in the slab.
        """
        if not parts:
            return None
        self.pinned.reach(layout.end)
        whole = torch.frombuffer(self.slab.memory, dtype=torch.uint8)
        size = sum(storage.nbytes() for storage, _ in parts)
        self.copied_bytes += size
        side = self._side = self._side or self.accelerator.new_stream()
        sources = [flat(storage) for storage, _ in parts]
        copies = self._copies_on_device(sources, size)
        self.accelerator.current_stream().synchronize()
        with side:
            for source, (storage, offset) in zip(copies or sources, parts, strict=True):
                whole[offset : offset + storage.nbytes()].copy_(source, non_blocking=True)
                source.record_stream(side)
            event = side.record_event()
        if copies is None:
            event.synchronize()
        return event

    def _copies_on_device(
        self, sources: list[torch.Tensor], size: int
    ) -> list[torch.Tensor] | None:
        """Return copies of the sources on the device, or None if the device has no room for them.

        Another process may take the room after it was measured; this returns None, too.
        """
        if self.accelerator.free_bytes() <= 2 * size:
            return None
        try:
            return [source.clone() for source in sources]
        except torch.OutOfMemoryError:
            return None

    # --- while nothing steps ---

    def _brought(self, plan: _Plan, layout: Layout, extents: dict[int, Extent]) -> Iterator[Lying]:
        for storage in plan.small:
            yield storage, extents[_number(storage)]
        written = self._written(plan.again)
        for part in plan.again:
            if part.pages in written:
                self._is_hot(part)
            else:
                self._copy_edges(part)
                yield part.storage, extents[_number(part.storage)]
        rewritten = [part for part in plan.again if part.pages in written]
        for part in (*plan.later, *plan.now, *rewritten):
            for at in range(0, part.size, PIECE_BYTES):
                size = min(PIECE_BYTES, part.size - at)
                _copy(self.slab.address + part.offset + at, part.address + at, size)
            self.copied_bytes += part.size
            yield part.storage, extents[_number(part.storage)]
        yield from self._brought_from_device(plan.device, layout, extents)

    def _written(self, parts: list[StoragePart]) -> set[Range]:
        return set() if self.watch is None else self.watch.written(part.pages for part in parts)

    def _brought_from_device(
        self,
        parts: list[tuple[torch.UntypedStorage, int]],
        layout: Layout,
        extents: dict[int, Extent],
    ) -> Iterator[Lying]:
        """Start all copies at once, so that the bus is never idle.

        Each copy has an event of its own.
        """
        if not parts:
            return
        self.pinned.reach(layout.end)
        whole = torch.frombuffer(self.slab.memory, dtype=torch.uint8)
        side = self._side = self._side or self.accelerator.new_stream()
        side.wait_stream(self.accelerator.current_stream())
        events = []
        with side:
            for storage, offset in parts:
                part = whole[offset : offset + storage.nbytes()]
                part.copy_(flat(storage), non_blocking=True)
                events.append(side.record_event())
        for (storage, _), event in zip(parts, events, strict=True):
            event.synchronize()
            self.copied_bytes += storage.nbytes()
            yield storage, extents[_number(storage)]


def _number(storage: torch.UntypedStorage) -> int:
    number: int = storage._cdata
    return number


def _part(storage: torch.UntypedStorage, extent: Extent) -> StoragePart:
    address, size = storage.data_ptr(), extent.size
    pages = Range.inside(address, size)
    return StoragePart(
        storage=storage, address=address, size=size, offset=extent.offset, pages=pages
    )


def _storages(values: Iterable[Any]) -> Iterable[int]:
    plain = (torch.nn.Parameter, torch.Tensor)
    return [value.untyped_storage()._cdata for value in values if type(value) in plain]


def _extent(
    storage: torch.UntypedStorage, content: torch.Tensor | None, *, may_pin: bool
) -> tuple[int, str, bool]:
    kind = storage.device.type
    if content is not None:
        return len(content), kind, False
    return storage.nbytes(), kind, may_pin and kind == "cpu" and storage.is_pinned()
