"""What monitors read: a file of another program, and NVML, of which only the answers are played.

No GPU was there.  The library's own module is real where it is installed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.core.device.health_readings import Reading
from app.storage.store import Store
from workers.device import monitors
from workers.device.monitors import DeviceLost, FileMonitor, MonitorGone, NvmlMonitor, find_monitor
from workers.transfer.host_context import CannotServe, House

# --- the choice -----------------------------------------------------------------------------------


def house(tmp_path: Path, monitor: str, kind: str = "cpu") -> House:
    store = Store.at(tmp_path / "store")
    return House(device="h.0", island="i", store=store, run=tmp_path, kind=kind, monitor=monitor)


@pytest.fixture
def without_nvml(monkeypatch):
    monkeypatch.setattr(monitors, "NVML", "no_such_module")


def test_a_cpu_has_no_monitor_by_itself(tmp_path):
    assert find_monitor(house(tmp_path, "auto")) is None
    assert find_monitor(house(tmp_path, "none", "cuda")) is None


def test_an_accelerator_without_a_monitor_is_told(tmp_path, without_nvml, caplog):
    assert find_monitor(house(tmp_path, "auto", "cuda")) is None
    assert "h.0 has no monitor: its health is not watched" in caplog.text


def test_a_monitor_that_is_named_but_not_installed_keeps_the_worker_from_serving(
    tmp_path, without_nvml
):
    with pytest.raises(CannotServe, match=r"roundhouse\[nvidia\]"):
        find_monitor(house(tmp_path, "nvidia"))


def test_a_folder_holds_a_file_for_each_device(tmp_path):
    found = find_monitor(house(tmp_path, f"file:{tmp_path}"))
    assert isinstance(found, FileMonitor)
    assert found.file == tmp_path / "h.0.json"


# --- a file ---------------------------------------------------------------------------------------


def write(file: Path, **said: object) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(said))
    before_ns = file.stat().st_mtime_ns if file.exists() else 0
    os.utime(draft, ns=(0, max(time.time_ns(), before_ns + 1)))
    draft.replace(file)


def test_a_file_is_read_and_each_xid_counts_once(tmp_path):
    file = tmp_path / "h.0.json"
    write(file, temperature_c=50, xids=[13])
    monitor = FileMonitor(file)
    assert monitor.read(0) == Reading(temperature_c=50), "what was there before is history"
    write(file, temperature_c=51, xids=[13, 48, 63])
    assert monitor.read(0) == Reading(temperature_c=51, xids=(48, 63))
    assert monitor.read(0) == Reading(temperature_c=51)


def test_a_change_of_the_file_ends_the_wait(tmp_path):
    file = tmp_path / "h.0.json"
    write(file, power_w=1.0)
    monitor = FileMonitor(file)
    monitor.read(0)
    later = threading.Timer(0.2, write, (file,), {"power_w": 2.0})
    later.start()
    began_s = time.monotonic()
    assert monitor.read(30) == Reading(power_w=2.0)
    assert time.monotonic() - began_s < 25  # and not after all of the wait
    later.join()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"xids": 7}', '{"humidity": 1}', '{"power_w": "much"}', '{"processes": [1]}'],
)
def test_a_file_that_cannot_be_read_is_a_monitor_that_does_not_work(tmp_path, text):
    file = tmp_path / "h.0.json"
    file.write_text(text)
    with pytest.raises(MonitorGone, match=r"h\.0\.json"):
        FileMonitor(file).read(0)


def test_a_file_that_is_missing_may_come_later(tmp_path):
    monitor = FileMonitor(tmp_path / "h.0.json")
    with pytest.raises(MonitorGone):
        monitor.read(0)
    write(tmp_path / "h.0.json", power_w=2.0)
    assert monitor.read(0) == Reading(power_w=2.0)


def test_a_lost_device_and_a_hang_are_said_by_the_file(tmp_path):
    file = tmp_path / "h.0.json"
    write(file, fault="lost")
    monitor = FileMonitor(file)
    with pytest.raises(DeviceLost):
        monitor.read(0)
    write(file, fault="hang")
    read: list[Reading] = []
    thread = threading.Thread(target=lambda: read.append(monitor.read(0)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "it does not answer"
    write(file, power_w=3.0)
    thread.join(60)
    assert read == [Reading(power_w=3.0)]


# --- NVML -----------------------------------------------------------------------------------------


class PlayedError(Exception):
    pass


class PlayedNvml:
    """Answers as NVML does, in the names of its Python module; a question in `errors` raises."""

    NVMLError = PlayedError
    nvmlEventTypeXidCriticalError = 8
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.codes: list[int] = []

    def __getattr__(self, name: str):
        if name.startswith("NVMLError_"):
            made = type(name, (PlayedError,), {})
            setattr(type(self), name, made)
            return made
        answers = {
            "nvmlDeviceGetHandleByUUID": "gpu",
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlEventSetCreate": "events",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10, total=100),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=70),
            "nvmlDeviceGetPowerUsage": 301_500,
            "nvmlDeviceGetRemappedRows": (0, 1, 0, 0),
            "nvmlDeviceGetTemperature": 60,
            "nvmlDeviceGetTemperatureThreshold": 90,
            "nvmlDeviceGetClockInfo": 1500,
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=7, usedGpuMemory=9),
                SimpleNamespace(pid=8, usedGpuMemory=None),
            ],
        }

        def answer(*about: object):
            self.asked.append(name)
            if name in self.errors:
                raise self.errors[name]
            return answers.get(name)

        return answer

    def nvmlEventSetWait_v2(self, events: str, wait_ms: int):
        if not self.codes:
            raise self.NVMLError_Timeout
        return SimpleNamespace(eventData=self.codes.pop(0))


@pytest.fixture
def nvml(monkeypatch):
    played = PlayedNvml()
    monkeypatch.setattr(monitors.importlib, "import_module", lambda name: played)
    return played


WHOLE = Reading(
    utilisation_percent=70,
    memory_used_bytes=10,
    memory_total_bytes=100,
    processes=((7, 9), (8, 0)),
    power_w=301.5,
    temperature_c=60,
    temperature_limit_c=90,
    clock_mhz=1500,
    ecc_corrected=2,
    ecc_uncorrected=2,
)


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("", "nvmlDeviceGetHandleByIndex"),
        ("3", "nvmlDeviceGetHandleByIndex"),
        ("GPU-5b3f6c1e", "nvmlDeviceGetHandleByUUID"),
    ],
)
def test_nvml_is_opened_once_and_read_whole(nvml, name, question):
    monitor = NvmlMonitor(name)
    assert nvml.asked == [], "nothing is opened before the first reading"
    assert monitor.read(0) == WHOLE
    assert monitor.read(0) == WHOLE
    assert [nvml.asked.count(one) for one in ("nvmlInit", question)] == [1, 1]
    monitor.close()
    assert nvml.asked[-2:] == ["nvmlEventSetFree", "nvmlShutdown"]


def test_nvml_tells_xids_as_they_come(nvml):
    monitor = NvmlMonitor("")
    nvml.codes = [48, 63]
    assert [monitor.read(0).xids for _ in range(3)] == [(48,), (63,), ()]


def test_what_a_gpu_does_not_tell_is_left_out(nvml):
    unknown = nvml.NVMLError_NotSupported()
    nvml.errors = {
        "nvmlDeviceGetTotalEccErrors": unknown,
        "nvmlDeviceGetPowerUsage": nvml.NVMLError_NoPermission(),
        "nvmlDeviceGetRemappedRows": unknown,
        "nvmlDeviceRegisterEvents": unknown,
        "nvmlDeviceGetComputeRunningProcesses": unknown,
    }
    read = NvmlMonitor("").read(0)
    assert (read.ecc_uncorrected, read.power_w, read.processes) == (None, None, ())
    assert (read.temperature_c, read.remap_failed) == (60, False)


@pytest.mark.parametrize(
    ("question", "error", "raised"),
    [
        ("nvmlInit", "DriverNotLoaded", MonitorGone),
        ("nvmlDeviceGetHandleByUUID", "NotFound", DeviceLost),
        ("nvmlDeviceGetTemperature", "GpuIsLost", DeviceLost),
        ("nvmlDeviceGetTemperature", "Unknown", MonitorGone),
        ("nvmlDeviceGetMemoryInfo", "Uninitialized", MonitorGone),
    ],
)
def test_an_error_of_nvml_is_told_and_all_is_opened_anew(nvml, question, error, raised):
    monitor = NvmlMonitor("GPU-5b3f6c1e")
    nvml.errors[question] = getattr(nvml, f"NVMLError_{error}")("why")
    with pytest.raises(raised):
        monitor.read(0)
    nvml.errors.clear()
    assert monitor.read(0) == WHOLE
    assert nvml.asked.count("nvmlInit") == 2


def test_the_library_itself_says_that_there_is_no_driver():
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is optional")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        with pytest.raises(MonitorGone, match="NVML: "):
            NvmlMonitor("").read(0)
    else:
        assert NvmlMonitor("").read(0).memory_total_bytes
