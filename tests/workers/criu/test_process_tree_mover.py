"""A dump takes no more memory of its host than there is, and gets time for what it takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.criu import dump_and_restore, process_tree_mover
from workers.criu.dump_and_restore import CriuFailed
from workers.criu.process_tree_mover import CannotStore, StubAccess, TreeMover
from workers.criu.program import CriuProgram
from workers.device.processes.resident import memory_to_dump
from workers.process.isolation.sandbox import Room

MIB = 2**20
FIRST = 1001


@pytest.fixture
def mover(tmp_path):
    @contextmanager
    def folder(limit_bytes):  # an ordinary one: only root can make one in memory
        with tempfile.TemporaryDirectory(dir=tmp_path) as made:
            yield Path(made)

    return TreeMover(CriuProgram(Path("/no/criu"), "4.2.1"), 2**50, folder)


def stored(mover: TreeMover, memory_bytes: int) -> None:
    room = Room(code=Path("/code"), scratch=Path("/scratch"), uid=261_001)
    mover.store(StubAccess(pidfd=-1, room=room), FIRST, [FIRST], {}, {}, memory_bytes)


def test_more_memory_than_half_of_what_is_free_is_not_dumped(mover, monkeypatch):
    monkeypatch.setattr(process_tree_mover, "available_bytes", lambda: 20 * MIB)
    with pytest.raises(CannotStore, match="have 11 MiB in memory, and this host can store 10 MiB"):
        stored(mover, 11 * MIB)


def test_more_memory_than_the_worker_may_hold_is_not_dumped(mover):
    mover.most_bytes = 4 * MIB
    with pytest.raises(CannotStore, match="have 5 MiB in memory, and this host can store 4 MiB"):
        stored(mover, 5 * MIB)


def test_image_that_became_larger_than_the_memory_is_not_packed(mover, monkeypatch, tmp_path):
    def dump(program, target, **more):  # deleted files go into it too, for example
        for number in range(2):
            with (target.images / f"ghost-file-{number}.img").open("wb") as file:
                file.truncate(3 * MIB)

    monkeypatch.setattr(dump_and_restore, "dump", dump)
    mover.most_bytes = 5 * MIB
    with pytest.raises(CannotStore, match="have 6 MiB in memory, and this host can store 5 MiB"):
        stored(mover, MIB)
    assert not list(tmp_path.iterdir())


def test_dump_of_more_memory_may_take_longer(mover, monkeypatch):
    limits_s = []

    def dump(program, target, **more):
        limits_s.append(target.limit_s)
        raise CriuFailed("dump: no")

    monkeypatch.setattr(dump_and_restore, "dump", dump)
    monkeypatch.setattr(process_tree_mover, "available_bytes", lambda: 2**50)
    for size in (0, 64 * MIB, 64 * 1024 * MIB):
        with pytest.raises(CannotStore, match="dump: no"):
            stored(mover, size)
    assert limits_s == [60.0, 62.0, 60.0 + 2048.0]


STUB = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
TREE = """
import mmap, os, time
own, shared = bytearray(b"x") * (32 << 20), mmap.mmap(-1, 64 << 20)
shared.write(b"y" * len(shared))
child = os.fork()
sum(shared[::4096])  # both have all pages of it
if child:
    print(flush=True)
time.sleep(1000)
"""


def test_pages_since_a_fork_count_for_each_process_and_shared_memory_once():
    words = [sys.executable, "-c", STUB, TREE]
    stub = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    try:
        with stub.stdout:
            stub.stdout.readline()
        counted = memory_to_dump(stub.pid)
    finally:
        os.killpg(stub.pid, signal.SIGKILL)
        stub.wait()
    assert 128 * MIB <= counted < 190 * MIB
