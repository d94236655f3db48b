"""Configures torch as a preset says, and reads the settings back.

`app.core.model.preset` defines the parameters and their values.  This module applies each to this
process and reads it back from torch itself.  A difference is an error, never a warning.

`fingerprint` has everything that is known to change the bits of a result; it travels with every
image.  `impose` restores what a process can still change.  A remaining difference makes a restored
job `equivalent` instead of `exact`.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from app.core.model import preset as presets
from workers.hardware.accelerator import Accelerator

_CPUINFO = Path("/proc/cpuinfo")


class NotTaken(Exception):
    """Raised when torch did not accept the preset; `differences` has a sentence for each
    difference.
    """

    def __init__(self, differences: list[str]) -> None:
        self.differences = differences
        super().__init__("The device did not take the preset: " + "; ".join(differences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    apply: Callable[[Any], object]
    read: Callable[[], Any]


def _deterministic(wanted: bool | str) -> None:
    torch.use_deterministic_algorithms(bool(wanted), warn_only=wanted == presets.WARN)
    torch.backends.cudnn.deterministic = bool(wanted)


def _is_deterministic() -> bool | str:
    return (False, presets.WARN, True)[torch.get_deterministic_debug_mode()]


def _cudnn_benchmark(wanted: bool) -> None:
    torch.backends.cudnn.benchmark = wanted


def _flushes_denormals() -> bool:
    # torch has no getter: test with the smallest float64
    smallest = torch.full((1,), 5e-324, dtype=torch.float64, device="cpu")
    return bool(smallest.mul(1.0).item() == 0.0)


SETTINGS = {
    "threads": Setting(apply=torch.set_num_threads, read=torch.get_num_threads),
    "interop_threads": Setting(
        apply=torch.set_num_interop_threads, read=torch.get_num_interop_threads
    ),
    "deterministic": Setting(apply=_deterministic, read=_is_deterministic),
    "float32_matmul_precision": Setting(
        apply=torch.set_float32_matmul_precision, read=torch.get_float32_matmul_precision
    ),
    "flush_denormal": Setting(apply=torch.set_flush_denormal, read=_flushes_denormals),
    "cudnn_benchmark": Setting(apply=_cudnn_benchmark, read=lambda: torch.backends.cudnn.benchmark),
}


def configure(wanted: dict[str, Any]) -> dict[str, Any]:
    """Apply every parameter to this process; return the values read back.  Raises NotTaken."""
    found = {}
    for name, value in wanted.items():
        setting = SETTINGS.get(name)
        if setting is None:
            continue  # the value was not read back, so it counts as a difference
        try:
            setting.apply(value)
            found[name] = setting.read()
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    if different := presets.differences(wanted, found):
        raise NotTaken(different)
    return found


# --- the fingerprint ------------------------------------------------------------------------------


_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
)  # these are read when a process starts; `cpu_capability` covers ATEN_CPU_CAPABILITY


def _flag(of: Any, name: str) -> Setting:
    return Setting(apply=lambda value: setattr(of, name, value), read=lambda: getattr(of, name))


def _attention(name: str) -> Setting:
    return Setting(
        apply=getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        read=getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
    )


# torch puts objects in the place of these two modules
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_matmul = torch.backends.cuda.matmul

#: Settings that a process can change at any time, with values in JSON.  Settings for all matrix
#: products come before those for one kind, which they would overwrite.
IMPOSABLE = {
    **SETTINGS,
    "deterministic": Setting(
        apply=lambda wanted: torch.use_deterministic_algorithms(
            wanted != "no", warn_only=wanted == "warn"
        ),
        read=lambda: ("no", "warn", "yes")[torch.get_deterministic_debug_mode()],
    ),
    "fill_uninitialized_memory": _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    "default_dtype": Setting(
        apply=lambda name: torch.set_default_dtype(getattr(torch, name)),
        read=lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    ),
    "cudnn": _flag(_cudnn, "enabled"),
    "cudnn_benchmark": _flag(_cudnn, "benchmark"),
    "cudnn_deterministic": _flag(_cudnn, "deterministic"),
    "mkldnn": _flag(_mkldnn, "enabled"),
    "mkldnn_deterministic": _flag(_mkldnn, "deterministic"),
    "cuda_matmul_fp32": _flag(_matmul, "fp32_precision"),
    "cudnn_conv_fp32": _flag(_cudnn.conv, "fp32_precision"),
    "cudnn_rnn_fp32": _flag(_cudnn.rnn, "fp32_precision"),
    "mkldnn_matmul_fp32": _flag(_mkldnn.matmul, "fp32_precision"),
    "fp16_reduced_sums": _flag(_matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_sums": _flag(_matmul, "allow_bf16_reduced_precision_reduction"),
    "flash_attention": _attention("flash"),
    "memory_efficient_attention": _attention("mem_efficient"),
    "math_attention": _attention("math"),
    "cudnn_attention": _attention("cudnn"),
}


def fingerprint(accelerator: Accelerator) -> dict[str, Any]:
    """Return everything known to change the bits of a result on this device, as JSON."""
    return {
        **_of_machine(),
        **accelerator.description(),
        **{name: setting.read() for name, setting in IMPOSABLE.items()},
        **{name: os.environ.get(name) for name in _VARIABLES},
    }


@functools.cache
def _of_machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    """Return vendor, family and model of the processor, because libraries choose their kernels by
    these.
    """
    if not _CPUINFO.exists():
        return platform.processor()
    pairs = (line.partition(":")[::2] for line in _CPUINFO.read_text().splitlines())
    first = dict((name.strip(), value.strip()) for name, value in reversed([*pairs]))
    told = (first.get(name, "") for name in ("vendor_id", "cpu family", "model", "model name"))
    return " ".join(told).strip() or platform.processor()


def impose(before: Mapping[str, Any], accelerator: Accelerator) -> list[str]:
    """Make this process compute as the process with the fingerprint `before` did; return the
    differences that remain.
    """
    for name, setting in IMPOSABLE.items():
        if name in before and setting.read() != before[name]:
            try:
                setting.apply(before[name])
            except (AttributeError, RuntimeError, TypeError, ValueError):
                # the setting is missing here, or can no longer be changed: it is reported as a
                # difference
                continue
    return differences(before, fingerprint(accelerator))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference that may change bits; an empty list means `exact`."""
    return [
        f"{name}: {_shown(before, name)} where the image was made, {_shown(now, name)} here"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    return "not set" if values.get(name) is None else str(values[name])
