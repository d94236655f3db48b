"""Makes an image durable and reads it back: missing chunks first, then the signed manifest.

`write` reads an image from the slab that a resident and its device worker share.  `read` fills a
slab for a resident that is about to start.

Invariants:
* A resident is not trusted: only bytes that it can no longer change are hashed and stored.
* The manifest comes last and is signed, so all chunks that it names exist, are complete, and were
  written by this system.
* All data that `read` fills in was checked byte for byte against the manifest, and the manifest
  against its address and its signature.

This module imports no torch and opens no tenant's bytes.
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
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from xxhash import xxh3_128_digest

from app.core.model.checkpoints import manifest as manifests
from app.core.model.checkpoints.manifest import (
    LARGEST_CHUNK_BYTES,
    About,
    Chunk,
    Cut,
    Manifest,
    Part,
    RankImage,
)
from app.storage.backend import INCOMING, Bytes, Missing
from app.storage.chunk_cipher import NO_CIPHERS, ChunkCipher, Ciphers
from app.storage.chunks import Chunks, Writing
from app.storage.signing import Signer
from app.storage.store import Damaged, Store
from workers.process.image_layout import Extent, Layout, laid_out

log = logging.getLogger(__name__)

_POPULATE_READ = 22  # MADV_POPULATE_READ
_GAP_BYTES = 2**20

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


GRAPH_ROOM_BYTES = 2**20  # space for the graph of a read image is a multiple of this


class BadSlab(Exception):
    """Raised when a slab or its description cannot become a checkpoint; says why."""


class TooSlow(OSError):
    """Raised when a write took so long that chunks on which it relied may have been deleted."""


class Known:
    """Remembers the chunks of a resident's last checkpoint, so that the next `write` finds the
    changed ones.

    There is one for each resident, and `write` updates it. Two writes at once must not share it.

    Keys are quick hashes (XXH3) of the chunks' bytes. A tenant that makes two chunks with the same
    hash damages only its own checkpoint.
    """

    def __init__(self) -> None:
        self.seen: dict[bytes, _Seen] = {}
        self.image_key = ""  # the key with which the chunks are encrypted

    def use_key(self, image_key: str) -> None:
        """Set the key for the next chunks.

        If it is another key than before, forget the chunks of the old key.
        """
        if image_key != self.image_key:
            self.seen, self.image_key = {}, image_key


@dataclass(frozen=True, slots=True)
class _Seen:
    """Describes a chunk in the store; `at_s` is a time at which the store certainly had it, by
    `_clock_s`.
    """

    address: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Describes a written checkpoint: the size of its image, and by how much the store grew."""

    sha256: str
    size_bytes: int
    new_bytes: int
    chunks: int


