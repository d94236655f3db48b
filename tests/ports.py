"""Ports for servers that another process opens."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port that the system gives to no connection by itself, before it is listened at."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
