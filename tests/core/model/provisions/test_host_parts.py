"""A job may name on how many hosts its devices lie; what cannot be so is told what to do."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.model.descriptor import (
    BadDescriptor,
    Devices,
    as_json,
    choice_text,
    from_json,
    parse,
    to_wire,
)
from app.core.model.device_choice import choice_in


def request(devices: dict[str, Any], **task: Any) -> dict[str, Any]:
    usual = {"name": "t", "run": {"job": "m:J"}, "world_size": 16, "devices": devices}
    return {"tasks": [{**usual, **task}], "bundle": f"sha256:{'0' * 64}"}


def read(devices: dict[str, Any]) -> Devices:
    [task] = parse(request(devices)).tasks
    again = parse({"tasks": [as_json(task)], "bundle": f"sha256:{'0' * 64}"}).tasks
    assert again == (task,)
    assert as_json(task)["devices"]["hosts"] == task.devices.hosts
    return task.devices


@pytest.mark.parametrize(
    ("devices", "hosts", "across_hosts", "most"),
    [
        ({"min": 4}, None, False, 16),
        ({"min": 4, "hosts": None}, None, False, 16),
        ({"min": 4, "hosts": 1}, None, False, 16),
        ({"min": 4, "across_hosts": True}, None, True, 16),
        ({"min": 4, "hosts": 2}, 2, True, 4),
        ({"min": 4, "max": 4, "hosts": 4, "across_hosts": True}, 4, True, 4),
    ],
)
def test_number_of_hosts_is_read_and_written(
    devices: dict[str, Any], hosts: int | None, across_hosts: bool, most: int
) -> None:
    found = read(devices)
    assert (found.hosts, found.across_hosts, found.max) == (hosts, across_hosts, most)


@pytest.mark.parametrize("devices", [{"min": 4}, {"hosts": 1}, {"across_hosts": True}])
def test_device_is_sent_no_number_that_was_not_named(devices: dict[str, Any]) -> None:
    """A worker of an older version refuses a launch with a field that it does not know."""
    [task] = parse(request(devices)).tasks
    assert "hosts" not in to_wire(task)["devices"]
    assert from_json(to_wire(task)) == task


def test_row_holds_the_number_in_its_choice_of_devices() -> None:
    """So a row of an older version, which has none, reads as before."""
    [task] = parse(request({"min": 4, "hosts": 2, "labels": ["fast"]})).tasks
    assert choice_text(task) == "+fast,#2"
    assert choice_in(choice_text(task)) == task.devices.choice
    assert choice_in("+fast").hosts == 0


@pytest.mark.parametrize(
    ("devices", "task", "where", "told"),
    [
        ({"min": 5, "hosts": 2}, {}, "devices/min", "Set it to 4 or 6, or leave hosts out"),
        ({"hosts": 2}, {}, "devices/min", "Set it to 2, or leave hosts out"),
        ({"min": 4, "max": 8, "hosts": 2}, {}, "devices/max", "must be 4, as min is"),
        ({"min": 4, "hosts": 2, "across_hosts": False}, {}, "devices/across_hosts", "left out"),
        ({"min": 4, "hosts": 1, "across_hosts": True}, {}, "devices/hosts", "more than 1"),
        ({"min": 4, "hosts": 0}, {}, "devices/hosts", "must be from 1 to 16"),
        ({"min": 4, "hosts": 17}, {}, "devices/hosts", "must be from 1 to 16"),
        ({"min": 4, "hosts": 2}, {"islands": 2}, "islands", "are of one island"),
        (
            {"min": 16, "hosts": 2},
            {"collectives": "native"},
            "devices/hosts",
            "must be 1: ranks with native collectives are on one host",
        ),
    ],
)
def test_what_cannot_be_so_is_refused_with_ways_out(
    devices: dict[str, Any], task: dict[str, Any], where: str, told: str
) -> None:
    with pytest.raises(BadDescriptor) as refused:
        parse(request(devices, **task))
    [fault] = refused.value.faults
    assert fault.pointer == f"/tasks/0/{where}"
    assert told in fault.detail
