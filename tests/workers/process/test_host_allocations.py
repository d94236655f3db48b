"""What supervisors of a host know of each other's devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workers.starts import start_of
from workers.process.host_allocations import HostAllocations
from workers.process.isolation.device_access import DeviceAccess, NoSuchDevice, find_access


def no_presets(home: str, wanted: Any, then: Any) -> None:
    then(None)


@pytest.fixture
def host() -> tuple[HostAllocations, list[str]]:
    """Three devices of a kind and one of another, and which of them were woken."""
    allocations, woken = HostAllocations(), list[str]()
    for number in range(3):
        nodes = (Path(f"/dev/x{number}"), Path("/dev/xctl"))
        access = find_access("sim", str(number), environ={"SIM_HOME": "/x"}, nodes=nodes)
        device = f"h.{number}"
        wake = partial(woken.append, device)
        allocations.serve(device, "sim", access, wake, no_presets)
    allocations.serve("h.9", "other", DeviceAccess(), partial(woken.append, "h.9"), no_presets)
    return allocations, woken


def test_a_task_sees_its_devices_in_their_order_and_no_other(host):
    access = host[0].access("h.1", ["h.2"])
    assert access.variables == {"SIM_HOME": "/x", "SIM_VISIBLE_DEVICES": "1,2"}
    assert [*map(str, access.nodes)] == ["/dev/x1", "/dev/xctl", "/dev/x2"]
    alone = host[0].access("h.1", [])
    assert alone.variables == {"SIM_HOME": "/x", "SIM_VISIBLE_DEVICES": "1"}


def test_each_rank_sees_the_device_of_its_slot_alone(host):
    variables = host[0].access("h.1", ["h.2"]).variables
    start = replace(start_of({"job": "m:J"}, variables=variables), kind="sim")
    shown = [start.variables_of_slot(slot) for slot in range(2)]
    assert shown == [{"SIM_VISIBLE_DEVICES": "1"}, {"SIM_VISIBLE_DEVICES": "2"}]
    assert replace(start, variables={}).variables_of_slot(0) == {}


@pytest.mark.parametrize(
    ("guest", "told"), [("h.7", "does not serve h.7"), ("h.9", "h.9 is not of kind sim")]
)
def test_a_device_that_it_cannot_have_is_named(host, guest, told):
    with pytest.raises(NoSuchDevice, match=told):
        host[0].access("h.0", [guest])
    host[0].leave("h.1")
    with pytest.raises(NoSuchDevice, match=r"does not serve h\.1"):
        host[0].access("h.0", ["h.1"])


def test_a_claim_waits_until_the_other_device_has_made_room(host):
    allocations, woken = host
    allocations.claim("h.0", {"h.1": 5, "h.2": 7})
    assert woken == ["h.1", "h.2"]
    assert (allocations.claimed_bytes("h.1"), allocations.claimed_bytes("h.0")) == (5, 0)
    allocations.note_room("h.1", has_room=True)
    assert not allocations.have_room(["h.1", "h.2"])
    allocations.note_room("h.2", has_room=True)
    assert allocations.have_room(["h.1", "h.2"])
    assert woken == ["h.1", "h.2", "h.0", "h.0"]  # the home looks again each time
    allocations.claim("h.0", {"h.1": 5, "h.2": 7})
    assert allocations.have_room(["h.1", "h.2"]), "nothing has changed"
    allocations.claim("h.0", {"h.1": 6})
    assert not allocations.have_room(["h.1"])


def test_claims_end_with_the_task_or_with_the_supervisor_of_its_home(host):
    allocations, _ = host
    allocations.claim("h.0", {"h.2": 7})
    allocations.claim("h.1", {"h.2": 2})
    assert allocations.claimed_bytes("h.2") == 9
    allocations.claim("h.1", {})
    allocations.leave("h.0")
    assert allocations.claimed_bytes("h.2") == 0


def test_claims_outlive_a_supervisor_that_is_started_anew(host):
    """The claim comes again with the next round of its home; until then it is kept."""
    allocations, _ = host
    allocations.claim("h.0", {"h.1": 5})
    allocations.serve("h.1", "sim", DeviceAccess(id="1"), lambda: None, no_presets)
    assert allocations.claimed_bytes("h.1") == 5
