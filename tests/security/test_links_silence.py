"""Strangers that connect to a device worker do not keep real peers out."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from tests.workers.transfer.test_peer_auth import SECRET, Desk, close, once
from workers.transfer import peer_auth
from workers.transfer.peer_auth import connect

pytestmark = pytest.mark.security


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def test_peer_joins_beside_64_silent_connections(desk, monkeypatch):
    monkeypatch.setattr(peer_auth, "HANDSHAKE_S", 3600.0)  # none of them ends meanwhile
    desk.expect(1)
    with contextlib.ExitStack() as strangers:
        for _ in range(64):
            strangers.enter_context(socket.create_connection(desk.links.place))
        theirs = connect(desk.links.place, SECRET, 1, once)
        ours = desk.joined.get(timeout=60)
        close([*theirs, *ours])


def test_peer_joins_beside_strangers_that_come_without_end(desk):
    ended = threading.Event()

    def knock():
        while not ended.is_set():
            with contextlib.suppress(OSError):
                knocking.append(socket.create_connection(desk.links.place))
            close(knocking[:-64])
            del knocking[:-64]

    knocking: list[socket.socket] = []
    thread = threading.Thread(target=knock)
    thread.start()
    try:
        desk.expect(1)
        theirs = connect(desk.links.place, SECRET, 1, lambda: True)
        close([*theirs, *desk.joined.get(timeout=60)])
    finally:
        ended.set()
        thread.join()
        close(knocking)


def test_silent_connection_is_closed_at_its_deadline(desk, monkeypatch):
    monkeypatch.setattr(peer_auth, "HANDSHAKE_S", 0.3)
    with socket.create_connection(desk.links.place) as stranger:
        stranger.settimeout(60)
        stranger.sendall(b"half a hello")
        assert stranger.recv(1) == b""
