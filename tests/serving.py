"""The API over a real socket, in a thread of the test process, with what is really committed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest
import uvicorn

from app.api.access import gate
from app.api.http_protocol import BoundedProtocol
from app.api.routes import requests, streams
from app.db.transactions import transaction
from app.main import create_app
from app.messaging.live_updates import changes
from tests.app.conftest import World, people

PATIENT_S = 60.0  # a busy machine answers within this time
NEVER_S = 3600.0  # here no call looks again by itself: one that is not woken fails its test


@dataclass
class Server:
    url: str
    world: World
    uvicorn: uvicorn.Server
    thread: threading.Thread

    def client(self, who: str = "red.member") -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.world.keys[who]}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=PATIENT_S)


@pytest.fixture
def server(committed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(gate, "WAIT_S", PATIENT_S)
    monkeypatch.setattr(streams, "LONGEST_WAIT_S", NEVER_S)
    monkeypatch.setattr(requests, "LOOK_AGAIN_S", NEVER_S)
    with transaction() as session:
        world = people(session)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            create_app(), http=BoundedProtocol, log_level="warning", timeout_graceful_shutdown=60
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield Server(f"http://127.0.0.1:{port}", world, server, thread)
        changes.close()
        server.should_exit = True
        thread.join()
