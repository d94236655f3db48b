"""The store: blobs and manifests by their SHA-256, and chunks; in a folder or a bucket.

Both sides use it: the API stores uploaded bundles, device workers store checkpoints and outputs.  A
blob may belong to any tenant (equal bytes are stored once); manifests and chunks belong to one
tenant.  Nothing is ever overwritten, and whatever is read is checked against its name.

Data that nothing refers to stays for `GRACE_S`: see `app.storage.garbage_collector`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

from app.core.model.checkpoints.manifest import BadManifest, Manifest, decode
from app.storage.backend import INCOMING, Bytes, Folder, Missing, Place, close_to_others
from app.storage.chunk_cipher import ChunkCipher, Ciphers, NoImageKey
from app.storage.chunks import CONDEMNED, Chunks, Damaged, fetched
from app.storage.signing import BadSignature, unsealed

T = TypeVar("T")

PIECE = 1 << 20
#: Data that was seen in the store stays there for this time, in seconds, even if the last reference
#: to it goes. A writer relies on half of it, so writing a checkpoint may take that long.
GRACE_S = 3600.0
PATIENCE_S = 30.0  # time for a bucket that refuses to take a call after all

BLOBS, MANIFESTS = "blobs", "manifests"
UPLOADS = "uploads"  # parts of unfinished uploads

__all__ = ["BLOBS", "GRACE_S", "MANIFESTS", "UPLOADS", "Damaged", "Store", "place_at"]


class OtherBytes(Exception):
    """The bytes have the hash `found`, not the hash that was promised; nothing was kept."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(f"the bytes hash to {found}")


def place_at(address: str | Path, *, patience_s: float = PATIENCE_S) -> Place:
    """Return the place at a folder's path, or at "s3://bucket/prefix".

    A bucket that refuses is asked again for `patience_s`.
    """
    if str(address).startswith("s3://"):
        from app.storage.s3_backend import Bucket  # loads an S3 client: only where it is used

        return Bucket(str(address), patience_s=patience_s)
    close_to_others(Path(address), BLOBS, INCOMING)
    return Folder(Path(address))


class Store:
    def __init__(self, place: Place, *, grace_s: float = GRACE_S) -> None:
        self.place, self.grace_s = place, grace_s

    @classmethod
    def at(cls, address: str | Path, *, patience_s: float = PATIENCE_S) -> Store:
        return cls(place_at(address, patience_s=patience_s))

    # --- blobs ---

    def has(self, sha256: str) -> bool:
        return self.place.size(blob(sha256)) is not None

    def put(self, pieces: Iterable[Bytes], *, promised: str | None = None) -> tuple[str, int]:
        """Durably store the bytes; returns their SHA-256 and their number.

        Raises OtherBytes if the hash differs from the `promised` one.
        """
        digest, size = hashlib.sha256(), 0

        def counted() -> Iterator[Bytes]:
            nonlocal size
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                yield piece

        def named() -> str:
            if promised is not None and digest.hexdigest() != promised:
                raise OtherBytes(digest.hexdigest())
            return blob(digest.hexdigest())

        self.place.keep(counted(), named)
        return digest.hexdigest(), size

    def put_file(self, source: Path) -> tuple[str, int]:
        with source.open("rb") as file:
            return self.put(_pieces(file))

    def open(self, sha256: str) -> IO[bytes]:
        """Return a file with the blob's bytes, after reading them all as a check; raises
        Damaged.
        """
        file = self._found(sha256, self.place.open)
        try:
            digest = hashlib.sha256()
            for piece in _pieces(file):
                digest.update(piece)
            if digest.hexdigest() != sha256:
                raise _damaged(sha256, digest.hexdigest())
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def read(
        self, sha256: str, start: int, end: int, *, whole: bool
    ) -> Iterator[bytes | memoryview]:
        """Yield the blob's bytes from `start` to `end`; raises Damaged, at once if the blob is
        missing.

        A part of a blob is not checked.  With `whole`, the hash is checked on the way: if it is
        wrong, the last piece is not yielded.
        """
        pieces = self._found(sha256, lambda name: self.place.read(name, start, end))
        return _checked(pieces, sha256) if whole else pieces

    def _found(self, sha256: str, look: Callable[[str], T]) -> T:
        """Return what `look` returns for the name of the blob; raises Damaged if it is missing.

        A blob that is to be deleted is still found under its other name.
        """
        for name in (blob(sha256), f"{CONDEMNED}/{blob(sha256)}"):
            with suppress(Missing):
                return look(name)
        raise Damaged(f"blob {sha256[:12]}…", "it is not there")

    # --- checkpoints ---

    def chunks(self, tenant: str, cipher: ChunkCipher | None = None) -> Chunks:
        return Chunks(self.place, tenant, cipher)

    def chunks_of(self, manifest: Manifest, ciphers: Ciphers) -> Chunks:
        """Return the chunks of an image, to be read; raises NoImageKey."""
        if not manifest.image_key:
            return self.chunks(manifest.about.tenant)
        if (cipher := ciphers.get(manifest.image_key)) is None:
            raise NoImageKey("the image is encrypted, and its key is not here")
        return self.chunks(manifest.about.tenant, cipher)

    def put_manifest(self, tenant: str, sealed: bytes) -> str:
        """Durably store a signed manifest; returns its SHA-256."""
        sha256 = hashlib.sha256(sealed).hexdigest()
        self.place.keep([sealed], lambda: manifest(tenant, sha256))
        return sha256

    def manifest(self, tenant: str, sha256: str, *, key: str) -> Manifest:
        """Return the manifest if it is this tenant's and `key` signed it; raises Damaged."""
        return self.manifest_in(self.sealed(tenant, sha256), tenant, key=key)

    def manifest_in(self, sealed: bytes, tenant: str, *, key: str) -> Manifest:
        """Return the manifest in these bytes, from any source, with the same checks; raises
        Damaged.
        """
        what = f"manifest {hashlib.sha256(sealed).hexdigest()[:12]}…"
        try:
            found = decode(unsealed(sealed, key=key))
        except (BadSignature, BadManifest) as error:
            raise Damaged(what, str(error)) from error
        if found.about.tenant != tenant or not found.ranks:
            raise Damaged(what, f"it belongs to tenant {found.about.tenant}")
        return found

    def sealed(self, tenant: str, sha256: str) -> bytes:
        """Return a signed manifest as it was put; raises Damaged."""
        what = f"manifest {sha256[:12]}…"
        try:
            sealed = fetched(self.place, manifest(tenant, sha256))
        except Missing:
            raise Damaged(what, "it is not there") from None
        if (digest := hashlib.sha256(sealed).hexdigest()) != sha256:
            raise Damaged(what, f"its bytes hash to {digest[:12]}…")
        return sealed


def _checked(pieces: Iterator[bytes | memoryview], sha256: str) -> Iterator[bytes]:
    digest, last = hashlib.sha256(), b""
    for piece in pieces:
        if last:
            yield last
        digest.update(piece)
        last = bytes(piece)
    if digest.hexdigest() != sha256:
        raise _damaged(sha256, digest.hexdigest())
    yield last


def _damaged(sha256: str, found: str) -> Damaged:
    return Damaged(f"blob {sha256[:12]}…", f"its bytes hash to {found[:12]}…")


def blob(sha256: str) -> str:
    """The storage key of a blob."""
    return f"{BLOBS}/{sha256[:2]}/{sha256}"


def manifest(tenant: str, sha256: str) -> str:
    """The storage key of a manifest."""
    return f"{MANIFESTS}/{tenant}/{sha256[:2]}/{sha256}"


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece
