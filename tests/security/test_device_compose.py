"""docker-compose.yml as shipped, in a real container runtime (`tests.security.compose_in_runc`)."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from app.local.container_secrets import ROLES
from tests.security import compose_in_runc
from tests.security.compose_in_runc import ROOT, Deployment, deployment, inside, make_root

pytestmark = [
    pytest.mark.security,
    pytest.mark.long,
    pytest.mark.skipif(bool(compose_in_runc.why_not()), reason=compose_in_runc.why_not() or "-"),
]

URL = "http://127.0.0.1:8000"
#: A tenant's function that tries to reach what it should not, and returns what it reached.
SPY = """
import os, socket


def look(ctx, *, paths, places):
    seen = {}
    for path in paths:
        try:
            seen[path] = sorted(os.listdir(path)) if os.path.isdir(path) else len(open(path).read())
        except OSError as error:
            seen[path] = type(error).__name__
    for host, port in places:
        try:
            socket.create_connection((host, port), timeout=2).close()
            seen[f"{host}:{port}"] = "connected"
        except OSError as error:
            seen[f"{host}:{port}"] = type(error).__name__
    return {"seen": seen, "uid": os.getuid(), "processes": os.listdir("/proc")[:0]}
"""
PATHS = [
    "/var/lib/roundhouse/admin/keys.json",
    "/var/lib/roundhouse/run/signing.key",
    "/var/lib/roundhouse/island/local.key",
    "/var/lib/roundhouse/store",
    "/run/roundhouse/secrets/redis_url",
    "/run/roundhouse/public",
    "/srv/roundhouse/app",
    "/proc/1/root/run/roundhouse/secrets/redis_url",
]
PLACES = [["127.0.0.1", 8000], ["127.0.0.1", 6379], ["127.0.0.1", 5432]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("ROUNDHOUSE_CONTAINERS")  # keeps the root file system between runs
    return Path(given) if given else tmp_path_factory.mktemp("containers")


@pytest.fixture
def system(folder: Path, tmp_path: Path) -> Iterator[Deployment]:
    with deployment(tmp_path, make_root(folder)) as made:
        yield made


class Client:
    """A client of the containers' API, run in their network as a process of this machine."""

    def __init__(self, system: Deployment) -> None:
        self.system, self.key = system, ""

    def run(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ROUNDHOUSE_URL": URL, "ROUNDHOUSE_KEY": self.key}
        assert self.system.network is not None
        line = inside(self.system.network.pid, [sys.executable, *words])
        return subprocess.run(
            line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )

    def call(self, code: str) -> object:
        """Return the value of an expression with the API's client as `c`."""
        program = (
            "import json, os; from app.cli.client import Client\n"
            f"with Client({URL!r}, os.environ['ROUNDHOUSE_KEY']) as c: print(json.dumps({code}))"
        )
        done = self.run("-c", program)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    def cli(self, *words: str) -> str:
        done = self.run("-m", "app.cli.main", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def become_member(self) -> None:
        keys = self.system.volume("admin") / "keys.json"
        self.key = json.loads(keys.read_text())["platform"]["platform_admin"]
        body = {"name": "alpha", "weight": 1.0}
        tenant = self.call(f"c.post('/v1/tenants', {body!r})")
        user = self.call(f"c.post('/v1/users', {dict(tenant_id=tenant['id'], name='ann')!r})")
        body = {"user_id": user["id"], "role": "member", "name": "a test"}
        self.key = self.call(f"c.post('/v1/keys', {body!r})")["key"]


def until(true: Callable[[], object], timeout_s: float = 240.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "not in time"
        time.sleep(0.5)


def _ready(client: Client) -> dict[str, dict[str, object]]:
    return client.call("c.ready()")["checks"]


def test_compose_serves_tenants_behind_their_sandbox(system, tmp_path):
    system.up("api", "control", "island", "host")
    system._await("api", "service_healthy", 300)
    client = Client(system)
    client.become_member()
    until(lambda: _ready(client)["devices"]["detail"] == "2 of 2 are up")
    assert [name for name, check in _ready(client).items() if not check["ok"]] == []

    # 1. Both devices have all layers except a user of its own, which only root can provide.
    assert (
        _ready(client)["sandbox"]["detail"]
        == "local.0, local.1: its sandbox is complete (required)"
    )
    shown = client.call("[*c.items('/v1/devices')]")
    assert [device["sandbox"]["missing"] for device in shown] == [[], []]

    # 2. What a tenant's function can reach.
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "spy.py").write_text(SPY)
    params = json.dumps({"paths": PATHS, "places": PLACES})
    request = {
        "name": "spy",
        "tasks": [{"name": "look", "run": {"function": "spy:look"}, "params": json.loads(params)}],
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    bundle = str(tmp_path / "code")
    client.cli("submit", str(tmp_path / "request.json"), "--bundle", bundle, "--watch")
    task = client.call("c.get('/v1/requests/' + next(c.items('/v1/requests'))['id'])")["tasks"][0]
    seen = task["result"]["seen"]
    assert {seen[path] for path in PATHS} <= {"FileNotFoundError", "PermissionError"}, seen
    assert {seen[f"{host}:{port}"] for host, port in PLACES} == {"ConnectionRefusedError"}

    # 3. The demo's load.
    digits = ("submit", "examples/digits", "--job", "train:Train", "-p", "width=16")
    for n in range(3):
        client.cli(*digits, "-p", f"seed={n}", "-p", "work=1")
    states = "[each['state'] for each in c.items('/v1/requests')]"
    until(lambda: set(client.call(states)) == {"done"}, 240)

    # 4. All message consumers are healthy, and Redis has refused nothing to any of its users.
    for id in ("control", "island-0", "host"):
        assert system.is_healthy(id, "island" if id == "island-0" else id)
    logs = "".join(log.read_text() for log in (system.folder / "logs").iterdir())
    assert "NOPERM" not in logs
    assert "no permission" not in logs.lower()


def test_without_our_seccomp_profile_a_device_refuses_to_serve(system):
    dockers = copy.deepcopy(system.services["host"])
    dockers["security_opt"] = ["no-new-privileges:true"]
    system.services["host"] = dockers
    system.up("api", "island", "host")
    system._await("api", "service_healthy", 300)
    assert system.running["host"].wait(120) == 1
    assert "its sandbox is required, but its host" in system.log("host")
    assert "deploy/seccomp.json" in system.log("host")
    client = Client(system)
    client.become_member()
    until(lambda: "takes no work" in str(_ready(client)["sandbox"]["detail"]))
    found = _ready(client)
    assert not found["sandbox"]["ok"]
    assert "local.0, local.1: takes no work" in found["sandbox"]["detail"]
    told = "0 of 2 are up; local.0: its sandbox is required"
    assert found["devices"]["detail"].startswith(told)


# --- Redis ----------------------------------------------------------------------------------------


def _redis(system: Deployment, role: str, *command: str) -> str:
    """Return Redis' answer to a user of this role; "" stands for no user."""
    words = ["redis-cli", "--tls", "--cacert", "/run/roundhouse/secrets/ca.pem"]
    if role:
        secret = (system.volume(f"for-{role}") / "redis_url").read_text()
        words += ["--no-auth-warning", "--user", role, "--pass", urlsplit(secret).password or ""]
    return system.execute("redis", [*words, *command])[1].strip()


def test_redis_gives_each_kind_of_process_its_own_queues_and_nothing_else(system):
    system.up("redis")
    system._await("redis", "service_healthy", 60)
    more = ("FLUSHALL", "CONFIG GET *", "KEYS *", "ACL LIST", "MONITOR", "CLIENT LIST", "SHUTDOWN")
    for role in ROLES:
        for command in more:
            assert "NOPERM" in _redis(system, role, *command.split()), (role, command)
    assert _redis(system, "", "PING") == "PONG"
    assert "NOPERM" in _redis(system, "", "LPUSH", "control", "x")
    for role, takes, adds, neither in (
        ("device", "device.h.0", "island.local", "control"),
        ("island", "island.local", "device.h.0", "rate:key-reads:k"),
        ("control", "control", "island.local", "device.h.0"),
        ("api", "rate:key-reads:k", "control", "device.h.0"),
    ):
        assert "NOPERM" not in _redis(system, role, "EXISTS", takes)
        assert int(_redis(system, role, "LPUSH", adds, "x")) > 0
        assert "NOPERM" in _redis(system, role, "LPUSH", neither, "x")
    assert "NOPERM" in _redis(system, "device", "BRPOP", "island.local", "1")
    assert "NOPERM" in _redis(system, "api", "BRPOP", "device.h.0", "1")
    plain = system.execute("redis", ["redis-cli", "ping"])[1]
    assert "PONG" not in plain  # without TLS there is no answer
