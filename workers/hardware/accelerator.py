"""Wraps torch's devices: the only module that knows the kinds of accelerators.

The CPU is always there. For any other kind torch has a module (`torch.cuda`, `torch.xpu`, or what a
backend registers), and all code here uses only what these modules have in common. The exception is
registering host memory, for which there is a table.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from workers.process.isolation.device_access import driver_version

DeviceModule = Any  # torch's module for a kind of device


class Accelerator:
    """Represents a torch device; `kind` is torch's name for its family: "cpu", "cuda", "xpu", ...

    A worker sees one device of its kind, so the device has number 0.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.module: DeviceModule = None if kind == "cpu" else _available_module(kind)
        self.device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)

    @property
    def is_host(self) -> bool:
        """True if the device's memory is the host's."""
        return self.module is None

    def synchronize(self) -> None:
        """Wait until all work issued so far is done."""
        if self.module is not None:
            self.module.synchronize(self.device)

    # --- memory ---

    def empty_cache(self) -> None:
        if self.module is not None:
            self.module.empty_cache()

    def held_bytes(self) -> int:
        """Return the device memory that this process holds; 0 if the device uses host memory."""
        return 0 if self.module is None else int(self.module.memory_reserved(self.device))

    def free_bytes(self) -> int:
        """Return the device memory that no process holds."""
        free_bytes, _ = self.module.mem_get_info(self.device)
        return int(free_bytes)

    # --- what it is ---

    def description(self) -> dict[str, Any]:
        """Return the model of the device and the versions of the libraries that compute on it."""
        if self.module is None:
            return {}
        told: dict[str, Any] = {"accelerator": self.kind}
        for name in ("name", "capability"):
            if ask := getattr(self.module, f"get_device_{name}", None):
                said = ask(self.device)
                told[f"accelerator_{name}"] = [*said] if isinstance(said, tuple) else said
        return told | _LIBRARIES.get(self.kind, dict)()

    # --- streams ---

    def new_stream(self) -> torch.Stream:
        return torch.Stream(device=self.device)

    def on_default_stream(self) -> contextlib.AbstractContextManager[object]:
        """Let the block run on the default stream, which code uses if it chooses none."""
        if self.module is None:
            return contextlib.nullcontext()
        now = self.current_stream()
        return torch.Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    # --- random numbers ---

    def generators(self) -> list[torch.Generator]:
        """Return the default random generators, of the CPU and of this device, which code uses if
        it names none.
        """
        if self.module is None:
            return [torch.default_generator]
        self.module.init()  # before that, CUDA has no generator
        return [torch.default_generator, self.module.default_generators[self.device.index]]

    def seed(self, number: int) -> None:
        for generator in self.generators():
            generator.manual_seed(number)

    def random_state(self) -> list[torch.Tensor]:
        return [] if self.module is None else [self.module.get_rng_state(self.device)]

    def set_random_state(self, states: list[torch.Tensor]) -> None:
        for state in states:
            self.module.set_rng_state(state, self.device)


def device_types() -> list[str]:
    """Return the kinds of devices on which this process may have tensors.

    It asks how torch was built, not whether there is a device. To look for a device would start the
    driver, and the process could not fork any more.
    """
    found = torch.accelerator.current_accelerator(check_available=False)
    return ["cpu"] if found is None else ["cpu", found.type]


def default_generators() -> dict[str, torch.Generator]:
    """Return the default generators of the accelerator that this process uses, by their names."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return {}
    module = torch.get_device_module(found)
    generators = module.default_generators if module.is_initialized() else ()
    return {f"torch.{found.type}.default_generators.{n}": it for n, it in enumerate(generators)}


def _cuda_libraries() -> dict[str, Any]:
    return {
        "driver": driver_version("cuda"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


#: The libraries of a kind, whose versions decide which kernels run.
_LIBRARIES: dict[str, Callable[[], dict[str, Any]]] = {"cuda": _cuda_libraries}


def _available_module(kind: str) -> DeviceModule:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError as error:
        raise RuntimeError(
            f"this device worker serves {kind}, and torch knows no such kind of device"
        ) from error
    if not module.is_available():
        raise RuntimeError(f"this device worker serves {kind}, but torch finds no {kind} device")
    return module


# --- pinned memory --------------------------------------------------------------------------------


class _CudaHost:
    """Registers memory of the host with CUDA's runtime."""

    @staticmethod
    def register(address: int, size: int) -> bool:
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0

    @staticmethod
    def unregister(address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class _BackendHost:
    """Registers host memory by two functions of the backend's module, if the module has them."""

    def __init__(self, module: DeviceModule) -> None:
        self.module = module

    def register(self, address: int, size: int) -> bool:
        if not hasattr(self.module, "host_register"):
            return False
        self.module.host_register(address, size)
        return True

    def unregister(self, address: int) -> None:
        self.module.host_unregister(address)


class Pinned:
    """Holds host memory that is pinned, as far as requested, for access by an accelerator.

    `held` owns the memory at `address`: the memory is unregistered before `held` is freed.
    """

    def __init__(self, address: int, held: object, accelerator: Accelerator) -> None:
        self.address, self.size, self._held = address, 0, held
        is_cuda = accelerator.kind == "cuda"
        self.host = _CudaHost() if is_cuda else _BackendHost(accelerator.module)
        self._unpin: Callable[[], object] = int

    def reach(self, size: int) -> None:
        if size <= self.size:
            return
        self._unpin()
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.host.register(self.address, self.size):
            whose = (self.host, self.address, self._held, os.getpid())
            self._unpin = unpin = weakref.finalize(self, _unpin, *whose)
            unpin.atexit = False  # the process's end unpins everything
        else:
            self.size = 0  # the memory is not pinned: copies are slower and block the host


def _unpin(host: _CudaHost | _BackendHost, address: int, held: object, process: int) -> None:
    if os.getpid() == process:  # memory that a parent registered is not registered in its fork
        host.unregister(address)