HeldChunks = Mapping[str, Bytes]  # chunks by address: checked, decrypted, in memory of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundImage:
    """Describes an image in a slab, and its manifest.

    `fetched_bytes` is the size of the chunks that were not here before. `beside` has chunks of the
    manifest's second image that were fetched ahead.
    """

    sha256: str
    layout: Layout
    manifest: Manifest
    fetched_bytes: int
    beside: HeldChunks = field(default_factory=dict, repr=False)


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
    beside: Sequence[memoryview] = (),
    cipher: ChunkCipher | None = None,
) -> Written:
    """Make the image in `slab` durable; returns when it is.

    `slab` is the descriptor of a memfd that is sealed against shrinking (F_SEAL_SHRINK): otherwise
    a resident could end the device worker with a SIGBUS.  `layout` must lie inside it
    (`image_layout.from_json(..., limit_bytes=)`).  No process writes to the slab meanwhile; a
    resident that does spoils only its own checkpoint.  `tensors` is the table of the resident's
    capture, `{name: [storage, dtype, shape, stride, offset]}`.  It is only for the export; invalid
    rows are left out.

    `beside` are the parts of a second image of the same moment, in memory that the resident cannot
    reach: the processes of a command.  With a `cipher` all chunks are encrypted.

    Under the name `draft` the manifest exists for a while before its chunks do, for a device that
    waits for them (`follow`): so chunks go to the store and from the store at the same time.

    Raises BadSlab for a fault of the resident, OSError for one of the store (disk full, bucket
    away; the message says which).  After either error no new checkpoint is listed, and the same
    image may be written again.
    """
    images: list[_InMemory] = [(*_in_slab(slab, layout), tensors)]
    if beside:
        images.append(([Part(size=len(part)) for part in beside], beside, {}))
    image_key = "" if cipher is None else cipher.id
    known.use_key(image_key)
    with store.chunks(about.tenant, cipher).writing() as writing:
        writers = [_Writer(*image, store, known, writing) for image in images]

        def manifest_of(rank_of: Callable[[_Writer], RankImage]) -> Manifest:
            ranks = tuple(map(rank_of, writers))
            return Manifest(about=about, ranks=ranks, image_key=image_key)

        # a store on this machine takes all chunks at once
        drafted = bool(draft) and not store.place.is_near
        if drafted:
            announced = manifest_of(lambda writer: writer.rank(writer.announced))
            sealed = signer.sealed(manifests.encode(announced))
            store.place.keep([sealed], lambda: draft)
        manifest = manifest_of(lambda writer: writer.rank(writer.keep))
        writing.settle()
        sha256 = store.put_manifest(about.tenant, signer.sealed(manifests.encode(manifest)))
        for writer in writers:
            writer.must_be_in_time()
        known.seen = {quick: seen for writer in writers for quick, seen in writer.seen.items()}
    if drafted:
        store.place.delete(draft)
    return Written(
        sha256=sha256,
        size_bytes=manifest.size_bytes,
        new_bytes=writing.new_bytes,
        chunks=sum(len(rank.chunks) for rank in manifest.ranks),
    )


# the parts, their memory, and the tensors by name
_InMemory = tuple[Sequence[Part], Sequence[memoryview], Mapping[str, Any]]


class _Writer:
    """Writes one image; `keep` runs in several threads."""

    def __init__(
        self,
        parts: Sequence[Part],
        memory: Sequence[memoryview],  # memory of each part
        tensors: Mapping[str, Any],
        store: Store,
        known: Known,
        writing: Writing,
    ) -> None:
        self.parts, self.memory = tuple(parts), memory
        self.tensors = manifests.tensors_told(tensors, self.parts[1:])
        self.store, self.known, self.writing = store, known, writing
        self.seen: dict[bytes, _Seen] = {}
        self._mine = threading.local()

    def rank(self, do: Callable[[Cut], Chunk]) -> RankImage:
        """Call `do` for all chunks of the image; return the image in the form that the manifest
        needs.
        """
        cuts = manifests.planned([part.size for part in self.parts])
        chunks = _all_hands(self.store.place.hands, do, cuts)
        return RankImage(parts=self.parts, chunks=tuple(chunks), tensors=self.tensors)

    def keep(self, cut: Cut) -> Chunk:
        spans = [self._span(span.part, span.offset, span.size) for span in cut]
        # a body of several spans is small, so to copy it costs less than to hash it twice
        if len(spans) == 1:
            quick = xxh3_128_digest(spans[0])
            if (seen := self._still_there(quick)) is not None:
                self.seen[quick] = seen
                return Chunk(address=seen.address, spans=cut)
        body = self._copied(spans)
        # Hash the copy, as the slab may have changed since the first hash.
        quick = xxh3_128_digest(body)
        seen = self._still_there(quick)
        if seen is None:
            seen = _Seen(self.writing.chunks.address(body), _clock_s())
            self.writing.put(seen.address, body)
        self.seen[quick] = seen
        return Chunk(address=seen.address, spans=cut)

    def announced(self, cut: Cut) -> Chunk:
        """Return the address and the spans of the chunk as `keep` would store it now."""
        spans = [self._span(span.part, span.offset, span.size) for span in cut]
        body = spans[0] if len(spans) == 1 else self._copied(spans)
        seen = self.known.seen.get(xxh3_128_digest(body))
        address = seen.address if seen else self.writing.chunks.address(body)
        return Chunk(address=address, spans=cut)

    def must_be_in_time(self) -> None:
        """Raise TooSlow if a chunk that was found early may be deleted by the time of the manifest.

        This is checked after the manifest is stored, so that nothing can happen in between. A
        manifest that is too late is not reported, and is deleted later.
        """
        oldest_s = min((seen.at_s for seen in self.seen.values()), default=_clock_s())
        if (took_s := _clock_s() - oldest_s) > self.store.grace_s / 2:
            raise TooSlow(
                f"writing took {took_s:.0f} s; the limit is {self.store.grace_s / 2:.0f} s"
            )

    def _still_there(self, quick: bytes) -> _Seen | None:
        """Return a chunk of the last checkpoint if the store still has it; None if not."""
        seen = self.known.seen.get(quick)
        if seen is None:
            return None
        is_fresh = _clock_s() - seen.at_s < self.store.grace_s / 4
        if is_fresh and not self.store.place.is_near:
            # the chunk cannot have been deleted yet, and asking a remote store is slow
            return seen
        now_s = _clock_s()
        return _Seen(seen.address, now_s) if self.writing.chunks.has(seen.address) else None

    def _span(self, part: int, offset: int, size: int) -> memoryview:
        return self.memory[part][offset : offset + size]

    def _copied(self, spans: Iterable[memoryview]) -> memoryview:
        """Copy the spans into a buffer of this thread, which the resident cannot reach; return the
        copy.
        """
        if not hasattr(self._mine, "buffer"):
            # Whole pages, so that they may go to the disk without the page cache.
            self._mine.buffer = memoryview(mmap.mmap(-1, LARGEST_CHUNK_BYTES))
        buffer: memoryview = self._mine.buffer
        end = 0
        for span in spans:
            buffer[end : end + len(span)] = span
            end += len(span)
        return buffer[:end]


