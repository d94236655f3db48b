"""The whole system, started once for all acceptance tests, and helpers to use and disturb it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running

JSON = dict[str, Any]

JOBS = Path(__file__).parent / "jobs"
SETTLE_S = 60.0
ENDED = ("done", "failed", "cancelled")
SUMS = """
    select (select coalesce(sum(held_us), 0)::bigint from placements),
           (select coalesce(sum(held_us), 0)::bigint from usage),
           (select coalesce(sum(charged_us), 0)::bigint from placements),
           (select coalesce(sum(charged_us), 0)::bigint from usage),
           (select coalesce(sum(total_us), 0)::bigint from accounts)
"""


class TenantClient(Client):
    """A client of one user that can upload the test jobs.

    It retries while something is restarted.
    """

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key, patience_s=60.0)
        self._bundle = ""

    @property
    def bundle(self) -> str:
        """The bundle of the test jobs, uploaded at first use."""
        if not self._bundle:
            found = bundle_folder(JOBS)
            self.upload(found.sha256, found.body)
            self._bundle = f"sha256:{found.sha256}"
        return self._bundle

    def submit_job(self, entry: str, *, name: str, params: JSON | None = None, **task: Any) -> str:
        """Submit one task that runs this class; returns the request's id."""
        job = {"name": "job", "type": "train", "run": {"job": entry}, "params": params or {}}
        request = {"name": name.lower(), "bundle": self.bundle, "tasks": [{**job, **task}]}
        return str(self.submit(request)["id"])

    def request(self, id: str) -> JSON:
        return self.get(f"/v1/requests/{id}")

    def wait(self, id: str, *, timeout_s: float) -> JSON:
        """Wait for the request to end and return it."""
        return self.wait_until(id, lambda request: request["state"] in ENDED, timeout_s=timeout_s)

    def wait_until(self, id: str, what: Any, *, timeout_s: float) -> JSON:
        """Wait until `what(request)` is true and return the request."""
        until_s = time.monotonic() + timeout_s
        while not what(request := self.request(id)):
            if time.monotonic() > until_s:
                raise TimeoutError(f"after {timeout_s} s: {request}")
            time.sleep(0.1)
        return request

    def log_text(self, task_id: str) -> list[str]:
        """Return the lines that a task printed."""
        request_id = self.get(f"/v1/tasks/{task_id}")["request_id"]
        lines = self.items(f"/v1/requests/{request_id}/logs", task=task_id, limit=200)
        return [line["text"] for line in lines]


class System:
    def __init__(self, handle: Handle) -> None:
        self.handle, self.url, self.keys = handle, handle.url, handle.keys
        self._clients: dict[tuple[str, str], TenantClient] = {}

    def client(self, tenant: str, role: str = "member") -> TenantClient:
        """Return the only client of this tenant and role; `close` closes all clients."""
        who = (tenant, role)
        if who not in self._clients:
            self._clients[who] = TenantClient(self.url, self.keys[tenant][role])
        return self._clients[who]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def wait_running(self, client: TenantClient, id: str, timeout_s: float = 60.0) -> None:
        """Wait until a task of this request has made a step."""

        def steps(request: JSON) -> bool:
            return any(task["state"] == "running" and task["step"] for task in request["tasks"])

        client.wait_until(id, steps, timeout_s=timeout_s)

    def kill(self, victim: str) -> None:
        """Send `kill -9` to a process of the system, by its name in up.json, or to a "resident"."""
        if victim == "resident":
            os.kill(self.resident(), signal.SIGKILL)
            return
        pid = self.handle.kill(victim)
        self.handle.wait_restarted(victim, pid)

    def resident(self) -> int:
        """Return the process id of a job that computes now."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            before = {process: sum(process.cpu_times()[:2]) for process in self.residents()}
            time.sleep(0.5)
            used_s = {p: sum(p.cpu_times()[:2]) - before[p] for p in before if p.is_running()}
            busiest = max(used_s, key=lambda p: used_s[p], default=None)
            if busiest is not None and used_s[busiest] > 0:
                return int(busiest.pid)
        raise TimeoutError(f"no job computes within {SETTLE_S} s")

    def residents(self) -> list[psutil.Process]:
        """Return the residents: the ends of device worker -> zygote -> (keeper ->) resident."""
        below = [child for zygote in self.zygotes() for child in zygote.children(recursive=True)]
        return [process for process in below if not process.children()]

    def zygotes(self) -> list[psutil.Process]:
        devices = [pid for name, pid in self.handle.pids().items() if name.startswith("device.")]
        return [child for pid in devices for child in psutil.Process(pid).children()]

    def holders_of(self, name: str) -> list[str]:
        """Return processes of the device workers that have this shared memory open or mapped."""
        devices = [pid for name, pid in self.handle.pids().items() if name.startswith("device.")]
        below = [p for pid in devices for p in psutil.Process(pid).children(recursive=True)]
        found = []
        for process in below:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                links = [fd.readlink() for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                if name in maps or any(name in str(link) for link in links):
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return found

    def until(self, true: Callable[[], object]) -> bool:
        """Wait until `true()` holds, at most SETTLE_S; returns whether it did."""
        until_s = time.monotonic() + SETTLE_S
        while not (came := bool(true())) and time.monotonic() < until_s:
            time.sleep(0.1)
        return came

    def sql(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        url = self.handle.facts["database_url"].replace("postgresql+psycopg", "postgresql", 1)
        with psycopg.connect(url) as connection:
            return connection.execute(query, values).fetchall()

    def check_ledger(self) -> None:
        """Assert that placements, usage and accounts agree, to the microsecond."""
        [(held, booked, charged, booked_charges, accounts)] = self.sql(SUMS)
        assert held == booked
        assert charged == booked_charges == accounts


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    with (
        temporary_home() as home,
        running(home) as handle,
        contextlib.closing(System(handle)) as system,
    ):
        yield system
