"""Moves bytes between the store and a resident: what a launch names, and what a resident stores.

It runs outside the supervisor's thread, as disks and hashes take time.  A resident never sees the
store: it gets open files; its images lie in its slab, and its outputs come over a socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.model import tensor_file
from app.core.model.manifest import About
from app.core.model.messages import Launch
from app.core.model.tensor_file import HEAD_BYTES, BadTensorFile
from app.storage.store import Damaged, Store
from workers.device.resident import Saving
from workers.process import slab, untrusted
from workers.process.image_layout import BadLayout, from_json
from workers.process.slab import BadIndex
from workers.process.untrusted import Nonsense
from workers.transfer import checkpoint, peer_blocks
from workers.transfer.checkpoint import BadSlab, FoundImage, Known, Written
from workers.transfer.code_unpack import BadBundle, unpacked
from workers.transfer.host_context import House

JSON = dict[str, Any]

log = logging.getLogger(__name__)

AGAIN_AFTER_S = (0.2, 0.5, 1.0)
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """All that a launch names, verified: its code, open files of its inputs, its image.

    If the launch runs a graph, the first file is the graph; the other files are its inputs, by
    port.

    The image lies in `slab`, which is empty without an image.  `input_bytes` is the size of all
    inputs.  `fetched_bytes` of them were read from the store, as neither this host nor another had
    them.  `ways` has for each port how the input came: one of core.model.messages.WAYS.
    """

    code: Path
    fds: list[int]
    slab: int
    input_bytes: int = 0
    fetched_bytes: int = 0
    ways: dict[str, str] = field(default_factory=dict)
    index_bytes: int = 0
    image: Saving | None = None

    def close(self) -> None:
        close_all([*self.fds, self.slab])


class NotFetched(Exception):
    """Raised when a part of a launch is unavailable; `cause` is one of
    core.model.messages.CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause, self.message = cause, message
        super().__init__(message)


class OutOfStep(Exception):
    """Raised when a resident did not send the bytes that it announced."""


def fetch(
    launch: Launch,
    house: House,
    came: dict[str, str],
    *,
    held: int | None = None,
    before: FoundImage | None = None,
) -> Fetched:
    """Verify and open what the launch names; raises NotFetched.

    `came` has, by SHA-256, how prefetched inputs came; the first launch that takes one reports it.
    `held` is a slab that already has the image `before`; it is closed if anything fails.
    """
    if held is None:
        held = slab.made(house.host_memory_bytes)
    fds: list[int] = []
    try:
        code = unpack(launch.bundle, house)
        with _as_cause("bundle"):
            if "graph" in launch.run:
                graph = launch.run["graph"].removeprefix("sha256:")
                fds.append(house.cache.opened(graph, house.store).fd)
        counted = _inputs(launch, house, came, fds)
        if not launch.images:
            return Fetched(code=code, fds=fds, slab=held, **counted)
        newest = launch.images[0]
        found = fill(held, newest, tenant=launch.tenant, store=house.store, before=before)
        with _as_cause("image"):
            image, index_bytes = _indexed(held, newest, found)
    except BaseException:
        close_all([*fds, held])
        raise
    return Fetched(code=code, fds=fds, slab=held, index_bytes=index_bytes, image=image, **counted)


def _inputs(launch: Launch, house: House, came: dict[str, str], fds: list[int]) -> JSON:
    """Open the inputs, in the order of their ports; return their sizes and how each came."""
    all_bytes = fetched_bytes = 0
    ways = dict[str, str]()
    with _as_cause("exception"):
        for port in sorted(launch.inputs):
            fd, ways[port] = opened(launch.inputs[port], house, came)
            fds.append(fd)
            size = os.fstat(fd).st_size
            all_bytes += size
            fetched_bytes += size if ways[port] == "store" else 0
    return {"input_bytes": all_bytes, "fetched_bytes": fetched_bytes, "ways": ways}


def opened(source: JSON, house: House, came: dict[str, str]) -> tuple[int, str]:
    """Open an input that a Launch names; return its descriptor and its way.

    It comes from this host, another host, or else the store.  For an input that was prefetched, the
    way is taken from `came`, by SHA-256; the first task that takes the input reports it.  Raises
    the store's errors.
    """
    sha256, copies = source["sha256"], source.get("copies", [])
    if (fd := house.cache.held(sha256)) is not None:
        return fd, came.pop(sha256, "here")
    fd = peer_blocks.taken(copies, sha256, source["size_bytes"], house.cache) if copies else None
    if fd is not None:
        return fd, "host"
    return house.cache.opened(sha256, house.store).fd, "store"


