"""What a job can reach of devices."""

import os
import stat


def reach(ctx, *, paths, number):
    """Which of these nodes can be opened, and whether a node with this number can be made."""
    found = {path: _opens(path) for path in paths}
    try:
        os.mknod("own", stat.S_IFCHR | 0o600, number)
        found["mknod"] = _opens("own")
    except OSError:
        found["mknod"] = False
    found["visible"] = os.environ.get("SIM_VISIBLE_DEVICES")
    return found


def _opens(path):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def sees(ctx):
    """Which devices torch shows, and which of the host's devices that is."""
    import torch

    count = torch.accelerator.device_count()
    number = torch.get_device_module().get_device_properties(0).number
    return {"count": count, "number": number, "device": str(ctx.device)}


class Holds:
    """Holds memory on its device; it may lift its cap, and deny what it holds."""

    def __init__(self, ctx, *, megabytes, lifts=False, denies=False):
        import torch

        module = torch.get_device_module(ctx.device)
        if lifts:
            module.set_per_process_memory_fraction(1.0)
        if denies:
            module.memory_reserved = lambda device=None: 0
        self.held = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=ctx.device)

    def step(self, ctx):
        import time

        self.held += 1
        time.sleep(0.02)
        return {"first": int(self.held[0])}
