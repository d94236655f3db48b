"""Blocks of a graph within a budget of device memory: what is used last goes to host memory.

Before a node runs, all that it reads is brought to the device, with room for what it will write.
If that is too much, those storages give way that are read farthest in the future, by the known
order of the nodes (`core.datablock.victims`).  Tensors stay the same objects: they are pointed to
other memory, so views and ties hold.

A block does not change once it is made; so what was put aside is kept there when it comes back,
and gives way another time without a copy.  Only an in-out port may write to it: `forget` is told
before.

On a CPU device what is put aside is memory that a process shares with nobody else but could, as its
slab is: the kernel counts it apart from the process's own.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from app.core.datablock import Held, victims
from workers.accelerator import Accelerator
from workers.staging import flat
from workers.watch import PAGE, Range

_DONTNEED = 4  # MADV_DONTNEED
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

SPILLED_BYTES = 64 * 1024  # what is smaller stays: it is not worth a mapping

Piece = tuple[int | None, object]  # when it is read next, None: no more; and what


class NoRoom(Exception):
    """A node needs more at once than there is; the message says how much."""


@dataclass(slots=True)
class _Lying:
    """A storage of some pieces: the tensors that see it, and when the first of them is read."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor] = field(default_factory=list)
    next_use: float = math.inf
    is_needed: bool = False

    @property
    def size(self) -> int:
        return self.storage.nbytes()


