"""Names places inside a job, for error messages and for exported tensors.

The path of something that cannot be captured is written like code (`job.data._it`). A tensor has a
name that people would look for (`model.fc1.weight`, `opt.state.0.exp_avg`).
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch

OBJECTS_LIMIT = 200_000
_NOT_ENTERED = (types.ModuleType, type, str, bytes, int, float, complex, bool, type(None))
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")  # attributes of torch.nn.Module


class Uncapturable(Exception):
    """Raised when an object cannot be captured: `path` is its place, `what` its type.

    A path looks like "job.data._it".
    """

    def __init__(self, path: str, what: str, advice: str) -> None:
        self.path, self.what, self.advice = path, what, advice
        super().__init__(f"{path}: {what} cannot be captured. {advice}")


class Refused(Exception):
    """Raised while pickling an object that cannot be captured, whose path is not known yet."""

    def __init__(self, obj: object, what: str, advice: str) -> None:
        self.obj, self.what, self.advice = obj, what, advice
        super().__init__(what)


# --- paths of what cannot be captured ------------------------------------------------------------


def find(start: object, target: object, *, root: str) -> str:
    """Return the shortest path from `start` to `target` as text; `root` with an ellipsis if none is
    found.
    """
    seen = {id(start)}
    ahead: deque[tuple[str, object]] = deque([(root, start)])
    alive = [start]  # an id is only valid while its object lives
    while ahead and len(seen) < OBJECTS_LIMIT:
        path, obj = ahead.popleft()
        if obj is target:
            return path
        for label, part in _parts(obj):
            if id(part) not in seen and not isinstance(part, _NOT_ENTERED):
                seen.add(id(part))
                alive.append(part)
                ahead.append((path + label, part))
    return f"{root}…"


def _parts(obj: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object, each with the text to append to the object's own path."""
    if isinstance(obj, dict):
        yield from _items(obj)
    elif isinstance(obj, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", part) for index, part in enumerate(obj))
    elif isinstance(obj, types.FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(getattr(obj, "__dict__", None), dict):
        yield from _attributes(obj)
    if not isinstance(obj, dict | list | tuple | types.FunctionType):
        # Iterators, slots and other C objects: whatever the garbage collector can see.
        yield from ((f".<{type(part).__name__}>", part) for part in gc.get_referents(obj))


def _items(obj: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    for key, part in obj.items():
        yield f"[{_shown(key)}]", part
    for key in obj:
        yield ".<key>", key


def _shown(key: object) -> str:
    return repr(key)[:40] if isinstance(key, str | int | tuple) else f"<{type(key).__name__}>"


def _attributes(obj: Any) -> Iterator[tuple[str, object]]:
    own = vars(obj)
    for table in _MODULE_TABLES:
        if isinstance(own.get(table), dict):
            yield from ((f".{name}", part) for name, part in own[table].items())
    yield from ((f".{name}", part) for name, part in list(own.items()))
    if isinstance(getattr(type(obj), "grad", None), types.GetSetDescriptorType):
        yield ".grad", obj.grad


def _of_function(obj: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:
            continue  # a cell that was never filled
    yield from ((".<default>", part) for part in obj.__defaults__ or ())
    for name in obj.__code__.co_names:
        if name in obj.__globals__:
            yield f".<global {name}>", obj.__globals__[name]


# --- names of tensors -----------------------------------------------------------------------------


def named(job: object, *, root: str) -> Iterator[tuple[str, Any]]:
    """Yield every tensor and array with its name; a tied tensor comes under each of its names.

    Parts of modules are named as in `state_dict`, the state of optimizers by the parameter's
    number, parts of other objects by attribute, of dicts and lists by key. Objects of torch's and
    numpy's own classes are not entered.
    """
    if isinstance(job, torch.Tensor | numpy.ndarray):
        yield root, job
    ahead: list[tuple[str, Any, tuple[int, ...]]] = [("", job, ())]
    # limited, because objects that many others share have very many names
    for _ in range(OBJECTS_LIMIT):
        if not ahead:
            return
        name, obj, above = ahead.pop()
        above = (*above, id(obj))
        for label, part in _entered(obj):
            if isinstance(part, torch.Tensor | numpy.ndarray):
                yield name + label, part
            elif type(part) not in _ATOMS and id(part) not in above:
                ahead.append((f"{name}{label}.", part, above))


_ATOMS = {*_NOT_ENTERED, torch.Size, torch.dtype, torch.device, torch.Generator, types.FunctionType}


def _entered(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((str(key), part) for key, part in obj.items() if type(key) in (str, int))
    elif isinstance(obj, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(obj))
    elif isinstance(obj, torch.nn.Module):
        own = vars(obj)
        for table in _MODULE_TABLES:
            yield from own[table].items()
        yield from ((key, part) for key, part in own.items() if key not in _OF_MODULES)
    elif isinstance(obj, torch.optim.Optimizer):
        yield "state", _optimizer_state(obj)
    elif not type(obj).__module__.startswith(("torch.", "numpy")):
        yield from getattr(obj, "__dict__", {}).items()


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        number: optimizer.state[parameter]
        for number, parameter in enumerate(order)
        if parameter in optimizer.state
    }
