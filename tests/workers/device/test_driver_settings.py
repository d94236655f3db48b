"""A device's settings are set, read back and put back; NVML's answers are played.

No GPU was there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workers.device.test_monitors import PlayedError
from workers.device import driver_settings
from workers.device.driver_settings import AppliedPreset, FileSettings, NotSet, NvmlSettings

AT_FIRST: dict[str, Any] = {
    "power_limit_w": {"value": 300, "least": 100, "most": 400},
    "graphics_clock_mhz": {"value": 1410},
    "compute_mode": {"value": "default"},
}


class SimulatedDriver:
    """The file of a device's settings, and its preset."""

    def __init__(self, folder: Path) -> None:
        self.file, self.before = folder / "h.0.settings.json", folder / "before.json"
        self.make(AT_FIRST)

    def make(self, said: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(said))

    def preset(self) -> AppliedPreset:
        return AppliedPreset(FileSettings(self.file), self.before)

    @property
    def values(self) -> dict[str, Any]:
        return {name: one["value"] for name, one in json.loads(self.file.read_text()).items()}


FIRST = {name: one["value"] for name, one in AT_FIRST.items()}


@pytest.fixture
def driver(tmp_path: Path) -> SimulatedDriver:
    return SimulatedDriver(tmp_path)


def test_settings_are_read_back_and_put_back(driver: SimulatedDriver) -> None:
    preset = driver.preset()
    assert preset.apply({}) == {}
    assert preset.apply({"power_limit_w": 200}) == {"power_limit_w": 200}
    assert driver.values == {**FIRST, "power_limit_w": 200}
    wanted = {"power_limit_w": 150, "compute_mode": "exclusive_process"}
    assert preset.apply(wanted) == wanted
    assert preset.apply({"graphics_clock_mhz": 990}) == {"graphics_clock_mhz": 990}
    assert driver.values == {**FIRST, "graphics_clock_mhz": 990}
    assert preset.apply({}) == {}
    assert driver.values == FIRST
    assert not driver.before.exists()


def test_the_next_worker_puts_back_what_a_killed_one_has_set(driver: SimulatedDriver) -> None:
    driver.preset().apply({"power_limit_w": 200})
    after = driver.preset()
    assert after.before == {"power_limit_w": 300}
    after.apply({"power_limit_w": 250})
    assert driver.preset().before == {"power_limit_w": 300}, "of the time before both"
    driver.preset().apply({})
    assert driver.values == FIRST


def test_a_worker_killed_before_its_change_puts_back_nothing_wrong(driver: SimulatedDriver) -> None:
    driver.before.write_text(json.dumps({"power_limit_w": 300}))
    driver.preset().apply({})
    assert driver.values == FIRST
    assert not driver.before.exists()


@pytest.mark.parametrize(
    ("wanted", "more", "told"),
    [
        ({"power_limit_w": 90}, {}, "power_limit_w: 90 is not from 100 to 400"),
        ({"memory_clock_mhz": 1}, {}, "the device has no memory_clock_mhz"),
        (
            {"power_limit_w": 200},
            {"power_limit_w": {"value": 300, "refused": "only root may"}},
            "power_limit_w: only root may",
        ),
        (
            {"power_limit_w": 200},
            {"power_limit_w": {"value": 300, "takes": 290}},
            "power_limit_w: set to 200, but the device reports 290",
        ),
    ],
)
def test_a_setting_that_the_driver_does_not_take_is_told_and_all_is_put_back(
    driver: SimulatedDriver, wanted: dict[str, Any], more: dict[str, Any], told: str
) -> None:
    driver.make({**AT_FIRST, **more})
    with pytest.raises(NotSet) as refused:
        driver.preset().apply({"compute_mode": "exclusive_process", **wanted})
    assert str(refused.value) == told
    changed = {} if "takes" not in json.dumps(more) else {"power_limit_w": 290}
    assert driver.values == {**FIRST, **changed}, "a driver that takes one value only keeps it"


