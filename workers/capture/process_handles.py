"""Objects that belong to a process, and are found or made again in the next process.

Process groups by name, in the order in which they were made; streams and events; locks that are not
held; loggers by name, with their own handlers; results of `torch.compile`, as what was compiled (it
compiles again); caches, empty; weak references to objects that the job itself holds.
"""

from __future__ import annotations

import _thread
import functools
import gc
import logging
import threading
import types
import weakref
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cloudpickle.cloudpickle import _lookup_module_and_qualname, _should_pickle_by_reference
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed import distributed_c10d as c10d
from torch.utils.hooks import RemovableHandle

from workers.capture.graph_pickler import Capture
from workers.capture.paths import Refused
from workers.capture.rebuild import known

# --- process groups -------------------------------------------------------------------------------


def groups() -> list[dict[str, Any]]:
    """Return every process group of this process, oldest first; the default group is the first."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    return [_described(group) for group in c10d._world.pg_map]


def _described(group: dist.ProcessGroup) -> dict[str, Any]:
    return {
        "name": c10d._world.pg_names[group],
        "ranks": dist.get_process_group_ranks(group),
        "rank": dist.get_rank(),
        "backend": c10d._world.pg_backend_config[group],
        "about": group.group_desc,
        "timeout": _timeout(group),
    }


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return a group's timeout; None means torch's own choice for the backend."""
    # the group of `workers.ranks.process_group` is its own backend
    if (own_s := getattr(group, "timeout_s", None)) is not None:
        return timedelta(seconds=own_s)
    backend = group._get_backend(group._device_types[0])
    options = getattr(backend, "options", None)
    return None if options is None else options._timeout


def restore_groups(wanted: list[dict[str, Any]]) -> None:
    """Make the process groups that this process lacks.

    Raises if the default group has several ranks: it must exist before.
    """
    if wanted and not dist.is_initialized():
        first = wanted[0]
        if len(first["ranks"]) > 1:
            raise RuntimeError(
                f"the job needs the process group of its {len(first['ranks'])} ranks, "
                "and this process has none"
            )
        dist.init_process_group(
            first["backend"],
            timeout=first["timeout"],
            world_size=1,
            rank=0,
            store=HashStore(),
        )
    for group in wanted[1:]:
        if group["name"] not in c10d._world.pg_names.values():
            _restore_group(group)


def _restore_group(group: dict[str, Any]) -> None:
    by_number = group["name"].isdigit()
    if by_number:
        c10d._world.group_count = int(group["name"])  # torch names the next group after this number
    dist.new_group(
        group["ranks"],
        group["timeout"],
        group["backend"],
        use_local_synchronization=not by_number,
        group_desc=group["about"],
    )


def _reduce_group(capture: Capture, group: dist.ProcessGroup) -> Any:
    name = c10d._world.pg_names.get(group)
    if name is None:
        advice = "Make it with init_process_group or new_group."
        raise Refused(group, "a process group that torch does not know", advice)
    return process_group, (name,)


@known
def process_group(name: str) -> object:
    return _resolve_process_group(c10d.GroupName(name))


# --- handles of hooks, streams, locks, threads, loggers -------------------------------------------


def _reduce_stream(capture: Capture, stream: Any) -> Any:
    is_default = stream.stream_id == 0
    priority = getattr(stream, "priority", 0)  # only some classes of groups tell their timeout
    return make_stream, (type(stream), str(stream.device), is_default, priority)


def _reduce_event(capture: Capture, event: Any) -> Any:
    """Pickle an event as a new, empty one: at a safe point all recorded events have happened."""
    return make_event, (type(event),)


def _reduce_lock(capture: Capture, lock: Any) -> Any:
    if lock.locked():
        raise Refused(lock, "a lock that is held", "Release it before step returns.")
    return make_lock, ()


def _reduce_reentrant_lock(capture: Capture, lock: Any) -> Any:
    if lock._is_owned() or not lock.acquire(blocking=False):
        raise Refused(lock, "a lock that is held", "Release it before step returns.")
    lock.release()
    return make_reentrant_lock, ()


def _reduce_thread(capture: Capture, thread: threading.Thread) -> Any:
    advice = "Join it before step returns, and keep it out of the job's attributes."
    raise Refused(thread, "a thread", advice)


def _reduce_logger(capture: Capture, logger: logging.Logger) -> Any:
    names = ("level", "handlers", "filters", "propagate", "disabled")
    state = {name: getattr(logger, name) for name in names}
    return logging.getLogger, (logger.name,), state, None, None, set_logger


def _reduce_handle(capture: Capture, handle: RemovableHandle) -> Any:
    """Pickle the handle of a registered hook.

    torch's own way cannot be restored if one of the handle's tables is gone.
    """
    tables = (handle.hooks_dict_ref, *(handle.extra_dict_ref or ()))
    return make_handle, (), (handle.id, [table() for table in tables]), None, None, set_handle


@known
def make_handle() -> object:
    return RemovableHandle.__new__(RemovableHandle)


@known
def set_handle(handle: Any, state: tuple[int, list[Any]]) -> None:
    handle.id, tables = state
    found = [weakref.ref(OrderedDict() if table is None else table) for table in tables]
    handle.hooks_dict_ref, handle.extra_dict_ref = found[0], tuple(found[1:])


