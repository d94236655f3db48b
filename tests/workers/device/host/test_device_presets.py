"""A device worker sets its driver as a task's preset says: real processes, a simulated driver."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Started
from tests.workers.conftest import PRESET, ROOT, DeviceRig, separate_device
from tests.workers.device.test_driver_settings import AT_FIRST, FIRST, SimulatedDriver
from workers.device import driver_settings

LOW = {**PRESET, "power_limit_w": 200}


@pytest.fixture
def driver(tmp_path: Path) -> SimulatedDriver:
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "h.0.json").write_text("{}")
    return SimulatedDriver(folder)


@pytest.fixture
def device(rigs: Callable[..., DeviceRig], driver: SimulatedDriver) -> DeviceRig:
    return rigs(monitor=f"file:{driver.file.parent}")


def _wait(true: Callable[[], Any]) -> None:
    by_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < by_s
        time.sleep(0.02)


def test_settings_hold_while_the_task_has_the_slot(
    device: DeviceRig, driver: SimulatedDriver
) -> None:
    device.launch("t1", "jobs:Patient", preset=LOW, params={"steps": 2, "nap_s": 0.01})
    assert device.event(Started, "t1").preset == LOW, "read back, beside those of torch"
    device.steps("t1", 1)
    assert driver.values == {**FIRST, "power_limit_w": 200}
    device.pause("t1")
    device.event(Paused, "t1")
    _wait(lambda: driver.values == FIRST)
    device.launch("t1", "jobs:Patient", 2, preset=LOW, params={"steps": 2, "nap_s": 0.01})
    device.launch("t2", "jobs:Count", params={"steps": 3, "nap_s": 0.01})
    device.event(Started, "t1", 2)
    device.let_end("t1", 2)
    device.event(Finished, "t1", 2)
    assert device.event(Started, "t2").preset == PRESET
    device.event(Finished, "t2")
    _wait(lambda: driver.values == FIRST)


def test_a_command_gets_the_settings_too(device: DeviceRig, driver: SimulatedDriver) -> None:
    device.launch("t1", ["sleep", "60"], preset=LOW)
    assert device.event(Started, "t1").preset == {"power_limit_w": 200}
    assert driver.values == {**FIRST, "power_limit_w": 200}
    device.cancel("t1")
    _wait(lambda: driver.values == FIRST)


def test_a_refused_setting_fails_the_task_with_the_reason(
    device: DeviceRig, driver: SimulatedDriver
) -> None:
    driver.make({**AT_FIRST, "power_limit_w": {"value": 300, "refused": "only root may set it"}})
    device.launch("t1", "jobs:Count", preset=LOW, params={"steps": 3})
    failed = device.event(Failed, "t1")
    assert (failed.cause, failed.step) == ("device_preset", 0)
    assert failed.message == (
        "The device did not take the preset: power_limit_w: only root may set it"
    )
    device.launch("t2", "jobs:Count", params={"steps": 3})
    device.event(Finished, "t2")


def test_a_device_without_a_way_to_its_driver_refuses_the_preset(rig: DeviceRig) -> None:
    rig.launch("t1", "jobs:Count", preset=LOW, params={"steps": 3})
    assert "no way to its driver's settings" in rig.event(Failed, "t1").message


def test_words_that_come_while_the_driver_works_reach_the_task_after_it_began(
    device: DeviceRig, driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = driver_settings.FileSettings.write

    def slow(self: driver_settings.FileSettings, changes: dict[str, Any]) -> None:
        _wait(lambda: (driver.file.parent / "go").exists())
        write(self, changes)

    monkeypatch.setattr(driver_settings.FileSettings, "write", slow)
    device.launch("t1", "jobs:Count", preset=LOW, params={"steps": 400, "nap_s": 0.01})
    device.until(lambda: (view := device.view("t1")) and view.state == "running")
    assert not device.all(Started, "t1")
    device.pause("t1")
    time.sleep(0.3)
    assert not device.all(Paused, "t1")
    (driver.file.parent / "go").touch()
    device.event(Started, "t1")
    device.event(Paused, "t1")


@pytest.fixture
def separate(tmp_path: Path, driver: SimulatedDriver) -> Iterator[subprocess.Popen[bytes]]:
    told = ("--monitor", f"file:{driver.file.parent}", "--preset", '{"power_limit_w": 200}')
    with separate_device(tmp_path / "home", *told) as device:
        yield device


def test_settings_of_a_killed_worker_are_put_back_at_the_next_start(
    separate: subprocess.Popen[bytes],
    tmp_path: Path,
    driver: SimulatedDriver,
    rigs: Callable[..., DeviceRig],
) -> None:
    assert driver.values == {**FIRST, "power_limit_w": 200}
    separate.kill()
    separate.wait()
    before = tmp_path / "home" / "run" / "h.0" / "settings_before.json"
    assert json.loads(before.read_text()) == {"power_limit_w": 300}
    assert driver.values == {**FIRST, "power_limit_w": 200}
    rigs(home=tmp_path / "home", monitor=f"file:{driver.file.parent}")
    _wait(lambda: driver.values == FIRST)
    _wait(lambda: not before.exists())  # it goes after the driver was read again


HUNG = """
import sys, threading
from types import SimpleNamespace as Some
from workers.device.host import device_presets

device_presets.find_settings = lambda house: Some(read=threading.Event().wait)
device_presets.END_S = 0.1
house = Some(folder=__import__("pathlib").Path(sys.argv[1]), device="h.0")
presets = device_presets.DevicePresets(house, None, None)
presets.start()
launch = Some(preset={"power_limit_w": 200})
resident = Some(id="p", stay=Some(launch=launch, record=Some(guests=())))
presets.begin(resident, lambda now: None, 0)
presets.end()
"""


def test_a_driver_that_hangs_does_not_keep_the_worker(tmp_path: Path) -> None:
    told = [sys.executable, "-c", HUNG, str(tmp_path)]
    assert subprocess.run(told, cwd=ROOT, timeout=60).returncode == 0
