"""The launcher: side by side, twice on one home, after Ctrl-C, after `kill -9`, after a restart."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.cli.client import ApiProblem, Client
from app.local.embedded_servers import socket_folder, temporary_home
from app.local.up import ROOT, running
from tests.acceptance.conftest import SETTLE_S
from tests.ports import free_port

pytestmark = pytest.mark.acceptance


@pytest.fixture
def home():
    with temporary_home() as home:
        yield home


def family(home: Path) -> list[str]:
    """Return every process of this machine that names `home` in its command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
            name = process.name()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(home) in word or str(socket_folder(home)) in word for word in words):
            found.append(f"{process.pid} {name}")
    return found


def wait_until_gone(home: Path) -> None:
    until_s = time.monotonic() + SETTLE_S
    while left := family(home):
        assert time.monotonic() < until_s, f"still there: {left}"
        time.sleep(0.1)


def launched(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a launcher that is to end by itself."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SETTLE_S)


def me(system, tenant: str = "alpha") -> dict:
    with Client(system.url, system.keys[tenant]["member"]) as client:
        return client.get("/v1/me")


def test_second_service_on_one_home_is_refused_with_the_reason(system):
    home = system.handle.wanted.home
    command = [sys.executable, "-m", "app.cli.main", "up", "--home", str(home)]
    second = launched(command)
    assert second.returncode == 1
    assert f"already runs on {home} (process {system.handle.process.pid})" in second.stderr
    assert me(system.handle)["tenant"] == "alpha"


def test_port_that_another_program_has_is_refused_with_advice(home):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "app.cli.main", "up", "--home", str(home), "--port", port]
        refused = launched(command)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"cannot listen on port {port} of 127.0.0.1: Address already")


def test_service_beside_another_leaves_nothing_behind_and_keeps_its_data(system, home):
    """Check what `kill -9` of the supervisor leaves, what the next start finds, and Ctrl-C."""
    (home / "port").write_text(str(free_port()))  # as of an earlier run: nobody else gets this one
    with running(home, devices=1) as first:
        before, url = me(first), first.url
        assert url != system.url
        assert before["tenant_id"] != me(system.handle)["tenant_id"]
        stranger = Client(url, system.keys["alpha"]["member"], patience_s=0)
        with stranger, pytest.raises(ApiProblem, match="key"):
            stranger.get("/v1/me")
        first.process.kill()
        wait_until_gone(home)  # what its processes had started ends with them, a moment later
    assert me(system.handle)["tenant"] == "alpha"
    with running(home, devices=1) as again:
        assert (me(again), again.url) == (before, url)
        assert again.stop(signal.SIGINT) == 0
        wait_until_gone(home)
        assert not socket_folder(home).exists()
    assert me(system.handle)["tenant"] == "alpha"
