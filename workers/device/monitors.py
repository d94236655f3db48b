"""Reads the figures of a device: by NVML, or from a file that another program writes.

A `DeviceMonitor` may take long, or never return: a driver that hangs is itself a finding.  So only
the thread of `workers.device.host.health` reads it, and the supervisor never waits for it.

`nvidia-ml-py` is optional (`pip install roundhouse[nvidia]`), and is imported only by NvmlMonitor.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from app.core.device.health_readings import Reading, reading_of
from workers.transfer.host_context import CannotServe, House

log = logging.getLogger(__name__)

LOOK_S = 0.05  # interval at which a file is looked at
NVML = "pynvml"  # the module that nvidia-ml-py installs


class DeviceLost(Exception):
    """Raised when the driver no longer finds the device."""


class MonitorGone(Exception):
    """Raised when the monitor itself does not work; says why."""


class DeviceMonitor(Protocol):
    def read(self, wait_s: float) -> Reading:
        """Wait for an event of the device, at most `wait_s`, then read its figures.

        Raises DeviceLost or MonitorGone, perhaps before `wait_s` is over; a later call may work.
        """

    def close(self) -> None:
        """Release what the monitor holds; called by the thread that reads."""


def find_monitor(house: House) -> DeviceMonitor | None:
    """Return the monitor that the settings name; None if nothing watches the device.

    Raises CannotServe if the library of a named monitor is not installed.
    """
    name, _, folder = house.monitor.partition(":")
    if name == "file":
        return FileMonitor(Path(folder) / f"{house.device}.json")
    is_installed = importlib.util.find_spec(NVML) is not None
    if name == "nvidia" and not is_installed:
        raise CannotServe(
            "ROUNDHOUSE_DEVICE_MONITOR is nvidia, but nvidia-ml-py is not installed; install "
            "roundhouse[nvidia], or set it to none"
        )
    if name == "nvidia" or (name == "auto" and house.kind == "cuda" and is_installed):
        return NvmlMonitor(house.access.id)
    if name == "auto" and house.kind != "cpu":
        log.warning("%s has no monitor: its health is not watched", house.device)
    return None


# --- a file ---------------------------------------------------------------------------------------


class FileMonitor:
    """Reads what another program writes to a file: for devices without NVML, and for tests.

    The file is one JSON object with the fields of `Reading`. `xids` lists all codes so far; those
    that are new since the last reading count. Two more values are possible: `"fault": "lost"`, the
    device is gone, and `"fault": "hang"`, the driver does not answer. Replace the file in one step
    (write another one, rename it): a monitor with half a file counts as broken.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen: int | None = None  # number of codes that were read before
        self._read_ns = 0  # modification time of the file that was read last

    def read(self, wait_s: float) -> Reading:
        until_s = time.monotonic() + wait_s
        while self._written_ns() == self._read_ns and time.monotonic() < until_s:
            time.sleep(LOOK_S)  # a file that appears or changes cannot be awaited portably
        said = self._read_file()
        while said.get("fault") == "hang":
            time.sleep(LOOK_S)
            said = self._read_file()
        if said.pop("fault", None) == "lost":
            raise DeviceLost
        codes = [int(code) for code in said.get("xids", [])]
        new = codes[len(codes) if self._seen is None else self._seen :]
        self._seen = len(codes)
        try:
            figures = reading_of(said)
        except (ValueError, TypeError) as error:
            raise MonitorGone(f"{self.file.name}: {error}"[:200]) from error
        return replace(figures, xids=tuple(new))

    def close(self) -> None:
        """Do nothing: a file holds nothing."""

    def _written_ns(self) -> int:
        try:
            return self.file.stat().st_mtime_ns
        except OSError:
            return -1

    def _read_file(self) -> dict[str, Any]:
        self._read_ns = self._written_ns()
        try:
            said = json.loads(self.file.read_text())
        except (OSError, ValueError) as error:
            raise MonitorGone(f"{self.file.name}: {error}"[:200]) from error
        if not isinstance(said, dict) or not isinstance(said.get("xids", []), list):
            raise MonitorGone(f"{self.file.name} has no object with a list of xids")
        return said