def test_what_was_not_put_back_is_tried_again(
    driver: SimulatedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    preset = driver.preset()
    preset.apply({"power_limit_w": 200})
    driver.make({**AT_FIRST, "power_limit_w": {"value": 200, "takes": 200}})
    preset.apply({})
    assert "the driver did not put back power_limit_w" in caplog.text
    assert driver.preset().before == {"power_limit_w": 300}
    driver.make({**AT_FIRST, "power_limit_w": {"value": 200}})
    preset.apply({})
    assert driver.values == FIRST


def test_without_a_way_to_the_driver_only_a_preset_that_needs_it_is_refused(tmp_path: Path) -> None:
    preset = AppliedPreset(None, tmp_path / "before.json")
    assert preset.apply({}) == {}
    with pytest.raises(NotSet, match="no way to its driver's settings"):
        preset.apply({"power_limit_w": 200})


# --- NVML -----------------------------------------------------------------------------------------


class PlayedSettings:
    """A GPU's settings as NVML's Python module reads and sets them; `refuse` names what raises."""

    NVMLError = PlayedError
    NVMLError_NoPermission = type("NVMLError_NoPermission", (PlayedError,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (PlayedError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (PlayedError,), {})
    NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM = 0, 2

    def __init__(self) -> None:
        self.limit_mw, self.clocks, self.mode, self.open = 300_000, {0: 1410, 2: 1593}, 0, 0
        self.refuse: dict[str, Exception] = {}

    def _check(self, name: str) -> None:
        assert self.open == 1
        if name in self.refuse:
            raise self.refuse[name]

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._check("find")
        return uuid

    def nvmlDeviceGetPowerManagementLimit(self, gpu: str) -> int:
        self._check("power")
        return self.limit_mw

    def nvmlDeviceSetPowerManagementLimit(self, gpu: str, limit_mw: int) -> None:
        self._check("set power")
        self.limit_mw = limit_mw

    def nvmlDeviceGetApplicationsClock(self, gpu: str, which: int) -> int:
        self._check("clocks")
        return self.clocks[which]

    def nvmlDeviceSetApplicationsClocks(self, gpu: str, memory: int, graphics: int) -> None:
        self._check("set clocks")
        self.clocks = {0: graphics, 2: memory}

    def nvmlDeviceGetComputeMode(self, gpu: str) -> int:
        return self.mode

    def nvmlDeviceSetComputeMode(self, gpu: str, mode: int) -> None:
        self.mode = mode


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> PlayedSettings:
    played = PlayedSettings()
    monkeypatch.setattr(driver_settings.importlib, "import_module", lambda name: played)
    return played


def test_settings_of_a_gpu_are_set_and_put_back_by_nvml(
    nvml: PlayedSettings, tmp_path: Path
) -> None:
    nvml.limit_mw = 300_500  # a limit that is not whole is put back as it was
    preset = AppliedPreset(NvmlSettings("GPU-1"), tmp_path / "before.json")
    wanted = {
        "power_limit_w": 250,
        "graphics_clock_mhz": 990,
        "compute_mode": "exclusive_process",
    }
    assert preset.apply(wanted) == wanted
    assert (nvml.limit_mw, nvml.clocks, nvml.mode) == (250_000, {0: 990, 2: 1593}, 3)
    preset.apply({"memory_clock_mhz": 1215})
    assert (nvml.limit_mw, nvml.clocks, nvml.mode) == (300_500, {0: 1410, 2: 1215}, 0)
    preset.apply({})
    assert (nvml.limit_mw, nvml.clocks, nvml.open) == (300_500, {0: 1410, 2: 1593}, 0)


@pytest.mark.parametrize(
    ("what", "error", "told"),
    [
        ("set power", "NoPermission", "power_limit_w: the driver lets only root set it"),
        ("set clocks", "NotSupported", "graphics_clock_mhz: NVML: "),
        ("clocks", "NotSupported", "the device has no graphics_clock_mhz"),
        ("find", "NotSupported", "NVML: "),
    ],
)
def test_what_nvml_refuses_is_told(
    nvml: PlayedSettings, tmp_path: Path, what: str, error: str, told: str
) -> None:
    nvml.refuse[what] = getattr(nvml, f"NVMLError_{error}")("played")
    preset = AppliedPreset(NvmlSettings("GPU-1"), tmp_path / "before.json")
    with pytest.raises(NotSet) as refused:
        preset.apply({"power_limit_w": 250, "graphics_clock_mhz": 990})
    assert str(refused.value).startswith(told)
    assert (nvml.limit_mw, nvml.clocks, nvml.open) == (300_000, {0: 1410, 2: 1593}, 0)


def test_a_mig_instance_has_no_settings_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(NotSet, match="a MIG instance shares the settings of its GPU"):
        AppliedPreset(NvmlSettings("MIG-1"), tmp_path / "b.json").apply({"power_limit_w": 250})
