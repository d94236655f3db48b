"""Programs that are moved between sandboxes of other namespaces, folders and users."""

from __future__ import annotations

import os
import random
import sys

import pytest

from tests.workers.criu import two_stubs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

COUNTS = """
import hashlib, os, random, socket, sys, tempfile, threading, time
random.seed(7); digest = hashlib.sha256(); log = open("/scratch/log.txt", "a")
gone = tempfile.TemporaryFile(dir="/scratch"); ours, theirs = socket.socketpair()
listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen()
client = socket.create_connection(listening.getsockname()); server, _ = listening.accept()
beats = []
def beat():
    while len(beats) < 150: beats.append(time.monotonic()); time.sleep(0.008)
thread = threading.Thread(target=beat); thread.start()
for step in range(200):
    digest.update(random.randbytes(100)); time.sleep(0.008)
    print(step, flush=True); log.write(f"{step}\\n"); log.flush()
    gone.write(b"x"); client.send(b"y"); ours.send(b"z")
while not os.path.exists("/scratch/end"): time.sleep(0.01)
thread.join(); gone.seek(0)
assert beats == sorted(beats) and beats[-1] - beats[0] < 60
print(digest.hexdigest(), len(open("/scratch/log.txt").read()), len(gone.read()))
print(len(server.recv(200, socket.MSG_WAITALL)), len(theirs.recv(200, socket.MSG_WAITALL)))
"""
FORKS = """
import os, sys, time
def value(depth, n):
    if not depth: return n
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(value(depth - 1, 2 * n + 1)).encode()); os._exit(0)
    got = int(os.read(read, 100)); os.waitpid(child, 0); os.close(read); os.close(write)
    return got + 1
total = 0
for step in range(200):
    total += value(3, step); print(step, flush=True)
while not os.path.exists("/scratch/end"): time.sleep(0.01)
print(total)
"""

#: One connection has a full window, two are closed at one end.  Mostly a datagram is unread, or a
#: connection is not accepted.
CONNECTS = """
import hashlib, os, socket, time
listening = socket.create_server(("127.0.0.1", 0)); address = listening.getsockname()
def pair(): return socket.create_connection(address), listening.accept()[0]
(full, drain), (asks, answers), (gone, ended) = pair(), pair(), pair()
data, sent = bytes(range(256)) * 256, 0; full.setblocking(False)
try:
    while True: sent += full.send(data[sent % 65536:])
except BlockingIOError: full.setblocking(True)
asks.sendall(b"q" * 1000); asks.shutdown(socket.SHUT_WR); gone.sendall(b"e" * 1000); gone.close()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0))
udp.settimeout(20); drain.settimeout(20)
for step in range(40):
    udp.sendto(b"%d" % step, udp.getsockname()); time.sleep(0.02)
    assert int(udp.recv(10)) == step; time.sleep(0.01); print(step, flush=True)
    later = socket.create_connection(address); time.sleep(0.01); listening.accept()[0].close()
while not os.path.exists("/scratch/end"): time.sleep(0.01)
full.close(); left, right = hashlib.sha256(), hashlib.sha256((data * (sent // 65536 + 1))[:sent])
while part := drain.recv(1 << 20): left.update(part)
got = [len(end.recv(2000, socket.MSG_WAITALL)) for end in (answers, ended)]
answers.sendall(b"a" * 1000); answers.close(); got.append(len(asks.recv(2000, socket.MSG_WAITALL)))
print(left.digest() == right.digest(), got)
"""


@pytest.mark.parametrize("source", [COUNTS, FORKS, CONNECTS], ids=["counts", "forks", "connects"])
def test_program_that_moves_five_times_ends_with_the_same_bits(criu, tmp_path, source):
    moments = random.Random(int(os.environ.get("MOVES_SEED", "26")))
    stops = [moments.random() * 0.2 for _ in range(5)]
    still, moved = (
        _run(criu, tmp_path / name, source, at) for name, at in (("a", []), ("b", stops))
    )
    assert len(moved.images) == 5
    assert (moved.output, moved.status) == (still.output, still.status)
    assert still.status == 0


def _run(criu, home, source, stops):
    home.mkdir(mode=0o711)
    request = two_stubs.Request(
        criu=str(criu), argv=[sys.executable, "p.py"], files={"p.py": source}, home=str(home),
        stop_after_s=stops, uids=[261_001 + number for number in range(6)],
    )  # fmt: skip
    return two_stubs.run(request)


def test_restored_program_is_stopped_even_if_its_image_says_that_it_ran(criu, tmp_path):
    tmp_path.chmod(0o711)
    source = (
        "import os, time\n"
        "while not os.path.exists('/scratch/end'): print('on', flush=True); time.sleep(0.05)"
    )
    request = two_stubs.Request(
        criu=str(criu),
        argv=[sys.executable, "-c", source],
        files={},
        home=str(tmp_path),
        stop_after_s=[0.5],
        is_stopped=False,
    )
    two_stubs.run(request)  # it looks at the restored processes before it lets them run


def test_unread_datagram_that_no_stop_waited_for_fails_the_dump(criu, tmp_path):
    tmp_path.chmod(0o711)
    source = (
        "import socket, time; udp = socket.socket(type=socket.SOCK_DGRAM)\n"
        "udp.bind(('127.0.0.1', 0)); udp.sendto(b'x', udp.getsockname())\n"
        "print(flush=True); time.sleep(100)"
    )
    request = two_stubs.Request(
        criu=str(criu),
        argv=[sys.executable, "-c", source],
        files={},
        home=str(tmp_path),
        stop_after_s=[0.0],
        says_first=True,
        is_stopped=False,
    )
    with pytest.raises(AssertionError, match="a datagram that came late is not read yet"):
        two_stubs.run(request)
