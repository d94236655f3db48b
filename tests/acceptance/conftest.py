"""A system for the acceptance tests that follow each other, and helpers to use and disturb it."""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running
from tests import warm_programs
from tests.processes import children, is_living, runs, used_s
from tests.wheels import add_wheel
from tests.workers import warm_zygotes

JSON = dict[str, Any]

JOBS = Path(__file__).parent / "jobs"
SETTLE_S = 300.0  # of every wait: long, as only a test that fails waits so long
WAIT = "3s"  # of one call that waits for a change
#: An address of this machine stands for a server in the house, names for all sorts of addresses.
HOUSE = "127.77.0.5"
NETWORK = {
    "ROUNDHOUSE_EGRESS_PRIVATE": "127.77.0.0/16",
    "ROUNDHOUSE_EGRESS_HOSTS": f"files.test={HOUSE},labels.example.org={HOUSE}"
    ",local.test=127.0.0.1,meta.test=169.254.169.254",
}
#: No lease runs out because the machine is busy: a test that wants it sets its own.  A worker that
#: was killed is known to be lost as soon as it reports again.  Tasks grow as soon as they can.  A
#: switch that a busy machine made slow gives no slice that is longer than a test waits.
STEADY = {
    "ROUNDHOUSE_SLICE_MAX_S": "30",
    "ROUNDHOUSE_LEASE_S": "60",
    "ROUNDHOUSE_LEADER_S": "10",
    "ROUNDHOUSE_GROW_AFTER_S": "1",
}
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

    def submit_job(
        self,
        entry: str,
        *,
        name: str,
        params: JSON | None = None,
        gate: Gate | None = None,
        **task: Any,
    ) -> str:
        """Submit one task that runs this class; returns the request's id."""
        params = params or {}
        if gate is not None:
            params, task["mounts"] = {**params, "gate": gate.file}, gate.mounts
        job = {"name": "job", "type": "train", "run": {"job": entry}, "params": params}
        request = {"name": name.lower(), "bundle": self.bundle, "tasks": [{**job, **task}]}
        return str(self.submit(request)["id"])

    def request(self, id: str) -> JSON:
        return self.get(f"/v1/requests/{id}")

    def wait(self, id: str, *, timeout_s: float = SETTLE_S) -> JSON:
        """Wait for the request to end and return it; the answer comes when it changes."""
        until_s = time.monotonic() + timeout_s
        while (request := self.get(f"/v1/requests/{id}", wait=WAIT))["state"] not in ENDED:
            if time.monotonic() > until_s:
                raise TimeoutError(f"after {timeout_s} s: {request}")
        return request

    def wait_until(self, id: str, what: Any, *, timeout_s: float = SETTLE_S) -> JSON:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Keeps jobs and graphs slow until it opens, so that none ends before a test has looked.

    `file` is where tasks look for the file, in the folder of `mounts`.
    """

    path: Path

    @property
    def file(self) -> str:
        return f"/gates/{self.path.name}"

    @property
    def mounts(self) -> dict[str, str]:
        return {"/gates": "gates"}

    def open(self) -> None:
        self.path.touch()


def _shows_gates(device: JSON) -> bool:
    return "mount:gates" in device["facts"]["offers"]


class System:
    """The whole system; its hosts show what is below `shared`, if that is given."""

    def __init__(self, handle: Handle, shared: Path | None = None) -> None:
        self.handle, self.url, self.keys = handle, handle.url, handle.keys
        self.shared, self._gates = shared, shared and shared / "gates"
        self._clients: dict[tuple[str, str], TenantClient] = {}
        self._others: list[TenantClient] = []

    def client(self, tenant: str, role: str = "member") -> TenantClient:
        """Return the only client of this tenant and role; `close` closes all clients."""
        who = (tenant, role)
        if who not in self._clients:
            self._clients[who] = TenantClient(self.url, self.keys[tenant][role])
        return self._clients[who]

    def client_with(self, key: str) -> TenantClient:
        """Return a new client with this key; `close` closes it, also after a test that failed."""
        client = TenantClient(self.url, key)
        self._others.append(client)
        return client

    def close(self) -> None:
        for client in (*self._clients.values(), *self._others):
            client.close()

    @contextlib.contextmanager
    def gate(self) -> Iterator[Gate]:
        """Give a gate that opens at the end, also after a failure."""
        assert self._gates is not None
        admin = self.client("platform", "platform_admin")
        if not self._gates.exists():
            self._gates.mkdir()
            admin.post("/v1/mounts", {"name": "gates", "path": str(self._gates)})
        assert self.until(lambda: all(map(_shows_gates, admin.items("/v1/devices"))))
        gate = Gate(path=self._gates / uuid.uuid4().hex)
        try:
            yield gate
        finally:
            gate.open()

    def wait_running(self, client: TenantClient, id: str) -> None:
        """Wait until a task of this request has made a step."""

        def steps(request: JSON) -> bool:
            return any(task["state"] == "running" and task["step"] for task in request["tasks"])

        client.wait_until(id, steps)

    def kill(self, victim: str) -> None:
        """Send `kill -9` to a process of the system, by its name in up.json, to the worker of the
        device "device.N", or to a "resident".
        """
        if victim == "resident":
            assert self.until(self._kill_resident)
            return
        pid = self.handle.kill(victim)
        self.handle.wait_restarted(victim, pid)

    def _kill_resident(self) -> bool:
        """Kill a job that computes; False if it ended by itself before the kill."""
        try:
            self.resident().kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def resident(self) -> psutil.Process:
        """Return the process of a job that computes now."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            before = {process: used_s(process) for process in self.residents()}
            time.sleep(0.5)
            gained_s = {p: used_s(p) - before[p] for p in before if is_living(p)}
            busiest = max(gained_s, key=lambda p: gained_s[p], default=None)
            if busiest is not None and gained_s[busiest] > 0:
                return busiest
        raise TimeoutError(f"no job computes within {SETTLE_S} s")

    def residents(self) -> list[psutil.Process]:
        """Return the residents: the ends of device worker -> zygote -> (keeper ->) resident."""
        below = [child for zygote in self.zygotes() for child in children(zygote, recursive=True)]
        return [process for process in below if is_living(process) and not children(process)]

    def zygotes(self) -> list[psutil.Process]:
        """Return the zygotes: programs of their own, or forks of the host zygote."""
        below = self.of_devices()
        hosts = [each for each in below if runs(each, "workers.host_zygote")]
        forks = [fork for host in hosts for fork in children(host)]
        return [*(each for each in below if runs(each, "workers.zygote")), *forks]

    def workers(self) -> list[int]:
        """Return the processes that serve the devices, one for each host."""
        return [pid for name, pid in self.handle.pids().items() if name.startswith("host.")]

    def of_devices(self) -> list[psutil.Process]:
        """Return the processes that the device workers started: zygotes, and proxies of tasks."""
        found = []
        for pid in self.workers():
            # none while it is being started again
            found += [*children(pid), *warm_zygotes.forked_for(pid)]
        return found

    def holders_of(self, name: str) -> list[str]:
        """Return processes of the device workers that have this shared memory open or mapped."""
        below = [p for near in self.of_devices() for p in (near, *children(near, recursive=True))]
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


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root below which the hosts of one system show mounts: none knows those of another."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is the index of packages of the system."""
    folder = tmp_path_factory.mktemp("wheels")
    add_wheel(folder, "blocks")
    add_wheel(folder, "towers", requires=["blocks>=1", "torch>=2"])
    return folder


