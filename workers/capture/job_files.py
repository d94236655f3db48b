"""The files of a job's working folder, and the files that it has open.

The working folder belongs to the job. Its files travel as blocks beside the storages, so unchanged
files are not stored again. A restored job finds the folder as it was: a log that was appended to
later is cut back, and a file that came later is gone.

An open file is opened again at its position: for reading anywhere, for writing only in the working
folder. Sockets, pipes and files without a name cannot be restored.
"""

from __future__ import annotations

import bz2
import fcntl
import gzip
import io
import lzma
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from workers.capture.graph_pickler import Capture
from workers.capture.paths import Refused
from workers.capture.rebuild import Surroundings, current, known
from workers.hardware.storages import memory_of

FILES_LIMIT = 10_000
SETTLED_NS = (
    # file system clocks tick coarsely: a change this soon after the last one may not show in the
    # file's time
    100_000_000
)

# --- the working folder ---------------------------------------------------------------------------

#: (path inside the folder, mode, time of change in ns, number of its block, target of a link)
Entry = tuple[str, int, int, int | None, str | None]


@dataclass(frozen=True, slots=True)
class FileContent:
    """The bytes of a file when it was last read, and the status that identified this version."""

    seen: tuple[int, ...]
    bytes: torch.UntypedStorage


def listing(capture: Capture) -> list[Entry]:
    """List the working folder; the bytes of its files become storages. Raises Refused."""
    around = capture.around
    if around.scratch is None:
        return []
    entries, left, read = list[Entry](), around.scratch_limit_bytes, dict[str, FileContent]()
    for found in _below(around.scratch):
        path = os.path.relpath(found.path, around.scratch)
        try:
            status, number, target = found.stat(follow_symlinks=False), None, None
            if stat.S_ISREG(status.st_mode):
                left -= status.st_size
                _must_fit(path, left, len(entries), around)
                read[path] = _read(found.path, status, around.files.get(path), capture.mapped)
                number = capture.number(read[path].bytes)
            elif found.is_symlink():
                target = os.readlink(found.path)
            elif not found.is_dir():
                continue  # skip a socket or a pipe: the process that needs it makes it again
        except FileNotFoundError:
            continue  # the file is gone, for example because a loading process tidied up
        except OSError as error:
            what = f"a file that cannot be read ({error.strerror})"
            raise Refused(
                f"working folder/{path}", what, "Make the file readable for its owner."
            ) from error
        entries.append((path, stat.S_IMODE(status.st_mode), status.st_mtime_ns, number, target))
    around.files = read
    return entries


