"""Reads and changes the settings of a device in its driver: by NVML, or in a file.

A call of `DriverSettings` may take long, or never return, so only the thread of
`workers.device.host.device_presets` makes one. `AppliedPreset` changes settings and later restores
the old values. It writes these to a file first, so they are restored even after the device worker
was killed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from app.core.model import preset as presets
from workers.device.monitors import NVML
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]


class NotSet(Exception):
    """Raised when the driver does not take a setting, or does not answer; says why."""


class DriverSettings(Protocol):
    def read(self) -> JSON:
        """Return the present value of each preset parameter that the device has.  Raises NotSet."""

    def write(self, changes: Mapping[str, Any]) -> None:
        """Change some settings.  Raises NotSet, perhaps after some were changed."""


def find_settings(house: House) -> DriverSettings | None:
    """Return the access to the device's settings, over its monitor; None without a monitor."""
    name, _, folder = house.monitor.partition(":")
    if name == "file":
        return FileSettings(Path(folder) / f"{house.device}.settings.json")
    is_installed = importlib.util.find_spec(NVML) is not None
    if is_installed and (name == "nvidia" or (name == "auto" and house.kind == "cuda")):
        return NvmlSettings(house.access.id)
    return None


class AppliedPreset:
    """Keeps a device's settings as a preset says, and remembers the old values.

    `before` has the value that each changed setting had; `file` has the same, for the next device
    worker.
    """

    def __init__(self, settings: DriverSettings | None, file: Path) -> None:
        self.settings, self.file = settings, file
        self.before: JSON = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            self.before = json.loads(file.read_text())

    def apply(self, wanted: Mapping[str, Any]) -> JSON:
        """Set the wanted values, restore the old values of all other settings, and return the
        wanted ones as read back.

        If this fails, restores all old values, as far as the driver allows it, and raises NotSet.
        """
        if self.settings is None:
            if wanted:
                raise NotSet(_NO_WAY)
            return {}
        try:
            return self._apply(self.settings, wanted)
        except NotSet:
            with contextlib.suppress(NotSet):  # report the first error, which says more
                self._apply(self.settings, {})
            raise

    def _apply(self, settings: DriverSettings, wanted: Mapping[str, Any]) -> JSON:
        if not wanted and not self.before:
            return {}
        there = settings.read()
        if lacking := sorted(wanted.keys() - there.keys()):
            raise NotSet(f"the device has no {' and no '.join(lacking)}")
        before = {**{name: there[name] for name in wanted}, **self.before}
        self._write_down(before)  # before anything changes
        target = {**before, **wanted}
        settings.write({name: to for name, to in target.items() if there.get(name) != to})
        found = settings.read()
        self._write_down(
            {name: old for name, old in before.items() if name in wanted or found.get(name) != old}
        )
        if left := self.before.keys() - wanted.keys():
            log.error("the driver did not put back %s", ", ".join(sorted(left)))
        if different := presets.differences(wanted, {k: found[k] for k in wanted if k in found}):
            raise NotSet("; ".join(different))
        return {name: found[name] for name in wanted}

    def _write_down(self, before: JSON) -> None:
        if before == self.before:
            return
        self.before = before
        if not before:
            self.file.unlink(missing_ok=True)
            return
        draft = self.file.with_suffix(".draft")
        with draft.open("w") as out:
            out.write(json.dumps(before))
            out.flush()
            os.fsync(out.fileno())
        draft.replace(self.file)


_NO_WAY = (
    "the device worker has no way to its driver's settings; install roundhouse[nvidia], or see "
    "ROUNDHOUSE_DEVICE_MONITOR"
)


# --- a file ---------------------------------------------------------------------------------------


