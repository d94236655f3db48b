"""Restores a job from its image: makes equal objects around storages that are already filled.

`capture` says what an image holds. The functions that an image calls while it is restored are here
and beside the code that captured such objects (`tensors`, `data_loader`, `job_files`,
`process_handles`).
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from typing import Any

import numpy
import torch
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

# These modules are imported so that images find the functions of each.
from workers.capture import data_loader, job_files, process_handles, tensors  # noqa: F401
from workers.capture.rebuild import Loading, Surroundings, known, rebuilding
from workers.hardware.accelerator import Accelerator, default_generators

TRAILER_BYTES = 8  # the last bytes of a graph, which say where the header begins


def rebuilt(
    graph: memoryview, storages: list[torch.UntypedStorage], *, around: Surroundings
) -> dict[str, Any]:
    """Restore what was captured around `storages`: the job under "job", and the random states.

    The working folder's files are written first. Call it only inside the tenant's sandbox:
    unpickling runs code.
    """
    begins = int.from_bytes(graph[-TRAILER_BYTES:], "big")
    header = pickle.loads(graph[begins:])
    RemovableHandle.next_id = max(RemovableHandle.next_id, header["hooks"])
    for number in header["shared"]:
        storages[number].share_memory_()
    if header["files"] is not None:
        job_files.restore(header["files"], storages, around)
    process_handles.restore_groups(header["groups"])
    lent = [around.lent.storage(name) for name in reversed(header.get("lent", ()))]
    with rebuilding(Loading([*storages, *lent], named_here(around), around)):
        world: dict[str, Any] = pickle.loads(graph[:begins])
    return world


def return_to(world: dict[str, Any], accelerator: Accelerator) -> None:
    """Give this process the random states and the defaults of `world`."""
    torch.set_default_dtype(world["default_dtype"])
    if str(torch.get_default_device()) != world["default_device"]:
        torch.set_default_device(world["default_device"])
    torch.set_grad_enabled(world["gradients"])
    numpy.random.set_state(world["numpy"])
    random.setstate(world["random"])
    accelerator.set_random_state(world["accelerator"])
    torch.set_rng_state(world["torch"])


def named_here(around: Surroundings) -> dict[str, object]:
    """Return the objects that images refer to by name: surroundings and random generators."""
    return {
        **around.named,
        "torch.default_generator": torch.default_generator,
        "random": random._inst,
        "numpy.random": numpy.random.mtrand._rand,
        **default_generators(),
    }


@known
def make_module(cls: Any, empty: tuple[str, ...]) -> object:
    module = object.__new__(cls)  # FSDP's classes have a __new__ that would build a new module
    vars(module).update((name, OrderedDict()) for name in empty)
    return module


@known
def make_parametrized(cls: Any, names: tuple[str, ...]) -> object:
    """Make a module whose class has, as torch's parametrizations need it, a property for each
    computed parameter.
    """
    module = object.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


@known
def set_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)


@known
def make_optimizer(cls: Any, scheduled: bool) -> object:
    optimizer = cls.__new__(cls)
    return process_handles.with_counted_steps(optimizer) if scheduled else optimizer


@known
def make_generator(device: str, state: torch.Tensor) -> torch.Generator:
    return torch.Generator(device).set_state(state)
