"""No way out of the sandbox that is tried from inside a real resident reaches its target.

Outside of the sandbox the same probes do reach it, so each of them would notice a hole.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from app.core.model.protocol.messages import Finished
from app.core.security.sandbox_layers import missing
from tests.conftest import Servers
from tests.security.bundle import probes
from tests.security.devices import hostile_bundle
from tests.workers.conftest import ROOT, DeviceRig

pytestmark = pytest.mark.security

#: file names as `make up` lays them out below its home
SECRETS = {
    "keys": "keys.json",
    "signing key": "run/signing.key",
    "database": "postgres/PG_VERSION",
    "message queue": "redis/dump.rdb",
}
#: probes that fail on some machines without a sandbox too
NOT_EVERYWHERE = {
    *("connect to address of host", "see interfaces", "connect by name"),
    "read limits: neighbour",  # needs CAP_SYS_RESOURCE
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceRig]:
    made = DeviceRig(tmp_path_factory.mktemp("probed"))
    made.open()
    yield made
    made.close()


@pytest.fixture(scope="module")
def where(rig: DeviceRig, servers: Servers) -> Iterator[dict[str, Any]]:
    """Start a neighbour, and listen on the host; return the targets."""
    walls = rig.reports[-1].facts["sandbox"]
    if lacking := missing(walls):
        pytest.skip(f"this machine does not give the layers {', '.join(lacking)}")
    bundle = hostile_bundle(rig)
    before = set(_descendants())
    rig.launch("neighbour", "probes:Neighbour", bundle=bundle, tenant="good")
    rig.until(lambda: rig.printed("neighbour"))
    rig.pause("neighbour")  # it stays in memory, and the device is free for the probes
    rig.until(lambda: rig.view("neighbour").state == "paused")
    neighbour = next(pid for pid in set(_descendants()) - before if _is_process_1(pid))
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        abstract = f"roundhouse-probe-{os.getpid()}"
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind("\0" + abstract)
        unix.listen()
        yield {
            "files": _files(rig, neighbour),
            "pids": {
                "device worker": os.getpid(),
                "zygote": _parent(neighbour),
                "neighbour": neighbour,
            },
            "port": listening.getsockname()[1],
            "address": _address_of_host(),
            "abstract": abstract,
            "postgres": _postgres(servers),
            "redis": _redis(servers),
        }


def _files(rig: DeviceRig, neighbour: int) -> dict[str, str]:
    home = rig.house.run.parent
    for name in SECRETS.values():
        path = home / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text("secret")
        path.chmod(0o644)  # so that only the sandbox hides it
    stored = next((home / "store").rglob(f"*{rig.bundle[2:]}*"))
    scratch = f"/proc/{neighbour}/root/scratch/neighbour"
    return {
        **{label: str(home / name) for label, name in SECRETS.items()},
        "stored object": str(stored),
        "store": str(home / "store"),
        "run folder": str(rig.house.run),
        "neighbour's scratch": scratch,
        "code of the service": str(ROOT / "app" / "settings.py"),
        "password hashes": "/etc/shadow",
        "state of the machine": "/var/lib",
    }


def _descendants() -> Iterator[int]:
    parents = {pid: _parent(pid) for pid in _pids()}
    for pid in parents:
        above: int | None = pid
        while above is not None:
            above = parents.get(above)
            if above == os.getpid():
                yield pid
                break


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _status(pid: int) -> dict[str, list[str]]:
    """Return the fields of the process's status; none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _parent(pid: int) -> int | None:
    return int(_status(pid).get("PPid", ["0"])[0]) or None


def _is_process_1(pid: int) -> bool:
    return _status(pid).get("NSpid", [])[1:] == ["1"]


def _address_of_host() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect(("192.0.2.1", 9))  # sends nothing
        return str(sock.getsockname()[0])
    return "127.0.0.1"


def _postgres(servers: Servers) -> str | list[Any]:
    url = make_url(servers.database_url)
    folder, port = url.query.get("host"), url.port or 5432
    return f"{folder}/.s.PGSQL.{port}" if folder else [url.host, port]


def _redis(servers: Servers) -> str | list[Any]:
    if servers.redis_url.startswith("unix://"):
        return servers.redis_url.removeprefix("unix://").partition("?")[0]
    url = make_url(servers.redis_url)
    return [url.host, url.port or 6379]


@pytest.fixture(scope="module")
def inside(rig: DeviceRig, where: dict[str, Any]) -> dict[str, str]:
    """Return what each probe reached inside a resident of another tenant."""
    params = {"where": where}
    bundle = hostile_bundle(rig)
    rig.launch("probe", "probes:Probe", bundle=bundle, tenant="bad", params=params)
    finished = rig.event(Finished, "probe")
    if os.geteuid() == 0:
        assert finished.result["uid"] >= 200_000
    reached: dict[str, str] = finished.result["reached"]
    return reached


@pytest.fixture(scope="module")
def outside(where: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the probes that change nothing reach in a process without a sandbox."""
    code = "import json, sys; from tests.security.bundle import probes; "
    code += "print(json.dumps(probes.tried(probes.PLAIN, json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(where),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        cwd=tmp_path_factory.mktemp("outside"),
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", probes.PROBES)
def test_probe_inside_the_sandbox_reaches_nothing(name, inside):
    assert inside[name] == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reaches all targets without a sandbox")
@pytest.mark.parametrize("name", sorted(probes.PLAIN.keys() - NOT_EVERYWHERE))
def test_probe_outside_the_sandbox_reaches_its_target(name, outside):
    assert outside[name] != ""


def test_neighbour_of_the_probes_goes_on_in_the_same_process(rig, inside, where):
    bundle = hostile_bundle(rig)
    rig.launch("neighbour", "probes:Neighbour", 2, bundle=bundle, tenant="good")
    rig.until(lambda: rig.printed("neighbour", 2))
    assert _is_process_1(where["pids"]["neighbour"])
    rig.cancel("neighbour", 2)
