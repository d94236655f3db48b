"""The shared memory arena of one gang on one host: table, heap, lock, eventfds, lifelines.

    board   the table: words of 64 bits with a fixed layout, written under the lock
    land    the heap: a sparse file of bytes; regions are taken once and never moved
    bells   one eventfd per rank, to sleep on
    lock    one byte of a file, held while writing to the table; further bytes are lifelines

A file lock of this kind belongs to a process and is released when the process ends, however it
ends. So the table is never left locked. Each rank holds the lock on its own byte, its lifeline, all
its life: a process that finds that byte free knows that the rank is dead. This needs no supervisor.

A gang over several hosts has an arena on each host, with room for all ranks. Ranks of another host
stay `RankState.NEW` here; this host's bridge (`workers.ranks.host_bridge`) acts for them. It has an
eventfd and a lifeline of its own, behind those of the ranks, and an outbox to which the ranks of
this host write.

Everything is reached by file descriptors, which a fork inherits and a socket can carry; nothing has
a name in the file system. `turns` and `rendezvous` give the words their meaning; this module itself
uses only two words of the head.
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

#: Environment variable of a command's rank: `Handles`, its number and its engine, as JSON.
GANG = "ROUNDHOUSE_GANG"
LAND_BYTES = 1 << 42  # size of the address space; memory is used only where something was written
#: The same size for a gang whose processes may be stored: CRIU looks at each page, 64 GiB in 0.1 s.
STORED_LAND_BYTES = 1 << 36
# torch aligns its own memory so, too; with it the same kernels compute the same bits
ALIGN_BYTES = 64
GROUPS = 256
DEPTH = 256  # calls of one group that may be open; a member that is further ahead has to wait
TEXT_WORDS = 32  # length of a text in the table, in words of 64 bits

HEAD_WORDS = 512
RANK_WORDS = 32 + TEXT_WORDS
SEAT_WORDS = 8
SLOT_WORDS = 16 + TEXT_WORDS

_LAND_TAKEN = 8  # word of the head: the bytes of the heap that are taken
_BRIDGE = 9  # word of the head: the process id of the bridge
LOOK_EVERY_S = 0.25  # in seconds: how often a waiting rank checks that the other ranks are alive
TOLD_LIMIT_BYTES = 1 << 17  # per message to the bridge
_PUNCH_HOLE_KEEP_SIZE = 3
_FUTEX = {"aarch64": 98}.get(os.uname().machine, 202)  # number of the system call
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handles:
    """The file descriptors that a rank's process gets to reach the arena."""

    ranks: int
    board: int
    land: int
    lock: int
    bells: tuple[int, ...]
    hosts: tuple[int, ...] = ()  # host number of each rank; empty if all ranks live on one host
    host: int = 0  # number of the host to which this arena belongs
    outbox: tuple[int, ...] = ()  # the ranks' end, and the bridge's

    @property
    def all(self) -> tuple[int, ...]:
        return (self.board, self.land, self.lock, *self.bells, *self.outbox)


def make(
    ranks: int, hosts: tuple[int, ...] = (), host: int = 0, land_bytes: int = LAND_BYTES
) -> Handles:
    """Create shared memory for a gang of `ranks` ranks; any open descriptor keeps it alive.

    `hosts` has the host number of each rank, if not all live on this host.
    `host` is the number of this host.
    """
    board = os.memfd_create("gang-board")
    os.ftruncate(board, _Layout(ranks).words * 8)
    land = os.memfd_create("gang-land")
    os.ftruncate(land, land_bytes)
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
    """The offsets of the parts of the table, in words."""

    def __init__(self, ranks: int) -> None:
        self.rank = HEAD_WORDS
        self.seat = self.rank + ranks * RANK_WORDS
        self.group = self.seat + ranks * SEAT_WORDS
        self.slot_words = SLOT_WORDS + 6 * ranks
        self.group_head = 16 + 3 * ranks  # members, and `native.call_counters`
        self.group_words = self.group_head + DEPTH * self.slot_words
        self.words = self.group + GROUPS * self.group_words


