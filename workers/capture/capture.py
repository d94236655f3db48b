"""Captures a job's whole object graph as bytes beside its storages; `restore` is the way back.

`capture` is called at a safe point. It pickles the graph and lists the storages to which the graph
refers; their bytes stay where they are (`context_switch` moves them).

Invariants:
* two objects that share memory before a restore share it after (`tensors`);
* the state of the random number generators of torch, numpy and Python belongs to the graph;
* objects of the process are found or made again in the next process (`process_handles`), and the
  files of the working folder belong to the job (`job_files`);
* data lent to a job (datablocks) is referred to by name, as long as it was never written to;
* what cannot be captured (a generator, a socket, a live autograd graph, ...) is refused with its
  path, and nothing is captured in part.

State outside the job's object (module globals, class attributes) is not captured.

A graph is two pickles: the world, and a header. The header is read first, because it describes what
must be set up before objects are made. The last eight bytes say where the header begins.
"""

from __future__ import annotations

import io
import itertools
import pickle
import random
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from workers.capture import data_loader, job_files, process_handles, tensors
from workers.capture.graph_pickler import Capture, Reducer
from workers.capture.paths import Refused, Uncapturable, find, named
from workers.capture.rebuild import Surroundings
from workers.capture.restore import (
    TRAILER_BYTES,
    make_generator,
    make_module,
    make_optimizer,
    make_parametrized,
    named_here,
    set_module,
)
from workers.hardware.accelerator import Accelerator

__all__ = ["Captured", "Surroundings", "Uncapturable", "capture"]

