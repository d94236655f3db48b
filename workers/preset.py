"""Configure torch as a preset says, and read it back.

Which parameters there are, and what they may be, is decided in `app.core.preset`; here each is
applied to this process and read back from torch itself.  A difference is an error, never a
warning.  What else may change the bits of a result is listed in `fingerprint`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from app.core.preset import differences

_FINGERPRINT_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


class NotTaken(Exception):
    """The device did not take the preset; `differences` are sentences, one for each parameter."""

    def __init__(self, differences: list[str]) -> None:
        self.differences = differences
        super().__init__("The device did not take the preset: " + "; ".join(differences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    apply: Callable[[Any], object]
    read: Callable[[], Any]


def _deterministic(wanted: bool) -> None:
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic = wanted


def _cudnn_benchmark(wanted: bool) -> None:
    torch.backends.cudnn.benchmark = wanted


def _flushes_denormals() -> bool:
    # torch has no getter: the smallest float64 tells
    smallest = torch.full((1,), 5e-324, dtype=torch.float64)
    return bool(smallest.mul(1.0).item() == 0.0)


SETTINGS = {
    "threads": Setting(apply=torch.set_num_threads, read=torch.get_num_threads),
    "interop_threads": Setting(
        apply=torch.set_num_interop_threads, read=torch.get_num_interop_threads
    ),
    "deterministic": Setting(apply=_deterministic, read=torch.are_deterministic_algorithms_enabled),
    "float32_matmul_precision": Setting(
        apply=torch.set_float32_matmul_precision, read=torch.get_float32_matmul_precision
    ),
    "flush_denormal": Setting(apply=torch.set_flush_denormal, read=_flushes_denormals),
    "cudnn_benchmark": Setting(apply=_cudnn_benchmark, read=lambda: torch.backends.cudnn.benchmark),
}


def configure(wanted: dict[str, Any]) -> dict[str, Any]:
    """Apply every parameter to this process; what was read back.  Raises NotTaken."""
    found = {}
    for name, value in wanted.items():
        setting = SETTINGS.get(name)
        if setting is None:
            continue  # not read back: a difference
        try:
            setting.apply(value)
            found[name] = setting.read()
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    if different := differences(wanted, found):
        raise NotTaken(different)
    return found


def fingerprint() -> dict[str, Any]:
    """Everything known to change the bits of a result; travels with every image."""
    return {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal": _flushes_denormals(),
        "environment": {name: os.environ.get(name) for name in _FINGERPRINT_VARIABLES},
    }
