"""The launcher: side by side, twice on one home, after Ctrl-C, after `kill -9`, after a restart."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.cli.client import ApiProblem, Client
from app.local.embedded_servers import socket_folder, temporary_home
from app.local.up import ROOT, running

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


def wait_until_gone(home: Path, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while left := family(home):
        assert time.monotonic() < until_s, f"still there: {left}"
        time.sleep(0.1)


def me(system, tenant: str = "alpha") -> dict:
    with Client(system.url, system.keys[tenant]["member"]) as client:
        return client.get("/v1/me")


def test_two_side_by_side_know_nothing_of_each_other(system, home):
    with running(home, devices=1) as other:
        assert other.url != system.url
        assert me(other)["tenant_id"] != me(system.handle)["tenant_id"]
        stranger = Client(other.url, system.keys["alpha"]["member"], patience_s=0)
        with stranger, pytest.raises(ApiProblem, match="key"):
            stranger.get("/v1/me")
    assert me(system.handle)["tenant"] == "alpha"


def test_a_second_one_on_the_same_home_is_refused_and_told_why(system):
    home = system.handle.wanted.home
    command = [sys.executable, "-m", "app.local.up", "--home", str(home)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert f"already runs on {home} (process {system.handle.process.pid})" in second.stderr
    assert me(system.handle)["tenant"] == "alpha"


def test_ctrl_c_leaves_nothing_behind_and_data_survive(home):
    with running(home, devices=1) as first:
        before, url = me(first), first.url
        assert first.stop(signal.SIGINT) == 0
        assert family(home) == []
        assert not socket_folder(home).exists()
    with running(home, devices=1) as again:
        assert me(again) == before
        assert again.url == url


def test_kill_9_of_the_supervisor_leaves_nothing_behind_and_the_next_start_recovers(home):
    with running(home, devices=1) as first:
        before = me(first)
        first.process.kill()
        wait_until_gone(home, timeout_s=15)
    with running(home, devices=1) as again:
        assert me(again) == before
