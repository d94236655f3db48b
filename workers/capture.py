"""A job's whole object graph as bytes beside its storages, and back, without code by its tenant.

`capture` is called at a safe point: it pickles the graph and names the storages that the graph
refers to; their bytes stay where they are (`context_switch` moves them).  `rebuilt` makes the same
objects around storages that lie ready.

What always holds:
* two objects that share memory before share it after: tensors, views, tied weights, gradients, an
  optimizer's binding to its parameters, numpy arrays that look into tensors;
* the state of the random number generators of torch, numpy and Python belongs to the graph;
* what cannot be captured (a generator, a lock, a socket, a live autograd graph, ...) is refused
  with its path, and nothing is captured half.

State outside the job's object (module globals, class attributes) is not captured.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import torch

from workers.accelerator import Accelerator
from workers.paths import find

#: The module under which an image names the functions below: images outlive our file names, and a
#: tenant may have a module `workers` of its own.
FORMAT = "_roundhouse_image_1"


class Uncapturable(Exception):
    """`path` is where the thing is, like "job.data._it"; `what` is its type."""

    def __init__(self, path: str, what: str, advice: str) -> None:
        self.path, self.what, self.advice = path, what, advice
        super().__init__(f"{path}: {what} cannot be captured. {advice}")


class Refused(Exception):
    """Raised while pickling, where the path is not known yet."""

    def __init__(self, obj: object, what: str, advice: str) -> None:
        self.obj, self.what, self.advice = obj, what, advice
        super().__init__(what)


class Surroundings:
    """What a job may refer to that is not its own: `named` objects, and its code folder.

    An image refers to them by name, and a restored job finds those of its new process.
    """

    def __init__(self, *, code: Path | None = None, scratch: Path | None = None, **named: object):
        self.code, self.scratch = code, scratch
        self.named = {
            "stdin": sys.stdin,
            "stdout": sys.stdout,
            "stderr": sys.stderr,
            **named,
        }
        self.names = {id(obj): name for name, obj in self.named.items()}


# --- to bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """`graph` is the pickled object graph; it refers to `storages` by number."""

    graph: memoryview
    storages: list[torch.UntypedStorage]


def capture(
    job: object, *, around: Surroundings, accelerator: Accelerator, root: str = "job"
) -> Captured:
    """The graph of `job` and the world's random state; raises Uncapturable."""
    out = io.BytesIO()
    pickler = Capture(out, around)
    world = {
        "job": job,
        "torch": torch.get_rng_state(),
        "accelerator": accelerator.random_state(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "default_dtype": torch.get_default_dtype(),
    }
    try:
        pickler.dump(world)
        pickler.must_not_overlap()
    except Refused as refused:
        path = find(job, refused.obj, root=root)
        raise Uncapturable(path, refused.what, refused.advice) from None
    except Exception as error:
        # Whatever a tenant's __reduce__ or __getstate__ may raise.
        what = type(pickler.last).__name__
        path = find(job, pickler.last, root=root)
        raise Uncapturable(path, what, f"{_advice(what)} ({error})") from error
    return Captured(graph=out.getbuffer(), storages=pickler.storages)


class Capture(cloudpickle.Pickler):
    """Pickles a graph but leaves the bytes of storages out; they are in `storages`, by number."""

    def __init__(self, out: io.BytesIO, around: Surroundings) -> None:
        super().__init__(out, protocol=5)
        self.around = around
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.storages: list[torch.UntypedStorage] = []
        self.last: object = None

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        if (name := self.around.names.get(id(obj))) is not None:
            return named, (name,)
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        for kind, reduce in _REDUCERS:
            if isinstance(obj, kind):
                return reduce(self, obj)
        return super().reducer_override(obj)

    def must_not_overlap(self) -> None:
        """Two storages over the same memory would be torn apart by the restore."""
        host = [s for s in self.storages if s.device.type == "cpu" and s.nbytes()]
        host.sort(key=lambda storage: storage.data_ptr())
        for before, after in itertools.pairwise(host):
            if before.data_ptr() + before.nbytes() > after.data_ptr():
                raise Refused(
                    after,
                    "memory that a tensor and a part of a numpy array share",
                    "Make the tensor from the whole array, or copy the part.",
                )

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        return block, (self._number(storage),)

    def _number(self, storage: torch.UntypedStorage) -> int:
        size = storage.nbytes()
        # Identity decides what is shared; equal bytes elsewhere are not the same storage.
        key = (str(storage.device), storage.data_ptr(), size) if size else (storage._cdata,)
        if key not in self.numbers:
            self.numbers[key] = len(self.storages)
            self.storages.append(storage)
        return self.numbers[key]

    def _typed_storage(self, storage: torch.storage.TypedStorage) -> Any:
        return make_typed_storage, (storage._untyped_storage, storage.dtype)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        _must_be_at_rest(tensor)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout is not torch.strided or tensor.device.type == "meta":
            if tensor.grad is not None:
                raise Refused(
                    tensor,
                    f"a gradient of a {type(tensor).__name__}",
                    "Call zero_grad(set_to_none=True) at the end of step.",
                )
            return super().reducer_override(tensor)
        arguments = (
            type(tensor),
            tensor.untyped_storage(),
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return make_tensor, arguments, (tensor.grad, dict(tensor.__dict__)), None, None, set_extras

    def _generator(self, generator: torch.Generator) -> Any:
        return make_generator, (str(generator.device), generator.get_state())

    def _array(self, array: numpy.ndarray[Any, Any]) -> Any:
        memory = _memory(array)
        if type(array) is not numpy.ndarray or memory is None:
            return super().reducer_override(array)
        offset = _address(array) - memory.data_ptr()
        arguments = (memory, array.dtype, array.shape, array.strides, offset, array.flags.writeable)
        return make_array, arguments

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        if type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
            return super().reducer_override(optimizer)
        # The stock state leaves out hooks and whatever else was put on the instance.  A scheduler
        # wraps `step` only to warn about the order of the very first calls.
        state = dict(vars(optimizer))
        if hasattr(state.get("step"), "_wrapped_by_lr_sched"):
            del state["step"]
        return make_bare, (type(optimizer),), state

    def _file(self, file: Any) -> Any:
        place, name = self._place(file)
        text = isinstance(file, io.TextIOBase)
        try:
            position = file.tell()
        except (OSError, ValueError) as error:
            raise Refused(file, "an open file", f"Its position cannot be told: {error}.") from error
        return open_again, (place, name, text and (file.encoding, file.errors), position)

    def _place(self, file: Any) -> tuple[str, str]:
        if file.closed:
            raise Refused(file, "a closed file", "Set the attribute to None instead.")
        bytes_file = file.buffer if isinstance(file, io.TextIOWrapper) else file
        if not isinstance(getattr(bytes_file, "raw", bytes_file), io.FileIO):
            advice = "Open it within step, or keep what was read in memory."
            raise Refused(file, "an open file that is not a plain one", advice)
        if file.writable() or not isinstance(file.name, str):
            advice = "Open it where it is written, and close it before step returns."
            raise Refused(file, "a file open for writing", advice)
        path = Path(file.name).absolute()
        if self.around.scratch and path.is_relative_to(self.around.scratch):
            advice = "The scratch folder does not travel with a job: keep what was read in memory."
            raise Refused(file, "a file open in the scratch folder", advice)
        if self.around.code and path.is_relative_to(self.around.code):
            return "code", str(path.relative_to(self.around.code))
        return "host", str(path)


_REDUCERS: tuple[tuple[Any, Callable[[Capture, Any], Any]], ...] = (
    (torch.UntypedStorage, Capture._storage),
    (torch.storage.TypedStorage, Capture._typed_storage),
    (numpy.ndarray, Capture._array),
    (torch.Generator, Capture._generator),
    (torch.optim.Optimizer, Capture._optimizer),
    ((io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom), Capture._file),
    (io.FileIO, Capture._file),
)


def _must_be_at_rest(tensor: torch.Tensor) -> None:
    if not tensor.is_leaf:
        raise Refused(
            tensor,
            "a tensor with a live autograd graph",
            "Keep tensor.detach() or tensor.item() instead.",
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise Refused(
            tensor, "a tensor with a gradient hook", "Use a hook on the module or the optimizer."
        )


def _memory(array: numpy.ndarray[Any, Any]) -> torch.UntypedStorage | None:
    """The storage that an array looks into; None for what pickles well by itself."""
    if array.dtype.hasobject or not array.nbytes:
        return None
    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    if isinstance(root.base, torch.Tensor):
        return root.base.untyped_storage()
    if root.base is not None or not root.flags.owndata or not root.flags.writeable:
        return None
    whole: Any = (ctypes.c_char * root.nbytes).from_address(_address(root))  # any order of axes
    whole._root = root  # and so the storage below keeps it alive
    return torch.from_numpy(numpy.frombuffer(whole, numpy.uint8)).untyped_storage()


def _address(array: numpy.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


_ADVICE = {
    "generator": "Write it as a class with __next__ that keeps its own position.",
    "coroutine": "Await it before step returns.",
    "lock": "Make the lock where it is used; a job runs in one thread.",
    "RLock": "Make the lock where it is used; a job runs in one thread.",
    "socket": "Open and close it within step.",
    "weakref": "Keep the object itself.",
    "ReferenceType": "Keep the object itself.",
    "_SingleProcessDataLoaderIter": "Draw batches by index, or use torchdata's StatefulDataLoader.",
    "_MultiProcessingDataLoaderIter": "Draw batches by index, or use StatefulDataLoader.",
    "RecursiveScriptModule": "Keep the plain module; script it where it is used.",
}


def _advice(what: str) -> str:
    kept_out = "Keep it out of the job's attributes: make it where it is used."
    return _ADVICE.get(what, kept_out)


# --- and back -------------------------------------------------------------------------------------


class _Loading:
    """What the functions that an image calls may look up, while one is being restored."""

    def __init__(self, storages: list[torch.UntypedStorage], around: Surroundings) -> None:
        self.storages, self.around = storages, around


_loading: list[_Loading] = []


def rebuilt(
    graph: memoryview, storages: list[torch.UntypedStorage], *, around: Surroundings
) -> dict[str, Any]:
    """What was captured, around `storages`: the job under "job", and the random states.

    Only ever inside the tenant's walls: unpickling runs code.
    """
    _loading.append(_Loading(storages, around))
    try:
        world: dict[str, Any] = pickle.loads(graph)
    finally:
        _loading.pop()
    return world


def return_to(world: dict[str, Any], accelerator: Accelerator) -> None:
    """Give this process the random states and the defaults of `world`."""
    torch.set_default_dtype(world["default_dtype"])
    numpy.random.set_state(world["numpy"])
    random.setstate(world["random"])
    accelerator.set_random_state(world["accelerator"])
    torch.set_rng_state(world["torch"])


# Every image calls these by name: what they take and do may grow, never change.


def block(number: int) -> torch.UntypedStorage:
    return _loading[-1].storages[number]


def named(name: str) -> object:
    return _loading[-1].around.named[name]


def make_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> object:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def make_tensor(
    cls: type,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    conj: bool,
    neg: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, shape, stride)
    tensor = tensor.conj() if conj else tensor
    tensor = torch._neg_view(tensor) if neg else tensor
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def set_extras(tensor: torch.Tensor, extras: tuple[torch.Tensor | None, dict[str, Any]]) -> None:
    """Runs after the tensor is known to the unpickler, so that cycles are safe."""
    tensor.grad, attributes = extras
    tensor.__dict__.update(attributes)


def make_generator(device: str, state: torch.Tensor) -> torch.Generator:
    return torch.Generator(device).set_state(state)


def make_array(
    storage: torch.UntypedStorage,
    dtype: numpy.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    writeable: bool,
) -> numpy.ndarray[Any, Any]:
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    array: numpy.ndarray[Any, Any] = numpy.ndarray(shape, dtype, flat.numpy(), offset, strides)
    array.flags.writeable = writeable
    return array


def make_bare(cls: Any) -> object:
    return cls.__new__(cls)


def open_again(
    place: str, name: str, text: tuple[str, str] | bool, position: int
) -> io.TextIOBase | io.BufferedIOBase:
    around = _loading[-1].around
    path = around.code / name if place == "code" and around.code else Path(name)
    encoding, errors = text if isinstance(text, tuple) else (None, None)
    file: Any = path.open("r" if text else "rb", encoding=encoding, errors=errors)
    file.seek(position)
    return file  # type: ignore[no-any-return]


def _known_as(format: str, functions: Iterable[Callable[..., Any]]) -> None:
    sys.modules[format] = sys.modules[__name__]
    for function in functions:
        function.__module__ = format


_known_as(
    FORMAT,
    (
        block,
        named,
        make_typed_storage,
        make_tensor,
        set_extras,
        make_generator,
        make_array,
        make_bare,
        open_again,
    ),
)
