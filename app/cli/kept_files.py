"""Reads single files out of a zip that stays in the service, by ranges of its bytes.

Of the zip only its list of files and the wanted files are transferred.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from app.cli.bundling import UnreadablePath
from app.cli.client import Client, DamagedDownload

READ_BYTES = 1 << 20  # what one call asks for


class RangedFile(io.RawIOBase):
    """Reads the content of a path of the service at any place, as if it were an open file."""

    def __init__(self, client: Client, path: str) -> None:
        """Ask for the size; raises ApiProblem, Unreachable."""
        self._client, self._path, self._at = client, path, 0
        self.size_bytes = client.size_of(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self.size_bytes)
        if end <= self._at:
            return 0
        found = self._client.read_part(self._path, self._at, end)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@contextmanager
def opened_zip(client: Client, path: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip of the service; raises ApiProblem, Unreachable, DamagedDownload."""
    file = io.BufferedReader(RangedFile(client, path), READ_BYTES)
    try:
        with zipfile.ZipFile(file) as found:
            yield found
    except zipfile.BadZipFile as error:
        raise DamagedDownload(f"{path}: {error}") from error


def files_in(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [each for each in archive.infolist() if not each.is_dir()]


def extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> Path:
    """Write a file of the zip into the folder, executable if it was; return its path."""
    try:
        file = Path(archive.extract(info, folder))
        if bits := info.external_attr >> 16 & 0o111:
            file.chmod(file.stat().st_mode | bits)
        return file
    except OSError as error:
        raise UnreadablePath(f"cannot write to {folder}: {error.strerror or error}") from error


def is_wanted(name: str, patterns: list[str]) -> bool:
    """True if the file is named, lies in a named folder, or matches a pattern, e.g. `out/*.pt`."""
    return any(
        fnmatchcase(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/")
        for pattern in patterns
    )