def _in_slab(slab: int, layout: Layout) -> tuple[list[Part], list[memoryview]]:
    """Return the parts of the image in a slab, and the memory of each."""
    extents = (layout.graph, *layout.storages)
    parts = [Part(size=e.size, device=e.device, pinned=e.pinned) for e in extents]
    memory = _mapped(slab, extents)
    return parts, [memory[e.offset : e.offset + e.size] for e in extents]


def _mapped(slab: int, extents: Sequence[Extent]) -> memoryview:
    """Return the slab from its beginning to the end of the last extent, read-only."""
    size = max(extent.offset + extent.size for extent in extents)
    if not fcntl.fcntl(slab, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise BadSlab("a slab must be sealed against shrinking before it is read")
    if (length := os.fstat(slab).st_size) < size:
        raise BadSlab(f"the slab has {length} bytes, and the image ends at {size}")
    if not size:
        return memoryview(b"")
    # The mapping is not closed but only dropped: the traceback of an error may refer to it for a
    # while.
    memory = mmap.mmap(slab, size, prot=mmap.PROT_READ)
    for start, end in _runs(extents):  # a page fault for each page takes longer than hashing
        with suppress(OSError):  # from Linux 5.14 on
            memory.madvise(_POPULATE_READ, start, end - start)
    return memoryview(memory)


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Yield runs of whole pages that cover the extents.

    Extents that are close share a run; ranks are gigabytes apart.
    """
    start = end = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset > end + _GAP_BYTES:
            yield start, end
            start = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = max(end, extent.offset + extent.size)
    yield start, end


def _all_hands(hands: int, do: Callable[[_Item], _Made], items: Sequence[_Item]) -> list[_Made]:
    """Call `do` for all items, up to `hands` at the same time; after the first error no further
    call begins.
    """
    pool = ThreadPoolExecutor(min(hands, max(1, len(items))), "chunks")
    try:
        return list(pool.map(do, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _clock_s() -> float:
    """Return the time of a clock that no one can set and that also runs while the host is
    suspended.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# --- from the store -----------------------------------------------------------------------------


def read(
    sha256: str,
    *,
    into: int,
    tenant: str,
    key: str,
    store: Store,
    before: FoundImage | None = None,
    ciphers: Ciphers = NO_CIPHERS,
    ahead_bytes: int = 0,
) -> FoundImage:
    """Fill the memfd `into` with the checkpoint of this address; its length is set as needed.

    `key` is the public key (hexadecimal) of the host that wrote it, as the Launch order has it.
    `before` is the image that was read into this memfd last and not changed since: equal chunks
    stay in place. Without `before` the memfd is empty. After an error the memfd holds no image.
    `ciphers` are for the keys with which the image may be encrypted. A second image of up to
    `ahead_bytes` is fetched ahead; without that its chunks in `before` stay.

    Raises app.storage.store.Damaged for a checkpoint that cannot be restored (it names what is
    lost, cut or changed): then try the previous checkpoint. Raises OSError while the store is away,
    and NoImageKey; these two say nothing about the checkpoint.
    """
    if before is not None and before.sha256 == sha256:
        return replace(before, fetched_bytes=0)
    manifest = store.manifest(tenant, sha256, key=key)
    chunks = store.chunks_of(manifest, ciphers)

    def get(chunk: Chunk) -> Bytes:
        try:
            return chunks.get(chunk.address, chunk.size)
        except Damaged as damaged:
            _set_aside(store, tenant, chunk.address, damaged)
            raise

    return _laid(manifest, sha256, into, get, before, store.place.hands, ahead_bytes)


@dataclass(frozen=True, slots=True)
class BesideImage:
    """Reads the second image of a checkpoint, chunk by chunk; `read` reads the first one.

    Chunks that are `held` are not read from the store. Reading raises Damaged and OSError as `read`
    does.
    """

    rank: RankImage
    chunks: Chunks
    held: HeldChunks

    @classmethod
    def of(
        cls, manifest: Manifest, *, store: Store, ciphers: Ciphers, held: HeldChunks | None = None
    ) -> BesideImage:
        """Raises NoImageKey; KeyError if the checkpoint has no second image."""
        if len(manifest.ranks) < 2:
            raise KeyError("the checkpoint has no second image")
        return cls(manifest.ranks[1], store.chunks_of(manifest, ciphers), held or {})

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self.rank.parts]

    def read(self, part: int) -> bytes:
        """Return one part."""
        body = bytearray(self.rank.parts[part].size)

        def write(number: int, at: int, piece: memoryview) -> None:
            if number == part:
                body[at : at + len(piece)] = piece

        having = [each for each in self.rank.chunks if part in {span.part for span in each.spans}]
        self._lay(having, write)
        return bytes(body)

    def read_into(self, write: Callable[[int, int, memoryview], None]) -> None:
        """Call `write` with (part, offset in it, bytes) until all bytes were given, each once; in
        several threads.
        """
        self._lay(self.rank.chunks, write)

    def _lay(self, chunks: Sequence[Chunk], write: Callable[[int, int, memoryview], None]) -> None:
        def lay(chunk: Chunk) -> None:
            held = self.held.get(chunk.address)
            body = memoryview(held or self.chunks.get(chunk.address, chunk.size))
            at = 0
            for span in chunk.spans:
                write(span.part, span.offset, body[at : at + span.size])
                at += span.size

        _all_hands(self.chunks.place.hands, lay, chunks)


