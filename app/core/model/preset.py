"""Defines presets: the parameters that are set on a device for a type of task, before its first
step.

Only the parameters listed here can be set, each within its range. `workers.hardware.preset` applies
a preset and reads every value back. `differences` lists the values that the device did not take.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.core.model.fields import MAX_FAULTS, Fault, escaped, near_name

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Describes a parameter that may be set: a value of `kind` from `least` to `most`, or one of
    `words`.

    `on` names the device kinds that have the parameter; empty means every kind. `on_accelerators`
    is the default on all kinds but the CPU, if it differs there. A parameter that is `of_device` is
    a setting of the accelerator itself, in its driver; without a value it stays as it is.
    """

    kind: type
    default: Any
    words: tuple[str, ...] = ()
    least: int = 0
    most: int = 0
    on: tuple[str, ...] = ()
    on_accelerators: Any = None
    of_device: bool = False


#: Kinds of devices that may have a preset even if no device of the kind was ever seen.
KINDS = ("cpu", "cuda")
WARN = "warn"  # of `deterministic`: run an operation that cannot be deterministic, with a warning

PARAMETERS: dict[str, Parameter] = {
    "threads": Parameter(kind=int, default=1, least=1, most=1024),
    "interop_threads": Parameter(kind=int, default=1, least=1, most=1024),
    # An accelerator has no deterministic kernel for some ordinary operations; with True they would
    # raise.
    "deterministic": Parameter(kind=bool, default=True, words=(WARN,), on_accelerators=WARN),
    "float32_matmul_precision": Parameter(
        kind=str, default="highest", words=("highest", "high", "medium")
    ),
    "flush_denormal": Parameter(kind=bool, default=False),
    "cudnn_benchmark": Parameter(kind=bool, default=False, on=("cuda",)),
    "power_limit_w": Parameter(kind=int, default=None, least=1, most=10_000, of_device=True),
    # application clocks
    "graphics_clock_mhz": Parameter(kind=int, default=None, least=1, most=100_000, of_device=True),
    "memory_clock_mhz": Parameter(kind=int, default=None, least=1, most=100_000, of_device=True),
    "compute_mode": Parameter(
        kind=str, default=None, words=("default", "exclusive_process"), of_device=True
    ),
}


def defaults(kind: str, *, threads: int = 1) -> JSON:
    """Return the defaults for a device of `kind`; `threads` is how many the device has."""
    known = {name: _default(PARAMETERS[name], kind) for name in _known(kind)}
    found = {name: value for name, value in known.items() if value is not None}
    return {**found, "threads": threads}


def of_device(params: Mapping[str, Any]) -> JSON:
    """Return the part of a preset that the device worker sets in the device's driver."""
    return {name: value for name, value in params.items() if _is_of_device(name)}


def of_process(params: Mapping[str, Any]) -> JSON:
    """Return the part of a preset that a task's process sets for itself."""
    return {name: value for name, value in params.items() if not _is_of_device(name)}


def _is_of_device(name: str) -> bool:
    return name in PARAMETERS and PARAMETERS[name].of_device


def _known(kind: str) -> list[str]:
    """Return the names of the parameters that a device of this kind has."""
    return [
        name
        for name, parameter in PARAMETERS.items()
        if (not parameter.on or kind in parameter.on)
        and not (parameter.of_device and kind == "cpu")
    ]


def _default(parameter: Parameter, kind: str) -> Any:
    is_other = kind != "cpu" and parameter.on_accelerators is not None
    return parameter.on_accelerators if is_other else parameter.default


def promises_bits(params: Mapping[str, Any]) -> bool:
    """True if a task with this preset computes the same bits whenever it is run.

    If False, an operation may run that has no deterministic kernel on its device.
    """
    return params.get("deterministic", True) is True


def check(params: object, *, kind: str, pointer: str = "/params") -> tuple[Fault, ...]:
    """Report what is wrong with parameters for a device of `kind`.

    Parameters may be left out.
    """
    if not isinstance(params, dict):
        return (Fault(pointer, "must be an object of parameters", "type"),)
    known = _known(kind)
    faults: list[Fault] = []
    for name, value in params.items():
        if len(faults) >= MAX_FAULTS:
            break
        fault = _wrong(PARAMETERS[name], value) if name in known else _unknown(name, kind)
        if fault:
            faults.append(Fault(f"{pointer}/{escaped(name)}", *fault))
    return tuple(faults)


def _unknown(name: str, kind: str) -> tuple[str, str]:
    known = _known(kind)
    near = near_name(str(name), known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"a {kind} device has no parameter {name!r}; {hint}", "unknown-field"


def _wrong(parameter: Parameter, value: object) -> tuple[str, str] | None:
    if type(value) is str and value in parameter.words:
        return None
    if type(value) is not parameter.kind:
        others = "".join(f" or {word!r}" for word in parameter.words if parameter.kind is not str)
        return f"must be of type {parameter.kind.__name__}{others}; got {value!r}", "type"
    if parameter.kind is str:
        return f"must be one of {', '.join(parameter.words)}; got {value!r}", "invalid"
    if isinstance(value, int) and parameter.most and not parameter.least <= value <= parameter.most:
        return f"must be from {parameter.least} to {parameter.most}; got {value}", "range"
    return None


def sha256(params: Mapping[str, Any]) -> str:
    """Return the content hash: equal parameters have equal hashes, in whatever order."""
    text = json.dumps(dict(params), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(wanted: Mapping[str, Any], read_back: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each parameter that the device did not take; [] if it took all."""
    return [
        f"{name}: set to {value!r}, but the device reports {read_back[name]!r}"
        if name in read_back
        else f"{name}: set to {value!r}, but the device does not report it"
        for name, value in sorted(wanted.items())
        if name not in read_back or (type(read_back[name]), read_back[name]) != (type(value), value)
    ]
