"""Offers `torch.sim`: the face of the simulated accelerator that torch and its users expect.

It has the names that `torch.cuda` has, as far as `torch.accelerator`, `torch.random`,
`torch.amp`, `torch.serialization` and device-generic code ask for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

torch.ops.load_library(Path(__file__).parent / "sim.so")
_sim = torch.ops.sim

type_of_device = "sim"


@dataclass(frozen=True, slots=True)
class Properties:
    """Properties of one device; `number` is the device's number on the host."""

    name: str
    total_memory: int
    number: int


# --- devices --------------------------------------------------------------------------------------


def device_count() -> int:
    return _sim.device_count()


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return _sim.is_used() and not _sim.in_bad_fork()


def _lazy_init() -> None:
    _sim.use()


init = _lazy_init


def _is_in_bad_fork() -> bool:
    return _sim.in_bad_fork()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Make `device` the current one within the block."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_properties(device: Any = None) -> Properties:
    number = _sim.physical(_index(device))
    return Properties(f"simulated accelerator {number}", _sim.memory_bytes(), number)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (1, 0)


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != type_of_device:
        raise ValueError(f"{device} is no device of sim")
    return current_device() if device.index is None else device.index


# --- streams --------------------------------------------------------------------------------------

Stream, Event = torch.Stream, torch.Event


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Issue the block's work to `stream`."""
    with contextlib.nullcontext() if stream is None else stream:
        yield


def set_mode(mode: str, seed: int = 0) -> None:
    """Run what is queued, then go on as "eager", "lazy" or, by dice from `seed`, "random"."""
    _sim.set_mode(mode, seed)


# --- memory ---------------------------------------------------------------------------------------


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


get_memory_info = mem_get_info


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Let this process hold at most this fraction of the device's memory."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _sim.set_memory_fraction(fraction, _index(device))


def host_register(address: int, size: int) -> None:
    """Pin memory of the host that somebody else has allocated, as cudaHostRegister does."""
    _sim.host_register(address, size)


def host_unregister(address: int) -> None:
    _sim.host_unregister(address)


# --- random numbers -------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(_sim.default_generator(index) for index in range(device_count()))
    raise AttributeError(f"module 'torch.sim' has no attribute {name!r}")


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return _sim.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "sim") -> None:
    _sim.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    if is_available():
        _sim.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _sim.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _sim.default_generator(current_device()).initial_seed()


# --- mixed precision ------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported() -> bool:
    return True
