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
from pathlib import Path, PurePosixPath
from typing import IO, Any

from app.storage.backend import make_private

FILES_LIMIT = 5_000
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
        path.chmod(0o755 if stat.S_ISDIR(path.lstat().st_mode) else 0o444)


def _unpack(archive: Path, into: Path) -> None:
    total, seen = 0, set[str]()
    for name, file in _entries(archive):
        path = _checked(name)
        if path.as_posix().casefold() in seen:
            raise BadBundle(f"{name}: two entries have this name")
        seen.add(path.as_posix().casefold())
        if len(seen) > FILES_LIMIT:
            raise BadBundle(f"more than {FILES_LIMIT} files")
        total += _write(file, into / path, TOTAL_LIMIT_BYTES - total)


def _entries(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield all plain files of a zip or tar; raises BadBundle for links and the like."""
    try:
        if zipfile.is_zipfile(archive):
            yield from _of_zip(archive)
        else:
            yield from _of_tar(archive)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError) as error:
        raise BadBundle(f"the bundle is neither a valid zip nor a valid tar: {error}") from error


def _of_zip(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for entry in opened.infolist():
            kind = entry.external_attr >> 16 & 0o170000
            if kind not in (0, 0o100000, 0o040000):
                raise BadBundle(f"{entry.filename}: only plain files and folders are taken")
            if entry.flag_bits & 1:
                raise BadBundle(f"{entry.filename} is encrypted")
            if not entry.is_dir():
                with opened.open(entry) as file:
                    yield entry.filename, file


def _of_tar(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as opened:
        for entry in opened:
            if entry.isdir():
                continue
            file = opened.extractfile(entry) if entry.isreg() else None
            if file is None:
                raise BadBundle(f"{entry.name}: only plain files and folders are taken")
            yield entry.name, file


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(unicodedata.normalize("NFC", name))
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise BadBundle(f"{name!r} is outside the bundle")
    if len(path.parts) > DEPTH_LIMIT:
        raise BadBundle(f"{name!r} lies deeper than {DEPTH_LIMIT} folders")
    return path


def _write(file: IO[bytes], path: Path, limit_bytes: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags: Any = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    written = 0
    with os.fdopen(os.open(path, flags, 0o444), "wb") as out:
        while piece := file.read(_PIECE):
            written += len(piece)
            if written > limit_bytes:
                raise BadBundle(f"more than {TOTAL_LIMIT_BYTES} bytes when unpacked")
            out.write(piece)
    return written
