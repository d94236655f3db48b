"""Run another program under a seccomp filter that refuses what Docker's default refuses.

    python -m tests.security.refusing PROGRAM ARGUMENT...

Namespaces and mounts are refused, whatever rights the program has (x86-64 and arm64).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_REFUSED = {  # system call numbers on x86-64, on arm64
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
}
_CLONE, _CLONE3 = (56, 220), 435
_NEW_NAMESPACES = 0x7E020000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse() -> None:
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    refused = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    lines = [(_LOAD, 0, 0, 0)]
    for numbers in _REFUSED.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), refused]
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16)]
    lines += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), refused, (_RETURN, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    head = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, head, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter here")


if __name__ == "__main__":
    refuse()
    os.execvp(sys.argv[1], sys.argv[1:])