class FileSettings:
    """Keeps settings in a file, for tests and for devices without NVML, whose settings another
    program applies.

    The file is an object: parameter -> {"value"}. Beside the value there may be "least" and "most",
    its bounds; "refused", the reason why the driver takes no value; and "takes", a value that the
    driver takes instead of any other.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> JSON:
        return {name: one["value"] for name, one in self._read_file().items()}

    def write(self, changes: Mapping[str, Any]) -> None:
        said = self._read_file()
        for name, value in changes.items():
            one = said[name]
            if reason := one.get("refused"):
                raise NotSet(f"{name}: {reason}")
            bounds = one.get("least", value), one.get("most", value)
            if not bounds[0] <= value <= bounds[1]:
                raise NotSet(f"{name}: {value!r} is not from {bounds[0]!r} to {bounds[1]!r}")
            one["value"] = one.get("takes", value)
            draft = self.file.with_suffix(".draft")
            draft.write_text(json.dumps(said))
            draft.replace(self.file)

    def _read_file(self) -> dict[str, JSON]:
        try:
            said: dict[str, JSON] = json.loads(self.file.read_text())
            return {name: dict(one) for name, one in said.items() if "value" in one}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise NotSet(f"{self.file.name}: {error}"[:200]) from error


# --- NVML -----------------------------------------------------------------------------------------

_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}


class NvmlSettings:
    """Reads and sets a GPU's power limit, application clocks and compute mode by NVML.

    `name` is its UUID or its index by PCI bus; "" is the only GPU.  NVML is open only while it is
    used.  Only root may set most of them.  Locked clocks are not used, as NVML cannot read them.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> JSON:
        with self._opened() as (nvml, gpu):
            found = {
                "power_limit_w": _watts(
                    _ask_nvml(nvml, nvml.nvmlDeviceGetPowerManagementLimit, gpu)
                ),
                "graphics_clock_mhz": _ask_nvml(
                    nvml, nvml.nvmlDeviceGetApplicationsClock, gpu, nvml.NVML_CLOCK_GRAPHICS
                ),
                "memory_clock_mhz": _ask_nvml(
                    nvml, nvml.nvmlDeviceGetApplicationsClock, gpu, nvml.NVML_CLOCK_MEM
                ),
                "compute_mode": _mode(_ask_nvml(nvml, nvml.nvmlDeviceGetComputeMode, gpu)),
            }
        return {name: value for name, value in found.items() if value is not None}

    def write(self, changes: Mapping[str, Any]) -> None:
        now = self.read()
        with self._opened() as (nvml, gpu):
            if "power_limit_w" in changes:
                limit_mw = round(changes["power_limit_w"] * 1000)
                _set("power_limit_w", nvml, nvml.nvmlDeviceSetPowerManagementLimit, gpu, limit_mw)
            clocks = ("memory_clock_mhz", "graphics_clock_mhz")  # NVML sets both clocks at once
            if set_ := [name for name in clocks if name in changes]:
                pair = [changes.get(name, now.get(name)) for name in clocks]
                _set(" and ".join(set_), nvml, nvml.nvmlDeviceSetApplicationsClocks, gpu, *pair)
            if "compute_mode" in changes:
                mode = _MODES[changes["compute_mode"]]
                _set("compute_mode", nvml, nvml.nvmlDeviceSetComputeMode, gpu, mode)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        if self.name.startswith("MIG-"):
            raise NotSet("a MIG instance shares the settings of its GPU with others")
        nvml = importlib.import_module(NVML)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NotSet(f"NVML: {error}") from error
        try:
            by_uuid = not (self.name or "0").isdecimal()
            find = nvml.nvmlDeviceGetHandleByUUID if by_uuid else nvml.nvmlDeviceGetHandleByIndex
            yield nvml, find(self.name if by_uuid else int(self.name or "0"))
        except nvml.NVMLError as error:
            raise NotSet(f"NVML: {error}") from error
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _ask_nvml(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """Return NVML's answer; None if this device has no such setting."""
    try:
        return question(*about)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None


def _set(name: str, nvml: Any, order: Callable[..., Any], *how: Any) -> None:
    try:
        order(*how)
    except nvml.NVMLError_NoPermission as error:
        raise NotSet(
            f"{name}: the driver lets only root set it, and this process is not root"
        ) from error
    except nvml.NVMLError as error:
        raise NotSet(f"{name}: NVML: {error}") from error


def _watts(limit_mw: int | None) -> int | float | None:
    """Return watts: whole numbers as int, like the values of presets."""
    if limit_mw is None:
        return None
    return limit_mw / 1000 if limit_mw % 1000 else limit_mw // 1000


def _mode(number: int | None) -> str | None:
    return next((word for word, mode in _MODES.items() if mode == number), None)