# --- NVML -----------------------------------------------------------------------------------------


class NvmlMonitor:
    """Reads a GPU by NVML. `name` is its UUID or its index by PCI bus; "" is the only GPU.

    Nothing is opened before the first reading. After an error everything is opened again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._nvml: Any = None
        self._gpu: Any = None
        self._events: Any = None

    def read(self, wait_s: float) -> Reading:
        try:
            return self._read(wait_s)
        except (DeviceLost, MonitorGone):
            self.close()
            raise

    def close(self) -> None:
        if self._nvml is None:
            return
        nvml, self._nvml, self._gpu = self._nvml, None, None
        events, self._events = self._events, None
        try:
            if events is not None:
                nvml.nvmlEventSetFree(events)
            nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            log.warning("NVML was not closed: %s", error)

    def _read(self, wait_s: float) -> Reading:
        if self._nvml is None:
            self._open()
        xids, nvml, gpu = self._await_events(wait_s), self._nvml, self._gpu
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
        load = self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, gpu)
        rows = self._ask(nvml.nvmlDeviceGetRemappedRows, gpu)
        return Reading(
            utilisation_percent=None if load is None else load.gpu,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            processes=self._processes(),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            temperature_limit_c=self._ask(
                nvml.nvmlDeviceGetTemperatureThreshold,
                gpu,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            ),
            clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            ecc_corrected=self._ecc(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            remap_failed=bool(rows is not None and rows[3]),
            xids=xids,
        )

    def _open(self) -> None:
        nvml = importlib.import_module(NVML)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise MonitorGone(f"NVML: {error}") from error
        self._nvml = nvml
        by_uuid = not (self.name or "0").isdecimal()
        find = nvml.nvmlDeviceGetHandleByUUID if by_uuid else nvml.nvmlDeviceGetHandleByIndex
        self._gpu = self._ask(find, self.name if by_uuid else int(self.name or "0"))
        if self._gpu is None:
            raise DeviceLost
        self._events = self._ask(nvml.nvmlEventSetCreate)
        if self._events is not None:
            kinds = nvml.nvmlEventTypeXidCriticalError
            if (
                self._try(nvml.nvmlDeviceRegisterEvents, self._gpu, kinds, self._events)
                is _NOT_HERE
            ):
                self._nvml.nvmlEventSetFree(self._events)
                self._events = None

    def _await_events(self, wait_s: float) -> tuple[int, ...]:
        """Wait up to `wait_s` for an Xid event of the device; return its codes, or () if none
        came.
        """
        if self._events is None:
            time.sleep(wait_s)  # the device reports no events, so only its figures are read
            return ()
        try:
            came = self._nvml.nvmlEventSetWait_v2(self._events, int(wait_s * 1000))
        except self._nvml.NVMLError_Timeout:
            return ()
        except self._nvml.NVMLError as error:
            raise self._grave(error) from error
        return (int(came.eventData),)

    def _processes(self) -> tuple[tuple[int, int], ...]:
        there = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._gpu)
        return tuple((process.pid, process.usedGpuMemory or 0) for process in there or ())

    def _ecc(self, kind: int) -> int | None:
        count = self._nvml.nvmlDeviceGetTotalEccErrors
        found: int | None = self._ask(count, self._gpu, kind, self._nvml.NVML_VOLATILE_ECC)
        return found

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        """Return NVML's answer; None if this device does not give one."""
        found = self._try(question, *about)
        return None if found is _NOT_HERE else found

    def _try(self, question: Callable[..., Any], *about: Any) -> Any:
        nvml = self._nvml
        unknown = (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NotFound,
            nvml.NVMLError_InvalidArgument,
        )
        try:
            return question(*about)
        except unknown:
            return _NOT_HERE
        except nvml.NVMLError as error:
            raise self._grave(error) from error

    def _grave(self, error: Exception) -> Exception:
        if isinstance(error, self._nvml.NVMLError_GpuIsLost):
            return DeviceLost()
        return MonitorGone(f"NVML: {error}")


_NOT_HERE = object()  # stands for NVML's answer that the device does not support a question
