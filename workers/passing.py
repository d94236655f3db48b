"""Blocks that pass between the executors of a graph: made by one, mapped by others, copied once.

A table in the gang's land says of each block, and of each executor's part of a list, where it lies.
Who made it posts it: what it holds is copied into land of the maker's own, once, however many read
it, and not at all where it was made there (`empty`).  Who reads it maps it where it lies.  The
maker takes the land back when all have let go of it, and nobody still holds a view.

Beside blocks the table holds what ends a graph: that it is over, and the first place in the order
at which a node finished it early.

What always holds: a block is posted once in the life of a ground, and nobody writes to it from
then on; after it was posted, that is announced under the board's lock if anybody waits for it, or
is about to, so nobody sleeps through it.  Who does not sleep looks at the table without the lock,
which relies on x86: stores are seen in order.
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

from workers.accelerator import Accelerator
from workers.capture import Surroundings, capture, rebuilt
from workers.ground import aligned, rounded
from workers.staging import flat
from workers.turns import GangFailed, Turns, Wait

_TABLE = 24  # the word of the board's head that says where in the land it lies
_OVER, _EARLY, _PASSED = 0, 1, 2  # words of the table; _PASSED begins one for each executor
# Words of a block: its offset, and one for each executor, that of whoever needs it no longer.
_HEAD = 8  # words before a block's bytes: how they are to be read
_HEAD_BYTES = 8 * _HEAD
_VALUE = -1  # in place of a tensor's rank
_VERSION = 0x2026_11_24  # the last word of a head: of how these are written
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
)
_NUMBER = {dtype: n for n, dtype in enumerate(_DTYPES)}
_MOST_SIZES = 4  # of a tensor whose sizes stand in the head
_KNOWN_HEADS = 1024
_uses = torch._C._storage_Use_Count
SPIN_S = 50e-6
CORES = os.cpu_count() or 1
_SMALL_BYTES, _TAKEN_BYTES = 1 << 14, 1 << 18  # pieces that are cut off, and of what
_LOOKED_AT = 2  # of those that are done with, the oldest, whenever there is one more
LARGE_BYTES = 1 << 16  # a block of which its maker keeps no copy of its own
KEPT_BYTES = 1 << 28  # of land that is free, and faulted in, for blocks to come

Held = tuple[int, int]  # block, whose


@dataclass(frozen=True, slots=True)
class _Head:
    """How a block is to be read: a tensor, or if `dtype` is None a value, pickled, in so many
    bytes.  Tensors within have `content_bytes`.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    graph_bytes: int
    content_bytes: int


