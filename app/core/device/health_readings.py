"""Defines what a device's monitor reads, and decides when a new reading is worth a report.

A figure is None if the device does not report it. Heartbeats repeat the last reported reading. A
new reading replaces it only when the device has changed enough, so that most heartbeats are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Holds the figures of a device at one time.

    `processes` are (process id, bytes) of all processes with memory on the device. The device slows
    down from `temperature_limit_c` on. The counts of ECC errors begin when the driver is loaded.
    `remap_failed` means that a row of faulty memory could not be replaced. `xids` are the codes of
    the events since the last reading, oldest first.
    """

    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    power_w: float | None = None
    temperature_c: int | None = None
    temperature_limit_c: int | None = None
    clock_mhz: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_failed: bool = False
    xids: tuple[int, ...] = ()


#: The figures in a heartbeat, each with two numbers. A figure is reported again if it changed by at
#: least the first number, and by at least the second number as a part of the reported figure. A
#: count is told whenever it changes.
_ENOUGH: Mapping[str, tuple[float, float]] = {
    "utilisation_percent": (15, 0.0),
    "memory_used_bytes": (64 * 2**20, 0.05),
    "memory_total_bytes": (1, 0.0),
    "power_w": (10, 0.1),
    "temperature_c": (3, 0.0),
    "temperature_limit_c": (1, 0.0),
    "clock_mhz": (100, 0.1),
    "ecc_corrected": (1, 0.1),
    "ecc_uncorrected": (1, 0.0),
}


def figures(reading: Reading) -> JSON:
    """Return what a heartbeat has of a reading: the known figures, but not the processes."""
    values = {name: getattr(reading, name) for name in _ENOUGH}
    known = {name: value for name, value in values.items() if value is not None}
    if reading.processes:
        known["processes"] = len(reading.processes)
    return known


def is_worth_telling(told: JSON, now: JSON) -> bool:
    """True if the device has changed enough since the last reported figures."""
    if told.keys() != now.keys() or told.get("processes") != now.get("processes"):
        return True
    return any(
        abs(now[name] - told[name]) >= max(least, part * abs(told[name]))
        for name, (least, part) in _ENOUGH.items()
        if name in now
    )


def reading_of(told: Mapping[str, Any]) -> Reading:
    """Return the reading that a program wrote about a device; raises ValueError if it is not one.

    `xids` are left out: only the reader of the file knows which of them are new.
    """
    names = {field.name for field in fields(Reading)}
    if unknown := sorted(set(told) - names):
        raise ValueError(f"a reading has no {', '.join(unknown)[:100]}")
    values = {name: _value(name, value) for name, value in told.items() if name != "xids"}
    return Reading(**values)


def _value(name: str, value: Any) -> Any:
    if name == "processes":
        return tuple((int(process), int(held)) for process, held in dict(value).items())
    if name == "remap_failed":
        return bool(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} must be a number; got {value!r:.50}")
    return value
