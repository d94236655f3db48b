"""Reads and writes the manifest of a datablock that is a folder: its files by path, size, SHA-256
and mode.

The files lie in the store as blobs, each once for all folders that have it. The manifest is a blob
too, and its SHA-256 names the folder. Equal folders have equal bytes here. A manifest has plain
files only: no links, no devices, and no path that leaves the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "folder"  # the `format` of a datablock that is a folder
MAX_FILES = 10_000
SMALL_FILES = 1_000  # most files whose bytes one call may have
SMALL_BYTES = 2 * 2**20  # most bytes of them together, as a client sends them
MAX_PATH = 1024  # characters
MAX_NAME = 255  # bytes of one name in a path, as file systems allow
MAX_DEPTH = 32
MAX_FILE_BYTES = 2**50
# the hash of an empty file; the store need not have such a file
EMPTY = hashlib.sha256(b"").hexdigest()

_HASH = re.compile(r"[0-9a-f]{64}")


class BadFolderManifest(Exception):
    """Raised for bytes that are no manifest of a folder; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFile:
    """One file; only the executable bit of its mode is kept."""

    path: str
    size_bytes: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """All files, by path."""

    files: tuple[FolderFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def contents(self) -> dict[str, int]:
        """Return the size of each different file by its SHA-256, without empty ones."""
        return {file.sha256: file.size_bytes for file in self.files if file.size_bytes}


def folder_of(files: Iterable[FolderFile]) -> FolderManifest:
    """Return the folder with these files; raises BadFolderManifest."""
    ordered = tuple(sorted(files, key=lambda file: file.path))
    for _, told in faults(ordered):
        raise BadFolderManifest(told)
    return FolderManifest(ordered)


def faults(files: Sequence[FolderFile]) -> Iterator[tuple[int, str]]:
    """Yield (number of the file, what is wrong) for each file that the folder cannot have."""
    if not 1 <= len(files) <= MAX_FILES:
        yield 0, f"a folder must have from 1 to {MAX_FILES} files; got {len(files)}"
        return
    sizes = dict[str, int]()
    seen, above = set[str](), set[str]()
    for file in files:
        seen.add(file.path)
        parts = file.path.split("/")
        above |= {"/".join(parts[:n]) for n in range(1, len(parts))}
    paths = set[str]()
    for n, file in enumerate(files):
        if told := _wrong_with(file):
            yield n, told
        elif file.path in paths:
            yield n, f"the path {file.path!r} is used twice"
        elif file.path in above:
            yield n, f"{file.path!r} is a file and a folder"
        elif sizes.setdefault(file.sha256, file.size_bytes) != file.size_bytes:
            yield n, f"{file.path!r} has the hash of a file of another size"
        paths.add(file.path)


def _wrong_with(file: FolderFile) -> str:
    if not is_inside(file.path):
        return f"{file.path[:80]!r} is not a plain path inside the folder"
    if not 0 <= file.size_bytes <= MAX_FILE_BYTES or not _HASH.fullmatch(file.sha256):
        return f"the size or the hash of {file.path!r} is not well formed"
    if (file.size_bytes == 0) != (file.sha256 == EMPTY):
        return f"{file.path!r} is empty by its size or by its hash, not by both"
    return ""


def is_inside(path: str) -> bool:
    """True if the path is relative and made of plain names, so that it names exactly one place."""
    parts = path.split("/")
    if len(path) > MAX_PATH or len(parts) > MAX_DEPTH or not path.isprintable():
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME for part in parts)


def encoded(folder: FolderManifest) -> bytes:
    """Return the bytes of the manifest; `decoded` reads them."""
    files = [[f.path, f.size_bytes, f.sha256, int(f.executable)] for f in folder.files]
    text = json.dumps({FOLDER: 1, "files": files}, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def decoded(body: bytes) -> FolderManifest:
    """Read a manifest; raises BadFolderManifest unless it is exactly what `encoded` writes."""
    try:
        folder = folder_of(_file(row) for row in _rows(json.loads(body)))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFolderManifest(
            f"the manifest of the folder cannot be read: {error}"[:200]
        ) from error
    if encoded(folder) != body:
        raise BadFolderManifest("the manifest of the folder is not in its canonical form")
    return folder


def _rows(said: Any) -> list[Any]:
    if not isinstance(said, dict) or said.keys() != {FOLDER, "files"} or said[FOLDER] != 1:
        raise BadFolderManifest("the manifest of the folder must be a list of files")
    rows: list[Any] = said["files"]
    return rows


def _file(row: Any) -> FolderFile:
    path, size_bytes, sha256, executable = row
    kinds = (str, int, str, int)
    if tuple(map(type, row)) != kinds or executable not in (0, 1):
        raise TypeError("a file is [path, size, SHA-256, 0 or 1]")
    return FolderFile(path=path, size_bytes=size_bytes, sha256=sha256, executable=bool(executable))