class _Lock:
    """The lock of the table, between threads and between processes."""

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


class Arena:
    """A process's view of the shared memory arena."""

    def __init__(self, handles: Handles) -> None:
        self.ranks, self.handles = handles.ranks, handles
        self.hosts, self.host = handles.hosts, handles.host
        self._layout = _Layout(handles.ranks)
        self._board = mmap.mmap(handles.board, self._layout.words * 8)
        self._lock = _Lock(handles.lock)
        self._polls: dict[tuple[int, ...], Any] = {}
        self.words = memoryview(self._board).cast("q")
        self._board_address = ctypes.addressof(ctypes.c_char.from_buffer(self._board))
        self._land_bytes = min(os.fstat(handles.land).st_size, LAND_BYTES)
        self._land = mmap.mmap(handles.land, self._land_bytes)
        self.land = torch.frombuffer(self._land, dtype=torch.uint8)
        self.address = self.land.data_ptr()

    # --- places in the table, as indices into `words` ---

    def rank(self, rank: int) -> int:
        return self._layout.rank + rank * RANK_WORDS

    def seat(self, seat: int) -> int:
        return self._layout.seat + seat * SEAT_WORDS

    def group(self, index: int) -> int:
        return self._layout.group + index * self._layout.group_words

    def slot(self, index: int, sequence: int) -> int:
        inside = self._layout.group_head + sequence % DEPTH * self._layout.slot_words
        return self.group(index) + inside

    # --- other hosts ---

    @property
    def is_bridged(self) -> bool:
        """True if ranks of this gang live on other hosts."""
        return bool(self.hosts)

    @property
    def bridge(self) -> int:
        """The bridge's index in the lists of eventfds and lifelines.

        A rank's index is its number, and the bridge comes after all ranks.
        """
        return self.ranks

    def is_here(self, rank: int) -> bool:
        return not self.hosts or self.hosts[rank] == self.host

    def here(self) -> list[int]:
        return [rank for rank in range(self.ranks) if self.is_here(rank)]

    def tell_bridge(self, message: tuple[Any, ...]) -> None:
        """Send a message to the bridge; the messages of one rank keep their order.

        Do not call it under the lock: the bridge may wait for the lock. Raises OSError if the
        bridge is gone, ValueError if the message is too long.
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
        """Register the calling process as the bridge.

        The bridge stays as long as its ranks need it.
        """
        self.hold_lifeline(self.bridge)
        self.words[_BRIDGE] = os.getpid()

    @property
    def bridge_process(self) -> int:
        """The bridge's process id; 0 before it has registered."""
        return self.words[_BRIDGE]

    def has_no_bridge(self) -> bool:
        """True if the bridge had registered and is gone."""
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

    # --- the lock, and which processes are alive ---

    def locked(self) -> _Lock:
        """Return the lock of the table. The same thread must not enter it twice."""
        return self._lock

    def hold_lifeline(self, rank: int) -> None:
        fcntl.lockf(self.handles.lock, fcntl.LOCK_EX, 1, 1 + rank)

    def is_dead(self, rank: int) -> bool:
        """True if the process that held this rank's lifeline is gone.

        A rank must not ask this about itself.
        """
        try:
            fcntl.lockf(self.handles.lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + rank)
        except BlockingIOError:
            return False
        fcntl.lockf(self.handles.lock, fcntl.LOCK_UN, 1, 1 + rank)
        return True

    # --- words to sleep on ---

    def wait_while(self, place: int, value: int, timeout_s: float) -> None:
        """Sleep while the word at `place` has this value, at most `timeout_s`; may return early.

        Any process that has the table can wake the sleepers (futex(2)).  An eventfd could not be
        found again by the stub of a restored gang.
        """
        seconds = int(timeout_s)
        limit = (ctypes.c_int64 * 2)(seconds, int((timeout_s - seconds) * 1e9))
        _libc.syscall(_FUTEX, self._word(place), _FUTEX_WAIT, value & 0xFFFFFFFF, limit, None, 0)

    def wake(self, place: int) -> None:
        """Wake all that sleep on the word at `place`."""
        _libc.syscall(_FUTEX, self._word(place), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def _word(self, place: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._board_address + 8 * place)

    # --- eventfds ---

    def ring(self, rank: int) -> None:
        os.eventfd_write(self.handles.bells[rank], 1)

    def ring_all(self) -> None:
        for bell in range(len(self.handles.bells)):
            self.ring(bell)

    def sleep(self, rank: int, timeout_s: float, *, beside: int | None = None) -> None:
        """Sleep until the eventfd of `rank` is signalled, at most `timeout_s`.

        The sleep also ends when the descriptor `beside` becomes readable.
        """
        bell, fds = self.handles.bells[rank], (beside,) if beside is not None else ()
        poll = self._polls.get((rank, *fds))
        if poll is None:
            poll = self._polls[rank, *fds] = select.poll()
            for fd in (bell, *fds):
                poll.register(fd, select.POLLIN)
        if bell in (fd for fd, _ in poll.poll(timeout_s * 1000)):
            os.eventfd_read(bell)

    # --- heap ---

    def take_land(self, size_bytes: int) -> int:
        """Take unused heap memory, full of zeros, and return its offset; call under the lock."""
        start = max(self.words[_LAND_TAKEN], mmap.PAGESIZE)
        pages = -(-size_bytes // mmap.PAGESIZE)
        self.words[_LAND_TAKEN] = start + pages * mmap.PAGESIZE
        if self.words[_LAND_TAKEN] > self._land_bytes:
            raise MemoryError(f"a gang's heap of {self._land_bytes} bytes is used up")
        return start

    def land_words(self) -> memoryview:
        """Return the heap as words of 64 bits."""
        return memoryview(self._land).cast("q")

    def at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return bytes of the heap as a tensor that is shared with all ranks."""
        return self.land[offset : offset + size_bytes]

    def apart(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return the same bytes as `at`, but as a tensor with a storage of its own, so that `uses`
        counts only its users.
        """
        return torch.frombuffer(self._land, dtype=torch.uint8, offset=offset, count=size_bytes)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a non-empty tensor like `apart` does, of this type and shape."""
        if (known := _in_numpy(dtype)) is not None:  # this takes half as long as torch.frombuffer
            return torch.from_numpy(numpy.ndarray(shape, known, self._land, offset))
        count = math.prod(shape)
        return torch.frombuffer(self._land, dtype=dtype, offset=offset, count=count).view(shape)

    def is_land(self, address: int) -> bool:
        """True if this address of the process lies in the heap."""
        return 0 <= address - self.address < self._land_bytes

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self._land[offset : offset + size_bytes]

    def write(self, offset: int, data: bytes) -> None:
        self._land[offset : offset + len(data)] = data

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return bytes of the heap without a copy, for sending and receiving."""
        return memoryview(self._land)[offset : offset + size_bytes]

    def private(self, offset: int, size_bytes: int) -> mmap.mmap:
        """Return a private mapping of heap memory (copy-on-write)."""
        pages = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self.handles.land, pages, mmap.MAP_PRIVATE, rights, offset=offset)

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Free the memory behind a region that no rank uses any more.

        Its offsets are not used again.
        """
        pages = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.fallocate(self.handles.land, _PUNCH_HOLE_KEEP_SIZE, offset, pages):
            raise OSError(ctypes.get_errno(), "the memory of a region could not be given back")


@functools.cache
def _in_numpy(dtype: torch.dtype) -> numpy.dtype[Any] | None:
    """Return the numpy dtype; None for dtypes that only torch has."""
    try:
        return numpy.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


def uses(tensor: torch.Tensor) -> int:
    """Return how many references the tensor's storage has.

    The Python object `tensor` is one of them.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@functools.lru_cache
def rounded(size_bytes: int) -> int:
    """Round up, by at most an eighth, to one of few sizes.

    With few sizes, freed memory can be reused more often.
    """
    size = max(size_bytes, 512)
    step = 1 << max(size.bit_length() - 4, 6)
    return -(-size // step) * step
