"""Blocks from host to host: what lies in this host's cache is given to device workers of others.

The store is where a block is durable; this only saves the way there and back.  A device worker has
a secret as long as it lives, which its island learns from its facts.  A launch says of each input
which workers may have it, and the key by which each of them gives that block
(`app.signing.block_key`): whoever connects proves that it knows it, by the same handshake as the
hosts of a gang (`workers.links`).  So a worker gets what it was launched to take, a stranger
nothing, and a job has no network at all.

    worker of the giver -> taker   how many bytes there are, 0 if it is not here any more; the bytes

What arrives is hashed on the way, and is no block unless the hash is right.  Whoever is gone, has
it no more, is too slow or sends other bytes is passed over: then the store is read.

What a leg of a graph makes, and legs that run on other hosts wait for, goes **straight** to them
while it is being stored (`Wanted`): one way instead of a flush, two notes and a fetch.

    worker of the maker -> worker of the taker   how many bytes; the bytes

Nobody has written down yet what it is.  So the taker keeps its hash, and nothing that it makes of
it counts before its island says the same (`workers.resident.Stay`).  Who cannot be reached or is
slow is let go of: such a block comes as others do, and so does one that is too large.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from app.places import Bytes
from app.signing import block_key, input_name
from workers import links
from workers.cache import Cache, Draft

log = logging.getLogger(__name__)

JSON = dict[str, Any]

AT_ONCE = 4  # of those who take blocks; others wait for their turn, until they read the store
STALL_S = 5.0  # so long nothing may come
ROOM_BYTES, ROOMS = 64 << 20, 4  # so large a block, and so many at once, can go straight
HOLDS_UP_S = 0.25  # so long it may hold up the storing of a block that it goes straight to others
SILENT_S = 60.0  # so long nobody is asked who did not answer
SLOWEST_BYTES_PER_S = 10**6  # from a host that is slower the block does not come any sooner
STRAIGHT_BYTES_PER_S = 10**8  # as slow may a host be to which blocks go straight
BURST_S = 0.005  # so much of its rate may be made up for, after a thread was late
_PIECE = 256 << 10  # is sent at a time,
_TAKEN = 1 << 20  # and so much taken, if it is there
_SIZE = struct.Struct("!Q")
_silent_until_s: dict[tuple[str | int, ...], float] = {}  # by place, of this process


class Giver:
    """Gives blocks of the cache, so many bytes in a second to all together; 0: as fast as it goes.

    All is called in any thread.
    """

    def __init__(self, cache: Cache, bytes_per_s: int = 0) -> None:
        self.secret = secrets.token_hex(32)
        self._cache, self._pace = cache, Pace(bytes_per_s)
        self._hands = ThreadPoolExecutor(AT_ONCE, "giving")
        self._over = threading.Event()
        self._rooms = Rooms()

    def key(self, sha256: str) -> bytes:
        return bytes.fromhex(block_key(self.secret, sha256))

    def serve(self, sock: socket.socket, sha256: str) -> None:
        self._hands.submit(self._give, sock, sha256)

    def sent_too(
        self, pieces: Iterable[memoryview], size: int, takers: Sequence[JSON]
    ) -> Iterator[memoryview]:
        """The pieces of a block; if there are takers, and room for it, all of it at once, when they
        were sent it: to hash and to write it takes longer.
        """
        with contextlib.ExitStack() as stack:
            room = stack.enter_context(self._rooms.of(size if takers else 0))
            if not room:
                yield from pieces
                return
            lines = [stack.enter_context(Line(taker)) for taker in takers]
            until_s = time.monotonic() + HOLDS_UP_S + size / STRAIGHT_BYTES_PER_S
            self._send_all([_SIZE.pack(size)], lines, until_s)
            self._send_all(_laid_down(pieces, room), lines, until_s)
            yield room

    def _send_all(self, pieces: Iterable[Bytes], lines: Sequence[Line], until_s: float) -> None:
        for piece in pieces:
            for line in lines:
                if line.is_open(until_s):
                    self._pace.wait(len(piece))
                    line.send(piece, until_s)

    def close(self) -> None:
        self._over.set()
        self._hands.shutdown(cancel_futures=True)

    def _give(self, sock: socket.socket, sha256: str) -> None:
        with sock:
            try:
                sock.settimeout(STALL_S)
                if (fd := self._cache.held(sha256)) is None:
                    sock.sendall(_SIZE.pack(0))
                else:
                    self._send(sock, fd)
            except OSError as error:
                log.warning("block %s was not given: %s", sha256, error)

    def _send(self, sock: socket.socket, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            sock.sendall(_SIZE.pack(size))
            for at in range(0, size, _PIECE):
                if self._over.is_set():
                    raise ConnectionAbortedError("this device worker stops")
                self._pace.wait(min(_PIECE, size - at))
                sock.sendfile(file, at, min(_PIECE, size - at))


def _laid_down(pieces: Iterable[memoryview], room: memoryview) -> Iterator[memoryview]:
    at = 0
    for piece in pieces:
        room[at : at + len(piece)] = piece
        at += len(piece)
        yield piece


class Rooms:
    """Memory for some blocks at a time, which is used again: new memory is dear."""

    def __init__(self) -> None:
        self._free = [bytearray() for _ in range(ROOMS)]
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[memoryview]:
        """Room for so many bytes, or none."""
        with self._lock:
            memory = self._free.pop() if 0 < size <= ROOM_BYTES and self._free else None
        if memory is None:
            yield memoryview(b"")
            return
        try:
            if len(memory) < size:
                memory = bytearray(size)
            yield memoryview(memory)[:size]
        finally:
            with self._lock:
                self._free.append(memory)


class Pace:
    """Of all who wait here no more go on than `bytes_per_s`; 0: nobody waits."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # from when on the next may go on
        self._lock = threading.Lock()

    def wait(self, size: int) -> None:
        """Until so many bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            begins_s = max(self._free_s, now_s - BURST_S)
            self._free_s = begins_s + size / self._bytes_per_s
        if begins_s > now_s:
            time.sleep(begins_s - now_s)


class Line:
    """To a taker, as long as it takes."""

    def __init__(self, taker: JSON) -> None:
        self.place: list[str | int] = taker["place"]
        self.sock: socket.socket | None = None
        name = input_name(taker["task"], taker["epoch"], taker["port"])
        with self._or_none():
            self.sock = links.at_desk(links.INPUT, self.place, taker["key"], name, HOLDS_UP_S)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self.sock is not None:
            self.sock.close()

    def is_open(self, until_s: float) -> bool:
        with self._or_none():
            if self.sock is not None and time.monotonic() >= until_s:
                raise TimeoutError("it is too slow")
        return self.sock is not None

    def send(self, piece: Bytes, until_s: float) -> None:
        assert self.sock is not None
        with self._or_none():
            self.sock.settimeout(max(0.001, until_s - time.monotonic()))
            self.sock.sendall(piece)

    @contextlib.contextmanager
    def _or_none(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("a block does not go straight to %s: %s", self.place, error)
            if self.sock is not None:
                self.sock.close()
            self.sock = None


class Taker:
    """Takes what others bring straight: `came` is called with the name of the input, its file,
    read only and at its beginning, and its hash.

    The file has no name: its memory is free, and is used again, when the task lets go of it.
    """

    def __init__(self, cache: Cache, secret: str, came: Callable[[str, int, str], None]) -> None:
        self._cache, self._secret, self._came = cache, secret, came
        self._hands = ThreadPoolExecutor(AT_ONCE, "taking")

    def key(self, name: str) -> bytes:
        return bytes.fromhex(block_key(self._secret, name))

    def serve(self, sock: socket.socket, name: str) -> None:
        self._hands.submit(self._take, sock, name)

    def close(self) -> None:
        self._hands.shutdown(cancel_futures=True)

    def _take(self, sock: socket.socket, name: str) -> None:
        with sock, Draft(self._cache) as draft:
            try:
                links.wait_for(sock, STALL_S)
                (size,) = _SIZE.unpack(links.read(sock, _SIZE.size))
                sha256 = _received(sock, size, draft)
                fd = draft.opened()
            except OSError as error:
                log.warning("an input did not come straight: %s", error)
                return
        self._came(name, fd, sha256)


def taken(copies: Iterable[JSON], sha256: str, size: int, cache: Cache) -> int | None:
    """A block of so many bytes, verified: its file, read only, at its beginning; it is kept in the
    cache.  None if none of those who may have it gives it.

    One who does not answer in time is waited for once: then the store is read, and nobody asks
    there for a while.
    """
    for copy in copies:
        place = tuple(copy["place"])
        if time.monotonic() < _silent_until_s.get(place, 0.0):
            continue
        try:
            return _taken(copy, sha256, size, cache)
        except OSError as error:
            log.warning("%s does not give block %s: %s", copy["place"], sha256, error)
            if isinstance(error, TimeoutError):
                _silent_until_s[place] = time.monotonic() + SILENT_S
                return None
    return None


def _taken(copy: JSON, sha256: str, size: int, cache: Cache) -> int:
    asked = links.at_desk(links.BLOCK, copy["place"], copy["key"], sha256)
    with asked as sock, Draft(cache) as draft:
        links.wait_for(sock, STALL_S)
        (told,) = _SIZE.unpack(links.read(sock, _SIZE.size))
        if told != size:
            raise ConnectionRefusedError(f"it has {told} bytes of it, not {size}")
        found = _received(sock, size, draft)
        if found != sha256:
            raise ConnectionRefusedError(f"its bytes hash to {found}")
        draft.keep(sha256)
        return draft.opened()


def _received(sock: socket.socket, size: int, draft: Draft) -> str:
    """The hash of what came.

    Each piece is hashed and written while the processor has it near, which costs no more than
    mapping the file and receiving into its new pages.
    """
    digest, left, piece = hashlib.sha256(), size, memoryview(bytearray(min(size, _TAKEN)))
    until_s = time.monotonic() + STALL_S + size / SLOWEST_BYTES_PER_S
    while left:
        came = sock.recv_into(piece, min(left, _TAKEN), socket.MSG_WAITALL)
        if not came or time.monotonic() > until_s:
            raise TimeoutError(f"{left} of {size} bytes did not come, or too slowly")
        digest.update(piece[:came])
        draft.write(piece[:came])
        left -= came
    return digest.hexdigest()
