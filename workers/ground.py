"""The memory that the ranks of one gang share on one host: words, land, a lock, bells, lifelines.

    board   words of 64 bits with a fixed layout, written under the lock
    land    bytes without end (a sparse file): regions are taken once and never moved
    bells   one eventfd per rank, to sleep on
    lock    one byte of a file, held by whoever writes to the board; further bytes are lifelines

A lock of this kind belongs to a process and goes with it, however it ends.  So the board is never
left locked, and a rank that holds the lock on its own byte all its life is known to be dead by
whoever finds that byte free: no supervisor is needed for it.

A gang over several hosts has a ground on each, with room for all ranks.  Those of another host
stay `State.NEW` here; what they do is done for them by this host's bridge (`workers.bridge`), which
has a bell and a lifeline of its own, behind those of the ranks, and an outbox that the ranks here
write to.

Everything is reached by file descriptors, which a fork inherits and a socket can carry; nothing
has a name in the file system.  Nothing here knows what the words mean to turns and meetings; of
the head only one is ours.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import marshal
import math
import mmap
import os
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

LAND_BYTES = 1 << 42  # of addresses; memory is only where something was written
ALIGN_BYTES = 64  # as torch aligns its own, so that the same kernels compute the same bits
GROUPS = 256
DEPTH = 256  # calls of one group that may be under way before its fastest member has to wait
TEXT_WORDS = 32  # of a text on the board

HEAD_WORDS = 512
RANK_WORDS = 32 + TEXT_WORDS
SEAT_WORDS = 8
SLOT_WORDS = 16 + TEXT_WORDS

_LAND_TAKEN = 8  # the word of the head that counts it
_BRIDGE = 9  # the word that holds the process id of the bridge
LOOK_EVERY_S = 0.25  # so often who waits looks whether the others are alive
TOLD_LIMIT_BYTES = 1 << 17  # one message to the bridge
_PUNCH_HOLE_KEEP_SIZE = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handles:
    """What a rank's process is given: file descriptors."""

    ranks: int
    board: int
    land: int
    lock: int
    bells: tuple[int, ...]
    hosts: tuple[int, ...] = ()  # of each rank its host's number; empty where all are of one
    host: int = 0  # whose ground this is
    outbox: tuple[int, ...] = ()  # the ranks' end, and the bridge's

    @property
    def all(self) -> tuple[int, ...]:
        return (self.board, self.land, self.lock, *self.bells, *self.outbox)


def make(ranks: int, hosts: tuple[int, ...] = (), host: int = 0) -> Handles:
    """Fresh shared memory for a gang of `ranks`; whoever holds a descriptor keeps it alive.

    `hosts` says on which each of the ranks lives, if not all are of this one, whose number is
    `host`.
    """
    board = os.memfd_create("gang-board")
    os.ftruncate(board, _Layout(ranks).words * 8)
    land = os.memfd_create("gang-land")
    os.ftruncate(land, LAND_BYTES)
    lock = os.memfd_create("gang-lock")
    bells = tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(ranks + bool(hosts)))
    outbox: tuple[int, ...] = ()
    if hosts:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setblocking(False)
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * TOLD_LIMIT_BYTES)
        outbox = tuple(end.detach() for end in ends)
    return Handles(
        ranks=ranks,
        board=board,
        land=land,
        lock=lock,
        bells=bells,
        hosts=hosts,
        host=host,
        outbox=outbox,
    )


def close(handles: Handles) -> None:
    for fd in handles.all:
        os.close(fd)


class _Layout:
    """Where things lie on the board, in words."""

    def __init__(self, ranks: int) -> None:
        self.rank = HEAD_WORDS
        self.seat = self.rank + ranks * RANK_WORDS
        self.group = self.seat + ranks * SEAT_WORDS
        self.slot_words = SLOT_WORDS + 6 * ranks
        self.group_words = 16 + ranks + DEPTH * self.slot_words
        self.words = self.group + GROUPS * self.group_words


class _Lock:
    """That of the board, between threads and between processes."""

    def __init__(self, fd: int) -> None:
        self._fd, self._threads = fd, threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)
        self._threads.release()


