"""Shared blocks: pass blocks between the executors of a graph through shared memory.

A table in the gang's heap says where each block, and each executor's part of a list, is stored. The
maker of a block posts it: the content is copied once into heap memory of the maker, however many
executors read it, and not at all if it was made there (`empty`). Readers map it in place. The maker
reuses the memory when all readers have dropped the block, and nothing still holds a view.

The table also says how a graph ends: that it is over, and the first place in the order at which a
node finished it early.

Invariants: a block is posted once in the life of an arena, and never written to afterwards. A post
is announced under the table's lock if a rank waits for it or is about to, so no rank sleeps through
it. A rank that does not sleep reads the table without the lock. This relies on x86, where stores
are seen in order.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workers.capture.capture import Surroundings, capture
from workers.capture.restore import rebuilt
from workers.hardware.accelerator import Accelerator
from workers.hardware.storages import flat
from workers.ranks.shared_memory import aligned, rounded
from workers.ranks.turns import GangFailed, Turns, Wait

_TABLE = 24  # word in the head of the shared table: where in the heap the table of blocks begins
# words of the table of blocks; from _PASSED on there is one word for each executor
_OVER, _EARLY, _PASSED = 0, 1, 2
# Words of a block: its offset, then one word for each executor, set when that executor no longer
# needs the block.
_HEAD = 8  # words before a block's bytes that say how to read them
_HEAD_BYTES = 8 * _HEAD
_VALUE = -1  # marks a pickled value, in place of a tensor's rank
_VERSION = 0x2026_11_24  # the last word of a head: the version of this format
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
)
_NUMBER = {dtype: n for n, dtype in enumerate(_DTYPES)}
_MOST_SIZES = 4  # most dimensions of a tensor that the head can describe
_KNOWN_HEADS = 1024
_uses = torch._C._storage_Use_Count
SPIN_S = 50e-6
CORES = os.cpu_count() or 1
# in bytes: pieces of up to the first size are cut from regions of the second size
_SMALL_BYTES, _TAKEN_BYTES = 1 << 14, 1 << 18
_LOOKED_AT = 2  # when a block is dropped, this many of the oldest dropped blocks are checked, too
LARGE_BYTES = 1 << 16  # from this size on the maker keeps no separate copy
KEPT_BYTES = 1 << 28  # free heap memory, already faulted in, that is kept for further blocks

Held = tuple[int, int]  # (block, executor that made it)


@dataclass(frozen=True, slots=True)
class _Head:
    """Describes how to read a block: as a tensor, or, if `dtype` is None, as a pickled value of
    `graph_bytes` bytes.

    The tensors inside a pickled value take `content_bytes`.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    graph_bytes: int
    content_bytes: int


