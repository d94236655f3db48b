"""Caps the memory that a process may take on its accelerator."""

from __future__ import annotations

from workers.hardware.accelerator import Accelerator


def cap_memory(accelerator: Accelerator, fraction: float) -> None:
    """Let torch's allocator in this process hold at most this fraction of the device's memory.

    Above it torch raises OutOfMemoryError. This protects other tasks from a mistake. Tenant code
    can lift the cap; then the driver's count shows it, and the task is ended
    (`workers.device.device_memory`). A whole device needs no cap, and setting one would start the
    driver.
    """
    if accelerator.is_host or fraction >= 1:
        return
    if hasattr(accelerator.module, "set_per_process_memory_fraction"):
        accelerator.module.set_per_process_memory_fraction(fraction, accelerator.device)
