"""Three simulated accelerators of one host, each with a zygote whose processes see it alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.sim import orders
from tests.workers.resident_gangs import DeviceOfResidents, Residents
from workers.process.isolation.device_access import find_access


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
