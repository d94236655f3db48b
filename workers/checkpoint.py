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
import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
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
from app.places import INCOMING, Bytes, Missing
from app.signing import Signer
from app.store import Damaged, Store
from workers.layout import Extent, Layout, laid_out

log = logging.getLogger(__name__)

_POPULATE_READ = 22  # MADV_POPULATE_READ
_GAP_BYTES = 2**20

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


GRAPH_ROOM_BYTES = 2**20  # of an image that was read, so much or a multiple is left for its graph


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
    """An image that lies in a slab, and the manifest that it came with.

    `fetched_bytes` are those that did not lie there before.
    """

    sha256: str
    layout: Layout
    manifest: Manifest
    fetched_bytes: int


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
    draft: str = "",
) -> Written:
    """Make the image that lies in `slab` durable; returns when it is.

    `slab` is the descriptor of a memfd, sealed against shrinking (F_SEAL_SHRINK: else a resident
    could end the device worker with a SIGBUS), of which `layout` lies inside
    (`layout.from_json(..., limit_bytes=)`); nobody writes to it meanwhile, and if somebody does it
    only spoils his own checkpoint.  `tensors` is the table of the resident's capture,
    `{name: [storage, dtype, shape, stride, offset]}`; it is only for the export, and rows that make
    no sense are left out.

    Under the name `draft` the manifest is there for a while before its chunks are, for whoever
    waits for them (`follow`): so they cross the way to the store and that from there at once.

    Raises BadSlab for what the resident is to blame for, OSError for what the store is (disk full,
    bucket away: its message says which); after either, nothing new is listed and the same image may
    be written again.
    """
    extents = (layout.graph, *layout.storages)
    parts = tuple(Part(size=e.size, device=e.device, pinned=e.pinned) for e in extents)
    table = manifests.tensors_told(tensors, parts[1:])
    memory = _mapped(slab, extents)
    with store.chunks(about.tenant).writing() as writing:
        writer = _Writer(memory, extents, store, known, writing)
        cuts = manifests.planned([part.size for part in parts])

        def manifest_of(chunks: Sequence[Chunk]) -> Manifest:
            rank = Rank(parts=parts, chunks=tuple(chunks), tensors=table)
            return Manifest(about=about, ranks=(rank,))

        drafted = bool(draft) and not store.place.is_near  # near, they all come at once
        if drafted:
            chunks = _all_hands(store.place.hands, writer.announced, cuts)
            sealed = signer.sealed(manifests.encode(manifest_of(chunks)))
            store.place.keep([sealed], lambda: draft)
        chunks = _all_hands(store.place.hands, writer.keep, cuts)
        writing.settle()
        manifest = manifest_of(chunks)
        sha256 = store.put_manifest(about.tenant, signer.sealed(manifests.encode(manifest)))
        writer.must_be_in_time()
        known.seen = writer.seen
    if drafted:
        store.place.delete(draft)
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

    def announced(self, cut: Cut) -> Chunk:
        """The chunk that `keep` will keep, if nobody writes to the slab meanwhile."""
        spans = [self._span(span.part, span.offset, span.size) for span in cut]
        body = spans[0] if len(spans) == 1 else self._copied(spans)
        seen = self.known.seen.get(xxh3_128_digest(body))
        return Chunk(address=seen.address if seen else blake3(body).hexdigest(), spans=cut)

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
            # Whole pages, which may go to the disk past the page cache.
            self._mine.buffer = memoryview(mmap.mmap(-1, LARGEST_CHUNK_BYTES))
        buffer: memoryview = self._mine.buffer
        end = 0
        for span in spans:
            buffer[end : end + len(span)] = span
            end += len(span)
        return buffer[:end]


