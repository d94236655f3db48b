"""Tries out the device of a worker, in a separate process, before the worker serves it.

    python -m workers.hardware.device_probe KIND

Writes one line of JSON: the fields of `FoundDevice` but its access, or {"error"} with a sentence
for the operator.  A process that has used a device must not fork, so neither the device worker nor
its zygote can do this.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from workers.hardware.cuda_checkpoint import TreeMemory

JSON = dict[str, Any]


def try_device(kind: str) -> JSON:
    """Return what torch says about the device; it sees only one of this kind."""
    try:
        device = torch.device(kind, 0)
    except RuntimeError:
        return {"error": f"torch knows no kind of device that is called {kind!r}"}
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != kind:
        found = "no accelerator" if there is None else f"an accelerator of kind {there.type}"
        return {"error": f"torch {torch.__version__} finds {found} here, and no {kind} device"}
    count = torch.accelerator.device_count()
    if count != 1:
        return {"error": f"torch sees {count} {kind} devices, and a worker serves exactly one"}
    _, memory_bytes = torch.accelerator.get_memory_info(device)
    module = torch.get_device_module(kind)
    name = getattr(module, "get_device_name", lambda _: kind)
    return {
        "model": str(name(device)),
        "memory_bytes": memory_bytes,
        "compute_capability": _compute_capability(module, device),
        "can_splice": can_splice(module, device),
        "can_checkpoint": TreeMemory.found(kind).can_leave,
    }


#: Functions that torch's module for a device, such as torch.cuda, must have so that ranks can take
#: turns on it.  Residents need further ones, which are not listed here.
_NEEDED = ("empty_cache", "memory_reserved", "mem_get_info", "default_generators")


def can_splice(module: Any, device: torch.device) -> bool:
    """True if a rank can release its device memory, and later take it back for the same tensors."""
    if not all(hasattr(module, name) for name in _NEEDED):
        return False
    tensor = torch.arange(1024, device=device)
    kept, storage = tensor.cpu(), tensor.untyped_storage()
    try:
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
    except (RuntimeError, NotImplementedError):
        return False
    tensor.copy_(kept)
    return torch.equal(tensor.cpu(), kept)


def _compute_capability(module: Any, device: torch.device) -> str:
    """Return the compute capability as "9.0"; "" if this kind has none, or not as two numbers."""
    found = getattr(module, "get_device_capability", lambda _: None)(device)
    return ".".join(map(str, found)) if isinstance(found, tuple) and len(found) == 2 else ""


def main() -> None:
    try:
        found = try_device(sys.argv[1])
    except RuntimeError as error:
        found = {"error": f"torch cannot use the {sys.argv[1]} device: {error}"}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
