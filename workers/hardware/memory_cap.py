"""Caps the memory that a process may take on its accelerator."""

from __future__ import annotations

from workers.hardware.accelerator import Accelerator


def cap_memory(accelerator: Accelerator, fraction: float) -> None:
    """Let torch's allocator in this process hold at most this fraction of the device's memory.

    Beyond it torch raises OutOfMemoryError.  This guards the other tasks against a mistake; tenant
    code can lift the cap, and is then ended by what the driver counts
    (`workers.device.device_memory`).  A whole device needs no cap, and setting one would start the
    driver.
    """
    if accelerator.is_host or fraction >= 1:
        return
    if hasattr(accelerator.module, "set_per_process_memory_fraction"):
        accelerator.module.set_per_process_memory_fraction(fraction, accelerator.device)
