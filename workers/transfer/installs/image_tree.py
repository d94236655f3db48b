"""Writes the root of a container image into one folder, layer after layer.

The kernel resolves every path with the folder as its root (`openat2`, RESOLVE_IN_ROOT), so neither
`..` nor a symbolic link in a layer leads out of it. Files belong to our user, whatever a layer
says: no device node, no pipe, no set-user-id bit and no extended attribute is written.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass, field
from typing import IO

from workers.process.isolation.host_mounts import open_in_root
from workers.transfer.installs.image_source import BadContainerImage

ENTRY_BYTES = 4096  # in bytes: disk space that each entry counts, in addition to the bytes of files
MAX_PATH, MAX_PARTS = 4096, 256
MAX_REAL = 3000  # most bytes of a folder's real path, so that paths of the host can name all in it
_COPY_BYTES = 2**20
_WHITEOUT, _OPAQUE, _INTERNAL = ".wh.", ".wh..wh..opq", ".wh..wh."
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(slots=True)
class ImageTree:
    """Writes into the root of a container image, opened at `root`; `left_bytes` may still be
    written.
    """

    root: int
    left_bytes: int
    skipped: int = 0  # device nodes, pipes and sockets
    _of_layer: set[str] = field(default_factory=set)  # paths that the present layer wrote

    def begin_layer(self) -> None:
        self._of_layer = set()

    # --- entries ---

    def add_folder(self, path: str) -> None:
        if not (parts := _parts(path)):
            return
        self._charge(0)
        at = self._parent(parts)
        try:
            self._make_folder(at, parts[-1])
        finally:
            os.close(at)
        self._note(parts)

    def add_file(self, path: str, body: IO[bytes], *, is_executable: bool) -> None:
        at, name = self._cleared(path)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o755 if is_executable else 0o644, dir_fd=at)
            with os.fdopen(fd, "wb") as file:
                while block := body.read(_COPY_BYTES):
                    self._charge(len(block), entries=0)
                    file.write(block)
        finally:
            os.close(at)

    def add_symlink(self, path: str, target: str) -> None:
        if not 0 < len(target) <= MAX_PATH or "\0" in target:
            raise BadContainerImage(f"the link {path!r:.200} has no target that a link can have")
        at, name = self._cleared(path)
        try:
            os.symlink(target, name, dir_fd=at)
        finally:
            os.close(at)

    def add_hard_link(self, path: str, target: str) -> None:
        """Give a file of the tree a second name."""
        if not (parts := _parts(target)):
            raise BadContainerImage(f"the hard link {path!r:.200} has no target")
        at, name = self._cleared(path)
        try:
            there = open_in_root(self.root, "/".join(parts[:-1]) or ".", _FOLDER)
            try:
                os.link(parts[-1], name, src_dir_fd=there, dst_dir_fd=at, follow_symlinks=False)
            finally:
                os.close(there)
        except OSError as error:
            told = f"the hard link {path!r:.200} cannot be made: {error.strerror}"
            raise BadContainerImage(told) from error
        finally:
            os.close(at)

    def skip(self, path: str) -> None:
        """Leave out an entry that is not a folder, file or link; remove an older entry of the same
        path.
        """
        if _parts(path):
            at, _ = self._cleared(path)
            os.close(at)
        self.skipped += 1

    def is_whiteout(self, path: str) -> bool:
        """Remove what a whiteout hides in the layers below it; False if the path is not a
        whiteout.
        """
        parts = _parts(path)
        if not parts or not parts[-1].startswith(_WHITEOUT):
            return False
        self._charge(0)
        if parts[-1] == _OPAQUE:
            self._clear_folder(parts[:-1])
        elif not parts[-1].startswith(_INTERNAL):
            hidden = parts[-1].removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise BadContainerImage(f"the whiteout {path!r:.200} hides no name")
            self._hide([*parts[:-1], hidden])
        return True

    def charge_skipped(self, size_bytes: int) -> None:
        """Count the content of an entry that is read and not written."""
        self._charge(size_bytes, entries=0)

    # --- inside ---

    def _hide(self, parts: list[str]) -> None:
        """Remove an entry, unless this layer made it."""
        if "/".join(parts) not in self._of_layer:
            try:
                at = open_in_root(self.root, "/".join(parts[:-1]) or ".", _FOLDER)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                _remove(at, parts[-1])
            finally:
                os.close(at)

    def _clear_folder(self, parts: list[str]) -> None:
        """Remove what the layers below have put into a folder."""
        try:
            at = open_in_root(self.root, "/".join(parts) or ".", _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            names = os.listdir(f"/proc/self/fd/{at}")
        finally:
            os.close(at)
        # charged, because a layer could have many whiteouts for a folder with many names
        self._charge(0, entries=len(names))
        for name in names:
            inner = [*parts, name]
            if "/".join(inner) in self._of_layer:
                self._clear_folder(inner)
            else:
                self._hide(inner)

    def _cleared(self, path: str) -> tuple[int, str]:
        """Remove what is at the place of an entry; return the open folder above it, and its
        name.
        """
        if not (parts := _parts(path)):
            raise BadContainerImage("it has a file in place of its root")
        self._charge(0)
        at = self._parent(parts)
        try:
            _remove(at, parts[-1])
        except BaseException:
            os.close(at)
            raise
        self._note(parts)
        return at, parts[-1]

    def _parent(self, parts: list[str]) -> int:
        """Return the open folder of an entry; make the folder if it is missing."""
        try:
            return self._bounded(open_in_root(self.root, "/".join(parts[:-1]) or ".", _FOLDER))
        except FileNotFoundError:
            pass
        except OSError as error:
            told = f"{'/'.join(parts)!r:.200} lies in no folder: {error.strerror}"
            raise BadContainerImage(told) from error
        above = self._parent(parts[:-1])
        try:
            self._charge(0)
            self._make_folder(above, parts[-2])
        finally:
            os.close(above)
        return self._parent(parts)

    def _bounded(self, at: int) -> int:
        """Return `at`, an open folder, if its real path is not too long; raises if it is."""
        try:
            is_short = _real_bytes(at) - _real_bytes(self.root) <= MAX_REAL
        except OSError:  # the kernel no longer tells the path
            is_short = False
        if not is_short:
            os.close(at)
            raise BadContainerImage(
                f"the path of one of its folders has more than {MAX_REAL} bytes"
            )
        return at

    def _make_folder(self, at: int, name: str) -> None:
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                return
        except FileNotFoundError:
            pass
        _remove(at, name)
        os.mkdir(name, 0o755, dir_fd=at)

    def _note(self, parts: list[str]) -> None:
        for n in range(len(parts), 0, -1):
            path = "/".join(parts[:n])
            if path in self._of_layer:
                return
            self._of_layer.add(path)

    def _charge(self, size_bytes: int, *, entries: int = 1) -> None:
        self.left_bytes -= size_bytes + entries * ENTRY_BYTES
        if self.left_bytes < 0:
            raise BadContainerImage(
                "unpacked it is larger than this host allows (ROUNDHOUSE_IMAGES_BYTES)"
            )


def _parts(path: str) -> list[str]:
    """Return the names of a path in a layer; none for the root itself."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise BadContainerImage(f"the path {path!r:.200} leaves the root")
    if len(path) > MAX_PATH or len(parts) > MAX_PARTS:
        raise BadContainerImage(f"the path {path!r:.200} is too long")
    return parts


def _real_bytes(folder: int) -> int:
    return len(os.readlink(b"/proc/self/fd/%d" % folder))


def _remove(at: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=at)
