"""Loads the simulated accelerator when torch is imported, where the environment asks for it.

Torch calls `load` by the entry point `torch.backends`.  Only a process with SIM_DEVICES pays for
the backend, and only such a process has an accelerator: a program that takes
`torch.accelerator.current_accelerator()` must not find a simulated one by accident.
"""

from __future__ import annotations

import os


def load() -> None:
    if not os.environ.get("SIM_DEVICES"):
        return
    import torch
    import torch_sim

    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", torch_sim)
    torch.utils.generate_methods_for_privateuse1_backend()