@dataclass(slots=True)
class _Posted:
    """Describes a block that this executor posted; `storages` are those of this process that use
    its memory.
    """

    offset: int
    size: int
    readers: Collection[int]
    storages: list[torch.UntypedStorage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Made:
    """Memory returned by `empty` and not posted yet."""

    offset: int
    size: int
    storage: torch.UntypedStorage


class BlockTable:
    """Gives one executor access to the shared table, for a graph with this number of `blocks`."""

    def __init__(
        self, turns: Turns, blocks: int, around: Surroundings, accelerator: Accelerator
    ) -> None:
        self.turns, self.arena = turns, turns.arena
        self.around, self.accelerator = around, accelerator
        self.me, self.executors = turns.rank, turns.arena.ranks
        self.entries = _PASSED + self.executors
        self.words = self.arena.land_words()
        self.table = self._table(blocks)
        self._first, self._words_each = self.table + self.entries, 1 + self.executors
        self.posted: dict[int, _Posted] = {}
        self.mapped: dict[Held, list[torch.UntypedStorage]] = {}
        self.dropping = deque[Held]()
        self.passed_bytes: dict[Held, int] = {}  # bytes of tensors taken from others
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        self._rest, self._rest_bytes = 0, 0
        self._made: dict[int, _Made] = {}  # by address
        self._seats, self._alone = -1, False

    def _table(self, blocks: int) -> int:
        words = self.arena.words
        with self.arena.locked():
            if not words[_TABLE]:
                size = 8 * (self.entries + blocks * self.executors * (1 + self.executors))
                words[_TABLE] = self.arena.take_land(size)
            return words[_TABLE] // 8

    def _entry(self, held: Held) -> int:
        return self._first + (held[0] * self.executors + held[1]) * self._words_each

    # --- progress of all executors ---

    def is_there(self, held: Held) -> bool:
        return bool(self.words[self._entry(held)])

    @property
    def is_over(self) -> bool:
        return bool(self.words[self.table + _OVER])

    def end(self) -> None:
        with self.turns.board():
            self.words[self.table + _OVER] = 1
            self.turns.ready(Wait.BLOCK, number=None)

    @property
    def early(self) -> Held | None:
        """The place in the order at which a node finished the graph early, and its executor; the
        first if there are several.
        """
        found = self.words[self.table + _EARLY] - 1
        return divmod(found, self.executors) if found >= 0 else None

    def end_early(self, at: int) -> None:
        """Record that a node at this place finished the graph.

        Nodes before it in the order still run.
        """
        found = at * self.executors + self.me + 1
        with self.turns.board():
            word = self.table + _EARLY
            self.words[word] = min(found, self.words[word] or found)
            self.turns.ready(Wait.BLOCK, number=None)

    def tell_passed(self, at: int) -> None:
        """Record that all nodes of this executor before this place have run."""
        word = self.table + _PASSED + self.me
        if self.words[word] != at:
            with self.turns.board():
                self.words[word] = at
                self.turns.ready(Wait.BLOCK, number=None)

    def all_passed(self, at: int) -> bool:
        """True if all other executors have run all their nodes up to this place."""
        first = self.table + _PASSED
        return all(self.words[first + e] > at for e in range(self.executors) if e != self.me)

    def wait(
        self,
        held: Held | None,
        until: Callable[[], bool],
        text: str,
        *,
        outside: int | None = None,
    ) -> None:
        """Let other ranks use our slot until `until()` is true, or until all ranks are called to
        stop.

        `held` is the block that is waited for; None if the wait is for something else. If the
        awaited thing may come from outside the gang, the descriptor `outside` becomes readable
        then.
        """
        number = 0 if held is None else self._entry(held)

        def is_enough() -> bool:
            return until() or self.turns.is_called()

        while not (is_enough() or (held is not None and self.is_soon(held))):
            self.reclaim()
            if outside is not None:
                self.turns.wait_outside(number, outside, until=is_enough, text=text)
            else:
                self.turns.wait(
                    Wait.BLOCK, number=number, until=is_enough, text=text, timeout_s=math.inf
                )

    def is_soon(self, held: Held) -> bool:
        """Poll for a block for a moment, if this rank is alone on its slot.

        To sleep and be woken would take as long.
        """
        if not self._is_alone():
            return False
        words, at, end_s = self.words, self._entry(held), time.perf_counter() + SPIN_S
        while not words[at]:
            if time.perf_counter() > end_s:
                return False
        return True

    def _is_alone(self) -> bool:
        if self._seats != (now := self.turns.generation):
            self._seats = now
            self._alone = CORES > 1 and len(self.turns.on_my_seat()) == 1
        return self._alone

    def want(self, held: Held) -> None:
        """Ask another host to send a block as soon as it is made; on a single host there is nothing
        to do.
        """

    @property
    def others_are_still(self) -> bool:
        """True if no other executor can run until this one posts a block."""
        return self.turns.is_last_to_move

    def call_first(self) -> None:
        """Wake the first executor: an output of the graph is there."""
        if self.me and self.arena.is_here(0):
            self.arena.ring(0)

    # --- posting ---

    def post(self, block: int, value: Any, readers: Collection[int]) -> Any:
        """Post a block for `readers`.

        Returns the value; a large value is returned as a view of the heap.
        """
        offset, size, storages = self._written(value)
        entry = self._entry((block, self.me))
        self.words[entry] = offset  # done first, so that polling readers need not wait
        posted = self.posted[block] = _Posted(offset, size, readers, storages)
        if self.turns.awaiting(Wait.BLOCK, entry):
            with self.turns.board():
                self.turns.ready(Wait.BLOCK, number=entry)
        if posted.size < LARGE_BYTES:
            return value
        value = self._seen_here(posted)
        # last, because freeing heap memory may take the kernel long, and the readers already run by
        # now
        self.reclaim()
        return value

    def _seen_here(self, posted: _Posted) -> Any:
        posted.storages = posted.storages or self._lying(posted.offset)
        return self._value(posted.offset, posted.storages)

    def _written(self, value: Any) -> tuple[int, int, list[torch.UntypedStorage]]:
        """Write a value to the heap.

        Returns the offset, the size with the head, and the storages of this process that use the
        memory.
        """
        known = _head_of(value.dtype, value.shape) if _is_plain(value) else None
        if known is None:
            return *self._graph(value), []
        size, head = known
        made = self._made.get(value.data_ptr()) if self._made else None
        if made is not None and made.size == size:
            del self._made[value.data_ptr()]
            offset, storages = made.offset, [made.storage]
        else:
            offset, storages = self._taken(size), []
            self._copy(offset + _HEAD_BYTES, value, size - _HEAD_BYTES)
        self.arena.write(offset, head)
        return offset, size, storages

    def _copy(self, start: int, tensor: torch.Tensor, size: int) -> None:
        if size >= LARGE_BYTES:
            self.arena.at(start, size).copy_(tensor.view(-1).view(torch.uint8))
        elif size:  # for a small copy torch's overhead exceeds the copy
            ctypes.memmove(self.arena.address + start, tensor.data_ptr(), size)

    def _graph(self, value: Any) -> tuple[int, int]:
        captured = capture(
            value, around=self.around, accelerator=self.accelerator, root="block", whole=False
        )
        about = [(storage.nbytes(), storage.device.type) for storage in captured.storages]
        graph = pickle.dumps((about, bytes(captured.graph)), protocol=5)
        start = aligned(_HEAD_BYTES + len(graph))
        size = start + sum(aligned(length) for length, _ in about)
        offset = self._taken(size)
        content_bytes = sum(length for length, _ in about)
        self.arena.write(offset, _words(_VALUE, len(graph), content_bytes) + graph)
        place = offset + start
        for storage in captured.storages:
            if storage.nbytes():
                self.arena.at(place, storage.nbytes()).copy_(flat(storage))
            place += aligned(storage.nbytes())
        return offset, size

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor that will be posted; the post then needs no copy."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        offset = self._taken(_HEAD_BYTES + size)
        made = self.arena.apart(offset + _HEAD_BYTES, size)
        self._made[made.data_ptr()] = _Made(offset, _HEAD_BYTES + size, made.untyped_storage())
        return made.view(dtype).view(shape)

    # --- taking ---

    def take(self, held: Held) -> Any:
        """Return a posted block as a view of the heap."""
        offset = self.words[self._entry(held)]
        head = self._head(offset)
        self.passed_bytes[held] = self.passed_bytes.get(held, 0) + head.content_bytes
        # the common case, in as few calls as possible
        if head.dtype is not None and head.content_bytes:
            value = self.arena.tensor(offset + _HEAD_BYTES, head.shape, head.dtype)
            self.mapped[held] = [value.untyped_storage()]
            return value
        storages = self.mapped[held] = self._lying(offset)
        return self._value(offset, storages)

    def _lying(self, offset: int) -> list[torch.UntypedStorage]:
        """Return the storages of a block, as views of the heap."""
        head, start = self._head(offset), offset + _HEAD_BYTES
        if head.dtype is not None:
            return [self._storage(start, head.content_bytes)]
        lengths, _ = pickle.loads(self.arena.read(start, head.graph_bytes))
        start, found = offset + aligned(_HEAD_BYTES + head.graph_bytes), []
        for length, _ in lengths:
            found.append(self._storage(start, length))
            start += aligned(length)
        return found

    def _storage(self, start: int, size: int) -> torch.UntypedStorage:
        if not size:
            return torch.UntypedStorage(0)
        return self.arena.apart(start, size).untyped_storage()

    def _value(self, offset: int, storages: list[torch.UntypedStorage]) -> Any:
        head = self._head(offset)
        if head.dtype is not None:
            whole = torch.empty(0, dtype=head.dtype, device="cpu")
            return whole.set_(storages[0], 0, head.shape)  # type: ignore[call-overload]
        lengths, graph = pickle.loads(self.arena.read(offset + _HEAD_BYTES, head.graph_bytes))
        there = self.accelerator.device
        lying = [
            storage if kind == "cpu" else storage.to(device=there)
            for storage, (_, kind) in zip(storages, lengths, strict=True)
        ]
        return rebuilt(memoryview(graph), lying, around=self.around)["job"]

    def _head(self, offset: int) -> _Head:
        return _read(self.arena.read(offset, _HEAD_BYTES))

    # --- dropping ---

    def drop(self, held: Held) -> None:
        """Give up a block: now, or as soon as nothing in this process uses its memory."""
        self.dropping.append(held)
        self._look_at(_LOOKED_AT)

    def reclaim(self) -> None:
        """Tell the makers which blocks are no longer used here, and reuse this executor's own
        memory.
        """
        self._look_at(len(self.dropping))
        for at in [at for at, made in self._made.items() if not _is_seen(made.storage)]:
            made = self._made.pop(at)
            self._give_back(made.offset, made.size)

    def _look_at(self, most: int) -> None:
        """Check the `most` oldest dropped blocks; a block that is still in use goes to the end of
        the queue.
        """
        for _ in range(min(most, len(self.dropping))):
            held = self.dropping.popleft()
            if not self._is_dropped(held):
                self.dropping.append(held)

    def _is_dropped(self, held: Held) -> bool:
        if held[1] == self.me:
            return self._is_taken_back(held[0])
        for storage in self.mapped.get(held, ()):
            if _is_seen(storage):
                return False
        self.mapped.pop(held, None)
        self.words[self._entry(held) + 1 + self.me] = 1
        return True

    def _is_taken_back(self, block: int) -> bool:
        posted = self.posted[block]
        words, first = self.words, self._entry((block, self.me)) + 1
        for reader in posted.readers:
            if not words[first + reader]:
                return False
        for storage in posted.storages:
            if _is_seen(storage):
                return False
        self._give_back(posted.offset, posted.size)
        del self.posted[block]
        return True

    def values(self) -> Mapping[int, Any]:
        """Return the posted blocks that are or may still be needed elsewhere."""
        return {n: self._seen_here(posted) for n, posted in self.posted.items()}

    # --- heap memory ---

    def _taken(self, size: int) -> int:
        length = rounded(size)
        pieces = self._free.get(length)
        if not pieces and length > _SMALL_BYTES:
            self.reclaim()
            pieces = self._free.get(length)
        if pieces:
            self._free_bytes -= length
            return pieces.pop()
        if length <= _SMALL_BYTES:
            return self._cut_off(length)
        with self.arena.locked():
            return self.arena.take_land(length)

    def _cut_off(self, length: int) -> int:
        """Cut a small piece from a larger region, because heap memory is taken by pages."""
        if self._rest_bytes < length:
            with self.arena.locked():
                self._rest = self.arena.take_land(_TAKEN_BYTES)
            self._rest_bytes = _TAKEN_BYTES
        offset = self._rest
        self._rest, self._rest_bytes = offset + length, self._rest_bytes - length
        return offset

    def _give_back(self, offset: int, size: int) -> None:
        length = rounded(size)
        if self._free_bytes + length > KEPT_BYTES and length > _SMALL_BYTES:
            self.arena.give_back(offset, length)
            return
        self._free.setdefault(length, []).append(offset)
        self._free_bytes += length


# --- the head of a block: many blocks have an equal one, so it is cached --------------------------


def _words(rank: int, number: int, content_bytes: int, *shape: int) -> bytes:
    """Pack a head; `number` is a tensor's dtype number, or a value's pickled length."""
    nothing = (0,) * (_MOST_SIZES - len(shape))
    words = (rank, number, content_bytes, *shape, *nothing, _VERSION)
    return struct.pack(f"={_HEAD}q", *words)


@functools.lru_cache(_KNOWN_HEADS)
def _head_of(dtype: torch.dtype, shape: torch.Size) -> tuple[int, bytes] | None:
    """Return a tensor's size with head, and its head; None if a head cannot describe it."""
    if dtype not in _NUMBER or len(shape) > _MOST_SIZES:
        return None
    content_bytes = shape.numel() * dtype.itemsize
    head = _words(len(shape), _NUMBER[dtype], content_bytes, *shape)
    return _HEAD_BYTES + content_bytes, head


@functools.lru_cache(_KNOWN_HEADS)
def _read(head: bytes) -> _Head:
    rank, number, content_bytes, *shape, version = struct.unpack(f"={_HEAD}q", head)
    if version != _VERSION:
        raise GangFailed("a block comes from a host with a device worker of another version")
    if rank == _VALUE:
        return _Head(None, (), number, content_bytes)
    return _Head(_DTYPES[number], tuple(shape[:rank]), 0, content_bytes)


def _is_plain(value: Any) -> bool:
    """True if type, shape and bytes describe the tensor completely."""
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and value.is_contiguous()
        and not (value.requires_grad or value.is_conj() or value.is_neg())
    )


def _is_seen(storage: torch.UntypedStorage) -> bool:
    """True if anything but our own list still uses the storage."""
    return bool(_uses(storage._cdata) > 1 and storage.nbytes())