@pytest.fixture(scope="package")
def system(shared: Path, wheels: Path) -> Iterator[System]:
    allowed = {"ROUNDHOUSE_MOUNT_ROOTS": str(shared), "ROUNDHOUSE_WHEELS": str(wheels)}
    # `test_commands_that_move` has a system of its own, whose devices store processes
    allowed["ROUNDHOUSE_CRIU"] = str(shared / "no-criu")
    with (
        temporary_home() as home,
        running_fast(home, env={**allowed, **NETWORK, **STEADY}) as handle,
        contextlib.closing(System(handle, shared)) as system,
    ):
        yield system


@contextlib.contextmanager
def running_fast(home: Path, **how: Any) -> Iterator[Handle]:
    """Run a system whose programs are forks of processes that have imported all they need."""
    with contextlib.ExitStack() as stack:
        with warm_programs.forked_from_a_warm_process():
            handle = stack.enter_context(running(home, **how))
        yield handle


@contextlib.contextmanager
def running_system(
    home: Path, kind: type[Any] = System, *, env: dict[str, str], **how: Any
) -> Iterator[Any]:
    """Run a system of a file's own, whose hosts show gates."""
    with tempfile.TemporaryDirectory() as shared:
        env = {"ROUNDHOUSE_MOUNT_ROOTS": shared, **STEADY, **env}
        with (
            running_fast(home, env=env, **how) as handle,
            contextlib.closing(kind(handle, Path(shared))) as system,
        ):
            yield system
