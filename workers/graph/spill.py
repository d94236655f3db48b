"""Keeps a graph's blocks within a budget of device memory: blocks that are read latest go to host
memory.

Before a node runs, all that it reads is brought to the device, with room for what it will write. If
that is too much, the storages that are read farthest in the future are spilled; the order of the
nodes is known (`core.model.graphs.datablock.victims`). The tensor objects stay the same: only the
memory that they point to changes, so views of each other stay views.

A block does not change once it is made. So its spilled copy is kept when the block comes back, and
the next spill needs no copy. Only an in-out port may write to it; `forget` must be called before.

On a CPU device, spilled storages are in shared memory that no other process uses: the kernel does
not count it as the process's own.
"""

from __future__ import annotations

import gc
import math
import mmap
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from app.core.model.graphs.datablock import EvictableCopy, victims
from workers.hardware.accelerator import Accelerator
from workers.hardware.storages import AT_ONCE, flat, may_leave, release_pages

# in bytes: smaller storages stay on the device, since a mapping of their own is not worth while
SPILLED_BYTES = 64 * 1024

# (place at which the value is read next, or None if never; the value)
Piece = tuple[int | None, object]


class NoRoom(Exception):
    """Raised when one node needs more memory than there is; the message says how much."""


@dataclass(slots=True)
class _Lying:
    """Describes a storage that blocks use: the tensors that view it, and the next use of any of
    them.
    """

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor] = field(default_factory=list)
    next_use: float = math.inf
    is_needed: bool = False

    @property
    def size(self) -> int:
        return self.storage.nbytes()


class SpillBudget:
    """Manages the budget of one graph, and its spilled storages.

    `out_bytes` and `in_bytes` were copied from and to the device. `peak_bytes` is the most that its
    blocks used there at once, with what the next node was expected to write.

    While all blocks fit, storages are not searched: `_most_bytes` is an upper bound of their size.
    """

    def __init__(self, budget_bytes: int, host_bytes: int, accelerator: Accelerator) -> None:
        self.budget_bytes, self.host_bytes, self.accelerator = budget_bytes, host_bytes, accelerator
        self.out_bytes = self.in_bytes = self.peak_bytes = self._more_bytes = 0
        self._most_bytes: float = math.inf  # not known yet
        # Both are by the storage's id: spilled storages with their bytes; host copies of storages
        # that are on the device.
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
        """Bring what is `needed` to the device, and keep `more_bytes` free; raises NoRoom.

        `likely_bytes` are kept free too, but only if there is room.
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
        """Return the bytes of `returned` that a node newly wrote, without what was `given` to
        it.
        """
        new_bytes = self.new_bytes(returned, given)
        self._most_bytes += max(0, new_bytes - self._more_bytes)
        return new_bytes

    def new_bytes(self, value: object, beside: object) -> int:
        """Return the bytes that a value takes and doesn't share with `beside`."""
        new = self._survey((value,), ())
        known = {one.storage._cdata for one in self._survey((beside,), ())} if new else set()
        return sum(one.size for one in new if one.storage._cdata not in known)

    def forget(self, value: object) -> None:
        """Drop the host copies of a value that is about to be written to."""
        for tensor in filter(_can_be_pointed, tensors_in(value)):
            self._copies.pop(tensor.untyped_storage()._cdata, None)

    # --- what images hold ---

    def aside(self, held: Iterable[object]) -> list[torch.Tensor]:
        """Return the spilled storages as tensors, so that `restore` can tell them from the
        others.
        """
        self._tidy()
        lying = self._survey((), ((None, value) for value in held))
        return [flat(one.storage) for one in lying if self._is_aside(one.storage)]

    def restore(self, aside: list[torch.Tensor], held: Iterable[object]) -> None:
        """Spill the storages of `aside` again, after a restore has put all storages on the
        device.
        """
        for tensor in aside:
            storage = tensor.untyped_storage()
            self._aside[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if not self.accelerator.is_host:
            return
        # A restore puts them into memory that counts as the device's.
        for one in self._survey((), ((None, value) for value in (*aside, *held))):
            if self._aside.pop(one.storage._cdata, None) is not None:
                self._put_aside(one)

    @property
    def held_bytes(self) -> int:
        """The bytes of host memory that spilled storages and copies take."""
        self._tidy()
        copies = sum(copy.nbytes() for _, copy in self._copies.values())
        return copies + sum(size for _, size in self._aside.values())

    # --- choosing storages ---

    def _survey(self, needed: Iterable[object], held: Iterable[Piece]) -> list[_Lying]:
        """Return all storages that count: the storages of needed and of held pieces."""
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
        """True if the storage is large, and on the device or spilled from it.

        Storages elsewhere, or with an address that other code knows, are left alone.
        """
        if storage.nbytes() < SPILLED_BYTES:
            return False
        if self._is_aside(storage):
            return True
        return storage.device.type == self.accelerator.kind and may_leave(storage)

    def _is_aside(self, storage: torch.UntypedStorage) -> bool:
        known = self._aside.get(storage._cdata)
        return known is not None and not known[0].expired()

    def _who_goes(self, here: list[_Lying], want: int) -> list[_Lying]:
        if want <= 0:
            return []
        by_name = {str(one.storage._cdata): one for one in here if not one.is_needed}
        held = [
            EvictableCopy(
                block=name,
                bytes=one.size,
                next_use=None if one.next_use == math.inf else int(one.next_use),
                clean=one.storage._cdata in self._copies,
            )
            for name, one in by_name.items()
        ]
        return [by_name[copy.block] for copy in victims(held, want)]

    def _tidy(self) -> None:
        """Forget freed storages: their ids will be used for others."""
        self._aside = {n: known for n, known in self._aside.items() if not known[0].expired()}
        self._copies = {n: kept for n, kept in self._copies.items() if not kept[0].expired()}

    # --- moving ---

    def _put_aside(self, one: _Lying) -> None:
        kept = self._copies.pop(one.storage._cdata, None)
        copy = kept[1] if kept is not None else self._copied(one.storage)
        self._aside[copy._cdata] = StorageWeakRef(copy), copy.nbytes()
        _point(one.tensors, copy)
        if self.accelerator.is_host and _is_unused(one):
            release_pages(one.storage, AT_ONCE)
        one.storage = copy

    def _copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        size = storage.nbytes()
        if self.held_bytes + size > self.host_bytes:
            self._copies.clear()  # these storages are on the device, too
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
    """True if the tensor's memory can be replaced: it is dense, and its storage alone describes its
    content.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_inference())


def _point(tensors: list[torch.Tensor], storage: torch.UntypedStorage) -> None:
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        seen = empty.set_(storage, *place)
        seen = seen.conj() if tensor.is_conj() else seen
        tensor.data = seen._neg_view() if tensor.is_neg() else seen


def _host_memory(size: int) -> torch.UntypedStorage:
    """Return shared memory, which the kernel does not count as the process's own.

    It is freed with its storage.
    """
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).untyped_storage()


def _is_unused(one: _Lying) -> bool:
    """True if only `one` uses the storage: no image is being copied from it, and no object of the
    tenant views it.
    """
    of_torch = torch._C._storage_Use_Count(one.storage._cdata)
    # the references of `one` and of this call
    return of_torch == 1 and sys.getrefcount(one.storage) == 2


_NOT_ENTERED = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor inside a value, each once."""
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
            ahead += filter(gc.is_tracked, gc.get_referents(part))  # a number holds no tensor
