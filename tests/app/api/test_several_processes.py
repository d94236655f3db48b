"""Two API processes that serve one port: what they count, they count together."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.db.transactions import transaction
from tests.app.conftest import World, people
from tests.ports import free_port
from tests.serving import PATIENT_S

STARTED_WITHIN_S = 180.0  # a busy machine starts both processes within this time
READS_PER_MIN = 2  # of a key: half a minute until it may read once more


@dataclass
class Service:
    port: int
    process: psutil.Process
    world: World
    opened: ExitStack

    def call(
        self, connection: http.client.HTTPConnection, path: str, who: str
    ) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.world.keys[who]}"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def connections(self) -> list[http.client.HTTPConnection]:
        """Return a connection to each of the two processes."""
        found: dict[int, http.client.HTTPConnection] = {}
        until_s = time.monotonic() + STARTED_WITHIN_S
        while len(found) < 2:
            assert time.monotonic() < until_s, "one process takes all connections"
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENT_S)
            self.opened.callback(connection.close)
            try:
                connection.request("GET", "/livez")
                connection.getresponse().read()
            except ConnectionRefusedError:
                time.sleep(0.1)
                continue
            if found.setdefault(self._server_of(connection), connection) is not connection:
                connection.close()
                time.sleep(0.05)  # the other process still starts
        return list(found.values())

    def _server_of(self, connection: http.client.HTTPConnection) -> int:
        ours = connection.sock.getsockname()[1]
        return next(
            child.pid
            for child in self.process.children()
            for one in child.net_connections("tcp")
            if one.raddr and one.raddr.port == ours
        )


@pytest.fixture
def service(committed: None, tmp_path: Path) -> Iterator[Service]:
    with transaction() as session:
        world = people(session)
    port = free_port()
    env = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "ROUNDHOUSE_API_PROCESSES": "2",
        "ROUNDHOUSE_KEY_READS_PER_MIN": str(READS_PER_MIN),
    }
    options = ("--workers", "2", "--port", str(port), "--log-level", "warning")
    bounded = ("--http", "app.api.http_protocol:BoundedProtocol")
    application = "tests.app.api.patient_service:app"
    command = (sys.executable, "-m", "uvicorn", application, *options, *bounded)
    with subprocess.Popen(command, env=env) as process, ExitStack() as opened:
        try:
            yield Service(port, psutil.Process(process.pid), world, opened)
        finally:
            process.terminate()


@pytest.mark.slow
def test_two_processes_count_together_and_end_with_the_one_that_started_them(
    service: Service,
) -> None:
    one, other = service.connections()
    of_one = [service.call(one, "/v1/me", "red.member")[0] for _ in range(READS_PER_MIN + 1)]
    of_other = service.call(other, "/v1/me", "red.member")[0]
    assert [*of_one, of_other] == [200, 200, 429, 429]
    for connection in (one, other):
        status, body = service.call(connection, "/metrics", "root")
        assert status == 200
        families = text_string_to_metric_families(body.decode())
        answered = {
            sample.labels["status"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "roundhouse_api_answers_total"
            and sample.labels["operation"] == "getMe"
        }
        assert answered == {"200": 2.0, "429": 2.0}

    children = service.process.children()
    service.process.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENT_S)
    assert not alive
