"""Finds the files that a command leaves behind: its artifacts, and files that are not kept.

Artifacts are the paths that the descriptor names, or what the command wrote to one of the usual
folders (`provisions.artifacts`). They leave as a zip, in which each file has its path in the
working folder; files below `artifacts` have their path inside that folder.

Nothing is written: a command that has filled its disk, or more than half of it, keeps its files.
"""

from __future__ import annotations

import errno
import filecmp
import io
import os
import stat
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from app.core.model.protocol.wellformed import FILES_MOST, SENTENCE_MOST
from app.core.model.provisions.artifacts import USUAL_FOLDERS
from workers.commands.working_folder import INTERNAL

JSON = dict[str, Any]

_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
_SHORT = USUAL_FOLDERS[0]  # files of this folder have short names in the zip
_CACHES = frozenset({"__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Lists the files that a command left: paths in its working folder, in order."""

    kept: tuple[str, ...]
    dropped: tuple[str, ...]

    @classmethod
    def of(
        cls, folder: Path, code: Path, named: Sequence[str], outputs: Collection[str]
    ) -> Results:
        """Sort the files of `folder`, which began as a copy of `code`; raises OSError.

        A file counts as dropped if the command wrote it, and it is neither an output nor hidden.
        """
        kept, dropped = list[str](), list[str]()
        for path in plain_files(folder):
            is_kept = _is_below(path, named or USUAL_FOLDERS)
            # a named path is kept as a whole
            if not (is_kept and named) and _is_unchanged(folder / path, code / path):
                continue
            if is_kept:
                kept.append(path)
            elif not _is_expected(path, outputs):
                dropped.append(path)
        return cls(kept=tuple(sorted(kept)), dropped=tuple(sorted(dropped)))

    def told(self, folder: Path) -> JSON:
        """Describe the dropped files; {} if there are none."""
        if not self.dropped:
            return {}
        sizes = (os.lstat(folder / path).st_size for path in self.dropped)
        named = (path.encode("utf-8", "replace").decode() for path in self.dropped[:FILES_MOST])
        first = [name[:SENTENCE_MOST] for name in named]
        return {"files": len(self.dropped), "bytes": sum(sizes), "first": first}


def plain_files(folder: Path) -> Iterator[str]:
    """Yield the paths of the plain files in a working folder; links are not followed."""
    for parent, folders, names in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        if not inside.parts and INTERNAL in folders:
            folders.remove(INTERNAL)
        for name in names:
            with suppress(FileNotFoundError):
                mode = os.lstat(path := Path(parent, name)).st_mode
                if stat.S_ISREG(mode):
                    if not mode & stat.S_IRUSR:
                        path.chmod(mode | stat.S_IRUSR)  # it is the command's own
                    yield str(inside / name)


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in folders)


def _is_unchanged(path: Path, original: Path) -> bool:
    """True if the file has the content that it has in the bundle."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return not original.is_symlink() and filecmp.cmp(path, original, shallow=False)
    return False


def _is_expected(path: str, outputs: Collection[str]) -> bool:
    """True if nobody misses the file: it is an output, hidden, or the cache of a program."""
    parts = path.split("/")
    is_output = len(parts) == 1 and any(
        path == out or path.startswith(f"{out}.") for out in outputs
    )
    return is_output or parts[0].startswith(".") or not _CACHES.isdisjoint(parts)


# --- the zip --------------------------------------------------------------------------------------


class Zipped:
    """Represents the zip of some files of a folder, which is made while it is read."""

    def __init__(self, folder: Path, paths: Sequence[str]) -> None:
        self._folder = folder
        self._files = dict(_named(paths))
        self.size_bytes = sum(map(len, self._written(lambda path: _zeros_of(folder / path))))

    def pieces(self) -> Iterator[bytes]:
        """Yield the zip; raises OSError if a file cannot be read, or has changed since."""
        return self._written(lambda path: _content_of(self._folder / path))

    def _written(self, content: Any) -> Iterator[bytes]:
        """Yield the zip of these files with such contents, uncompressed.

        So its length depends on the lengths of the files alone, and one file can be read from it.
        """
        pipe = _Pipe()
        with zipfile.ZipFile(pipe, "w", strict_timestamps=False) as archive:
            for name, path in self._files.items():
                info = zipfile.ZipInfo.from_file(self._folder / path, name, strict_timestamps=False)
                with archive.open(info, "w", force_zip64=True) as entry:
                    for piece in content(path):
                        entry.write(piece)
                        yield from pipe.taken()
        yield from pipe.taken()


class _Pipe(io.RawIOBase):
    """Takes what `zipfile` writes; it cannot seek."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def write(self, data: Any, /) -> int:
        self._held.append(bytes(data))
        return len(data)

    def taken(self) -> list[bytes]:
        held, self._held = self._held, []
        return held


def _named(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name in the zip, path)."""
    taken = {path for path in paths if not path.startswith(f"{_SHORT}/")}
    for path in paths:
        short = path.removeprefix(f"{_SHORT}/")
        name = path if short in taken and short != path else short
        yield name.encode("utf-8", "backslashreplace").decode(), path


def _zeros_of(path: Path) -> Iterator[bytes]:
    left = os.lstat(path).st_size
    while left:
        yield _ZEROS[: min(left, _PIECE)]
        left -= min(left, _PIECE)


def _content_of(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            if not (piece := file.read(min(left, _PIECE))):
                raise OSError(errno.EIO, "the file became shorter while it was read", str(path))
            yield piece
            left -= len(piece)


def opened(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
