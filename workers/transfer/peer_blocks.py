"""Sends blocks of this host's cache to the device workers of other hosts.

Every block is durable in the store; sending it from host to host only saves time.  A device worker
has a secret for its lifetime, which its island learns from its reports.  A launch names for each
input the workers that may have it, and the key of that block at each
(`app.storage.signing.block_key`).  A worker that connects proves that it knows the key, by the same
handshake as the hosts of a gang (`workers.transfer.peer_auth`).  So a worker gets only the inputs
of its launches, and a stranger gets nothing.  A job has no network at all.

    giving worker -> taker   size in bytes, 0 if it is not here any more; the bytes

The taker hashes the bytes as they arrive, and accepts a block only with the right hash.  A giver
that is gone, lost the block, is too slow or sends other bytes is skipped: then the store is read.

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

from app.core.security import peer_proof
from app.storage.signing import block_key
from workers.transfer import peer_auth
from workers.transfer.host_cache import Cache, Draft

log = logging.getLogger(__name__)

JSON = dict[str, Any]

AT_ONCE = 4  # blocks sent at once; other takers wait, until they read the store
STALL_S = 5.0  # limit without any byte
SILENT_S = 60.0  # pause before a host that did not answer is asked again
# least speed of a host: below it a block is read from the store instead
SLOWEST_BYTES_PER_S = 10**6
BURST_S = 0.005  # in seconds: a thread that was delayed may make up for this much by sending faster
_PIECE = 256 << 10  # bytes per send
_TAKEN = 1 << 20  # bytes per receive
_SIZE = struct.Struct("!Q")
# place -> when to ask it again, for this process
_silent_until_s: dict[tuple[str | int, ...], float] = {}


class Giver:
    """Sends blocks of the cache, at `bytes_per_s` for all takers together; 0 means no limit.

    Any thread may call its methods.
    """

    def __init__(self, cache: Cache, bytes_per_s: int = 0) -> None:
        self.secret = secrets.token_hex(32)
        self._cache, self._pace = cache, SharedPace(bytes_per_s)
        self._hands = ThreadPoolExecutor(AT_ONCE, "giving")
        self._over = threading.Event()

    def key(self, sha256: str) -> bytes:
        return bytes.fromhex(block_key(self.secret, sha256))

    def serve(self, sock: socket.socket, sha256: str) -> None:
        given = self._hands.submit(self._give, sock, sha256)
        given.add_done_callback(lambda done: sock.close() if done.cancelled() else None)

    def close(self) -> None:
        """Stop giving; closes the connections of takers that still wait, too."""
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
                log.warning("block %s was not sent: %s", sha256, error)

    def _send(self, sock: socket.socket, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            sock.sendall(_SIZE.pack(size))
            for at in range(0, size, _PIECE):
                if self._over.is_set():
                    raise ConnectionAbortedError("this device worker stops")
                self._pace.wait(min(_PIECE, size - at))
                sock.sendfile(file, at, min(_PIECE, size - at))


class SharedPace:
    """Limits the rate of all callers together to `bytes_per_s`; 0: no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when the next caller may go on
        self._lock = threading.Lock()

    def wait(self, size: int) -> None:
        """Wait until this many bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            begins_s = max(self._free_s, now_s - BURST_S)
            self._free_s = begins_s + size / self._bytes_per_s
        if begins_s > now_s:
            time.sleep(begins_s - now_s)


def taken(copies: Iterable[JSON], sha256: str, size: int, cache: Cache) -> int | None:
    """Fetch a block of this size from another host; return its file, read-only and at its
    beginning.

    The block is verified and kept in the cache. Returns None if no host of `copies` gives it. The
    first host that does not answer in time ends the search: the store is read instead, and that
    host is not asked again for SILENT_S.
    """
    for copy in copies:
        place = tuple(copy["place"])
        if time.monotonic() < _silent_until_s.get(place, 0.0):
            continue
        try:
            return _fetch_from(copy, sha256, size, cache)
        except OSError as error:
            log.warning("%s does not send block %s: %s", copy["place"], sha256, error)
            if isinstance(error, TimeoutError):
                _silent_until_s[place] = time.monotonic() + SILENT_S
                return None
    return None


def _fetch_from(copy: JSON, sha256: str, size: int, cache: Cache) -> int:
    asked = peer_auth.at_desk(peer_proof.BLOCK, copy["place"], copy["key"], sha256)
    with asked as sock, Draft(cache) as draft:
        peer_auth.wait_for(sock, STALL_S)
        (told,) = _SIZE.unpack(peer_auth.read(sock, _SIZE.size))
        if told != size:
            raise ConnectionRefusedError(f"it has {told} bytes of it, not {size}")
        found = _received(sock, size, draft)
        if found != sha256:
            raise ConnectionRefusedError(f"its bytes hash to {found}")
        draft.keep(sha256)
        return draft.opened()


def _received(sock: socket.socket, size: int, draft: Draft) -> str:
    """Receive the bytes into the draft; return their hash.

    Each piece is hashed and written while it is still in the processor's cache: this costs no more
    than to receive into a mapping of the file.
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
