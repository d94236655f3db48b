"""Load the tenant's code, call it, and take what it returns."""

from __future__ import annotations

import importlib
import math
import random
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from app.core.model.graphs.task_graph import TaskGraph
from workers.graph import runner
from workers.hardware.accelerator import Accelerator
from workers.residents.context import Context
from workers.residents.endings import JSON

METRICS_LIMIT = 100
SEED = 0  # seed of every job that sets none itself

_KEPT: list[ModuleType] = []  # our modules, so that a fork does not free them


class BadEntry(Exception):
    """Raised when the bundle has no such module, class or function."""


def load_entry(code: Path, target: str) -> Any:
    """Return the class or function that "module:name" names, from the tenant's folder `code`."""
    make_room_for(code)
    return find_entry(code, target)


def load_graph(
    code: Path, body: JSON | TaskGraph, accelerator: Accelerator, **more: Any
) -> runner.Loaded:
    """Return a loaded graph (`runner.Loaded`) with all functions from the tenant's folder
    `code`."""
    make_room_for(code)
    return runner.Loaded(body, partial(find_entry, code), accelerator, **more)


def find_entry(code: Path, target: str) -> Any:
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    found = getattr(module, "__file__", None)
    if found is None or not Path(found).is_relative_to(code):
        raise BadEntry(
            f"{module_name!r} is not a module of your code, "
            "but of Python or Roundhouse; rename your module"
        )
    entry: Any = module
    for part in name.split("."):
        if not hasattr(entry, part):
            raise BadEntry(f"{target}: {getattr(entry, '__name__', entry)} has no {part!r}")
        entry = getattr(entry, part)
    if not callable(entry):
        raise BadEntry(f"{target} is a {type(entry).__name__}, not a class or function")
    return entry


def make_room_for(code: Path) -> None:
    """Put the tenant's modules first on the import path.

    They win even if they have the name of one of our modules.
    """
    ours = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [str(code), *(path for path in sys.path if path not in ("", ours))]
    for name in _own_modules():
        del sys.modules[name]
    sys.path_importer_cache.pop(str(code), None)  # forget the folder's earlier content


def put_own_modules_last() -> None:
    """Move our modules to the end of `sys.modules`, and keep them.

    A fork then finds them without reading all other modules, and takes them from there without
    freeing them. Both would copy the pages around them.
    """
    for name in reversed(_own_modules()):
        sys.modules[name] = sys.modules.pop(name)
        _KEPT.append(sys.modules[name])


def _own_modules() -> list[str]:
    """Return our modules, newest first.

    The search stops at our packages, which are the oldest of them.
    """
    found, packages = [], {"app", "workers"}
    for name in reversed(sys.modules):
        if name.partition(".")[0] in ("app", "workers"):
            found.append(name)
            packages.discard(name)
            if not packages:
                break
    return found


def seed(accelerator: Accelerator) -> None:
    """Seed all generators; `torch.manual_seed` keeps a stack trace for each missing device."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    accelerator.seed(SEED)


def take_step(job: Any, ctx: Context, step: int) -> JSON:
    """Run step number `step` of a job; return its metrics."""
    ctx.step, ctx.logged = step, {}
    returned = job.step(ctx)
    if not isinstance(returned, dict | None):
        raise TypeError(
            f"step must return a dict of metrics or None, not a {type(returned).__name__}"
        )
    return metrics_of({**(returned or {}), **ctx.logged})


def call(function: Any, ctx: Context) -> JSON:
    """Call a function task once; return its result."""
    ctx.step = 1
    returned = function(ctx, **ctx.inputs, **ctx.params)
    if not isinstance(returned, dict | None):
        raise TypeError(f"a function must return a dict, not a {type(returned).__name__}")
    return returned or {}


def metrics_of(values: JSON) -> JSON:
    """Return at most METRICS_LIMIT values: numbers as they are, anything else as a short text."""
    return {str(name)[:100]: _metric(values[name]) for name in list(values)[:METRICS_LIMIT]}


def _metric(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.generic | numpy.ndarray) and _is_one(value):
        value = value.item()
    if isinstance(value, bool | int) and abs(value) < 2**63:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)[:200]


def plain(value: Any, path: str) -> Any:
    """Return `value` as JSON: torch and numpy numbers as Python's, other non-numbers as text.

    Raises TypeError with the path of a part that JSON cannot hold.
    """
    if isinstance(value, torch.Tensor | numpy.generic | numpy.ndarray) and _is_one(value):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(part, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{path}[{index}]") for index, part in enumerate(value)]
    raise TypeError(
        f"{path} is a {type(value).__name__}, which JSON cannot say: "
        "name it in the descriptor's `outputs`, or return a number, a text, a list or a dict"
    )


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | numpy.ndarray) or value.ndim == 0
