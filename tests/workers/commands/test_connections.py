"""What of a sandbox's network a store would lose is told, at real moments of a real network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Prints what is under way at moments of a program, in a network of its own.
PLAY = """
import socket, subprocess, sys
from workers.commands.connections import under_way
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
def tell(): print(under_way())
tell(); kind, at = (socket.AF_INET6, "::1") if "6" in sys.argv else (socket.AF_INET, "127.0.0.1")
udp = socket.socket(kind, socket.SOCK_DGRAM); udp.bind((at, 0))
udp.sendto(b"", udp.getsockname()); tell(); udp.recv(1); tell()
listening = socket.create_server((at, 0), family=kind)
client = socket.create_connection(listening.getsockname()[:2]); tell()
server, _ = listening.accept(); tell()
client.setblocking(False)
try:
    while True: client.send(bytes(1 << 16))
except BlockingIOError: tell()
client.close(); tell()
while server.recv(1 << 20): pass
tell(); server.close(); tell()
route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); route.bind((0, 0))
route.send((20).to_bytes(4, "little") + bytes((18, 0, 1, 3)) + bytes(12)); tell()
while b"\\3\\0" != route.recv(65536)[4:6]: pass
tell()
"""
UNREAD = "a datagram is not read yet"
UNACCEPTED = "a connection between its processes is not accepted yet"
CLOSED = "a connection that one end has closed still has data under way"
ASKED = "an answer of the kernel about its network is not read yet"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets a network of its own")
@pytest.mark.parametrize("version", ["4", "6"])
def test_moments_of_a_real_network_are_told(version):
    words = ["unshare", "--net", sys.executable, "-c", PLAY, version]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines() == [
        "", UNREAD, "", UNACCEPTED, "", "", CLOSED, "", "", ASKED, ""
    ]  # fmt: skip