class Room:
    """The budget of one graph, and what of it was put aside.

    `out_bytes` and `in_bytes` are what was copied from the device and to it, `peak_bytes` the most
    that its blocks had there at once, with what the next node was expected to write.

    As long as all fits, nobody is looked for: `_most_bytes` is what there can be at most.
    """

    def __init__(self, budget_bytes: int, host_bytes: int, accelerator: Accelerator) -> None:
        self.budget_bytes, self.host_bytes, self.accelerator = budget_bytes, host_bytes, accelerator
        self.out_bytes = self.in_bytes = self.peak_bytes = self._more_bytes = 0
        self._most_bytes: float = math.inf  # not known yet
        # By the number of a storage: those put aside, with their bytes; copies of those here.
        self._aside = dict[int, tuple[StorageWeakRef, int]]()
        self._copies = dict[int, tuple[StorageWeakRef, torch.UntypedStorage]]()

    # --- before and after a node ---

    def make(
        self,
        needed: Iterable[object],
        held: Iterable[Piece],
        more_bytes: int,
        *,
        likely_bytes: int = 0,
    ) -> None:
        """Have what is `needed` on the device, with room for more; raises NoRoom.

        For what is only likely there is as much room as the rest leaves.
        """
        if not self._aside and self._most_bytes + more_bytes + likely_bytes <= self.budget_bytes:
            self._expect(self._most_bytes, more_bytes + likely_bytes)
            return
        self._tidy()
        lying = self._survey(needed, held)
        needed_bytes = more_bytes + sum(one.size for one in lying if one.is_needed)
        if needed_bytes > self.budget_bytes:
            told = f"it takes {needed_bytes} bytes at once, {more_bytes} of them for what it writes"
            raise NoRoom(f"{told}; its blocks may have {self.budget_bytes} on the device")
        more_bytes += min(likely_bytes, self.budget_bytes - needed_bytes)
        here = [one for one in lying if not self._is_aside(one.storage)]
        coming = [one for one in lying if one.is_needed and self._is_aside(one.storage)]
        there_bytes = sum(one.size for one in (*here, *coming))
        for one in self._who_goes(here, there_bytes + more_bytes - self.budget_bytes):
            there_bytes -= one.size
            self._put_aside(one)
        for one in coming:
            self._bring_back(one)
        self._expect(there_bytes, more_bytes)

    def _expect(self, there_bytes: float, more_bytes: int) -> None:
        self._most_bytes, self._more_bytes = there_bytes + more_bytes, more_bytes
        self.peak_bytes = max(self.peak_bytes, int(self._most_bytes))

    def made(self, returned: object, given: object) -> int:
        """What a node wrote beside what it was given, in bytes."""
        new_bytes = self.new_bytes(returned, given)
        self._most_bytes += max(0, new_bytes - self._more_bytes)
        return new_bytes

    def new_bytes(self, value: object, beside: object) -> int:
        """What a value takes; not what it shares with another."""
        new = self._survey((value,), ())
        known = {one.storage._cdata for one in self._survey((beside,), ())} if new else set()
        return sum(one.size for one in new if one.storage._cdata not in known)

    def forget(self, value: object) -> None:
        """It is about to be written to."""
        for tensor in filter(_can_be_pointed, tensors_in(value)):
            self._copies.pop(tensor.untyped_storage()._cdata, None)

    # --- what images hold ---

    def aside(self, held: Iterable[object]) -> list[torch.Tensor]:
        """The storages that were put aside, as tensors, so that they can be told apart again."""
        self._tidy()
        lying = self._survey((), ((None, value) for value in held))
        return [flat(one.storage) for one in lying if self._is_aside(one.storage)]

    def restore(self, aside: list[torch.Tensor], held: Iterable[object]) -> None:
        """In another process they came with the others, and are put aside again."""
        for tensor in aside:
            storage = tensor.untyped_storage()
            self._aside[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.accelerator.kind != "cpu":
            return
        # They came into memory that counts as the device's.
        for one in self._survey((), ((None, value) for value in (*aside, *held))):
            if self._aside.pop(one.storage._cdata, None) is not None:
                self._put_aside(one)

    @property
    def held_bytes(self) -> int:
        """Of host memory."""
        self._tidy()
        copies = sum(copy.nbytes() for _, copy in self._copies.values())
        return copies + sum(size for _, size in self._aside.values())

    # --- who ---

    def _survey(self, needed: Iterable[object], held: Iterable[Piece]) -> list[_Lying]:
        """All storages that count: those of needed pieces, and those that are held."""
        found = dict[int, _Lying]()
        for value in needed:
            for one in self._storages(value, found):
                one.is_needed = True
        for next_use, value in held:
            for one in self._storages(value, found):
                one.next_use = min(one.next_use, math.inf if next_use is None else next_use)
        return list(found.values())

    def _storages(self, value: object, found: dict[int, _Lying]) -> Iterator[_Lying]:
        for tensor in filter(_can_be_pointed, tensors_in(value)):
            storage = tensor.untyped_storage()
            if not self._counts(storage):
                continue
            one = found.setdefault(storage._cdata, _Lying(storage))
            if not any(other is tensor for other in one.tensors):
                one.tensors.append(tensor)
            yield one

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        """Large, and on the device or put aside from there.

        What the tenant keeps elsewhere, or what others know by its address, is the tenant's.
        """
        if storage.nbytes() < SPILLED_BYTES:
            return False
        if self._is_aside(storage):
            return True
        kind = storage.device.type
        shared = kind == "cpu" and storage.is_shared()  # torch says so of all on CUDA
        return kind == self.accelerator.kind and storage.resizable() and not shared

    def _is_aside(self, storage: torch.UntypedStorage) -> bool:
        known = self._aside.get(storage._cdata)
        return known is not None and not known[0].expired()

    def _who_goes(self, here: list[_Lying], want: int) -> list[_Lying]:
        if want <= 0:
            return []
        by_name = {str(one.storage._cdata): one for one in here if not one.is_needed}
        held = [
            Held(
                block=name,
                bytes=one.size,
                next_use=None if one.next_use == math.inf else int(one.next_use),
                clean=one.storage._cdata in self._copies,
            )
            for name, one in by_name.items()
        ]
        return [by_name[copy.block] for copy in victims(held, want)]

    def _tidy(self) -> None:
        """Forget what nobody holds any more: its number will be another's."""
        self._aside = {n: known for n, known in self._aside.items() if not known[0].expired()}
        self._copies = {n: kept for n, kept in self._copies.items() if not kept[0].expired()}

    # --- moving ---

    def _put_aside(self, one: _Lying) -> None:
        kept = self._copies.pop(one.storage._cdata, None)
        copy = kept[1] if kept is not None else self._copied(one.storage)
        self._aside[copy._cdata] = StorageWeakRef(copy), copy.nbytes()
        _point(one.tensors, copy)
        if self.accelerator.kind == "cpu" and _is_unused(one):
            _give_back(one.storage)
        one.storage = copy

    def _copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        size = storage.nbytes()
        if self.held_bytes + size > self.host_bytes:
            self._copies.clear()  # all of these lie on the device, too
        if self.held_bytes + size > self.host_bytes:
            told = f"its blocks do not fit into {self.host_bytes} bytes of host memory"
            raise NoRoom(f"{told} either (ROUNDHOUSE_HOST_MEMORY_BYTES)")
        copy = _host_memory(size)
        copy.copy_(storage)
        self.out_bytes += size
        return copy

    def _bring_back(self, one: _Lying) -> None:
        copy = one.storage
        storage = torch.UntypedStorage(copy.nbytes(), device=self.accelerator.device)
        storage.copy_(copy)
        self.in_bytes += copy.nbytes()
        _point(one.tensors, storage)
        one.storage = storage
        del self._aside[copy._cdata]
        self._copies[storage._cdata] = StorageWeakRef(storage), copy


def _can_be_pointed(tensor: torch.Tensor) -> bool:
    """What has its memory elsewhere (sparse), or is more than its memory, stays where it is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_inference())


def _point(tensors: list[torch.Tensor], storage: torch.UntypedStorage) -> None:
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        seen = empty.set_(storage, *place)  # type: ignore[call-overload]
        seen = seen.conj() if tensor.is_conj() else seen
        tensor.data = seen._neg_view() if tensor.is_neg() else seen


def _host_memory(size: int) -> torch.UntypedStorage:
    """Shared, so that the kernel does not count it as the process's own; it goes with its user."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).untyped_storage()


def _is_unused(one: _Lying) -> bool:
    """Nobody else sees it: neither an image that is being copied, nor who only the tenant knows."""
    of_torch = torch._C._storage_Use_Count(one.storage._cdata)
    return of_torch == 1 and sys.getrefcount(one.storage) == 2  # `one`'s and that of the call


def _give_back(storage: torch.UntypedStorage) -> None:
    """Its pages to the kernel at once: malloc would keep them, in holes of its heap."""
    # Not the first and the last page, where malloc keeps its own words about what is free.
    pages = Range.inside(storage.data_ptr() + PAGE, storage.nbytes() - 2 * PAGE)
    _libc.madvise(pages.start, pages.end - pages.start, _DONTNEED)


_NOT_ENTERED = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor within a value, each once."""
    seen, ahead = set[int](), [value]
    while ahead:
        part = ahead.pop()
        if id(part) in seen or isinstance(part, _NOT_ENTERED):
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            yield part
            ahead += [part.grad] if part.is_leaf and part.grad is not None else []
        elif gc.is_tracked(part):
            ahead += filter(gc.is_tracked, gc.get_referents(part))  # a number holds nothing
