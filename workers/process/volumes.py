"""Gives each resident's scratch folder a file system of its own, of a fixed size.

The file system lies in a file without a name, on a loop device, and is mounted for the resident
only.  Its space is reserved on the host's disk before the resident starts: a tenant that fills it
gets ENOSPC, and the use of the host's disk does not change.  Quotas of the host's file system would
do the same, but few hosts have them enabled.  When the resident's last process has ended, the
kernel removes mount, loop device and file, so that no process of ours walks a tenant's files.

To reserve gigabytes and to free them takes longer than a short function.  So a device that starts
residents one after the other keeps a few files between them (`SpareImages`).  The kernel makes all
blocks of such a file read as zeros before the next resident gets it.

Only root can do this.  The resident itself does the slow steps, before its sandbox applies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

from workers.process.isolation import detached_mounts
from workers.process.isolation.detached_mounts import NODEV, NOSUID

SHARE = 64  # the default size is the free disk space divided by this: 8 devices with 8 residents
LARGEST_BYTES = 16 * 2**30
LEAST_BYTES = 64 * 2**20
KEPT_FREE_BYTES = 2**30  # kept free on the host's disk for all other use
SPARES = 2  # most files that a device keeps between residents: of the running one and the next
SPARES_ROOM = 8  # no file is kept unless the disk has space for so many more
# the file system never grows, so it has no blocks for that, which would be copied for each resident
_FEATURES = "^has_journal,^resize_inode"
_TEMPLATE = ("-O", _FEATURES, "-E", "lazy_itable_init=1", "-m", "0", "-b", "4096")


def usual_bytes(folder: Path) -> int:
    """Return the default size of a resident's scratch folder: a part of the free space on its
    disk.
    """
    part = _free_bytes(folder) // SHARE
    return max(LEAST_BYTES, min(LARGEST_BYTES, part) // 2**20 * 2**20)


def has_room(folder: Path, size_bytes: int) -> bool:
    """True if files of so many bytes can be reserved on the disk of this folder."""
    return _free_bytes(folder) >= size_bytes + KEPT_FREE_BYTES


def with_overhead(size_bytes: int) -> int:
    """Return the size of a file system that holds files of so many bytes, in whole MiB."""
    return -(-(size_bytes + size_bytes // 16 + 8 * 2**20) // 2**20) * 2**20


def make_template(path: Path, size_bytes: int) -> str:
    """Make an empty file system of this size, to be copied for each resident.

    Returns "", or why it could not be made.
    """
    if os.geteuid() != 0:
        return "only root can mount a file system"
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)
    words = ["mkfs.ext4", "-q", "-F", *_TEMPLATE, str(path)]
    environment = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    except OSError as error:
        return f"mkfs.ext4: {error.strerror}"
    return "" if not done.returncode else f"mkfs.ext4: {done.stderr.strip()[-200:]}"


class SpareImages:
    """Keeps open a few files of a template's size, so that their space stays reserved.

    The files have no names: their space is free when this process ends or closes them.
    """

    def __init__(self) -> None:
        self.template: Path | None = None
        self.fds: list[int] = []
        self._most = SPARES

    def prepare(self, template: Path | None) -> None:
        """Keep one file more for this template, up to SPARES; files of another one are closed."""
        if template != self.template:
            self.close()
            self.template = template
        if template is None or len(self.fds) >= self._most:
            return
        try:
            size_bytes = template.stat().st_size
            _must_leave_some(template.parent, SPARES_ROOM * size_bytes)
            fd = _reserved(template.parent, size_bytes)
        except OSError:
            return  # the resident makes a file of its own, or says why it cannot
        if _clear(fd, size_bytes):
            self.fds.append(fd)
        else:
            self._most = 0
            os.close(fd)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def mounted(template: Path, uid: int, spares: Iterable[int] = ()) -> int:
    """Return a descriptor of a new private mount, whose files belong to this user. Raises
    OSError.

    Its file is one of the `spares` that no other mount uses, or else a new one.
    """
    image = _copied(template, spares)
    try:
        loop, name = _looped(image)
    finally:
        os.close(image)
    try:
        mount = detached_mounts.mounted("ext4", {"source": name}, NOSUID | NODEV)
    finally:
        os.close(loop)
    root = f"/proc/self/fd/{mount}"
    os.rmdir(f"{root}/lost+found")
    os.chown(root, uid, uid)
    os.chmod(root, 0o700)
    return mount


def try_out(template: Path, uid: int) -> str:
    """Mount a copy of the template in a child process and write into it; return "" or what went
    wrong.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            mount = mounted(template, uid)
            Path(f"/proc/self/fd/{mount}/probe").write_text("probe")
        except OSError as error:
            os.write(write, f"{error.strerror or error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        why = answer.read().decode()
    status = os.waitpid(child, 0)[1]
    return why or ("" if not status else "the process died while mounting it")


# --- steps ----------------------------------------------------------------------------------------


def _copied(template: Path, spares: Iterable[int]) -> int:
    """Return a file with the content of the template, whose space is reserved."""
    with template.open("rb") as source:
        size_bytes = os.fstat(source.fileno()).st_size
        claims = (_claim(spare, size_bytes) for spare in spares)
        fd = next(filter(None, claims), None) or _reserved(template.parent, size_bytes)
        at = 0
        while (begin := _data_from(source.fileno(), at)) is not None:
            at = os.lseek(source.fileno(), begin, os.SEEK_HOLE)
            while begin < at:
                begin += os.copy_file_range(source.fileno(), fd, at - begin, begin, begin)
    return fd


def _reserved(folder: Path, size_bytes: int) -> int:
    """Return a file without a name in this folder, whose space is reserved and reads as zeros."""
    _must_leave_some(folder, size_bytes)
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        size = ctypes.c_long(size_bytes)
        _checked(_libc.fallocate(fd, 0, ctypes.c_long(0), size), "reserving disk for its folder")
    except OSError:
        os.close(fd)
        raise
    return fd


def _claim(spare: int, size_bytes: int) -> int | None:
    """Open a spare file anew, lock it and clear it; None if a mount still uses it, or if it has
    another size: clearing a larger range would fill the disk.

    The lock belongs to what was opened here, which the loop device keeps open until its mount is
    gone.
    """
    fd = os.open(f"/proc/self/fd/{spare}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.fstat(fd).st_size == size_bytes and _clear(fd, size_bytes)
    except BlockingIOError:
        is_ours = False
    if is_ours:
        return fd
    os.close(fd)
    return None


def _clear(fd: int, size_bytes: int) -> bool:
    """Make all of a file read as zeros, and keep its space; False if that is impossible."""
    size = ctypes.c_long(size_bytes)
    return bool(_libc.fallocate(fd, _ZERO_RANGE, ctypes.c_long(0), size) == 0)


def _must_leave_some(folder: Path, size_bytes: int) -> None:
    """Raise OSError if too little disk is free: `fallocate` would fill the disk before it fails."""
    if not has_room(folder, size_bytes):
        told = f"reserving disk for its folder: {os.strerror(errno.ENOSPC)}"
        raise OSError(errno.ENOSPC, told)


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _data_from(fd: int, at: int) -> int | None:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None  # write only the last byte, which leaves a hole before it


def _looped(image: int) -> tuple[int, str]:
    """Make a loop device for this file.

    It disappears when it is neither open nor mounted any more.
    """
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    config = struct.pack("=II52xI176x64x", image, 0, flags)
    with open("/dev/loop-control", "rb+", buffering=0) as control:
        while True:
            name = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # EBUSY: another process was faster
                    raise
            else:
                return loop, name


# --- system calls ---------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
_ZERO_RANGE = 16  # FALLOC_FL_ZERO_RANGE

assert platform.architecture()[0] == "64bit"  # fallocate takes sizes of the type long


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
