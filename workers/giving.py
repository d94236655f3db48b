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
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from app.signing import block_key
from workers import links
from workers.cache import Cache, Draft

log = logging.getLogger(__name__)

JSON = dict[str, Any]

AT_ONCE = 4  # of those who take blocks; others wait for their turn, until they read the store
STALL_S = 5.0  # so long nothing may come
SLOWEST_BYTES_PER_S = 10**6  # from a host that is slower the block does not come any sooner
BURST_S = 0.005  # so much of its rate may be made up for, after a thread was late
_PIECE = 256 << 10  # is sent at a time,
_TAKEN = 1 << 20  # and so much taken, if it is there
_SIZE = struct.Struct("!Q")


class Giver:
    """Gives blocks of the cache, so many bytes in a second to all together; 0: as fast as it goes.

    `key` and `give` are called in any thread.
    """

    def __init__(self, cache: Cache, bytes_per_s: int = 0) -> None:
        self.secret = secrets.token_hex(32)
        self._cache, self._pace = cache, Pace(bytes_per_s)
        self._hands = ThreadPoolExecutor(AT_ONCE, "giving")
        self._over = threading.Event()

    def key(self, sha256: str) -> bytes:
        return bytes.fromhex(block_key(self.secret, sha256))

    def give(self, sock: socket.socket, sha256: str) -> None:
        """To whoever has proved to know the key; the socket is closed afterwards."""
        self._hands.submit(self._give, sock, sha256)

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


def taken(copies: Iterable[JSON], sha256: str, size: int, cache: Cache) -> int | None:
    """A block of so many bytes, verified: its file, read only, at its beginning; it is kept in the
    cache.  None if none of those who may have it gives it.
    """
    for copy in copies:
        try:
            return _taken(copy, sha256, size, cache)
        except OSError as error:
            log.warning("%s does not give block %s: %s", copy["place"], sha256, error)
    return None


def _taken(copy: JSON, sha256: str, size: int, cache: Cache) -> int:
    with links.asked(copy["place"], copy["key"], sha256) as sock, Draft(cache) as draft:
        sock.settimeout(STALL_S)
        (told,) = _SIZE.unpack(links.read(sock, _SIZE.size))
        if told != size:
            raise ConnectionRefusedError(f"it has {told} bytes of it, not {size}")
        found = _received(sock, size, draft)
        if found != sha256:
            raise ConnectionRefusedError(f"its bytes hash to {found}")
        fd = draft.opened()
        draft.keep(sha256)
        return fd


def _received(sock: socket.socket, size: int, draft: Draft) -> str:
    """The hash of what came.

    Each piece is hashed and written while the processor has it near, which costs no more than
    mapping the file and receiving into its new pages.
    """
    digest, left, piece = hashlib.sha256(), size, memoryview(bytearray(min(size, _TAKEN)))
    until_s = time.monotonic() + STALL_S + size / SLOWEST_BYTES_PER_S
    while left:
        came = sock.recv_into(piece, min(left, _TAKEN))
        if not came or time.monotonic() > until_s:
            raise TimeoutError(f"{left} of {size} bytes did not come, or too slowly")
        digest.update(piece[:came])
        draft.write(piece[:came])
        left -= came
    return digest.hexdigest()
