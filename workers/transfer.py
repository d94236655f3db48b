"""Bytes between the store and a resident: what a launch names, and what a resident keeps.

It runs beside the supervisor's thread, as disks and hashes take their time.  A resident never sees
the store: it gets open files; its images lie in its slab, and its outputs come over a socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.manifest import About
from app.core.messages import Launch
from app.store import Damaged, Store
from workers import checkpoint, slab
from workers import resident as residents
from workers.checkpoint import BadSlab, Found, Known, Written
from workers.house import House
from workers.layout import BadLayout, from_json
from workers.resident import Nonsense, Saving
from workers.slab import BadIndex
from workers.unpack import BadBundle, unpacked

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Everything that a launch names, verified: its code, open files of its blobs, its image.

    The first file is its graph, if it runs one; the others are its inputs, by port.

    The image lies in `slab`, which is empty where there is none.
    """

    code: Path
    fds: list[int]
    slab: int
    index_bytes: int = 0
    image: Saving | None = None

    def close(self) -> None:
        close_all([*self.fds, self.slab])


class NotFetched(Exception):
    """Something that a launch names is not to be had; `cause` is one of core.messages.CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause, self.message = cause, message
        super().__init__(message)


class OutOfStep(Exception):
    """A resident did not give the bytes that it announced."""


def fetch(
    launch: Launch, house: House, *, held: int | None = None, before: Found | None = None
) -> Fetched:
    """Verify and open what the launch names; raises NotFetched.

    `held` is a slab in which the image `before` lies already; it is closed if anything fails.
    """
    if held is None:
        held = slab.made(house.host_memory_bytes)
    fds: list[int] = []
    try:
        code = unpack(launch.bundle, house)
        with _as_cause("bundle"):
            if "graph" in launch.run:
                fds.append(_opened(house.store, launch.run["graph"].removeprefix("sha256:")))
        with _as_cause("exception"):
            for port in sorted(launch.inputs):
                fds.append(_opened(house.store, launch.inputs[port]["sha256"]))
        if not launch.images:
            return Fetched(code=code, fds=fds, slab=held)
        newest = launch.images[0]
        found = fill(held, newest, tenant=launch.tenant, store=house.store, before=before)
        with _as_cause("image"):
            image, index_bytes = _indexed(held, newest, found)
    except BaseException:
        close_all([*fds, held])
        raise
    return Fetched(code=code, fds=fds, slab=held, index_bytes=index_bytes, image=image)


def unpack(bundle: str, house: House) -> Path:
    """The folder with the code of a bundle; raises NotFetched.  A command may do without: ""."""
    if not bundle:
        (house.folder / "code" / "none").mkdir(exist_ok=True)
        return house.folder / "code" / "none"
    code = house.folder / "code" / bundle
    with _as_cause("bundle"):
        if not code.is_dir():
            with house.store.open(bundle) as archive:
                unpacked(Path(f"/dev/fd/{archive.fileno()}"), code)
    return code


def fill(
    held: int, image: dict[str, Any], *, tenant: str, store: Store, before: Found | None
) -> Found:
    """Lay a checkpoint, as a Launch names it, into the slab `held`; raises NotFetched."""
    sha256, key = image["sha256"], image["key"]
    with _as_cause("image"):
        try:
            found = checkpoint.read(
                sha256, into=held, tenant=tenant, key=key, store=store, before=before
            )
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            raise _too_large(held) from error  # it is sealed at its length
    if found.layout.end > slab.limit_bytes(held):
        raise _too_large(held)
    return found


def _indexed(held: int, image: dict[str, Any], found: Found) -> tuple[Saving, int]:
    """How a resident will know the image, and how long the index behind it is."""
    about = found.manifest.about
    index = {"layout": found.layout.as_json(), "fingerprint": dict(about.fingerprint)}
    size_bytes = found.manifest.size_bytes
    saved = Saving(step=image["step"], sha256=image["sha256"], size_bytes=size_bytes)
    return saved, slab.write_index(held, index)


def _too_large(held: int) -> NotFetched:
    limit = slab.limit_bytes(held)
    told = f"its image is larger than the {limit} bytes that this device keeps at most"
    return NotFetched("exit", f"{told} (ROUNDHOUSE_HOST_MEMORY_BYTES)")


@contextlib.contextmanager
def _as_cause(cause: str) -> Iterator[None]:
    try:
        yield
    except (Damaged, BadBundle, BadIndex) as error:
        raise NotFetched(cause, str(error)) from error
    except OSError as error:  # the store is away: that says nothing about what lies in it
        raise NotFetched("store", f"{type(error).__name__}: {error}") from error


def _opened(store: Store, sha256: str) -> int:
    with store.open(sha256) as file:
        return os.dup(file.fileno())


def keep(
    held: int,
    index_bytes: int,
    launch: Launch,
    step: int,
    *,
    known: Known,
    house: House,
    awaited: bool = False,
) -> Written:
    """Make the image durable that a resident says lies in its slab; raises OutOfStep, OSError.

    If it is `awaited` on another device that one can fetch it while it is being written.
    """
    try:
        index = slab.read_index(held, index_bytes)
        layout = from_json(index.get("layout"), limit_bytes=slab.limit_bytes(held))
        about = About(
            tenant=launch.tenant,
            task=launch.task,
            epoch=launch.epoch,
            step=step,
            fingerprint=residents.table(index, "fingerprint"),
        )
        if not isinstance(tensors := index.get("tensors"), dict):
            raise Nonsense("tensors is no table")
        return checkpoint.write(
            *(held, layout, about),
            tensors=tensors,
            store=house.store,
            signer=house.signer,
            known=known,
            draft=checkpoint.draft(launch.task, launch.epoch) if awaited else "",
        )
    except (BadIndex, BadLayout, BadSlab, Nonsense) as error:
        raise OutOfStep(str(error)) from error


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
