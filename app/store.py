"""The store: blobs by their SHA-256, manifests by theirs, chunks; in a folder or a bucket.

Both sides use it: the API keeps uploaded bundles here, device workers keep checkpoints and outputs.
A blob may be anybody's (equal bytes are kept once); manifests and chunks are one tenant's alone.
Nothing is ever overwritten, and whatever is read is checked against its name.

How long things stay that nothing refers to is `GRACE_S`: see `app.sweeping`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

from app.chunks import CONDEMNED, Chunks, Damaged, fetched
from app.core.manifest import BadManifest, Manifest, decode
from app.places import INCOMING, Bytes, Folder, Missing, Place, close_to_others
from app.signing import BadSignature, unsealed

T = TypeVar("T")

PIECE = 1 << 20
#: What somebody saw in the store stays there for so long, whatever happens to whoever names it.  A
#: writer relies on half of it, so that is how long writing a checkpoint may take.
GRACE_S = 3600.0

BLOBS, MANIFESTS = "blobs", "manifests"
UPLOADS = "uploads"  # parts of what is not a blob yet

__all__ = ["BLOBS", "GRACE_S", "MANIFESTS", "UPLOADS", "Damaged", "Store", "place_at"]


class OtherBytes(Exception):
    """What was to be put under a hash has another one, `found`; nothing was kept."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(f"the bytes hash to {found}")


def place_at(address: str | Path) -> Place:
    """A folder's path, or "s3://bucket/prefix"."""
    if str(address).startswith("s3://"):
        from app.bucket import Bucket  # an engine of its own: loaded only where it is used

        return Bucket(str(address))
    close_to_others(Path(address), BLOBS, INCOMING)
    return Folder(Path(address))


class Store:
    def __init__(self, place: Place, *, grace_s: float = GRACE_S) -> None:
        self.place, self.grace_s = place, grace_s

    @classmethod
    def at(cls, address: str | Path) -> Store:
        return cls(place_at(address))

    # --- blobs ---

    def has(self, sha256: str) -> bool:
        return self.place.size(blob(sha256)) is not None

    def put(self, pieces: Iterable[Bytes], *, promised: str | None = None) -> tuple[str, int]:
        """Durably keep the bytes; returns their SHA-256 and their number.

        Raises OtherBytes if that is not the hash that was `promised`.
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
        """A file with the blob's bytes, after reading it through; raises Damaged."""
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

    def read(self, sha256: str, start: int, end: int, *, whole: bool) -> Iterator[Bytes]:
        """The blob's bytes from `start` to `end`, piece by piece; raises Damaged, at once if it is
        not there.

        A part of a blob is given as it is.  The `whole` is checked on the way: of one that is
        damaged the last piece never comes.
        """
        pieces = self._found(sha256, lambda name: self.place.read(name, start, end))
        return _checked(pieces, sha256) if whole else pieces

    def _found(self, sha256: str, look: Callable[[str], T]) -> T:
        """What `look` gives for the blob, also for one that is condemned; raises Damaged."""
        for name in (blob(sha256), f"{CONDEMNED}/{blob(sha256)}"):
            with suppress(Missing):
                return look(name)
        raise Damaged(f"blob {sha256[:12]}…", "it is not there")

    # --- checkpoints ---

    def chunks(self, tenant: str) -> Chunks:
        return Chunks(self.place, tenant)

    def put_manifest(self, tenant: str, sealed: bytes) -> str:
        """Durably keep a signed manifest; returns its SHA-256."""
        sha256 = hashlib.sha256(sealed).hexdigest()
        self.place.keep([sealed], lambda: manifest(tenant, sha256))
        return sha256

    def manifest(self, tenant: str, sha256: str, *, key: str) -> Manifest:
        """The manifest, if it is one of this tenant and `key` signed it; raises Damaged."""
        return self.manifest_in(self.sealed(tenant, sha256), tenant, key=key)

    def manifest_in(self, sealed: bytes, tenant: str, *, key: str) -> Manifest:
        """The manifest in these bytes, likewise, wherever they are from; raises Damaged."""
        what = f"manifest {hashlib.sha256(sealed).hexdigest()[:12]}…"
        try:
            found = decode(unsealed(sealed, key=key))
        except (BadSignature, BadManifest) as error:
            raise Damaged(what, str(error)) from error
        if found.about.tenant != tenant or not found.ranks:
            raise Damaged(what, f"it is one of tenant {found.about.tenant}")
        return found

    def sealed(self, tenant: str, sha256: str) -> bytes:
        """A signed manifest as it was put; raises Damaged."""
        what = f"manifest {sha256[:12]}…"
        try:
            sealed = fetched(self.place, manifest(tenant, sha256))
        except Missing:
            raise Damaged(what, "it is not there") from None
        if (digest := hashlib.sha256(sealed).hexdigest()) != sha256:
            raise Damaged(what, f"its bytes hash to {digest[:12]}…")
        return sealed


def _checked(pieces: Iterator[Bytes], sha256: str) -> Iterator[Bytes]:
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
    """The name of a blob in its place."""
    return f"{BLOBS}/{sha256[:2]}/{sha256}"


def manifest(tenant: str, sha256: str) -> str:
    """The name of a manifest in its place."""
    return f"{MANIFESTS}/{tenant}/{sha256[:2]}/{sha256}"


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece
