"""Slabs with images in them, as a resident would have staged them."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from collections.abc import Sequence

from workers.process.image_layout import Layout, laid_out

KB, MB = 2**10, 2**20


def new_slab(size: int = 0) -> int:
    fd = os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class Slab:
    """An image of a graph and storages, filled with bytes that do not shrink."""

    def __init__(self, storages: Sequence[int], *, graph: int = 3000, seed: int = 0) -> None:
        self.layout: Layout = laid_out(graph, [(size, "cpu", False) for size in storages])
        self.fd = new_slab(self.layout.end)
        self.random = random.Random(seed)
        self.memory = mmap.mmap(self.fd if self.layout.end else -1, self.layout.end or 1)
        self.fill_graph()
        for number in range(len(storages)):
            self.fill(number)

    def fill(self, number: int, body: bytes | None = None) -> None:
        part = self.layout.storages[number]
        self._write(part.offset, self.random.randbytes(part.size) if body is None else body)

    def fill_graph(self) -> None:
        self._write(0, self.random.randbytes(self.layout.graph.size))

    def _write(self, offset: int, body: bytes) -> None:
        self.memory[offset : offset + len(body)] = body

    def parts(self) -> list[bytes]:
        return parts_of(self.fd, self.layout)


def parts_of(fd: int, layout: Layout) -> list[bytes]:
    """The bytes of the graph and of each storage."""
    extents = (layout.graph, *layout.storages)
    return [os.pread(fd, part.size, part.offset) for part in extents]
