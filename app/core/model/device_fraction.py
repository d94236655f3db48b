"""Reads the fraction of a device that a task takes, so that other tasks can use the rest.

In a descriptor the fraction is a number below 1; everywhere else it is in whole thousandths
(`DeviceChoice.fraction_milli`). A task with a fraction has one rank on one device. Its memory there
is limited: by `memory_bytes`, or else by its fraction of the device's memory.
"""

from __future__ import annotations

from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.fields import Fields

#: The need (`device_choice.NEED`) of a task with a fraction: a host whose worker gives a device to
#: several tasks.
NEED = "fraction"
LEAST, MOST = 1 / WHOLE_MILLI, (WHOLE_MILLI - 1) / WHOLE_MILLI


def read_fraction(fields: Fields, *, world_size: int, devices: int) -> int:
    """Return `devices.fraction` in thousandths; WHOLE_MILLI if the task takes whole devices."""
    fraction = fields.number("fraction", 1.0, above=0, most=MOST)
    milli = round(fraction * WHOLE_MILLI)
    if milli == 0:
        fields.fault("fraction", f"must be at least {LEAST:g}; got {fraction:g}", "range")
    if 0 < milli < WHOLE_MILLI and world_size > 1:
        told = f"a fraction is of one device, for one rank; world_size is {world_size}"
        fields.fault("fraction", told, "fraction")
    elif 0 < milli < WHOLE_MILLI and devices > 1:
        fields.fault("fraction", f"a fraction is of one device; min is {devices}", "fraction")
    return milli or 1


def told_fraction(milli: int) -> str:
    """Return the fraction as it is written in a descriptor, such as "0.25"."""
    return f"{milli / WHOLE_MILLI:g}"


def cap_bytes(milli: int, memory_bytes: int, device_bytes: int) -> int:
    """Return the most memory that a task may take on a device with `device_bytes`; 0 if that is not
    known.

    A task with a fraction gets the memory that it asks for, or else its part of the device, rounded
    down. A task with a whole device may take all of it.
    """
    if milli == WHOLE_MILLI:
        return device_bytes
    return memory_bytes or device_bytes * milli // WHOLE_MILLI
