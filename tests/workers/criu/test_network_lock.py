"""The lock under which CRIU restores connections, in a real network of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gets a network of its own")

PLAY = """
import socket, subprocess
from workers.criu import enter, network_lock
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
run_id = "41797607-1dc4-4fa0-8e2f-d6aa41732e99"
listening = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listening.getsockname()); server, _ = listening.accept()
client.send(b"a"); print(server.recv(10))
enter._ask_netfilter(network_lock.locks(run_id).hex()); server.settimeout(0.1)
client.send(b"b")
try: print(server.recv(10))
except TimeoutError: print("nothing arrives")
print(socket.create_connection(listening.getsockname()).getsockname()[0])
try: enter._ask_netfilter(network_lock.locks(run_id).hex()); print("locks twice")
except FileExistsError as error: print(error)
enter._ask_netfilter(network_lock.unlocks(run_id).hex()); server.settimeout(20)
print(server.recv(10))
try: enter._ask_netfilter(network_lock.unlocks(run_id).hex()); print("unlocks twice")
except FileNotFoundError as error: print(error)
"""


def test_locked_network_holds_back_what_is_sent_until_it_is_unlocked():
    words = ["unshare", "--net", sys.executable, "-c", PLAY]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=40)
    assert (done.stdout.splitlines(), done.stderr) == (
        [
            "b'a'",
            "nothing arrives",
            "127.0.0.1",
            "locks twice",
            "b'b'",
            "[Errno 2] netfilter: No such file or directory",
        ],
        "",
    )
