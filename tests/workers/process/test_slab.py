"""A slab is bounded by the kernel, counted by the kernel, and no trap for who reads it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import pytest

from workers.process import slab
from workers.process.slab import BadIndex, Slab

LIMIT = 8 << 20


@pytest.fixture
def fd():
    made = slab.made(LIMIT)
    yield made
    os.close(made)


def test_slab_takes_memory_only_where_it_was_written(fd):
    assert slab.limit_bytes(fd) == LIMIT
    assert slab.held_bytes(fd) == 0
    Slab(fd).view(mmap.PAGESIZE, 5)[:] = b"hello"
    assert slab.held_bytes(fd) == mmap.PAGESIZE
    assert os.pread(fd, 5, mmap.PAGESIZE) == b"hello"


@pytest.mark.parametrize("size", [0, LIMIT, 1 << 40])
def test_size_of_a_slab_cannot_be_changed(fd, size):
    with pytest.raises(PermissionError) as refused:
        os.ftruncate(fd, size)
    assert refused.value.errno == errno.EPERM
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_pages_punched_out_by_the_owner_read_as_zeros_and_kill_no_reader(fd):
    mapped = Slab(fd)
    mapped.view(0, LIMIT)[:] = b"x" * LIMIT
    theirs = mmap.mmap(fd, LIMIT, prot=mmap.PROT_READ)
    mapped.memory.madvise(9, 0, LIMIT)  # MADV_REMOVE
    assert slab.held_bytes(fd) == 0
    assert theirs[: mmap.PAGESIZE] == bytes(mmap.PAGESIZE)
    theirs.close()


def test_index_is_read_back_and_lies_behind_every_image(fd):
    size = slab.write_index(fd, {"layout": [1, 2], "of": "it"})
    Slab(fd).view(LIMIT - 4, 4)[:] = b"last"
    assert slab.read_index(fd, size) == {"layout": [1, 2], "of": "it"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (b"", 0),
        (b"[1]", 3),
        (b"{]", 2),
        (b"[" * 100_000, 100_000),
        (b"{}", slab.INDEX_LIMIT_BYTES + 1),
        (b"\xff\xfe", 2),
    ],
)
def test_invalid_index_is_recognised(fd, text, size):
    os.pwrite(fd, text, LIMIT)
    with pytest.raises(BadIndex):
        slab.read_index(fd, size)


def test_much_smaller_image_gives_memory_back(fd):
    mapped = Slab(slab.made(128 << 20))
    mapped.make_ready(100 << 20)
    assert slab.held_bytes(mapped.fd) == 100 << 20
    mapped.used(100 << 20)
    mapped.used(60 << 20)
    assert slab.held_bytes(mapped.fd) == 100 << 20
    mapped.used(10 << 20)
    assert slab.held_bytes(mapped.fd) == 10 << 20
