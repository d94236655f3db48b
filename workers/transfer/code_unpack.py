"""Unpacks a bundle, the tenant's code, into a folder that its resident may read.

A resident has its own user, so all users may read the unpacked files.  No other user can reach
them: the folders above belong to the device worker alone, and the sandbox shows the resident only
the folder itself.

Archives are not trusted: only plain files and folders are taken, names must stay inside, and the
bytes actually read are counted.  Nothing of a bundle is imported or run here.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import tempfile
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from app.storage.backend import make_private

ENTRIES_LIMIT = 100_000  # files and folders that an archive names
DEPTH_LIMIT = 16
TOTAL_LIMIT_BYTES = 512 * 2**20
_PIECE = 1 << 20


class BadBundle(Exception):
    """Raised when an archive must not be unpacked; names the entry and the reason."""


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack the archive into `folder`, read-only, completely or not at all; return `folder`."""
    if folder.is_dir():
        return folder
    make_private(folder.parent)
    making = Path(tempfile.mkdtemp(prefix="unpacking-", dir=folder.parent))
    try:
        _unpack(archive, making)
        _let_residents_read(making)
        os.rename(making, folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        if folder.is_dir():
            return folder  # another thread or worker was faster
        raise
    return folder


def _let_residents_read(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):  # whatever the umask of this process
        mode = path.lstat().st_mode
        path.chmod(0o755 if stat.S_ISDIR(mode) else 0o555 if mode & stat.S_IXUSR else 0o444)


def _unpack(archive: Path, into: Path) -> None:
    total, seen = 0, set[str]()
    for number, entry in enumerate(_entries(archive)):
        path = _checked(entry.name)
        if number >= ENTRIES_LIMIT:
            raise BadBundle(f"more than {ENTRIES_LIMIT} files and folders")
        if path.as_posix().casefold() in seen:
            raise BadBundle(f"{entry.name}: two entries have this name")
        if entry.file is None:
            (into / path).mkdir(parents=True, exist_ok=True)
        else:
            seen.add(path.as_posix().casefold())
            total += _write(entry, into / path, TOTAL_LIMIT_BYTES - total)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file of an archive, or a folder, which has no `file`."""

    name: str
    file: IO[bytes] | None = None
    executable: bool = False


def _entries(archive: Path) -> Iterator[_Entry]:
    """Yield all files and folders of a zip or tar; raises BadBundle for links and the like."""
    try:
        if zipfile.is_zipfile(archive):
            yield from _of_zip(archive)
        else:
            yield from _of_tar(archive)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError) as error:
        raise BadBundle(f"the bundle is neither a valid zip nor a valid tar: {error}") from error


def _of_zip(archive: Path) -> Iterator[_Entry]:
    with zipfile.ZipFile(archive) as opened:
        for entry in opened.infolist():
            mode = entry.external_attr >> 16  # 0 for archives of systems without modes
            kind = mode & 0o170000
            if kind not in (0, 0o100000, 0o040000):
                raise BadBundle(f"{entry.filename}: only plain files and folders are taken")
            if entry.flag_bits & 1:
                raise BadBundle(f"{entry.filename} is encrypted")
            if entry.is_dir() or kind == 0o040000:
                yield _Entry(entry.filename)
                continue
            with opened.open(entry) as file:
                yield _Entry(entry.filename, file, bool(mode & stat.S_IXUSR))


def _of_tar(archive: Path) -> Iterator[_Entry]:
    with tarfile.open(archive) as opened:
        for entry in opened:
            if entry.isdir():
                if entry.name not in (".", "./"):
                    yield _Entry(entry.name)
                continue
            file = opened.extractfile(entry) if entry.isreg() else None
            if file is None:
                raise BadBundle(f"{entry.name}: only plain files and folders are taken")
            yield _Entry(entry.name, file, bool(entry.mode & stat.S_IXUSR))


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(unicodedata.normalize("NFC", name))
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise BadBundle(f"{name!r} is outside the bundle")
    if len(path.parts) > DEPTH_LIMIT:
        raise BadBundle(f"{name!r} lies deeper than {DEPTH_LIMIT} folders")
    return path


def _write(entry: _Entry, path: Path, limit_bytes: int) -> int:
    assert entry.file is not None, "a folder has no bytes"
    path.parent.mkdir(parents=True, exist_ok=True)
    flags: Any = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    written = 0
    with os.fdopen(os.open(path, flags, 0o555 if entry.executable else 0o444), "wb") as out:
        while piece := entry.file.read(_PIECE):
            written += len(piece)
            if written > limit_bytes:
                raise BadBundle(f"more than {TOTAL_LIMIT_BYTES} bytes when unpacked")
            out.write(piece)
    return written
