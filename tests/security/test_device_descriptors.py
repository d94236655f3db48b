"""Descriptors that a tenant's process inherits cannot be used against its device worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

from app.core.model.protocol.messages import Failed
from tests.security.devices import attack, serves
from tests.workers.conftest import ROOT, DeviceRig, rigs
from workers.device.processes import resident_records
from workers.transfer.host_context import locked

pytestmark = pytest.mark.security

__all__ = ["rigs"]


@pytest.fixture
def rig(rigs) -> DeviceRig:
    return rigs()


def test_descriptor_locks_held_by_a_resident_delay_no_launch(rig):
    attack(rig, "bad", "hold_descriptors")
    rig.until(lambda: rig.printed("bad"))
    done = json.loads(rig.printed("bad")[0])
    rig.launch("t1", "jobs:Count", params={"steps": 3})  # is prepared at the same time
    rig.until(lambda: rig.view("t1"))
    rig.pause("bad")
    serves(rig, "t2")
    assert not {"truncate", "seal", "lease"} & done.keys(), done
    held = {*done.get("flock", []), *done.get("lockf", [])}
    assert not [path for path in held if "run" in path.split("/")], done


def test_sockets_sent_by_a_resident_keep_nobody_waiting_when_they_are_closed(rig):
    attack(rig, "bad", "send_lingering_sockets")
    assert rig.event(Failed, "bad").cause == "exit"
    serves(rig, "t1")


@pytest.mark.parametrize("sandbox", ["preferred", "off"])
def test_resident_that_asked_to_outlive_its_device_worker_is_ended_by_the_next(tmp_path, sandbox):
    """Kill the device worker; a new one must serve, and the old job's process must be gone."""
    device = subprocess.Popen(
        [sys.executable, "-m", "tests.security.separate", str(tmp_path), "--sandbox", sandbox],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert device.stdout is not None
    try:
        assert device.stdout.readline() == b"outlives\n"
        left = psutil.Process(device.pid).children(recursive=True)
    finally:
        device.kill()
        device.wait()
        device.stdout.close()
    records = tmp_path / "run" / "h.0" / "residents"
    os.close(locked(tmp_path / "run" / "h.0.lock", 60.0))
    assert list(records.iterdir())
    assert resident_records.end_recorded(records, 60.0) == []
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    assert not list(records.iterdir())