def draft(task: str, epoch: int) -> str:
    """Return the name under which an image of this epoch is announced before it is durable."""
    return f"{INCOMING}/draft-{task}-{epoch}"


def follow(
    name: str,
    *,
    into: int,
    tenant: str,
    key: str,
    store: Store,
    before: FoundImage,
    wait: Callable[[], bool],
    ciphers: Ciphers = NO_CIPHERS,
    ahead_bytes: int = 0,
) -> FoundImage | None:
    """Read an image that is being written now, as `read` does.

    `wait` waits a moment and returns True if another look is worth while. Returns None if `wait`
    returned False before any of the image was there; then `into` is unchanged. Raises Damaged if it
    returned False later.
    """
    while True:
        try:
            sealed = store.place.get(name)
            break
        except Missing:
            if not wait():
                return None
    manifest = store.manifest_in(sealed, tenant, key=key)
    chunks = store.chunks_of(manifest, ciphers)

    def get(chunk: Chunk) -> Bytes:
        while not chunks.has(chunk.address) and wait():
            pass
        return chunks.get(chunk.address, chunk.size)

    sha256 = hashlib.sha256(sealed).hexdigest()
    return _laid(manifest, sha256, into, get, before, store.place.hands, ahead_bytes)


def _laid(
    manifest: Manifest,
    sha256: str,
    into: int,
    get: Callable[[Chunk], Bytes],
    before: FoundImage | None,
    hands: int,
    ahead_bytes: int,
) -> FoundImage:
    rank = manifest.ranks[0]
    graph, *storages = rank.parts
    layout = _laid_out(graph.size, [(part.size, part.device, part.pinned) for part in storages])
    there = set() if before is None else set(_placed(before.layout, before.manifest.ranks[0]))
    new = [chunk for place, chunk in _placed_with(layout, rank) if place not in there]
    fill(into, layout, new, get, hands=hands)
    fetched = sum(chunk.size for chunk in new)
    here: HeldChunks = {} if before is None else before.beside
    beside = here
    if 0 < sum(part.size for second in manifest.ranks[1:2] for part in second.parts) <= ahead_bytes:
        beside = _held(manifest.ranks[1], here, get, hands)
        fetched += sum(len(body) for address, body in beside.items() if address not in here)
    return FoundImage(
        sha256=sha256, layout=layout, manifest=manifest, fetched_bytes=fetched, beside=beside
    )


