"""Opens folders of the host that an administrator named as mounts, only beneath the allowed roots.

An administrator of the platform names a mount, in a row of the database. The row alone opens
nothing: the folder must lie below a root that the administrator of this host allowed by a setting
(ROUNDHOUSE_MOUNT_ROOTS). The kernel resolves the path from the root to the folder with `openat2`,
beneath the root. So a symbolic link or `..` in the path cannot lead out of the root, even if a
folder is replaced after it was checked. If the kernel has no `openat2`, this host shows no mounts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostMount:
    """Names the folder `below` an allowed `root`, which a resident sees at `target`, read-only.

    For a container image it may be a file.
    """

    root: str
    below: str
    target: str = ""
    may_be_file: bool = False


def place_of(
    path: str, roots: Iterable[str], target: str = "", *, may_be_file: bool = False
) -> HostMount | None:
    """Return the place of a folder below the deepest allowed root; None if no root contains it.

    Nothing is read from the disk.
    """
    if not os.path.isabs(path) or os.path.normpath(path) != path:
        return None
    above = [root for root in roots if Path(path).is_relative_to(root)]
    if not above:
        return None
    root = max(above, key=len)
    return HostMount(root, os.path.relpath(path, root), target, may_be_file)


def opened(mount: HostMount) -> int:
    """Return a descriptor of the folder (O_PATH); raises OSError without a path of the host in it.

    The folder may lie on another file system than its root.
    """
    try:
        root = os.open(mount.root, _FOLDER)
    except OSError as error:
        raise OSError(error.errno, "the root of the mount cannot be opened") from None
    try:
        flags = _FOLDER & ~os.O_DIRECTORY if mount.may_be_file else _FOLDER
        return _open_beneath(root, mount.below, flags)
    finally:
        os.close(root)


def trouble(mount: HostMount, own: Sequence[Path]) -> str:
    """Return why this host cannot show the folder now; "" if it can.

    `own` are folders of Roundhouse itself; a mount may neither contain them nor lie in them.
    """
    try:
        fd = opened(mount)
    except OSError as error:
        return f"it cannot be opened: {error.strerror}"
    try:
        there = Path(os.readlink(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)
    for folder in own:
        real = folder.resolve()
        if there.is_relative_to(real) or real.is_relative_to(there):
            return "it would show files of Roundhouse"
    return ""


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open a path as if the folder `root` were the root of the file system; raises OSError."""
    return _openat2(root, path, flags, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def _open_beneath(root: int, path: str, flags: int) -> int:
    try:
        return _openat2(root, path, flags, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    except OSError as error:
        if error.errno == errno.EXDEV:
            told = "its path leaves the root that this host allows"
            raise OSError(error.errno, told) from None
        raise


def _openat2(root: int, path: str, flags: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags, 0, resolve)
    fd = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how))
    if fd >= 0:
        return int(fd)
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_SYS_OPENAT2 = 437  # on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH, _RESOLVE_IN_ROOT = 0x02, 0x08, 0x10
