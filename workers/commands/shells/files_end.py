"""Reads the working folder of a running command for a call of the API: the inner end of a tunnel.

    python -I -S files_end.py FD TICKET

It sends a list of files, one file, or a folder as a zip (`provisions.running_files`), then END; or
FAILED with the reason, which is empty if there is nothing at the path.  It runs inside the sandbox
of the command, as its user, so it can read no more than the command.  It imports only the standard
library, because the sandbox shows no package of Roundhouse.

No link is followed, neither at the end of a path nor on the way.  The socket blocks: a user who
takes nothing stops this process, and nobody else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

HEAD = struct.Struct("!BHI")
DATA, END, FAILED = 0, 2, 6
FRAME_BYTES = 2**15
INTERNAL = ".roundhouse"
LISTED_MOST, LIST_BYTES = 2000, 2**20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# without O_NONBLOCK the open of a pipe would wait for its other end
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotReadable(Exception):
    """Raised if the path cannot be read; the message says why, and is empty if nothing is there."""


class FilesEnd:
    """Sends frames to the API; a folder's zip is written here as if this were a file."""

    def __init__(self, outer: socket.socket, folder: str) -> None:
        self.outer, self.folder = outer, folder

    def serve(self, operation: str, path: str) -> None:
        try:
            if operation == "list":
                self.write(json.dumps(listed(self.folder, path)).encode())
            else:
                self.read(path)
        except NotReadable as refused:
            self.say(FAILED, str(refused).encode())
            return
        self.say(END)

    def read(self, path: str) -> None:
        """Send a line that describes the content, and the content."""
        fd = opened(self.folder, path)
        try:
            status = os.fstat(fd)
            is_folder = stat.S_ISDIR(status.st_mode)
            size = 0 if is_folder else status.st_size
            head = {"is_folder": is_folder, "size_bytes": size}
            self.write(json.dumps(head).encode() + b"\n")
            if is_folder:
                self.zip(fd)
            else:
                for piece in content(fd, size):
                    self.write(piece)
        finally:
            os.close(fd)

    def zip(self, fd: int) -> None:
        with zipfile.ZipFile(self, "w", strict_timestamps=False) as archive:  # type: ignore[call-overload]
            for name, file in files_below(fd):
                status = os.fstat(file)
                changed = time.localtime(status.st_mtime)[:6]
                info = zipfile.ZipInfo(_shown(name), max(changed, (1980, 1, 1, 0, 0, 0)))
                info.external_attr = (status.st_mode & 0xFFFF) << 16
                with archive.open(info, "w", force_zip64=True) as entry:
                    for piece in content(file, status.st_size):
                        entry.write(piece)

    def write(self, body: bytes | bytearray | memoryview) -> int:
        for at in range(0, len(body), FRAME_BYTES):
            self.say(DATA, bytes(body[at : at + FRAME_BYTES]))
        return len(body)

    def flush(self) -> None:
        """Do nothing: no byte waits here. `zipfile` asks for it."""

    def say(self, kind: int, body: bytes = b"") -> None:
        self.outer.sendall(HEAD.pack(kind, 0, len(body)) + body)


def listed(folder: str, path: str) -> dict[str, Any]:
    """List the plain files at or below the path, up to the bounds of a list."""
    fd, files, size = opened(folder, path), list[tuple[str, int, int]](), 0
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            return {"files": [_described(path, fd)], "is_cut": False}
        for name, file in files_below(fd):
            described = _described(f"{path}/{name}" if path else name, file)
            size += len(json.dumps(described)) + 2
            if len(files) >= LISTED_MOST or size > LIST_BYTES - 100:
                return {"files": files, "is_cut": True}
            files.append(described)
        return {"files": files, "is_cut": False}
    finally:
        os.close(fd)


def _described(name: str, fd: int) -> tuple[str, int, int]:
    status = os.fstat(fd)
    return _shown(name), status.st_size, max(0, int(status.st_mtime))


def _shown(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def opened(folder: str, path: str) -> int:
    """Open a plain file or a folder below `folder`; raises NotReadable."""
    fd = os.open(folder, _FOLDER)
    parts = path.split("/") if path else []
    if parts and (parts[0] == INTERNAL or not {"", ".", ".."}.isdisjoint(parts)):
        os.close(fd)
        raise NotReadable
    for number, part in enumerate(parts):
        flags = _FOLDER if number < len(parts) - 1 else _FILE
        try:
            inner = os.open(part, flags, dir_fd=fd)
        except FileNotFoundError:
            raise NotReadable from None
        except OSError as error:
            raise NotReadable(f"{path} cannot be read: {_why(fd, part, error)}") from error
        finally:
            os.close(fd)
        fd = inner
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(fd)
        raise NotReadable(f"{path} is neither a file nor a folder")
    return fd


def _why(fd: int, part: str, error: OSError) -> str:
    with suppress(OSError):
        if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
            return f"{part} is a link, and links are not followed"
    return error.strerror or str(error)


def files_below(fd: int, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield (path below the folder, descriptor) of its plain files that can be read.

    A descriptor is closed when the next one is taken. Files come and go meanwhile.
    """
    entries = sorted(os.listdir(fd))
    folders = []
    for name in entries:
        if not prefix and name == INTERNAL:
            continue
        with suppress(OSError):
            mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                folders.append(name)
            elif stat.S_ISREG(mode):
                file = os.open(name, _FILE, dir_fd=fd)
                try:
                    yield prefix + name, file
                finally:
                    os.close(file)
    for name in folders:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            inner = os.open(name, _FOLDER, dir_fd=fd)
            try:
                yield from files_below(inner, f"{prefix}{name}/")
            finally:
                os.close(inner)


def content(fd: int, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, or fewer if it has become shorter."""
    while size and (piece := os.read(fd, min(size, FRAME_BYTES))):
        size -= len(piece)
        yield piece


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ticket = json.loads(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as outer, suppress(ConnectionError):
        FilesEnd(outer, os.getcwd()).serve(*ticket["words"])


if __name__ == "__main__":
    main()
