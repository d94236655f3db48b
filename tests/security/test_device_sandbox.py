"""A device with a sandbox that cannot be set up does not serve, and reports why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.security.sandbox_layers import LAYERS, missing
from app.local import embedded_servers
from app.settings import Settings
from workers.device.device_check import find_device
from workers.process.isolation import sandbox
from workers.transfer.host_context import House

ROOT = Path(__file__).parent.parent.parent
REFUSING = (sys.executable, "-m", "tests.security.refusing")

pytestmark = pytest.mark.security


def test_a_device_worker_by_default_requires_its_sandbox(monkeypatch, tmp_path):
    monkeypatch.delenv("ROUNDHOUSE_SANDBOX", raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(tmp_path))
    assert Settings().sandbox == House.of(Settings(), find_device(Settings())).sandbox == "required"
    monkeypatch.setenv("ROUNDHOUSE_SANDBOX", "on")  # a word that is not a mode
    with pytest.raises(ValueError, match="sandbox"):
        Settings()


def test_applied_layers_are_those_that_are_reported():
    assert tuple(LAYERS) == sandbox.WALLS


def _reports(home: Path, mode: str) -> tuple[list[dict[str, object]], str, str]:
    """Run a device where namespaces are refused; returns its reports, its end and its log."""
    words = (*REFUSING, sys.executable, "-m", "tests.security.one_device", str(home), mode)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    *reports, end = done.stdout.splitlines()
    return [json.loads(line) for line in reports], end, done.stderr


def test_device_refuses_to_serve_where_namespaces_are_refused(tmp_path):
    reports, end, log = _reports(tmp_path, "required")
    assert end == "ended"
    assert reports, "the island is told why"
    for facts in reports:
        assert "files" in facts["refuses"]
        assert "network" in facts["refuses"]
        assert facts["leaving"] is True
        assert facts["held"] == 0
    assert "ROUNDHOUSE_SANDBOX" in log
    assert "deploy/seccomp.json" in log


def test_device_in_preferred_mode_serves_without_namespaces_and_says_so(tmp_path):
    reports, end, log = _reports(tmp_path, "preferred")
    assert end == "still serves"
    assert {"files", "network"} <= set(missing(reports[-1]["sandbox"]))
    assert "refuses" not in reports[-1]
    assert "WARNING: h.0 without a complete sandbox" in log
    assert "read every file that the device worker can read" in log


# --- the whole system -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", ["required", "preferred"])
def test_make_up_explains_where_namespaces_are_refused(tmp_path_factory, mode):
    with embedded_servers.temporary_home() as home:
        words = (
            *REFUSING,
            sys.executable,
            "-m",
            "app.local.up",
            "--home",
            str(home),
            "--devices",
            "1",
        )
        environment = {**os.environ, "ROUNDHOUSE_SANDBOX": mode}
        output = home / "said"
        with output.open("w") as log:
            process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            if mode == "required":
                assert process.wait(300) == 1
                assert "its sandbox is required, but its host" in output.read_text()
                return
            until(lambda: "Ctrl-C stops everything" in output.read_text(), 300)
            said = output.read_text()
            assert "WARNING: local.0 without a complete sandbox" in said
            assert "reach the network, Postgres and Redis" in said
            url = json.loads((home / "run" / "up.json").read_text())["url"]
            with urllib.request.urlopen(f"{url}/readyz") as answer:
                checks = json.load(answer)["checks"]
            assert checks["sandbox"]["ok"]
            assert "runs tenants' code without the layers" in checks["sandbox"]["detail"]
        finally:
            process.terminate()
            process.wait(120)


def until(true: Callable[[], bool], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.1)