def _mapped(slab: int, extents: Sequence[Extent]) -> memoryview:
    """The slab from its beginning to the last of the extents, read-only."""
    size = max(extent.offset + extent.size for extent in extents)
    if not fcntl.fcntl(slab, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise BadSlab("a slab must be sealed against shrinking before it is read")
    if (length := os.fstat(slab).st_size) < size:
        raise BadSlab(f"the slab has {length} bytes, and the image ends at {size}")
    if not size:
        return memoryview(b"")
    # Not closed but dropped: an error may hold on to a piece of it for a while.
    memory = mmap.mmap(slab, size, prot=mmap.PROT_READ)
    for start, end in _runs(extents):  # a fault for each page takes longer than hashing
        with suppress(OSError):  # from Linux 5.14 on
            memory.madvise(_POPULATE_READ, start, end - start)
    return memoryview(memory)


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Stretches of whole pages in which they lie close together: between ranks lie gigabytes."""
    start = end = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset > end + _GAP_BYTES:
            yield start, end
            start = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = max(end, extent.offset + extent.size)
    yield start, end


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


def read(
    sha256: str, *, into: int, tenant: str, key: str, store: Store, before: Found | None = None
) -> Found:
    """Fill the memfd `into` with the checkpoint of that address; it is made long enough.

    `key` is the public key (hexadecimal) of the host that wrote it, as the Launch order says it.
    `before` is the image that was read into this memfd last, which nobody has touched since: what
    is the same stays where it lies.  Without it the memfd is empty.  After an error what lies there
    is no image.

    Raises app.store.Damaged for a checkpoint that cannot be restored (it names what is lost, cut,
    or changed): the one before it should be tried; and OSError while the store is away, which says
    nothing about the checkpoint.
    """
    if before is not None and before.sha256 == sha256:
        return replace(before, fetched_bytes=0)
    manifest, chunks = store.manifest(tenant, sha256, key=key), store.chunks(tenant)

    def get(chunk: Chunk) -> Bytes:
        try:
            return chunks.get(chunk.address, chunk.size)
        except Damaged as damaged:
            _set_aside(store, tenant, chunk.address, damaged)
            raise

    return _laid(manifest, sha256, into, get, before=before, hands=store.place.hands)


def draft(task: str, epoch: int) -> str:
    """The name under which an image of this epoch is told of before it is durable."""
    return f"{INCOMING}/draft-{task}-{epoch}"


def follow(
    name: str,
    *,
    into: int,
    tenant: str,
    key: str,
    store: Store,
    before: Found,
    wait: Callable[[], bool],
) -> Found | None:
    """As `read`, of an image that is being written now.

    `wait` waits a moment, and says whether to look again.  None if it said no before anything was
    there; then what lies in `into` is as it was.  Raises Damaged if it said no later.
    """
    while True:
        try:
            sealed = store.place.get(name)
            break
        except Missing:
            if not wait():
                return None
    manifest, chunks = store.manifest_in(sealed, tenant, key=key), store.chunks(tenant)

    def get(chunk: Chunk) -> Bytes:
        while not chunks.has(chunk.address) and wait():
            pass
        return chunks.get(chunk.address, chunk.size)

    sha256 = hashlib.sha256(sealed).hexdigest()
    return _laid(manifest, sha256, into, get, before=before, hands=store.place.hands)


def _laid(
    manifest: Manifest,
    sha256: str,
    into: int,
    get: Callable[[Chunk], Bytes],
    *,
    before: Found | None,
    hands: int,
) -> Found:
    rank = manifest.ranks[0]
    graph, *storages = rank.parts
    layout = _laid_out(graph.size, [(part.size, part.device, part.pinned) for part in storages])
    there = set() if before is None else set(_placed(before.layout, before.manifest.ranks[0]))
    new = [chunk for place, chunk in _placed_with(layout, rank) if place not in there]
    fill(into, layout, new, get, hands=hands)
    fetched = sum(chunk.size for chunk in new)
    return Found(sha256=sha256, layout=layout, manifest=manifest, fetched_bytes=fetched)


def _laid_out(graph_bytes: int, storages: list[tuple[int, str, bool]]) -> Layout:
    """With room behind the graph, so that the storages of the next image lie at the same places."""
    room = -(-graph_bytes // GRAPH_ROOM_BYTES) * GRAPH_ROOM_BYTES
    layout = laid_out(room, storages)
    return replace(layout, graph=replace(layout.graph, size=graph_bytes))


_Place = tuple[str, tuple[tuple[int, int], ...]]  # a chunk, and where its spans lie in a slab


def _placed_with(layout: Layout, rank: Rank) -> Iterator[tuple[_Place, Chunk]]:
    extents = (layout.graph, *layout.storages)
    for chunk in rank.chunks:
        spans = tuple((extents[s.part].offset + s.offset, s.size) for s in chunk.spans)
        yield (chunk.address, spans), chunk


def _placed(layout: Layout, rank: Rank) -> Iterator[_Place]:
    return (place for place, _ in _placed_with(layout, rank))


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