@dataclass(slots=True)
class _Posted:
    """A block of this executor's own; `storages` are those here that look at its memory."""

    offset: int
    size: int
    readers: Collection[int]
    storages: list[torch.UntypedStorage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Made:
    """What `empty` gave, as long as it is not posted."""

    offset: int
    size: int
    storage: torch.UntypedStorage


class Passing:
    """One executor's side of the table, for a graph of so many `blocks`."""

    def __init__(
        self, turns: Turns, blocks: int, around: Surroundings, accelerator: Accelerator
    ) -> None:
        self.turns, self.ground = turns, turns.ground
        self.around, self.accelerator = around, accelerator
        self.me, self.executors = turns.rank, turns.ground.ranks
        self.entries = _PASSED + self.executors
        self.words = self.ground.land_words()
        self.table = self._table(blocks)
        self._first, self._words_each = self.table + self.entries, 1 + self.executors
        self.posted: dict[int, _Posted] = {}
        self.mapped: dict[Held, list[torch.UntypedStorage]] = {}
        self.dropping = deque[Held]()
        self.passed_bytes: dict[Held, int] = {}  # of tensors, taken from others
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        self._rest, self._rest_bytes = 0, 0
        self._made: dict[int, _Made] = {}  # by address
        self._seats, self._alone = -1, False

    def _table(self, blocks: int) -> int:
        words = self.ground.words
        with self.ground.locked():
            if not words[_TABLE]:
                size = 8 * (self.entries + blocks * self.executors * (1 + self.executors))
                words[_TABLE] = self.ground.take_land(size)
            return words[_TABLE] // 8

    def _entry(self, held: Held) -> int:
        return self._first + (held[0] * self.executors + held[1]) * self._words_each

    # --- how far all are ---

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
        """The first place in the order at which a node finished the graph, and who ran it."""
        found = self.words[self.table + _EARLY] - 1
        return divmod(found, self.executors) if found >= 0 else None

    def end_early(self, at: int) -> None:
        """A node at this place did; what lies before it in the order still runs."""
        found = at * self.executors + self.me + 1
        with self.turns.board():
            word = self.table + _EARLY
            self.words[word] = min(found, self.words[word] or found)
            self.turns.ready(Wait.BLOCK, number=None)

    def tell_passed(self, at: int) -> None:
        """Everything of ours before this place has run."""
        word = self.table + _PASSED + self.me
        if self.words[word] != at:
            with self.turns.board():
                self.words[word] = at
                self.turns.ready(Wait.BLOCK, number=None)

    def all_passed(self, at: int) -> bool:
        """Has everybody else run what lies up to this place?"""
        first = self.table + _PASSED
        return all(self.words[first + e] > at for e in range(self.executors) if e != self.me)

    def wait(self, held: Held | None, until: Callable[[], bool], text: str) -> None:
        """Others run on our seat until then, or until all are called to stop.

        None: it is no block that is waited for.
        """
        number = 0 if held is None else self._entry(held)

        def is_enough() -> bool:
            return until() or self.turns.is_called()

        while not (is_enough() or (held is not None and self.is_soon(held))):
            self.reclaim()
            self.turns.wait(
                Wait.BLOCK, number=number, until=is_enough, text=text, timeout_s=math.inf
            )

    def is_soon(self, held: Held) -> bool:
        """Who sits alone looks for a moment before it goes to sleep: waking up takes as long."""
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

    # --- giving ---

    def post(self, block: int, value: Any, readers: Collection[int]) -> Any:
        """Let these executors have it; returns the value, a large one as it lies in the land."""
        offset, size, storages = self._written(value)
        entry = self._entry((block, self.me))
        self.words[entry] = offset  # before all else: who looks for it need not wait for us
        posted = self.posted[block] = _Posted(offset, size, readers, storages)
        if self.turns.awaiting(Wait.BLOCK, entry):
            with self.turns.board():
                self.turns.ready(Wait.BLOCK, number=entry)
        if posted.size < LARGE_BYTES:
            return value
        value = self._seen_here(posted)
        self.reclaim()  # they run already: the kernel may take long for land that is given back
        return value

    def _seen_here(self, posted: _Posted) -> Any:
        posted.storages = posted.storages or self._lying(posted.offset)
        return self._value(posted.offset, posted.storages)

    def _written(self, value: Any) -> tuple[int, int, list[torch.UntypedStorage]]:
        """Where it lies with its head, in how many bytes, and what here looks at them already."""
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
        self.ground.write(offset, head)
        return offset, size, storages

    def _copy(self, start: int, tensor: torch.Tensor, size: int) -> None:
        if size >= LARGE_BYTES:
            self.ground.at(start, size).copy_(tensor.view(-1).view(torch.uint8))
        elif size:  # what torch does about a copy takes longer than a small one
            ctypes.memmove(self.ground.address + start, tensor.data_ptr(), size)

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
        self.ground.write(offset, _words(_VALUE, len(graph), content_bytes) + graph)
        place = offset + start
        for storage in captured.storages:
            if storage.nbytes():
                self.ground.at(place, storage.nbytes()).copy_(flat(storage))
            place += aligned(storage.nbytes())
        return offset, size

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor that will be given: it need not be copied then."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        offset = self._taken(_HEAD_BYTES + size)
        made = self.ground.apart(offset + _HEAD_BYTES, size)
        self._made[made.data_ptr()] = _Made(offset, _HEAD_BYTES + size, made.untyped_storage())
        return made.view(dtype).view(shape)

    # --- taking ---

    def take(self, held: Held) -> Any:
        """Where it lies; it has been posted."""
        offset = self.words[self._entry(held)]
        head = self._head(offset)
        self.passed_bytes[held] = self.passed_bytes.get(held, 0) + head.content_bytes
        if head.dtype is not None and head.content_bytes:  # as below, in as few calls as can be
            value = self.ground.tensor(offset + _HEAD_BYTES, head.shape, head.dtype)
            self.mapped[held] = [value.untyped_storage()]
            return value
        storages = self.mapped[held] = self._lying(offset)
        return self._value(offset, storages)

    def _lying(self, offset: int) -> list[torch.UntypedStorage]:
        """The storages of a block, where they lie in the land."""
        head, start = self._head(offset), offset + _HEAD_BYTES
        if head.dtype is not None:
            return [self._storage(start, head.content_bytes)]
        lengths, _ = pickle.loads(self.ground.read(start, head.graph_bytes))
        start, found = offset + aligned(_HEAD_BYTES + head.graph_bytes), []
        for length, _ in lengths:
            found.append(self._storage(start, length))
            start += aligned(length)
        return found

    def _storage(self, start: int, size: int) -> torch.UntypedStorage:
        if not size:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        return self.ground.apart(start, size).untyped_storage()

    def _value(self, offset: int, storages: list[torch.UntypedStorage]) -> Any:
        head = self._head(offset)
        if head.dtype is not None:
            whole = torch.empty(0, dtype=head.dtype)
            return whole.set_(storages[0], 0, head.shape)  # type: ignore[call-overload]
        lengths, graph = pickle.loads(self.ground.read(offset + _HEAD_BYTES, head.graph_bytes))
        there = self.accelerator.device
        lying = [
            storage if kind == "cpu" else storage.to(device=there)
            for storage, (_, kind) in zip(storages, lengths, strict=True)
        ]
        return rebuilt(memoryview(graph), lying, around=self.around)["job"]

    def _head(self, offset: int) -> _Head:
        return _read(self.ground.read(offset, _HEAD_BYTES))

    # --- letting go ---

    def drop(self, held: Held) -> None:
        """We need it no longer: at once, or as soon as nothing here looks at its memory."""
        self.dropping.append(held)
        self._look_at(_LOOKED_AT)

    def reclaim(self) -> None:
        """Tell the makers what nobody here looks at any more; use our own land again."""
        self._look_at(len(self.dropping))
        for at in [at for at, made in self._made.items() if not _is_seen(made.storage)]:
            made = self._made.pop(at)
            self._give_back(made.offset, made.size)

    def _look_at(self, most: int) -> None:
        """The oldest first; whatever has to stay goes to the end of the row."""
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
        """What was posted and is still needed elsewhere, or may be."""
        return {n: self._seen_here(posted) for n, posted in self.posted.items()}

    # --- land ---

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
        with self.ground.locked():
            return self.ground.take_land(length)

    def _cut_off(self, length: int) -> int:
        """Small pieces lie side by side: land is taken by pages."""
        if self._rest_bytes < length:
            with self.ground.locked():
                self._rest = self.ground.take_land(_TAKEN_BYTES)
            self._rest_bytes = _TAKEN_BYTES
        offset = self._rest
        self._rest, self._rest_bytes = offset + length, self._rest_bytes - length
        return offset

    def _give_back(self, offset: int, size: int) -> None:
        length = rounded(size)
        if self._free_bytes + length > KEPT_BYTES and length > _SMALL_BYTES:
            self.ground.give_back(offset, length)
            return
        self._free.setdefault(length, []).append(offset)
        self._free_bytes += length


# --- the head of a block: the same for many, so it is looked up ----------------------------------


def _words(rank: int, number: int, content_bytes: int, *shape: int) -> bytes:
    """`number` is that of a tensor's dtype, of a value the length of what is pickled."""
    nothing = (0,) * (_MOST_SIZES - len(shape))
    words = (rank, number, content_bytes, *shape, *nothing, _VERSION)
    return struct.pack(f"={_HEAD}q", *words)


@functools.lru_cache(_KNOWN_HEADS)
def _head_of(dtype: torch.dtype, shape: torch.Size) -> tuple[int, bytes] | None:
    """Of a plain tensor: its bytes with the head, and the head; None if that cannot tell it."""
    if dtype not in _NUMBER or len(shape) > _MOST_SIZES:
        return None
    content_bytes = shape.numel() * dtype.itemsize
    head = _words(len(shape), _NUMBER[dtype], content_bytes, *shape)
    return _HEAD_BYTES + content_bytes, head


@functools.lru_cache(_KNOWN_HEADS)
def _read(head: bytes) -> _Head:
    rank, number, content_bytes, *shape, version = struct.unpack(f"={_HEAD}q", head)
    if version != _VERSION:
        raise GangFailed("a block comes from a host whose device worker is of another version")
    if rank == _VALUE:
        return _Head(None, (), number, content_bytes)
    return _Head(_DTYPES[number], tuple(shape[:rank]), 0, content_bytes)


def _is_plain(value: Any) -> bool:
    """A tensor of which its type, its shape and its bytes say everything."""
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and value.is_contiguous()
        and not (value.requires_grad or value.is_conj() or value.is_neg())
    )


def _is_seen(storage: torch.UntypedStorage) -> bool:
    """Whether anybody but our own list still looks at it."""
    return bool(_uses(storage._cdata) > 1 and storage.nbytes())
