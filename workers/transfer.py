"""Bytes between the store and a resident: what a launch names, and what a resident keeps.

It runs beside the supervisor's thread, as disks and hashes take their time.  A resident never sees
the store: it gets open files, and its images come over a socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.messages import Launch
from app.store import Damaged, Store
from workers.house import House
from workers.resident import Saving
from workers.unpack import BadBundle, unpacked

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Everything that a launch names, verified: its code, and open files of its blobs."""

    code: Path
    fds: list[int]
    image: Saving | None


class NotFetched(Exception):
    """Something that a launch names is not to be had; `cause` is one of core.messages.CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause, self.message = cause, message
        super().__init__(message)


class OutOfStep(Exception):
    """A resident did not send the bytes that it announced."""


def fetch(launch: Launch, house: House) -> Fetched:
    """Verify and open what the launch names; raises NotFetched."""
    fds: list[int] = []
    try:
        with _as_cause("bundle"):
            code = house.folder / "code" / launch.bundle
            if not code.is_dir():
                unpacked(house.store.verified(launch.bundle), code)
        with _as_cause("exception"):
            for port in sorted(launch.inputs):
                fds.append(_opened(house.store, launch.inputs[port]["sha256"]))
        if not launch.images:
            return Fetched(code=code, fds=fds, image=None)
        newest = launch.images[0]
        with _as_cause("image"):
            fds.append(_opened(house.store, newest["sha256"]))
    except NotFetched:
        close_all(fds)
        raise
    size = os.fstat(fds[-1]).st_size
    saved = Saving(step=newest["step"], sha256=newest["sha256"], size_bytes=size)
    return Fetched(code=code, fds=fds, image=saved)


@contextlib.contextmanager
def _as_cause(cause: str) -> Iterator[None]:
    try:
        yield
    except (Damaged, BadBundle) as error:
        raise NotFetched(cause, str(error)) from error
    except OSError as error:
        raise NotFetched(cause, f"{type(error).__name__}: {error}") from error


def _opened(store: Store, sha256: str) -> int:
    return os.open(store.verified(sha256), os.O_RDONLY | os.O_CLOEXEC)


def store(bulk: socket.socket, size: int, store: Store) -> tuple[str, int]:
    pieces = _received(bulk, size)
    try:
        return store.put(pieces)
    except OSError as error:
        if not isinstance(error, TimeoutError):
            for _ in pieces:  # so that the next image begins where it should
                pass
        raise


def _received(bulk: socket.socket, size: int) -> Iterator[bytes]:
    left = size
    while left:
        try:
            piece = bulk.recv(min(left, _PIECE))
        except OSError as error:
            raise OutOfStep(f"{left} of {size} bytes did not come: {error}") from error
        if not piece:
            raise OutOfStep(f"{left} of {size} bytes did not come")
        left -= len(piece)
        yield piece


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
