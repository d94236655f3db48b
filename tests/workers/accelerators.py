"""Simulated accelerators: three with a zygote each, whose processes see one of them; and a host of
eight, of which a test opens those that it needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.sim import orders
from tests.workers.conftest import DeviceRig
from tests.workers.resident_gangs import DeviceOfResidents, Residents
from workers.process.host_allocations import HostAllocations
from workers.process.isolation.device_access import DeviceAccess, find_access

DEVICES, MB = 8, 2**20


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Residents]]:
    """Start the zygotes; all devices have their memory in one budget file."""
    home = tmp_path_factory.mktemp("devices")
    node = home / "budget"  # in the place of a device node
    node.touch()
    environ = {"SIM_DEVICES": "3", "SIM_HOME": str(home), **orders.ENVIRON}
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(3):
            access = find_access("sim", str(number), environ=environ, nodes=(node,))
            device = DeviceOfResidents(kind="sim", variables=access.variables, nodes=access.nodes)
            residents = Residents(tmp_path_factory.mktemp(f"device{number}"), device)
            stack.callback(residents.close)
            found.append(residents)
        yield found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], DeviceRig]]:
    """Gives the worker of a device of the host, by its number; all are closed at the end.

    The folder `driver` of its home has the settings of all devices.
    """
    folder = tmp_path_factory.mktemp("host")
    for path in (folder, folder / "sim", folder / "driver"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    for number in range(DEVICES):
        (folder / "driver" / f"h.{number}.json").write_text("{}")
        settings = json.dumps({"power_limit_w": {"value": 300}})
        (folder / "driver" / f"h.{number}.settings.json").write_text(settings)
    allocations = HostAllocations()
    accesses = [_access(folder / "sim", number) for number in range(DEVICES)]
    for number, access in enumerate(accesses):
        has_room = partial(allocations.note_room, f"h.{number}", has_room=True)
        allocations.serve(f"h.{number}", "sim", access, has_room, _take_any_preset)
    opened: dict[int, DeviceRig] = {}

    def worker(number: int) -> DeviceRig:
        if number not in opened:
            opened[number] = rig = DeviceRig(
                folder,
                device=f"h.{number}",
                kind="sim",
                access=accesses[number],
                memory_bytes=64 * MB,
                allocations=allocations,
                monitor=f"file:{folder / 'driver'}",
            )
            rig.open()
        return opened[number]

    yield worker
    for rig in opened.values():
        rig.close()


def _take_any_preset(home: str, wanted: object, then: Callable[[None], None]) -> None:
    then(None)


def _access(home: Path, number: int) -> DeviceAccess:
    nodes = (home / "budget", home / f"node{number}")
    for node in nodes:
        node.touch()
        node.chmod(0o666)
    environ = {
        "SIM_DEVICES": str(DEVICES),
        "SIM_HOME": str(home),
        "SIM_MEMORY_BYTES": str(64 * MB),
        "SIM_MODE": "lazy",
    }
    return find_access("sim", str(number), environ=environ, nodes=nodes)