class Ground:
    """One process's view of the shared memory."""

    def __init__(self, handles: Handles) -> None:
        self.ranks, self.handles = handles.ranks, handles
        self.hosts, self.host = handles.hosts, handles.host
        self._layout = _Layout(handles.ranks)
        self._board = mmap.mmap(handles.board, self._layout.words * 8)
        self._lock = _Lock(handles.lock)
        self._polls: dict[int, Any] = {}
        self.words = memoryview(self._board).cast("q")
        self._land = mmap.mmap(handles.land, LAND_BYTES)
        self.land = torch.frombuffer(self._land, dtype=torch.uint8)
        self.address = self.land.data_ptr()

    # --- places on the board, as indices into `words` ---

    def rank(self, rank: int) -> int:
        return self._layout.rank + rank * RANK_WORDS

    def seat(self, seat: int) -> int:
        return self._layout.seat + seat * SEAT_WORDS

    def group(self, index: int) -> int:
        return self._layout.group + index * self._layout.group_words

    def slot(self, index: int, sequence: int) -> int:
        inside = 16 + self.ranks + sequence % DEPTH * self._layout.slot_words
        return self.group(index) + inside

    # --- other hosts ---

    @property
    def is_bridged(self) -> bool:
        """Whether ranks of this gang live on other hosts."""
        return bool(self.hosts)

    @property
    def bridge(self) -> int:
        """Its bell and its lifeline, where those of a rank have the rank's number."""
        return self.ranks

    def is_here(self, rank: int) -> bool:
        return not self.hosts or self.hosts[rank] == self.host

    def here(self) -> list[int]:
        return [rank for rank in range(self.ranks) if self.is_here(rank)]

    def tell_bridge(self, message: tuple[Any, ...]) -> None:
        """In the order in which one rank tells.  Not under the lock: the bridge may wait for it.

        Raises OSError if there is no bridge any more, ValueError if the message is too long.
        """
        data = marshal.dumps(message)
        if len(data) > TOLD_LIMIT_BYTES:
            raise ValueError(
                f"{message[0]!r} takes {len(data)} bytes to tell to other hosts, and "
                f"{TOLD_LIMIT_BYTES} are allowed: fewer tensors in one call, smaller values in the "
                "store"
            )
        while True:
            try:
                os.write(self.handles.outbox[0], data)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.handles.outbox[0], select.POLLOUT)
                if not poll.poll(LOOK_EVERY_S * 1000) and self.has_no_bridge():
                    raise BrokenPipeError("the bridge to the other hosts is gone") from None
            else:
                return

    def bridge_comes(self) -> None:
        """Said by the bridge itself, which then stays until its ranks need it no more."""
        self.hold_lifeline(self.bridge)
        self.words[_BRIDGE] = os.getpid()

    @property
    def bridge_process(self) -> int:
        """Its process id; 0 before it has come."""
        return self.words[_BRIDGE]

    def has_no_bridge(self) -> bool:
        """Whether the one that came is gone."""
        return self.bridge_process > 0 and self.is_dead(self.bridge)

    def clear(self, place: int, words: int) -> None:
        self.words[place : place + words] = memoryview(bytes(words * 8)).cast("q")

    def clear_slot(self, place: int) -> None:
        self.clear(place, self._layout.slot_words)

    def clear_group(self, index: int) -> None:
        self.clear(self.group(index), self._layout.group_words)

    def write_text(self, place: int, text: str, words: int = TEXT_WORDS) -> None:
        data = text.encode(errors="replace")[: words * 8]
        self._board[place * 8 : place * 8 + words * 8] = data.ljust(words * 8, b"\0")

    def read_text(self, place: int, words: int = TEXT_WORDS) -> str:
        data = self._board[place * 8 : place * 8 + words * 8]
        return data.rstrip(b"\0").decode(errors="replace")

    # --- the lock, and who is alive ---

    def locked(self) -> _Lock:
        """Alone on the board.  Not to be entered twice by the same thread."""
        return self._lock

    def hold_lifeline(self, rank: int) -> None:
        fcntl.lockf(self.handles.lock, fcntl.LOCK_EX, 1, 1 + rank)

    def is_dead(self, rank: int) -> bool:
        """Whether the process that held this rank's lifeline is gone.  Not for one's own rank."""
        try:
            fcntl.lockf(self.handles.lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + rank)
        except BlockingIOError:
            return False
        fcntl.lockf(self.handles.lock, fcntl.LOCK_UN, 1, 1 + rank)
        return True

    # --- bells ---

    def ring(self, rank: int) -> None:
        os.eventfd_write(self.handles.bells[rank], 1)

    def ring_all(self) -> None:
        for bell in range(len(self.handles.bells)):
            self.ring(bell)

    def sleep(self, rank: int, timeout_s: float) -> None:
        """Until the bell of `rank` rings, or so long."""
        poll = self._polls.get(rank)
        if poll is None:
            poll = self._polls[rank] = select.poll()
            poll.register(self.handles.bells[rank], select.POLLIN)
        if poll.poll(timeout_s * 1000):
            os.eventfd_read(self.handles.bells[rank])

    # --- land ---

    def take_land(self, size_bytes: int) -> int:
        """The offset of fresh, empty land.  Under the lock."""
        start = max(self.words[_LAND_TAKEN], mmap.PAGESIZE)
        pages = -(-size_bytes // mmap.PAGESIZE)
        self.words[_LAND_TAKEN] = start + pages * mmap.PAGESIZE
        if self.words[_LAND_TAKEN] > LAND_BYTES:
            raise MemoryError(f"a gang's land of {LAND_BYTES} bytes is used up")
        return start

    def land_words(self) -> memoryview:
        """The land as words of 64 bits."""
        return memoryview(self._land).cast("q")

    def at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes of the land as a tensor, shared with all ranks."""
        return self.land[offset : offset + size_bytes]

    def apart(self, offset: int, size_bytes: int) -> torch.Tensor:
        """The same, as a storage of its own: `uses` tells who else looks at it."""
        return torch.frombuffer(self._land, dtype=torch.uint8, offset=offset, count=size_bytes)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `apart`, of this type and shape, not empty."""
        if (known := _in_numpy(dtype)) is not None:  # takes half as long
            return torch.from_numpy(numpy.ndarray(shape, known, self._land, offset))
        count = math.prod(shape)
        return torch.frombuffer(self._land, dtype=dtype, offset=offset, count=count).view(shape)

    def is_land(self, address: int) -> bool:
        """Whether memory of this process is that of the land."""
        return 0 <= address - self.address < LAND_BYTES

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self._land[offset : offset + size_bytes]

    def write(self, offset: int, data: bytes) -> None:
        self._land[offset : offset + len(data)] = data

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of the land where they lie, to send from and to receive into."""
        return memoryview(self._land)[offset : offset + size_bytes]

    def private(self, offset: int, size_bytes: int) -> mmap.mmap:
        """A mapping that shows the land and keeps what is written to it to itself."""
        pages = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self.handles.land, pages, mmap.MAP_PRIVATE, rights, offset=offset)

    def give_back(self, offset: int, size_bytes: int) -> None:
        """The memory behind a region that nobody uses any more; its address is not used again."""
        pages = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.fallocate(self.handles.land, _PUNCH_HOLE_KEEP_SIZE, offset, pages):
            raise OSError(ctypes.get_errno(), "the memory of a region could not be given back")


@functools.cache
def _in_numpy(dtype: torch.dtype) -> numpy.dtype[Any] | None:
    """None for those of torch alone."""
    try:
        return numpy.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


def uses(tensor: torch.Tensor) -> int:
    """How many hold the tensor's storage; the object that Python asks by is one of them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@functools.lru_cache
def rounded(size_bytes: int) -> int:
    """Few sizes, each at most an eighth too large, so that land that was given back fits again."""
    size = max(size_bytes, 512)
    step = 1 << max(size.bit_length() - 4, 6)
    return -(-size // step) * step
