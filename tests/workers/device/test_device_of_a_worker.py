"""Workers of simulated accelerators: each its own device, whose memory the kernel counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.model.device_choice import DeviceTraits, traits_in
from app.core.model.protocol.messages import Failed, Finished, Paused
from app.settings import Settings
from tests.sim import orders
from tests.workers.conftest import DeviceRig
from workers.device import device_check
from workers.device.processes.resident import kernel_memory
from workers.process import slab
from workers.process.isolation.device_access import find_access
from workers.transfer.host_context import CannotServe, House

pytestmark = pytest.mark.sim

MB = 2**20
DEVICE_BYTES = 512 * MB


@pytest.fixture
def of_host(
    rigs: Callable[..., DeviceRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DeviceRig]:
    """Makes workers of a host with two simulated accelerators."""
    folder = tmp_path / "sim"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    told = {"SIM_DEVICES": "2", "SIM_HOME": str(folder), "SIM_MEMORY_BYTES": str(DEVICE_BYTES)}
    told |= orders.ENVIRON
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    def make(number: int, **more: Any) -> DeviceRig:
        home = tmp_path / f"home{number}"
        (home / "monitor").mkdir(parents=True)
        _write_reading(home / "monitor", {})
        usual = {
            "kind": "sim",
            "access": find_access("sim", str(number), environ=told, nodes=(folder,)),
            "memory_bytes": DEVICE_BYTES,
            "monitor": f"file:{home / 'monitor'}",
            "health_every_s": 0.2,
        }
        return rigs(home=home, **{**usual, **more})

    return make


def _count(rig: DeviceRig) -> None:
    """Count the memory of all residents on the device, as a driver does.

    The device's bytes are shared memory of the process that uses them, as its slab is.
    """
    counted = {}
    for resident in list(rig.supervisor.stays.residents.values()):
        if resident.slab >= 0 and (held := kernel_memory(resident.pid)) is not None:
            counted[resident.pid] = max(0, held[1] - slab.held_bytes(resident.slab))
    _write_reading(_monitor_of(rig), {"processes": counted})


def _monitor_of(rig: DeviceRig) -> Path:
    return rig.house.run.parent / "monitor"


def _write_reading(folder: Path, reading: dict[str, Any]) -> None:
    (folder / "draft").write_text(json.dumps(reading))
    (folder / "draft").replace(folder / "h.0.json")


def test_each_of_two_workers_on_a_host_shows_its_own_device(of_host):
    for number in (0, 1):
        rig = of_host(number)
        rig.launch("t1", "devices:sees")
        seen = rig.event(Finished, "t1").result
        assert seen == {"count": 1, "number": number, "device": "sim:0"}


def test_trial_at_the_start_finds_the_device_and_its_memory(of_host, tmp_path):
    def find(number: str) -> House:
        settings = Settings(
            home=tmp_path,
            device="h.0",
            device_kind="sim",
            accelerator=number,
            device_memory_bytes=DEVICE_BYTES // 2,
        )
        return House.of(settings, device_check.find_device(settings))

    house = find("1")
    assert (house.model, house.access.id) == ("simulated accelerator 1", "1")
    assert traits_in(house.facts) == DeviceTraits(
        model="simulated accelerator 1",
        compute_capability="1.0",
        offers=("env", "secrets", "notice", "session", "isolation", "isolation:user"),
    )
    assert (house.memory_bytes, house.device_fraction) == (DEVICE_BYTES // 2, 0.5)
    with pytest.raises(CannotServe, match=r"and no sim device \(with .*SIM_VISIBLE_DEVICES=2"):
        find("2")


def test_task_that_takes_too_much_or_denies_what_it_holds_is_bounded_and_told(of_host, monkeypatch):
    monkeypatch.setattr("workers.device.device_memory.CONTEXT_BYTES", 16 * MB)
    rig = of_host(0, memory_bytes=DEVICE_BYTES // 4, device_fraction=0.25)
    facts = rig.reports[-1].facts
    assert "device_memory" in facts["limits"]
    assert "device_memory" not in facts["unlimited"]
    # beyond the cap of the allocator
    rig.launch("t1", "devices:Holds", params={"megabytes": 200})
    assert "out of memory" in rig.event(Failed, "t1").message
    # beyond the cap, which it lifted
    rig.launch("t2", "devices:Holds", params={"megabytes": 200, "lifts": True})
    rig.steps("t2", 2)
    _count(rig)
    assert "more memory on the device" in rig.event(Failed, "t2").message
    # within it, but denied
    rig.launch("t3", "devices:Holds", params={"megabytes": 100, "denies": True})
    rig.steps("t3", 2)
    assert rig.view("t3").memory_bytes == 0
    _count(rig)
    rig.until(lambda: rig.view("t3").memory_bytes >= 100 * MB)
    rig.steps("t3", rig.view("t3").step + 20)  # it goes on telling nothing
    assert rig.view("t3").memory_bytes >= 100 * MB
    rig.pause("t3")
    rig.event(Paused, "t3")
    assert rig.supervisor.residency.free_bytes <= 28 * MB
