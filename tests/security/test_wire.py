"""The device worker's end of the socket to a tenant's process neither blocks nor works long."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from workers.device.processes.resident import kernel_memory
from workers.process.wire import (
    LIMIT_BYTES,
    TENANT_FRAME_BYTES,
    Garbled,
    Parts,
    ToSupervisor,
    Wire,
    parsed_parts,
    tenant_pair,
)

pytestmark = pytest.mark.security


@pytest.fixture
def ends():
    ours, theirs = tenant_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def _framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def _heard(ours, count=1):
    until_s, said = time.monotonic() + 60, []
    while len(said) < count and time.monotonic() < until_s:
        said += ours.receive()
    return said


def test_sending_to_a_process_that_does_not_read_never_waits(ends):
    ours, theirs = ends
    read, write = os.pipe()
    for number in range(40):
        ours.send({"is": "look", "number": number, "much": "x" * 50_000}, [read])
    assert ours.unread_since_us is not None
    os.close(read)
    wire, said = Wire(theirs.dup()), []
    while len(said) < 40:
        ours.flush()
        said += wire.receive()
    assert [one["number"] for one in said] == list(range(40))
    assert len(wire.fds) == 40
    assert ours.unread_since_us is None
    wire.close()
    os.close(write)


@pytest.mark.parametrize(
    "body",
    [
        b'{"is": "x", "a": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"is": "x", "a": [' + b"[]," * 3_000 + b"[]]}",
        b'\\"' * 30_000,
        b'"' * 60_000,
        b'{"is": 1}',
        b"[]",
        b"\xff",
    ],
)
def test_frame_that_is_costly_or_none_is_refused_in_milliseconds(ends, body):
    ours, theirs = ends
    theirs.sendall(_framed(body))
    cpu_s = time.thread_time()
    with pytest.raises(Garbled):
        _heard(ours)
    assert time.thread_time() - cpu_s < 0.2


def test_frame_above_the_limit_is_refused_before_it_has_come(ends):
    ours, theirs = ends
    theirs.sendall(struct.pack("!I", TENANT_FRAME_BYTES + 1))
    with pytest.raises(Garbled, match="the limit is"):
        _heard(ours)


def test_brackets_in_texts_are_no_containers(ends):
    ours, theirs = ends
    said = {"is": "failed", "detail": '[{"' * 10_000}
    theirs.sendall(_framed(json.dumps(said).encode()))
    assert _heard(ours) == [said]


def test_one_call_gives_a_bounded_number_of_frames_and_the_next_the_rest(ends):
    ours, theirs = ends
    theirs.sendall(_framed(b'{"is":"still"}') * 200)
    counts = []
    while sum(counts) < 200:
        counts.append(len(ours.receive()))
        assert ours.has_more == (sum(counts) < 200)
    assert max(counts) == 64


def test_frame_above_the_limit_behind_many_others_is_refused_at_the_next_call(ends):
    ours, theirs = ends
    theirs.sendall(_framed(b'{"is":"still"}') * 64 + struct.pack("!I", TENANT_FRAME_BYTES + 1))
    assert len(ours.receive()) == 64
    assert ours.has_more
    with pytest.raises(Garbled, match="the limit is"):
        ours.receive()


def test_long_message_comes_in_parts_and_is_whole(ends):
    ours, theirs = ends
    said = {"is": "finished", "result": {"text": 'é"[' * 50_000}}
    parts, whole = Parts(), None
    sender = ToSupervisor(socket.socket(fileno=theirs.detach()))

    thread = threading.Thread(target=sender.send, args=(said,))
    thread.start()
    while whole is None:
        for message in ours.receive():
            assert message["is"] == "part"
            whole = parts.add(message)
    thread.join()
    sender.close()
    assert parsed_parts(whole) == said


def test_parts_of_more_than_a_message_may_have_are_refused():
    parts, part = Parts(), {"text": "x" * 50_000, "last": False}
    for _ in range(LIMIT_BYTES // 50_000):
        assert parts.add(part) is None
    with pytest.raises(Garbled, match="in parts"):
        parts.add(part)


HOLDER = """
import mmap, subprocess, sys
own, shared = bytearray(b"x" * (32 << 20)), mmap.mmap(-1, 64 << 20)
shared.write(b"y" * (64 << 20))
holds = "x = b'z' * (48 << 20); print(flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", holds], stdin=-1, stdout=-1)
child.stdout.readline()
print(flush=True)
input()
child.kill()
"""


def test_kernel_counts_what_a_process_and_its_children_hold():
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"\n"
            own, shared = kernel_memory(holder.pid)
            assert 80 << 20 <= own < 200 << 20
            assert 64 << 20 <= shared < 70 << 20
        finally:
            holder.communicate(b"\n")
    assert kernel_memory(2**22 + 1) is None


def test_children_that_come_and_go_do_not_keep_the_kernel_from_counting():
    """Where the count fails, what the task says of its memory would stand."""
    forks = (
        "import os, threading\n"
        "while True:\n"
        "    threading.Thread(target=int).start()\n"
        "    if not os.fork(): os._exit(0)\n"
        "    os.wait()\n"
    )
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", forks])
    try:
        found = [kernel_memory(child.pid) for _ in range(2000)]
    finally:
        child.kill()
        child.wait()
    assert None not in found
