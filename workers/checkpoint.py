"""An image made durable, and back: chunks that are not there yet, then the signed manifest.

`write` reads an image out of the slab that a resident and its device worker share; `read` fills a
slab for a resident that is about to be born.

What always holds:
* a resident is not believed: what is hashed and kept are bytes that it cannot change any more;
* the manifest comes last and is signed, so what it names is there, whole, and was written here;
* what `read` fills in has been checked, byte for byte, against the manifest, and the manifest
  against its address and its signature.

Nothing here knows torch or opens a tenant's bytes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3
from xxhash import xxh3_128_digest

from app.chunks import Writing
from app.core import manifest as manifests
from app.core.manifest import (
    LARGEST_CHUNK_BYTES,
    About,
    Chunk,
    Cut,
    Manifest,
    Part,
    Rank,
)
from app.places import Bytes
from app.signing import Signer
from app.store import Damaged, Store
from workers.layout import Extent, Layout, laid_out

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class BadSlab(Exception):
    """The slab, or what a resident says of it, cannot be made a checkpoint; says why."""


class TooSlow(OSError):
    """Writing took so long that what it relied on may have been collected meanwhile."""


class Known:
    """The chunks of one resident's last checkpoint, by which the next one tells what changed.

    One for each resident; `write` keeps it.  Not for two writes at once.

    Keys are quick hashes (XXH3) of the chunks' bytes.  A tenant who finds two chunks with the same
    one deceives its own checkpoint, and nobody else's.
    """

    def __init__(self) -> None:
        self.seen: dict[bytes, _Seen] = {}


@dataclass(frozen=True, slots=True)
class _Seen:
    """`at_s` is when the store surely had the chunk, by `_clock_s`."""

    address: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """`size_bytes` are those of the image; by `new_bytes` the store grew."""

    sha256: str
    size_bytes: int
    new_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An image that lies in a slab, and the manifest that it came with."""

    layout: Layout
    manifest: Manifest


# --- to the store -------------------------------------------------------------------------------


def write(
    slab: int,
    layout: Layout,
    about: About,
    *,
    tensors: Mapping[str, Any],
    store: Store,
    signer: Signer,
    known: Known,
) -> Written:
    """Make the image that lies in `slab` durable; returns when it is.

    `slab` is the descriptor of a memfd, sealed against shrinking (F_SEAL_SHRINK: else a resident
    could end the device worker with a SIGBUS), of which `layout` lies inside
    (`layout.from_json(..., limit_bytes=)`); nobody writes to it meanwhile, and if somebody does it
    only spoils his own checkpoint.  `tensors` is the table of the resident's capture,
    `{name: [storage, dtype, shape, stride, offset]}`; it is only for the export, and rows that make
    no sense are left out.

    Raises BadSlab for what the resident is to blame for, OSError for what the store is (disk full,
    bucket away: its message says which); after either, nothing new is listed and the same image may
    be written again.
    """
    extents = (layout.graph, *layout.storages)
    parts = tuple(Part(size=e.size, device=e.device, pinned=e.pinned) for e in extents)
    table = manifests.tensors_told(tensors, parts[1:])
    memory = _mapped(slab, layout.end)
    with store.chunks(about.tenant).writing() as writing:
        writer = _Writer(memory, extents, store, known, writing)
        cuts = manifests.planned([part.size for part in parts])
        chunks = _all_hands(store.place.hands, writer.keep, cuts)
        writing.settle()
        rank = Rank(parts=parts, chunks=tuple(chunks), tensors=table)
        manifest = Manifest(about=about, ranks=(rank,))
        sha256 = store.put_manifest(about.tenant, signer.sealed(manifests.encode(manifest)))
        writer.must_be_in_time()
        known.seen = writer.seen
    return Written(
        sha256=sha256,
        size_bytes=manifest.size_bytes,
        new_bytes=writing.new_bytes,
        chunks=len(chunks),
    )


