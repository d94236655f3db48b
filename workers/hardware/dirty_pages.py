"""Finds out exactly which memory of this process has been written to, as the kernel sees it.

A range is write-protected through a userfaultfd in asynchronous mode (Linux >= 6.7). The first
write to a page removes the protection and then succeeds, whatever writes: Python, numpy, a kernel
of torch, or the operating system for `readinto`. PAGEMAP_SCAN reports the pages that have lost the
protection. Nothing ever waits, and no thread serves faults.

Memory of a file, and memory that other processes also map, always counts as written, because writes
by other processes are not visible. Writes by a device itself are not visible either, but no job has
such a device.

The descriptors are opened before the sandbox closes: tenant code cannot open its own.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
# ranges that are closer are protected as one; the memory between them costs a fault or two
GAP = 8 * PAGE

_SYS_USERFAULTFD = {"x86_64": 323}.get(platform.machine(), 282)
_USER_MODE_ONLY = 1
_API, _REGISTER, _WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
_API_VERSION = 0xAA
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_REGISTER_WP, _PROTECT = 2, 1
_PAGEMAP_SCAN = 0xC0606610
_CHECK_WPASYNC = 1 << 1
_IS_WRITTEN, _IS_SHARED = 1 << 1, 1 << 2
_REGIONS = 512  # most results of one scan; another scan gives the rest


class Unwatchable(Exception):
    """Raised when this kernel, or this range of memory, cannot be watched; says why."""


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "end", "categories")]


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Whole pages: from `start` up to `end`, as addresses."""

    start: int
    end: int

    @classmethod
    def inside(cls, address: int, size: int) -> Range:
        """Return the whole pages within; `start` == `end` if there are none."""
        start = -(-address // PAGE) * PAGE
        return cls(start, max(start, (address + size) // PAGE * PAGE))


class Watch:
    """Watches ranges of this process's memory. Raises Unwatchable where the kernel cannot."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
        self._faults: int = libc.syscall(_SYS_USERFAULTFD, flags)
        if self._faults < 0:
            raise Unwatchable(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        self._pages = -1
        self._regions = (_Region * _REGIONS)()
        try:
            asked = bytearray(struct.pack("QQQ", _API_VERSION, _WP_ASYNC | _WP_UNPOPULATED, 0))
            fcntl.ioctl(self._faults, _API, asked)
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._scan(Range(0, PAGE))
        except OSError as error:
            self.close()
            raise Unwatchable(f"Linux 6.7 or newer is needed: {error}") from error

    @property
    def fds(self) -> set[int]:
        return {self._faults, self._pages}

    def close(self) -> None:
        for fd in self.fds - {-1}:
            os.close(fd)

    def protect(self, ranges: Iterable[Range]) -> set[Range]:
        """Watch these ranges for writes from now on; return those that cannot be watched."""
        refused: set[Range] = set()
        for run in _runs(ranges):
            whole = Range(run[0].start, run[-1].end)
            for part in [whole] if self._protected(whole) else run:
                if part is not whole and not self._protected(part):
                    refused.add(part)
        return refused

    def release(self, ranges: Iterable[Range]) -> None:
        """Stop watching ranges that will be written to, so that these writes cost nothing."""
        for run in _runs(ranges):
            whole = Range(run[0].start, run[-1].end)
            for part in run if not self._set(whole, protected=False) else ():
                self._set(part, protected=False)

    def written(self, ranges: Iterable[Range]) -> set[Range]:
        """Return the ranges that were written to since they were protected, and those that cannot
        be checked.
        """
        found: set[Range] = set()
        for run in _runs(ranges):
            try:
                pages = self._scan(Range(run[0].start, run[-1].end))
            # a range of the group is no longer watched: check the ranges one by one
            except OSError:
                found |= {part for part in run if self._is_written(part)}
            else:
                found |= _touched(run, pages)
        return found

    # --- one range ---

    def _protected(self, part: Range) -> bool:
        asked = bytearray(struct.pack("QQQQ", part.start, part.end - part.start, _REGISTER_WP, 0))
        try:
            fcntl.ioctl(self._faults, _REGISTER, asked)
        except OSError:
            return False
        return self._set(part, protected=True)

    def _set(self, part: Range, *, protected: bool) -> bool:
        mode = _PROTECT if protected else 0
        asked = struct.pack("QQQ", part.start, part.end - part.start, mode)
        while True:
            try:
                fcntl.ioctl(self._faults, _WRITEPROTECT, bytearray(asked))
            except BlockingIOError:
                continue  # another thread is mapping memory at this moment: the kernel says "again"
            except OSError:
                return False
            return True

    def _is_written(self, part: Range) -> bool:
        try:
            return bool(self._scan(part))
        except OSError:
            return True

    def _scan(self, whole: Range) -> list[Range]:
        """Return the runs of pages in a range that have been written to.

        Raises OSError if not all pages of the range are watched.
        """
        found: list[Range] = []
        at = whole.start
        while at < whole.end:
            asked = bytearray(
                struct.pack(
                    "12Q",
                    *(96, _CHECK_WPASYNC, at, whole.end, 0),
                    *(ctypes.addressof(self._regions), _REGIONS, 0),
                    *(0, 0, _IS_WRITTEN | _IS_SHARED, _IS_WRITTEN),
                )
            )
            count = fcntl.ioctl(self._pages, _PAGEMAP_SCAN, asked)
            found += [Range(region.start, region.end) for region in self._regions[:count]]
            (at,) = struct.unpack_from("Q", asked, 32)  # walk_end
        return found


def _runs(ranges: Iterable[Range]) -> list[list[Range]]:
    """Sort the ranges, and group neighbours that lie within GAP."""
    runs: list[list[Range]] = []
    for part in sorted(part for part in ranges if part.start < part.end):
        if runs and part.start - runs[-1][-1].end <= GAP:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _touched(run: list[Range], pages: list[Range]) -> set[Range]:
    """Return the ranges of the sorted, disjoint `run` that share a page with any of `pages`."""
    starts = [part.start for part in run]
    found: set[Range] = set()
    for touched in pages:
        index = max(0, bisect.bisect_right(starts, touched.start) - 1)
        while index < len(run) and run[index].start < touched.end:
            if run[index].end > touched.start:
                found.add(run[index])
            index += 1
    return found