def opened_in_time(source: JSON, house: House, came: dict[str, str]) -> tuple[int, str]:
    """Open an input for a task that waits for it in the slot; on failure retry a few times."""
    for wait_s in AGAIN_AFTER_S:
        try:
            return opened(source, house, came)
        except (Damaged, OSError) as error:
            log.warning("block %s is not available now: %s", source["sha256"], error)
        time.sleep(wait_s)
    return opened(source, house, came)


def unpack(bundle: str, house: House) -> Path:
    """Return the folder with a bundle's code, empty if `bundle` is ""; raises NotFetched."""
    if not bundle:
        none = house.folder / "code" / "none"
        none.mkdir(exist_ok=True)
        none.chmod(0o755)  # the mode of a bundle's folder: see `workers.transfer.code_unpack`
        return none
    code = house.folder / "code" / bundle
    with _as_cause("bundle"):
        if not code.is_dir():
            with house.store.open(bundle) as archive:
                unpacked(Path(f"/dev/fd/{archive.fileno()}"), code)
    return code


def fill(
    held: int, image: dict[str, Any], *, tenant: str, store: Store, before: FoundImage | None
) -> FoundImage:
    """Read a checkpoint that a Launch names into the slab `held`; raises NotFetched."""
    sha256, key = image["sha256"], image["key"]
    with _as_cause("image"):
        try:
            found = checkpoint.read(
                sha256, into=held, tenant=tenant, key=key, store=store, before=before
            )
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            raise _too_large(held) from error  # the slab's length is sealed
    if found.layout.end > slab.limit_bytes(held):
        raise _too_large(held)
    return found


def _indexed(held: int, image: dict[str, Any], found: FoundImage) -> tuple[Saving, int]:
    """Write the index behind the image; return the image's description and the index's size."""
    about = found.manifest.about
    index = {"layout": found.layout.as_json(), "fingerprint": dict(about.fingerprint)}
    size_bytes = found.manifest.size_bytes
    saved = Saving(step=image["step"], sha256=image["sha256"], size_bytes=size_bytes)
    return saved, slab.write_index(held, index)


def _too_large(held: int) -> NotFetched:
    limit = slab.limit_bytes(held)
    told = f"its saved state exceeds the {limit} bytes that this device can keep"
    return NotFetched("exit", f"{told} (ROUNDHOUSE_HOST_MEMORY_BYTES)")


@contextlib.contextmanager
def _as_cause(cause: str) -> Iterator[None]:
    try:
        yield
    except (Damaged, BadBundle, BadIndex) as error:
        raise NotFetched(cause, str(error)) from error
    except OSError as error:  # the store is away; its content may be sound
        raise NotFetched("store", f"{type(error).__name__}: {error}") from error


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
    """Store the image that a resident announced in its slab; raises OutOfStep, OSError.

    If it is `awaited` on another device, that device can fetch it while it is being written.
    """
    try:
        index = slab.read_index(held, index_bytes)
        layout = from_json(index.get("layout"), limit_bytes=slab.limit_bytes(held))
        about = About(
            tenant=launch.tenant,
            task=launch.task,
            epoch=launch.epoch,
            step=step,
            fingerprint=untrusted.table(index, "fingerprint"),
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


def store(pieces: Iterator[memoryview], size: int, house: House) -> JSON:
    """Store an output from `received`; return its description.  Raises OutOfStep, OSError."""
    try:
        sha256, size_bytes = house.cache.stored(pieces, size, house.store)
    except OSError:
        for _ in pieces:  # so that the next output begins at its start
            pass
        raise
    return {"sha256": sha256, "size_bytes": size_bytes}


def publish(pieces: Iterator[memoryview], size: int, house: House) -> JSON:
    """Store an output that becomes a datablock; return also its summary.  It must hold tensors."""
    head = bytearray()

    def looked_at() -> Iterator[memoryview]:
        for piece in pieces:
            head.extend(piece[: HEAD_BYTES - len(head)])
            yield piece

    kept = store(looked_at(), size, house)
    try:
        return {**kept, **tensor_file.read(bytes(head), size).summary()}
    except BadTensorFile as error:
        raise OutOfStep(f"what it publishes is no file of tensors: {error}") from error


def received(bulk: socket.socket, size: int, read: Callable[[], None]) -> Iterator[memoryview]:
    """Yield what a resident sends, piece by piece, each in the same buffer.

    `read` is called when all of it has arrived.  Raises OutOfStep.
    """
    left, room = size, memoryview(bytearray(min(size, _PIECE)))
    while left:
        try:
            came = bulk.recv_into(room, min(left, _PIECE), socket.MSG_WAITALL)
        except OSError as error:
            raise OutOfStep(f"{left} of {size} bytes did not come: {error}") from error
        if not came:
            raise OutOfStep(f"{left} of {size} bytes did not come")
        left -= came
        yield room[:came].toreadonly()
    read()


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