NAMES_LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured job: `graph` is the pickled object graph, which refers to `storages` by number.

    `tensors` lists the tensors and arrays by name, so that they can be read without unpickling:
    name -> [storage, dtype, shape, stride, offset], the last two in elements.
    """

    graph: memoryview
    storages: list[torch.UntypedStorage]
    tensors: dict[str, list[Any]] = field(default_factory=dict)


def capture(
    job: object,
    *,
    around: Surroundings,
    accelerator: Accelerator,
    root: str = "job",
    whole: bool = True,
) -> Captured:
    """Capture `job`, and the random state with which it goes on; raises Uncapturable.

    If `whole` is false, `job` is a value that goes to another task: it has no working folder,
    process groups or random state.
    """
    world = {"job": job, **(_world(accelerator) if whole else {})}
    graph, pickler = _pickled(world, around, root, whole=whole)
    if pickler.weak:
        # Pickle the targets of weak references first, so that each is known when a reference is
        # met.
        _must_be_held(pickler, job, root)
        targets = [target for _, target in pickler.weak]
        graph, pickler = _pickled(
            {"targets": targets, **world}, around, root, whole=whole, weakly=True
        )
    return Captured(graph=graph, storages=pickler.storages, tensors=_table(job, root, pickler))


def _world(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state of this process that a job needs to continue, apart from the job's own
    objects.
    """
    return {
        "torch": torch.get_rng_state(),
        "accelerator": accelerator.random_state(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
        "gradients": torch.is_grad_enabled(),
    }


def _pickled(
    world: dict[str, Any], around: Surroundings, root: str, *, whole: bool, weakly: bool = False
) -> tuple[memoryview, Capture]:
    out = io.BytesIO()
    job, shared = world["job"], named_here(around)
    pickler = Capture(out, around, named=shared, reducer_of=_reducer_of, weakly=weakly)
    try:
        _dump(pickler, world)
        pickler.must_not_overlap()
        files = job_files.listing(pickler) if whole else None
    except Refused as refused:
        place = refused.obj if isinstance(refused.obj, str) else find(job, refused.obj, root=root)
        raise Uncapturable(place, refused.what, refused.advice) from None
    except NotPicklable as broken:
        what = type(pickler.last).__name__
        place = find(job, pickler.last, root=root)
        raise Uncapturable(place, what, f"{_advice(what)} ({broken})") from broken.__cause__
    begins = out.tell()
    header = {
        "hooks": RemovableHandle.next_id,
        "shared": [n for n, storage in enumerate(pickler.storages) if storage.is_shared()],
        "groups": process_handles.groups() if whole else [],
        "files": files,
        "lent": pickler.lent,
    }
    pickle.dump(header, out, protocol=5)
    out.write(begins.to_bytes(TRAILER_BYTES, "big"))
    return out.getbuffer(), pickler


class NotPicklable(Exception):
    """Raised when an object in the graph does not pickle, for any reason."""


def _dump(pickler: Capture, world: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from itertools, since Python 3.12
            pickler.dump(world)
    except Refused:
        raise
    except Exception as error:  # a tenant's __reduce__ or __getstate__ may raise any exception
        raise NotPicklable(str(error)) from error


def _must_be_held(pickler: Capture, job: object, root: str) -> None:
    """Refuse targets that only a weak reference reaches: they would be gone after a restore."""
    reached = pickler.memo.copy()
    for reference, target in pickler.weak:
        if id(target) not in reached:
            what = f"a weak reference to a {type(target).__name__} that the job does not hold"
            raise Uncapturable(find(job, reference, root=root), what, "Store the object itself.")


def _table(job: object, root: str, pickler: Capture) -> dict[str, list[Any]]:
    rows, table = pickler.rows, dict[str, list[Any]]()
    for name, part in itertools.islice(named(job, root=root), NAMES_LIMIT):
        if (row := rows.get(id(part))) is not None and row[0] >= 0:
            number, dtype, shape, stride, offset = row
            said = str(dtype).removeprefix("torch.")
            table[name] = [number, said, shape, stride, offset]
    return table


def _reducer_of(kind: type) -> Reducer | None:
    """Return the reducer of the first listed class that matches.

    Returns None where pickle needs no help.
    """
    if kind in (torch.Tensor, torch.nn.Parameter):
        return tensors.reduce_plain
    for cls, reduce in _REDUCERS:
        if issubclass(kind, cls):
            return reduce
    return None


_HOOK_TABLES = frozenset(
    name for name, table in vars(torch.nn.Module()).items() if type(table) is OrderedDict
)


def _reduce_module(capture: Capture, module: torch.nn.Module) -> Any:
    """Reduce a module. Modules have many tables of hooks; write only the tables that are not
    empty.
    """
    cls = type(module)
    if parametrize.is_parametrized(module) and cls.__module__ == parametrize.__name__:
        names = tuple(module.parametrizations)  # type: ignore[arg-type]
        return make_parametrized, (cls.__mro__[1], names), vars(module), None, None, set_module
    state = vars(module)
    if cls.__module__ == "torch._dynamo.eval_frame":  # torch's own pickling loses the hooks
        hooks = {name: state[name] for name in _HOOK_TABLES if state.get(name)}
        return cls, (module._orig_mod, module.dynamo_ctx), hooks, None, None, set_module
    if cls.__getstate__ is not torch.nn.Module.__getstate__ or _reduces_itself(cls):
        return NotImplemented
    empty = tuple([name for name in _HOOK_TABLES if not state.get(name, True)])
    empty = capture.unhooked.setdefault(empty, empty)  # so that each combination is pickled once
    held = {name: part for name, part in state.items() if name not in _HOOK_TABLES or part}
    return make_module, (cls, empty), held


def _reduce_optimizer(capture: Capture, optimizer: torch.optim.Optimizer) -> Any:
    cls = type(optimizer)
    if cls.__getstate__ is not torch.optim.Optimizer.__getstate__ or _reduces_itself(cls):
        return NotImplemented
    # The stock state leaves out hooks and other attributes of the instance.
    state = dict(vars(optimizer))
    if scheduled := hasattr(state.get("step"), "_wrapped_by_lr_sched"):
        del state["step"]
    return make_optimizer, (cls, scheduled), state


def _reduces_itself(cls: type) -> bool:
    methods = ("__reduce_ex__", "__reduce__")
    return any(getattr(cls, name) is not getattr(object, name) for name in methods)


def _reduce_generator(capture: Capture, generator: torch.Generator) -> Any:
    return make_generator, (str(generator.device), generator.get_state())


_REDUCERS: tuple[tuple[Any, Reducer], ...] = (
    (torch.Tensor, tensors.reduce_subclass),
    (torch.UntypedStorage, tensors.reduce_storage),
    (torch.storage.TypedStorage, tensors.reduce_typed_storage),
    *job_files.REDUCERS,
    (numpy.ndarray, tensors.reduce_array),
    (torch.Generator, _reduce_generator),
    *data_loader.REDUCERS,
    *process_handles.REDUCERS,
    (torch.nn.Module, _reduce_module),
    (torch.optim.Optimizer, _reduce_optimizer),
    (type, Capture.as_cloudpickle_does),
)

_ADVICE = {
    "generator": "Write it as a class with __next__ that keeps its own position.",
    "coroutine": "Await it before step returns.",
    "socket": "Open and close it within step.",
    "reader": "Store the rows that were read, or split the lines yourself.",
    "_SingleProcessDataLoaderIter": "Create the DataLoader's iterator in __init__ or in step.",
    "_MultiProcessingDataLoaderIter": "Create the DataLoader's iterator in __init__ or in step.",
    "RecursiveScriptModule": "Store the plain module; script it where it is used.",
}


def _advice(what: str) -> str:
    kept_out = "Keep it out of the job's attributes: create it where it is used."
    return _ADVICE.get(what, kept_out)
