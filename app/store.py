"""The store: bytes by their SHA-256, in a folder that every host of a deployment sees.

A blob is written to a temporary name, flushed, and renamed, so a name in the store is always a
whole blob.  Nothing is ever overwritten.  Both sides use it: the API keeps uploaded bundles here,
device workers keep checkpoints and outputs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PIECE = 1 << 20


class Damaged(Exception):
    """A blob's bytes are not those its name promises, or it is not there."""

    def __init__(self, sha256: str, found: str) -> None:
        self.sha256 = sha256
        super().__init__(f"blob {sha256[:12]}… in the store is damaged: {found}")


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def put(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Durably keep the bytes; returns their SHA-256 and their number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(prefix="incoming-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as out:
                for piece in pieces:
                    digest.update(piece)
                    size += len(piece)
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
            self._publish(name, digest.hexdigest())
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return digest.hexdigest(), size

    def put_file(self, source: Path) -> tuple[str, int]:
        with source.open("rb") as file:
            return self.put(_pieces(file))

    def verified(self, sha256: str) -> Path:
        """The blob's path, after reading it through; raises Damaged."""
        path = self.path(sha256)
        if not path.exists():
            raise Damaged(sha256, "it is not there")
        with path.open("rb") as file:
            digest = hashlib.sha256()
            for piece in _pieces(file):
                digest.update(piece)
        if digest.hexdigest() != sha256:
            raise Damaged(sha256, f"its bytes hash to {digest.hexdigest()[:12]}…")
        return path

    def delete(self, sha256: str, *, older_than_s: float = 0.0) -> None:
        path = self.path(sha256)
        if path.exists() and time.time() - path.stat().st_mtime >= older_than_s:
            path.unlink(missing_ok=True)

    def _publish(self, name: str, sha256: str) -> None:
        path = self.path(sha256)
        path.parent.mkdir(exist_ok=True)
        os.chmod(name, 0o444)
        os.rename(name, path)
        for folder in (path.parent, self.folder):
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def _pieces(file: object) -> Iterator[bytes]:
    while piece := file.read(PIECE):  # type: ignore[attr-defined]
        yield piece
