"""Computes the same thing on the CPU and on the simulated accelerator, and compares the bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compute = Callable[[str], Any]


def assert_same_bits(compute: Compute) -> None:
    """Call `compute` with "cpu" and with "sim", from the same seed; all tensors must be equal."""
    expected, found = _tensors(_computed(compute, "cpu")), _tensors(_computed(compute, "sim"))
    assert len(expected) == len(found)
    for index, (cpu, sim) in enumerate(zip(expected, found, strict=True)):
        assert sim.device.type == "sim", f"result {index} is on {sim.device}"
        assert (cpu.dtype, cpu.shape, cpu.stride()) == (sim.dtype, sim.shape, sim.stride()), index
        assert _bytes(cpu) == _bytes(sim.cpu()), f"result {index} has other bits"


def _computed(compute: Compute, device: str) -> Any:
    torch.manual_seed(7)
    return compute(device)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    return [tensor for part in result for tensor in _tensors(part)]


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def drawn(device: str, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """Return the same numbers on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).to(device)
