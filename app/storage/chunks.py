"""Chunks: pieces of images, stored by the BLAKE3 hash of their bytes, separately for each tenant.

Tenants never share a chunk, so no tenant can find out what another one has stored.  The last byte
of a stored chunk names its encoding: plain, or zstd if a sample showed that compression pays; each
of them also encrypted (`app.storage.chunk_cipher`).  The address is the hash of the plain bytes,
whatever the encoding; of encrypted chunks it is a keyed hash.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zstandard
from blake3 import blake3

from app.storage.backend import Batch, Bytes, Missing, Place
from app.storage.chunk_cipher import ChunkCipher

PLAIN, ZSTD = b"\x00", b"\x01"
#: The encodings of encrypted chunks, by the encoding of their content.
ENCRYPTED = {PLAIN: b"\x02", ZSTD: b"\x03"}
_DECRYPTED = {sealed: encoding for encoding, sealed in ENCRYPTED.items()}
SAMPLE_BYTES = 16 * 2**10  # size of a sample: taken from the beginning, the middle and the end
# if a sample's compressed size is less than this part of its plain size, the chunk is compressed
PAYS = 0.75
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,100}")

CHUNKS = "chunks"
CONDEMNED = "condemned"  # prefix of names that are to be deleted (`app.storage.garbage_collector`)
DAMAGED = "damaged"  # prefix of chunks that were found to be damaged


class Damaged(Exception):
    """Raised if bytes in the store do not match their name, or are missing.

    `what` names them, like "chunk ab12cd34ef56..."; `found` says what was found instead.
    """

    def __init__(self, what: str, found: str) -> None:
        self.what, self.found = what, found
        super().__init__(f"{what} in the store is damaged: {found}")


def fetched(place: Place, name: str) -> bytes:
    """Return the bytes under a name, even if it is condemned; raises Missing.

    A reader that began before the name was condemned must not notice it.  The name may also be
    moved back during this call, so the first place is tried once more at the end.
    """
    for where in (name, f"{CONDEMNED}/{name}"):
        try:
            return place.get(where)
        except Missing:
            continue
    return place.get(name)


class Chunks:
    """Stores the chunks of one tenant: encrypted with the key of `cipher`, or plain without it."""

    def __init__(self, place: Place, tenant: str, cipher: ChunkCipher | None = None) -> None:
        if not _TENANT.fullmatch(tenant):
            raise ValueError(f"not the id of a tenant: {tenant!r:.120}")
        self.place, self.tenant, self.cipher = place, tenant, cipher
        self.folder = f"{CHUNKS}/{tenant}"

    def name(self, address: str) -> str:
        return f"{self.folder}/{address[:2]}/{address}"

    def address(self, body: Bytes) -> str:
        """Return the address that a chunk with these bytes has."""
        return blake3(body).hexdigest() if self.cipher is None else self.cipher.address(body)

    def has(self, address: str) -> bool:
        """True if the chunk is stored.  False if it is condemned: then it must be put again."""
        return self.place.size(self.name(address)) is not None

    def get(self, address: str, size: int) -> Bytes:
        """Return the chunk's bytes, checked; `size` is the promised number.  Raises Damaged."""
        what = f"chunk {address[:16]}…"
        try:
            body = self._opened(address, fetched(self.place, self.name(address)), size)
        except Missing:
            raise Damaged(what, "it is not there") from None
        except ValueError as error:
            raise Damaged(what, str(error)) from error
        if (digest := self.address(body)) != address:
            raise Damaged(what, f"its bytes hash to {digest[:16]}…")
        return body

    def packed(self, address: str, body: Bytes) -> list[Bytes]:
        """Return the pieces of the chunk as it is stored."""
        *pieces, encoding = packed_up(body)
        if self.cipher is None:
            return [*pieces, encoding]
        encoding = ENCRYPTED[bytes(encoding)]
        return [*self.cipher.encrypted(self.tenant, address, pieces[0], encoding), encoding]

    def _opened(self, address: str, packed: bytes, size: int) -> Bytes:
        """Return the bytes of a chunk that was stored as `packed`; raises ValueError."""
        encoding = packed[-1:]
        if self.cipher is None:
            if encoding in _DECRYPTED:
                raise ValueError("it is encrypted")
            return unpacked(packed, size)
        if encoding not in _DECRYPTED:
            raise ValueError("it is not encrypted, and its image is")
        sealed = memoryview(packed)[:-1]
        body = self.cipher.decrypted(self.tenant, address, sealed, encoding)
        return _decoded(body, _DECRYPTED[encoding], size)

    def set_aside(self, address: str) -> None:
        """Move a damaged chunk away, where it can be examined for a while."""
        name = self.name(address)
        with suppress(Missing):
            self.place.move(name, f"{DAMAGED}/{name}")

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        with self.place.batch() as batch:
            yield Writing(self, batch)


class Writing:
    """Collects chunks that are written together; several threads may use it. `new_bytes` is the
    growth of the store.
    """

    def __init__(self, chunks: Chunks, batch: Batch) -> None:
        self.chunks, self.batch = chunks, batch
        self.new_bytes = 0
        self._claimed: set[str] = set()
        self._lock = threading.Lock()

    def put(self, address: str, body: Bytes) -> None:
        """Store the bytes unless they are there; they have their name after `settle`."""
        with self._lock:
            if address in self._claimed:
                return
            self._claimed.add(address)
        if self.chunks.has(address):
            return
        packed = self.chunks.packed(address, body)
        self.batch.put(self.chunks.name(address), packed)
        with self._lock:
            self.new_bytes += sum(len(piece) for piece in packed)

    def settle(self) -> None:
        self.batch.settle()


# --- encodings ----------------------------------------------------------------------------------


def packed_up(body: Bytes) -> tuple[Bytes, ...]:
    """Return the pieces to write: the bytes, plain or compressed, then the byte of the encoding."""
    if _pays(memoryview(body)):
        small = zstandard.ZstdCompressor(level=1).compress(body)
        if len(small) < len(body):
            return small, ZSTD
    return body, PLAIN


def unpacked(packed: bytes, size: int) -> Bytes:
    """Return the bytes that `packed_up` was given; raises ValueError.

    It never produces more than `size` bytes, whatever the compressed data claims.
    """
    return _decoded(memoryview(packed)[:-1], packed[-1:], size)


def _decoded(rest: Bytes, codec: bytes, size: int) -> Bytes:
    if codec == ZSTD:
        rest = _decompressed(rest, size)
    elif codec != PLAIN:
        told = f"the last of its {len(rest) + len(codec)} bytes, {codec!r}, names no known codec"
        raise ValueError(told)
    if len(rest) != size:
        raise ValueError(f"it has {len(rest)} bytes; its manifest says {size}")
    return rest


def _decompressed(packed: Bytes, size: int) -> bytes:
    try:
        if (says := zstandard.frame_content_size(packed)) != size:
            raise ValueError(f"its header says {says} bytes; its manifest says {size}")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error


def _pays(body: memoryview) -> bool:
    """True if compression pays for a sample.

    Floats of a trained model hardly shrink; zeros and counts do.
    """
    middle = max(0, len(body) // 2 - SAMPLE_BYTES // 2)
    starts = {0, middle, max(0, len(body) - SAMPLE_BYTES)}
    sample = b"".join(body[at : at + SAMPLE_BYTES] for at in sorted(starts))
    return len(zstandard.ZstdCompressor(level=1).compress(sample)) < PAYS * len(sample)
