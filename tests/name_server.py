"""A name server for one process tree that gives every name the address of loopback.

with NameServer() as names:
    ...  # the files of `names` say to use it
    with names.gone():
        ...
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

ADDRESS = "127.77.0.53"
SUFFIX = ".roundhouse.test"
RESOLV_CONF = f"nameserver {ADDRESS}\noptions timeout:1 attempts:1\n"
_HEADER_BYTES = 12
_TYPE_A = b"\0\1"


class NameServer:
    """Listens at port 53 of an address of loopback; while it is gone, it answers nothing."""

    def __init__(self) -> None:
        self._is_gone = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ADDRESS, 53))

    def __enter__(self) -> NameServer:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        self._is_gone = True
        try:
            yield
        finally:
            self._is_gone = False

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                query, sender = self._socket.recvfrom(512)
                if not self._is_gone:
                    self._socket.sendto(_answer(query), sender)


def _answer(query: bytes) -> bytes:
    """Return the address of loopback for a question of type A, and no record for others."""
    end = query.index(0, _HEADER_BYTES) + 5  # the name, its end, type and class
    question, kind = query[_HEADER_BYTES:end], query[end - 4 : end - 2]
    name = b".".join(_labels(question)).decode()
    has_address = kind == _TYPE_A and name.endswith(SUFFIX)
    flags = b"\x81\x80" if name.endswith(SUFFIX) else b"\x81\x83"  # 3: there is no such name
    counts = b"\0\1" + (b"\0\1" if has_address else b"\0\0") + bytes(4)
    record = b"\xc0\x0c\0\1\0\1" + bytes(4) + b"\0\4" + socket.inet_aton("127.0.0.1")
    return query[:2] + flags + counts + question + (record if has_address else b"")


def _labels(question: bytes) -> Iterator[bytes]:
    at = 0
    while length := question[at]:
        yield question[at + 1 : at + 1 + length]
        at += 1 + length
