"""A device worker watches its device: real processes, and a monitor that a test writes."""

from __future__ import annotations

import time

import pytest

from app.core.model.protocol.messages import Finished
from tests.workers.device.test_monitors import write

WELL = {"temperature_c": 60, "temperature_limit_c": 90, "power_w": 100.0}


@pytest.fixture
def watched(rigs, tmp_path):
    """Makes a device with this to read; `say` changes it, and `health` is the newest report's."""

    def make(patience_s=30.0, **said):
        file = tmp_path / "monitors" / "h.0.json"
        file.parent.mkdir()
        write(file, **said)
        hurried = {"health_every_s": 0.3, "health_patience_s": patience_s}
        device = rigs(monitor=f"file:{file.parent}", **hurried)
        device.say = lambda **more: write(file, **more)
        device.rules = lambda: [f["rule"] for f in device.reports[-1].health.get("findings", [])]
        return device

    return make


def test_the_figures_and_findings_of_a_device_go_up_with_its_heartbeats(watched):
    device = watched(**WELL)
    assert device.reports[0].health == {"checked": 0, "reading": WELL}
    device.say(**WELL, xids=[48])
    device.until(lambda: device.rules() == ["xid"])
    assert device.reports[-1].health["findings"] == [
        {
            "rule": "xid",
            "verdict": "cordon",
            "effect": "move",
            "reason": "Xid 48 (double-bit ECC error).",
        }
    ]


@pytest.mark.parametrize(("fault", "patience_s"), [("lost", 30.0), ("hang", 1.0)])
def test_a_device_that_is_faulty_from_its_start_says_so_in_its_first_report(
    watched, fault, patience_s
):
    device = watched(fault=fault, patience_s=patience_s)
    assert [f["rule"] for f in device.reports[0].health["findings"]] == [fault]


def test_a_driver_that_hangs_stops_neither_the_job_nor_the_heartbeats(watched):
    device = watched(**WELL, patience_s=1.0)
    device.launch("t1", "jobs:Patient", params={"steps": 40, "nap_s": 0.01})
    device.steps("t1", 1)
    device.say(fault="hang")
    device.until(lambda: device.rules() == ["hang"])
    device.steps("t1", device.view("t1").step + 20)
    device.let_end("t1")
    assert device.event(Finished, "t1").result["whole"]
    device.say(**WELL)
    device.until(lambda: device.rules() == [])


def test_a_worker_ends_although_its_driver_hangs(watched):
    device = watched(**WELL, patience_s=1.0)
    device.say(fault="hang")
    device.until(lambda: device.rules() == ["hang"])
    began_s = time.monotonic()
    device.close()
    assert time.monotonic() - began_s < 60


def test_a_check_forgets_what_was_and_is_told_when_it_is_made(watched):
    device = watched(**WELL)
    device.say(**WELL, xids=[48])
    device.until(lambda: device.rules() == ["xid"])
    device.check = 1
    device.until(lambda: device.reports[-1].health["checked"] == 1)
    assert device.rules() == []
    device.say(fault="lost")
    device.check = 2
    device.until(lambda: device.reports[-1].health["checked"] == 2)
    assert device.rules() == ["lost"]
