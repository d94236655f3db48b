"""Where in a job something lies, said like code: `job.data._it`."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

OBJECTS_LIMIT = 200_000
_NOT_ENTERED = (types.ModuleType, type, str, bytes, int, float, complex, bool, type(None))
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")  # of torch.nn.Module


def find(start: object, target: object, *, root: str) -> str:
    """The shortest path from `start` to `target`; `root` with dots where there is none."""
    seen = {id(start)}
    ahead: deque[tuple[str, object]] = deque([(root, start)])
    alive = [start]  # an id is only good while its object lives
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
    """What an object holds, each with how to write it after the object's own path."""
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
        # Iterators, slots and other C objects: what the collector can see.
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