class _Writer:
    """One write: `keep` runs in several threads."""

    def __init__(
        self,
        memory: memoryview,
        extents: Sequence[Extent],
        store: Store,
        known: Known,
        writing: Writing,
    ) -> None:
        self.memory, self.extents, self.store = memory, extents, store
        self.known, self.writing = known, writing
        self.seen: dict[bytes, _Seen] = {}
        self._mine = threading.local()

    def keep(self, cut: Cut) -> Chunk:
        spans = [self._span(span.part, span.offset, span.size) for span in cut]
        if len(spans) == 1:  # else it is small, and one copy is cheaper than to look twice
            quick = xxh3_128_digest(spans[0])
            if (seen := self._still_there(quick)) is not None:
                self.seen[quick] = seen
                return Chunk(address=seen.address, spans=cut)
        body = self._copied(spans)
        quick = xxh3_128_digest(body)  # of what is kept, which may have changed under the first
        seen = self._still_there(quick)
        if seen is None:
            seen = _Seen(blake3(body).hexdigest(), _clock_s())
            self.writing.put(seen.address, body)
        self.seen[quick] = seen
        return Chunk(address=seen.address, spans=cut)

    def must_be_in_time(self) -> None:
        """What was seen at first must surely have been there when the manifest came.

        Checked afterwards, so that nothing can come between: a manifest that is too late is not
        told of, and is collected.
        """
        oldest_s = min((seen.at_s for seen in self.seen.values()), default=_clock_s())
        if (took_s := _clock_s() - oldest_s) > self.store.grace_s / 2:
            raise TooSlow(f"the store took {took_s:.0f} s; at most {self.store.grace_s / 2:.0f} s")

    def _still_there(self, quick: bytes) -> _Seen | None:
        """A chunk of the last checkpoint, if the store has it still."""
        seen = self.known.seen.get(quick)
        if seen is None:
            return None
        is_fresh = _clock_s() - seen.at_s < self.store.grace_s / 4
        if is_fresh and not self.store.place.is_near:
            return seen  # it cannot have been collected yet, and asking is slow
        now_s = _clock_s()
        return _Seen(seen.address, now_s) if self.writing.chunks.has(seen.address) else None

    def _span(self, part: int, offset: int, size: int) -> memoryview:
        start = self.extents[part].offset + offset
        return self.memory[start : start + size]

    def _copied(self, spans: Iterable[memoryview]) -> memoryview:
        """The spans' bytes in a buffer of this thread's own, which the resident cannot reach."""
        if not hasattr(self._mine, "buffer"):
            self._mine.buffer = memoryview(bytearray(LARGEST_CHUNK_BYTES))
        buffer: memoryview = self._mine.buffer
        end = 0
        for span in spans:
            buffer[end : end + len(span)] = span
            end += len(span)
        return buffer[:end]


def _mapped(slab: int, size: int) -> memoryview:
    """The slab's first `size` bytes, read-only."""
    if not fcntl.fcntl(slab, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise BadSlab("a slab must be sealed against shrinking before it is read")
    if (length := os.fstat(slab).st_size) < size:
        raise BadSlab(f"the slab has {length} bytes, and the image ends at {size}")
    if not size:
        return memoryview(b"")
    # Not closed but dropped: an error may hold on to a piece of it for a while.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a fault for each page takes longer than hashing
    return memoryview(mmap.mmap(slab, size, flags=flags, prot=mmap.PROT_READ))


def _all_hands(hands: int, do: Callable[[_Item], _Made], items: Sequence[_Item]) -> list[_Made]:
    """Do it for all, `hands` at once; after the first error no further one is begun."""
    pool = ThreadPoolExecutor(min(hands, max(1, len(items))), "chunks")
    try:
        return list(pool.map(do, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _clock_s() -> float:
    """A clock that no one sets, and that goes on while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# --- from the store -----------------------------------------------------------------------------


def read(sha256: str, *, into: int, tenant: str, key: str, store: Store) -> Found:
    """Fill the empty memfd `into` with the checkpoint of that address; it is made long enough.

    `key` is the public key (hexadecimal) of the host that wrote it, as the Launch order says it.

    Raises app.store.Damaged for a checkpoint that cannot be restored (it names what is lost, cut,
    or changed): the one before it should be tried; and OSError while the store is away, which says
    nothing about the checkpoint.
    """
    manifest = store.manifest(tenant, sha256, key=key)
    rank = manifest.ranks[0]
    graph, *storages = rank.parts
    layout = laid_out(graph.size, [(part.size, part.device, part.pinned) for part in storages])
    chunks = store.chunks(tenant)

    def get(chunk: Chunk) -> Bytes:
        try:
            return chunks.get(chunk.address, chunk.size)
        except Damaged as damaged:
            _set_aside(store, tenant, chunk.address, damaged)
            raise

    fill(into, layout, rank.chunks, get, hands=store.place.hands)
    return Found(layout=layout, manifest=manifest)


def fill(
    into: int,
    layout: Layout,
    chunks: Sequence[Chunk],
    get: Callable[[Chunk], Bytes],
    *,
    hands: int,
) -> None:
    """Lay chunks into a memfd, wherever `get` has their (checked) bytes from."""
    extents = (layout.graph, *layout.storages)
    if not layout.end:
        return
    # All of its memory now, or an error: a page that is lacking later would be a SIGBUS.
    os.posix_fallocate(into, 0, layout.end)
    memory = memoryview(mmap.mmap(into, layout.end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))

    def lay(chunk: Chunk) -> None:
        body, at = memoryview(get(chunk)), 0
        for span in chunk.spans:
            start = extents[span.part].offset + span.offset
            memory[start : start + span.size] = body[at : at + span.size]
            at += span.size

    _all_hands(hands, lay, chunks)


def _set_aside(store: Store, tenant: str, address: str, damaged: Damaged) -> None:
    """Take a damaged chunk out of the way: whoever writes these bytes next puts them anew."""
    log.error("%s; it is set aside, and written again when next it is met", damaged)
    with suppress(OSError):
        store.chunks(tenant).set_aside(address)