def _below(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder's content: parents before children, in the same order on every host."""
    found = list[os.DirEntry[str]]()
    with os.scandir(folder) as inside:
        for entry in sorted(inside, key=lambda entry: entry.name):
            found.append(entry)
            if entry.is_dir(follow_symlinks=False):
                found += _below(Path(entry.path))
    return found


def _must_fit(path: str, left_bytes: int, files: int, around: Surroundings) -> None:
    if left_bytes < 0 or files > FILES_LIMIT:
        most = f"at most {around.scratch_limit_bytes} bytes and {FILES_LIMIT} files can be saved"
        raise Refused(
            f"working folder/{path}",
            f"a working folder that is too large to save ({most})",
            "Delete unneeded files, or return them as outputs.",
        )


def _read(
    path: str, status: os.stat_result, before: FileContent | None, mapped: set[str]
) -> FileContent:
    seen: tuple[int, ...] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if before is not None and before.seen == seen and path not in mapped:
        return before
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < SETTLED_NS:
        seen = ()
    storage = torch.UntypedStorage(status.st_size)
    with open(path, "rb", buffering=0) as file:
        view, at = memory_of(storage), 0
        while at < len(view) and (length := file.readinto(view[at:])):
            at += length
    return FileContent(seen, storage)


def restore(
    entries: list[Entry], storages: list[torch.UntypedStorage], around: Surroundings
) -> None:
    """Make the working folder what it was.

    The ranks of a host share one folder: the first rank restores it, and may open files in it,
    while the others wait.
    """
    if around.scratch is None:
        return
    with _alone_in(around.scratch):
        if not _is_restored(entries, storages, around.scratch):
            _empty(around.scratch)
            _fill(entries, storages, around.scratch)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_restored(entries: list[Entry], storages: list[torch.UntypedStorage], folder: Path) -> bool:
    """True if the folder holds exactly the entries."""
    there = [os.path.relpath(found.path, folder) for found in _below(folder)]
    if there != [path for path, *_ in entries]:
        return False
    return all(_is_as(entry, storages, folder / entry[0]) for entry in entries)


def _is_as(entry: Entry, storages: list[torch.UntypedStorage], path: Path) -> bool:
    _, mode, changed_ns, number, target = entry
    if target is not None or path.is_symlink():
        return path.is_symlink() and os.readlink(path) == target
    status = path.stat()
    if (stat.S_IMODE(status.st_mode), status.st_mtime_ns) != (mode, changed_ns):
        return False
    if number is None or not path.is_file():
        return number is None and path.is_dir()
    # Writing to a mapped file does not change its time of change, so compare the bytes.
    return path.read_bytes() == memory_of(storages[number])


def _fill(entries: list[Entry], storages: list[torch.UntypedStorage], scratch: Path) -> None:
    folders = list[tuple[Path, int, int]]()
    for name, mode, changed_ns, number, target in entries:
        path = scratch / name
        if target is not None:
            path.symlink_to(target)
        elif number is None:
            path.mkdir()
            folders.append((path, mode, changed_ns))
        else:
            with path.open("wb", buffering=0) as file:
                write_all(file, memory_of(storages[number]))
            date(path, mode, changed_ns)
    # a folder's time of change lasts only if nothing is added afterwards
    for folder in reversed(folders):
        date(*folder)


def _empty(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all data; a raw file may take less than it is given."""
    at = 0
    while at < len(data):
        at += file.write(data[at:])


def date(path: Path, mode: int, changed_ns: int) -> None:
    """Set a file's mode and time of change.

    Call this last: any later change to the file sets its time again.
    """
    path.chmod(mode)
    os.utime(path, ns=(changed_ns, changed_ns))


# --- open files -----------------------------------------------------------------------------------


def _place(capture: Capture, file: Any, name: Any, *, written: bool) -> tuple[str, str]:
    """Return (which folder, path there) of an open file; raises Refused."""
    if not isinstance(name, str):
        raise Refused(file, "an open file without a name", "Open it by its path.")
    path, around = Path(name).absolute(), capture.around
    for place, folder in (("scratch", around.scratch), ("code", around.code)):
        if folder is not None and path.is_relative_to(folder) and (place != "code" or not written):
            return place, str(path.relative_to(folder))
    if written:
        advice = "Write to the working folder, or close the file before step returns."
        raise Refused(file, "a file open for writing outside the working folder", advice)
    return "host", str(path)


def _found(place: str, name: str) -> Path:
    around = current().around
    folder = {"scratch": around.scratch, "code": around.code, "host": None}[place]
    return Path(name) if folder is None else folder / name


def _must_be_open(file: Any) -> None:
    if file.closed:
        raise Refused(file, "a closed file", "Set the attribute to None instead.")


def _position(file: Any, advice: str = "Open the file within step.") -> int:
    try:
        if file.writable():
            file.flush()
        return int(file.tell())
    except (OSError, ValueError) as error:
        what = f"an open file whose position is unknown ({error})"
        raise Refused(file, what, advice) from error


def _reduce_raw(capture: Capture, file: io.FileIO) -> Any:
    _must_be_open(file)
    place = _place(capture, file, file.name, written=file.writable())
    return open_raw, (*place, file.mode, _position(file))


def _reduce_buffered(capture: Capture, file: Any) -> Any:
    _must_be_open(file)
    if not isinstance(file.raw, io.FileIO):
        raise Refused(file, "an open file that is not a plain one", "Open the file within step.")
    return make_buffered, (type(file), file.raw, _position(file))


def _reduce_text(capture: Capture, file: io.TextIOWrapper) -> Any:
    _must_be_open(file)
    if "\r" in "".join(file.newlines or ""):
        what = "a text file with line ends other than \n"
        raise Refused(file, what, "Open the file in binary mode, and decode the bytes.")
    how = (file.encoding, file.errors, file.line_buffering, file.write_through)
    advice = "Read the file with readline() instead of a loop or next(), or open it in binary mode."
    position = _position(file, advice)
    return make_text, (file.buffer, how, getattr(file, "mode", None), position)


def _reduce_packed(capture: Capture, file: Any) -> Any:
    _must_be_open(file)
    if file.writable():
        advice = "Close the file before step returns; open it again to append."
        raise Refused(file, "a compressed file open for writing", advice)
    inner = file.fileobj if isinstance(file, gzip.GzipFile) else file._fp
    return make_packed, (type(file), inner, _position(file))


def mapped(array: Any) -> Any:
    """Return the memory map that an array views, or None."""
    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    return root if isinstance(root, numpy.memmap) and root.mode in ("r", "r+", "w+") else None


def reduce_mapped(capture: Capture, array: Any, root: Any) -> Any:
    """Pickle an array over a memory map as the file's path and the layout; a restore opens the map
    again.
    """
    if array is root:
        written = root.mode != "r"
        place = _place(capture, root, str(root.filename), written=written)
        if written:
            root.flush()
            capture.mapped.add(str(Path(root.filename).absolute()))
        order = "C" if root.flags.c_contiguous else "F"
        how = ("r+" if written else "r", root.offset, root.shape, order)
        return open_map, (*place, root.dtype, *how)
    offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return view_map, (root, type(array), array.dtype, array.shape, array.strides, offset)


@known
def open_raw(place: str, name: str, mode: str, position: int) -> io.FileIO:
    kept = ~(os.O_TRUNC | os.O_EXCL)
    file = io.FileIO(str(_found(place, name)), mode, opener=lambda p, how: os.open(p, how & kept))
    file.seek(position)
    return file


@known
def make_buffered(cls: Any, raw: io.FileIO, position: int) -> Any:
    file = cls(raw)
    file.seek(position)
    return file


@known
def make_text(buffer: Any, how: tuple[str, str, bool, bool], mode: Any, position: int) -> Any:
    encoding, errors, line_buffering, write_through = how
    file: Any = io.TextIOWrapper(
        buffer, encoding, errors, line_buffering=line_buffering, write_through=write_through
    )
    if mode is not None:
        file.mode = mode
    file.seek(position)
    return file


@known
def make_packed(cls: Any, inner: Any, position: int) -> Any:
    inner.seek(0)
    file = cls(fileobj=inner) if cls is gzip.GzipFile else cls(inner)
    if isinstance(file, gzip.GzipFile):
        file.myfileobj = inner  # so that the inner file is closed with it
    else:
        file._closefp = True
    file.seek(position)
    return file


@known
def open_map(
    place: str, name: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any
) -> Any:
    return numpy.memmap(_found(place, name), dtype, mode, offset, shape, order)


@known
def view_map(
    root: Any, cls: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Any:
    flat = root.reshape(-1, order="A").view(numpy.ndarray).view(numpy.uint8)
    view: Any = numpy.ndarray(shape, dtype, flat, offset, strides)
    return view.view(cls)


_BUFFERED = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom)
REDUCERS: tuple[tuple[Any, Any], ...] = (
    (io.TextIOWrapper, _reduce_text),
    (_BUFFERED, _reduce_buffered),
    (io.FileIO, _reduce_raw),
    ((gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile), _reduce_packed),
)