def _held(
    rank: RankImage, here: HeldChunks, get: Callable[[Chunk], Bytes], hands: int
) -> HeldChunks:
    """Return all chunks of an image. Chunks that are already here are not fetched again."""
    wanted = {chunk.address: chunk for chunk in rank.chunks}
    new = [chunk for address, chunk in wanted.items() if address not in here]
    fetched = {c.address: body for c, body in zip(new, _all_hands(hands, get, new), strict=True)}
    return {address: here.get(address) or fetched[address] for address in wanted}


def _laid_out(graph_bytes: int, storages: list[tuple[int, str, bool]]) -> Layout:
    """Lay out the image with free space behind the graph.

    So storages keep their places when the graph grows.
    """
    room = -(-graph_bytes // GRAPH_ROOM_BYTES) * GRAPH_ROOM_BYTES
    layout = laid_out(room, storages)
    return replace(layout, graph=replace(layout.graph, size=graph_bytes))


_Place = tuple[str, tuple[tuple[int, int], ...]]  # a chunk, and the places of its spans in a slab


def _placed_with(layout: Layout, rank: RankImage) -> Iterator[tuple[_Place, Chunk]]:
    extents = (layout.graph, *layout.storages)
    for chunk in rank.chunks:
        spans = tuple((extents[s.part].offset + s.offset, s.size) for s in chunk.spans)
        yield (chunk.address, spans), chunk


def _placed(layout: Layout, rank: RankImage) -> Iterator[_Place]:
    return (place for place, _ in _placed_with(layout, rank))


def fill(
    into: int,
    layout: Layout,
    chunks: Sequence[Chunk],
    get: Callable[[Chunk], Bytes],
    *,
    hands: int,
) -> None:
    """Write chunks into a memfd; `get` returns their checked bytes."""
    extents = (layout.graph, *layout.storages)
    if not layout.end:
        return
    # Allocate all memory now, or fail: with a page missing later, the process would die of SIGBUS.
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
    """Move a damaged chunk away, so that the next write of the same bytes stores them again."""
    log.error(
        "%s; it is set aside, and the next checkpoint with these bytes writes it again", damaged
    )
    with suppress(OSError):
        store.chunks(tenant).set_aside(address)
