"""Presets: the parameters set on a device for a type of task, before its first step.

Only the parameters listed here can be set, each within its range.  `workers.hardware.preset`
applies a preset and reads every value back.  `differences` lists the values that the device did not
take.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.core.model.descriptor import MAX_FAULTS, Fault, escaped, near_name

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter that may be set: a value of `kind`, one of `words` or from `least` to `most`.

    `on` names the device kinds that have the parameter; empty means every kind.
    """

    kind: type
    default: Any
    words: tuple[str, ...] = ()
    least: int = 0
    most: int = 0
    on: tuple[str, ...] = ()


KINDS = ("cpu", "cuda")  # of devices to which a preset can be applied

PARAMETERS: dict[str, Parameter] = {
    "threads": Parameter(kind=int, default=1, least=1, most=1024),
    "interop_threads": Parameter(kind=int, default=1, least=1, most=1024),
    "deterministic": Parameter(kind=bool, default=True),
    "float32_matmul_precision": Parameter(
        kind=str, default="highest", words=("highest", "high", "medium")
    ),
    "flush_denormal": Parameter(kind=bool, default=False),
    "cudnn_benchmark": Parameter(kind=bool, default=False, on=("cuda",)),
}


def defaults(kind: str, *, threads: int = 1) -> JSON:
    """Return the defaults for a device of `kind`; `threads` is how many the device has."""
    known = {
        name: parameter.default
        for name, parameter in PARAMETERS.items()
        if not parameter.on or kind in parameter.on
    }
    return {**known, "threads": threads}


def check(params: object, *, kind: str, pointer: str = "/params") -> tuple[Fault, ...]:
    """Report what is wrong with parameters for a device of `kind`; a partial set is valid."""
    if not isinstance(params, dict):
        return (Fault(pointer, "must be an object of parameters", "type"),)
    known = defaults(kind)
    faults: list[Fault] = []
    for name, value in params.items():
        if len(faults) >= MAX_FAULTS:
            break
        fault = _wrong(PARAMETERS[name], value) if name in known else _unknown(name, kind)
        if fault:
            faults.append(Fault(f"{pointer}/{escaped(name)}", *fault))
    return tuple(faults)


def _unknown(name: str, kind: str) -> tuple[str, str]:
    known = list(defaults(kind))
    near = near_name(str(name), known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"a {kind} device has no parameter {name!r}; {hint}", "unknown-field"


def _wrong(parameter: Parameter, value: object) -> tuple[str, str] | None:
    if type(value) is not parameter.kind:
        return f"must be of type {parameter.kind.__name__}; got {value!r}", "type"
    if parameter.words and value not in parameter.words:
        return f"must be one of {', '.join(parameter.words)}; got {value!r}", "invalid"
    if isinstance(value, int) and parameter.most and not parameter.least <= value <= parameter.most:
        return f"must be from {parameter.least} to {parameter.most}; got {value}", "range"
    return None


def sha256(params: Mapping[str, Any]) -> str:
    """Return the content hash: equal parameters have equal hashes, in whatever order."""
    text = json.dumps(dict(params), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(wanted: Mapping[str, Any], read_back: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each parameter that the device did not take; empty if it took all."""
    return [
        f"{name}: set to {value!r}, but the device reports {read_back[name]!r}"
        if name in read_back
        else f"{name}: set to {value!r}, but the device does not report it"
        for name, value in sorted(wanted.items())
        if name not in read_back or (type(read_back[name]), read_back[name]) != (type(value), value)
    ]