@known
def make_stream(cls: Any, device: str, is_default: bool, priority: int) -> object:
    if not is_default:
        return cls(device=device, priority=priority)
    current = torch.accelerator.current_stream(device)
    return cls(stream_id=0, device_index=current.device_index, device_type=current.device_type)


@known
def make_event(cls: Any) -> object:
    return cls(enable_timing=True)


@known
def make_lock() -> object:
    return threading.Lock()


@known
def make_reentrant_lock() -> object:
    return threading.RLock()


@known
def set_logger(logger: logging.Logger, state: dict[str, Any]) -> None:
    vars(logger).update(state)
    logger.setLevel(state["level"])  # setLevel also clears the cache of enabled levels


# --- functions with state beyond their code -------------------------------------------------------


def _reduce_function(capture: Capture, function: types.FunctionType) -> Any:
    made_of = vars(function).get("_torchdynamo_orig_callable")
    if made_of is None or _should_pickle_by_reference(function):
        return capture.as_cloudpickle_does(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    contexts = [cell.cell_contents for name, cell in cells if name == "self"]
    if not contexts:
        return capture.as_cloudpickle_does(function)
    return make_compiled, (contexts[0], made_of)


def _reduce_cache(capture: Capture, cache: Any) -> Any:
    if _lookup_module_and_qualname(cache) is not None:
        return NotImplemented
    return make_cache, (cache.__wrapped__, cache.cache_parameters())


_VIEWS: dict[type, Any] = {
    type({}.keys()): dict.keys,
    type({}.values()): dict.values,
    type({}.items()): dict.items,
    types.MappingProxyType: types.MappingProxyType,
}


def _reduce_view(capture: Capture, view: Any) -> Any:
    """Reduce a view of a dict, so that it still shows this dict and not a copy."""
    return _VIEWS[type(view)], (gc.get_referents(view)[0],)


@known
def make_compiled(context: Any, function: Any) -> object:
    return context(function)


@known
def make_cache(function: Any, how: dict[str, Any]) -> object:
    return functools.lru_cache(**how)(function)


def with_counted_steps(optimizer: Any) -> Any:
    """Wrap an optimizer's `step` as torch's schedulers do, so that they can warn of calls in the
    wrong order.
    """
    held = weakref.ref(optimizer)
    plain = type(optimizer).step

    @functools.wraps(plain)
    def step(*args: Any, **options: Any) -> Any:
        optimizer: Any = held()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
    return optimizer


# --- weak references ------------------------------------------------------------------------------


def _reduce_reference(capture: Capture, reference: Any) -> Any:
    target = reference()
    if target is None:
        return dead_reference, ()
    if type(reference) not in (weakref.ref, weakref.WeakMethod):
        raise Refused(reference, "a weak reference of a kind of its own", "Keep the object itself.")
    held = target.__self__ if isinstance(reference, weakref.WeakMethod) else target
    if not _kept(capture, reference, held):
        return dead_reference, ()
    callback = () if reference.__callback__ is None else (reference.__callback__,)
    if isinstance(reference, weakref.WeakMethod):
        return weakref.WeakMethod, (target,)
    return weakref.ref, (target, *callback)


def _reduce_proxy(capture: Capture, proxy: Any) -> Any:
    target = proxy.__repr__.__self__
    return (weakref.proxy, (target,)) if _kept(capture, proxy, target) else (dead_reference, ())


def _reduce_weak_dict(capture: Capture, table: Any) -> Any:
    items = list(table.items())
    number = 0 if isinstance(table, weakref.WeakKeyDictionary) else 1
    kept = [_kept(capture, table, item[number]) for item in items]
    return type(table), (), None, None, iter(items if all(kept) else [])


def _reduce_weak_set(capture: Capture, table: weakref.WeakSet[Any]) -> Any:
    parts = list(table)
    kept = [_kept(capture, table, part) for part in parts]
    return type(table), (), parts if all(kept) else [], None, None, fill_weak_set


def _kept(capture: Capture, reference: object, target: object) -> bool:
    """Record a weak reference and its target.

    True if the reference itself is to be pickled: only in the second round of pickling, when its
    target has been pickled (`capture.capture`).
    """
    capture.weak.append((reference, target))
    return capture.weakly


class _Nothing:
    """An object that is freed as soon as it is made: the target of a dead weak reference."""


@known
def dead_reference() -> object:
    return weakref.ref(_Nothing())


@known
def fill_weak_set(table: weakref.WeakSet[Any], parts: list[Any]) -> None:
    table.update(parts)


REDUCERS: tuple[tuple[Any, Any], ...] = (
    (dist.ProcessGroup, _reduce_group),
    ((torch.Stream, torch.cuda.Stream), _reduce_stream),
    ((torch.Event, torch.cuda.Event), _reduce_event),
    (RemovableHandle, _reduce_handle),
    (_thread.LockType, _reduce_lock),
    (_thread.RLock, _reduce_reentrant_lock),
    (threading.Thread, _reduce_thread),
    (logging.Logger, _reduce_logger),
    (types.FunctionType, _reduce_function),
    (tuple(_VIEWS), _reduce_view),
    (functools._lru_cache_wrapper, _reduce_cache),
    (weakref.ref, _reduce_reference),
    ((weakref.ProxyType, weakref.CallableProxyType), _reduce_proxy),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _reduce_weak_dict),
    (weakref.WeakSet, _reduce_weak_set),
)
