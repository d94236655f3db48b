"""Pickle a tensor apart from its storage, and an array apart from the memory that it views.

Invariant: two objects that share memory before a restore share it after. A storage is identified by
its address, never by its content: equal bytes elsewhere are another storage.

Kinds: strided tensors and parameters, also of plain subclasses; sparse layouts; nested tensors;
subclasses that say what they are made of (`__tensor_flatten__`, so distributed tensors as well);
gradients, hooks and attributes of each. Other kinds are pickled as torch does it, and refused where
that would lose a gradient or a hook.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy
import torch

# attributes and slots as torch pickles them
from torch._utils import _get_obj_state, _set_obj_state
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from workers.capture import job_files
from workers.capture.graph_pickler import Capture
from workers.capture.paths import Refused
from workers.capture.rebuild import current, known

Array = numpy.ndarray[Any, Any]

REQUIRES_GRAD, CONJUGATED, NEGATED = 1, 2, 4
_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_default_dispatch = torch.Tensor.__torch_dispatch__
_stock_reduce: tuple[Any, ...] = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)

# --- to bytes ------------------------------------------------------------------------------------


def reduce_plain(capture: Capture, tensor: torch.Tensor) -> Any:
    """Reduce a tensor of torch's own two classes."""
    if tensor.layout is not torch.strided or tensor.is_nested or _is_odd(tensor):
        return _odd(capture, tensor)
    if tensor.grad_fn is not None:
        raise _with_graph(tensor)
    make = make_parameter if type(tensor) is torch.nn.Parameter else make_tensor
    if extras := _extras(tensor):
        return make, _row(capture, tensor), extras, None, None, set_extras
    return make, _row(capture, tensor)


def reduce_subclass(capture: Capture, tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return _subclass(capture, tensor)


def _subclass(capture: Capture, tensor: Any) -> Any:
    cls = type(tensor)
    if tensor.grad_fn is not None:
        raise _with_graph(tensor)
    extras = (tensor.grad, _get_obj_state(tensor), *_hooks(tensor))
    made: tuple[Any, ...]
    if isinstance(tensor, UninitializedTensorMixin):
        made = (cls, tensor.requires_grad, str(tensor.device), tensor.dtype)
        return make_uninitialized, made, extras, None, None, set_subclass_extras
    if cls.__reduce_ex__ not in _stock_reduce:
        return _as_torch_does(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        outer = (tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        made = (cls, inner, context, *outer)
        return make_wrapper, made, extras, None, None, set_subclass_extras
    plain = tensor.layout is torch.strided and not tensor.is_nested and not _is_odd(tensor)
    if not plain or cls.__torch_dispatch__ is not _default_dispatch:
        return _as_torch_does(tensor)
    return make_subclass, (cls, *_row(capture, tensor)), extras, None, None, set_subclass_extras


def _row(capture: Capture, tensor: torch.Tensor) -> tuple[Any, ...]:
    number = capture.number(tensor.untyped_storage())
    dtype, shape, stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
    offset = int(tensor.storage_offset())
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if dtype.is_complex and tensor.is_conj():
        flags |= CONJUGATED
    if tensor.is_neg():
        flags |= NEGATED
    if flags <= REQUIRES_GRAD:  # with other flags the bytes are not the values
        capture.rows[id(tensor)] = (number, dtype, shape, stride, offset)
    return number, dtype, offset, shape, stride, flags


def _extras(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return (gradient, attributes, hooks, hooks after accumulation), or None if all are empty."""
    extras = (tensor.grad, tensor.__dict__, *_hooks(tensor))
    return extras if extras[0] is not None or any(extras[1:]) else None


def _hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _with_graph(tensor: torch.Tensor) -> Refused:
    return Refused(
        tensor,
        "a tensor with a live autograd graph",
        "Keep tensor.detach() or tensor.item() instead.",
    )


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor.is_quantized or tensor.is_meta


def _odd(capture: Capture, tensor: Any) -> Any:
    """Reduce a tensor that is of torch's own classes but is not a strided view of one storage."""
    if tensor.grad_fn is not None:
        raise _with_graph(tensor)
    if parts := _parts(tensor):
        made = (type(tensor), *parts, tensor.requires_grad)
        return (
            make_of_parts,
            made,
            (_extras(tensor) or (None, {}, None, None)),
            None,
            None,
            set_extras,
        )
    return _as_torch_does(tensor)


def _parts(tensor: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the kind of construction and its arguments; None for other layouts."""
    size, layout = tuple(tensor.shape) if not tensor.is_nested else (), tensor.layout
    if tensor.is_nested and layout is torch.strided:
        shapes = (tensor._nested_tensor_size(), tensor._nested_tensor_strides())
        return "nested", (tensor.values(), *shapes, tensor._nested_tensor_storage_offsets())
    parts: tuple[Any, ...]
    if layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        return "coordinates", (*parts, size, tensor.is_coalesced())
    if layout in _COMPRESSED_ROWS:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return "compressed", (*parts, size, layout)
    if layout in _COMPRESSED_COLUMNS:
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return "compressed", (*parts, size, layout)
    return None


def _as_torch_does(tensor: torch.Tensor) -> Any:
    if tensor.grad is not None or any(_hooks(tensor)):
        raise Refused(
            tensor,
            f"a gradient or a hook of a {type(tensor).__name__}",
            "Call zero_grad(set_to_none=True) at the end of step; use a hook on the module.",
        )
    return NotImplemented


def reduce_storage(capture: Capture, storage: torch.UntypedStorage) -> Any:
    return block, (capture.number(storage),)


def reduce_typed_storage(capture: Capture, storage: torch.storage.TypedStorage) -> Any:
    return make_typed_storage, (storage._untyped_storage, storage.dtype)


def reduce_array(capture: Capture, array: Array) -> Any:
    if (root := job_files.mapped(array)) is not None:
        return job_files.reduce_mapped(capture, array, root)
    memory = _memory(array)
    if memory is None:
        return NotImplemented
    number, offset = capture.number(memory), _address(array) - memory.data_ptr()
    size = array.itemsize
    if _is_plain(array) and not offset % size:
        stride = tuple(step // size for step in array.strides)
        capture.rows[id(array)] = (number, array.dtype, array.shape, stride, offset // size)
    flags = array.flags.writeable
    return make_array, (number, array.dtype, array.shape, array.strides, offset, flags)


def _is_plain(array: Array) -> bool:
    """True if a torch tensor could describe the array's layout and dtype."""
    steps = all(step >= 0 and not step % array.itemsize for step in array.strides)
    return steps and array.dtype.isnative and array.dtype.kind in "biufc"


def _memory(array: Array) -> torch.UntypedStorage | None:
    """Return the storage that an array views; None for arrays that pickle well by themselves."""
    if array.dtype.hasobject or not array.nbytes or type(array) is not numpy.ndarray:
        return None
    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    owner: object = root.base
    if isinstance(owner, torch.Tensor):
        return owner.untyped_storage()
    if type(root) is not numpy.ndarray or not (root.flags.owndata or type(owner) is bytes):
        return None
    # works for any order of axes
    whole: Any = (ctypes.c_char * root.nbytes).from_address(_address(root))
    whole._root = root  # so the storage below keeps the array alive
    return torch.from_numpy(numpy.frombuffer(whole, numpy.uint8)).untyped_storage()


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


# --- and back -------------------------------------------------------------------------------------


@known
def block(number: int) -> torch.UntypedStorage:
    return current().storages[number]


@known
def make_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> object:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


@known
def make_tensor(
    number: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    flags: int,
) -> torch.Tensor:
    tensor = _strided(number, dtype, offset, shape, stride, flags)
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


@known
def make_parameter(
    number: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    flags: int,
) -> torch.nn.Parameter:
    tensor = _strided(number, dtype, offset, shape, stride, flags)
    return torch.nn.Parameter(tensor, bool(flags & REQUIRES_GRAD))


@known
def make_subclass(
    cls: Any,
    number: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    flags: int,
) -> torch.Tensor:
    tensor = _strided(number, dtype, offset, shape, stride, flags)
    made: torch.Tensor = torch.Tensor._make_subclass(cls, tensor, bool(flags & REQUIRES_GRAD))
    return made


def _strided(
    number: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    flags: int,
) -> torch.Tensor:
    storage = current().storages[number]
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, shape, stride)
    tensor = tensor.conj() if flags & CONJUGATED else tensor
    return torch._neg_view(tensor) if flags & NEGATED else tensor


_OF_PARTS: dict[str, Callable[..., torch.Tensor]] = {
    "nested": torch._nested_view_from_buffer,
    "coordinates": lambda indices, values, size, is_coalesced: torch.sparse_coo_tensor(
        indices, values, size, is_coalesced=is_coalesced, check_invariants=False
    ),
    "compressed": lambda compressed, plain, values, size, layout: torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, check_invariants=False
    ),
}


@known
def make_of_parts(
    cls: type, kind: str, parts: tuple[Any, ...], requires_grad: bool
) -> torch.Tensor:
    tensor = _OF_PARTS[kind](*parts)
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


@known
def make_uninitialized(
    cls: Any, requires_grad: bool, device: str, dtype: torch.dtype
) -> torch.Tensor:
    made: torch.Tensor = cls(requires_grad, device=device, dtype=dtype)
    return made


@known
def make_wrapper(
    cls: Any,
    inner: dict[str, torch.Tensor],
    context: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    made: torch.Tensor = cls.__tensor_unflatten__(inner, context, shape, stride)
    return made if made.requires_grad == requires_grad else made.requires_grad_(requires_grad)


@known
def set_extras(tensor: torch.Tensor, extras: tuple[Any, dict[str, Any], Any, Any]) -> None:
    """Set a tensor's gradient, attributes and hooks.

    The unpickler calls this after it knows the tensor, so that they may refer to the tensor itself.
    """
    tensor.grad, attributes, hooks, after = extras
    tensor.__dict__.update(attributes)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


@known
def set_subclass_extras(tensor: torch.Tensor, extras: tuple[Any, Any, Any, Any]) -> None:
    grad, state, hooks, after = extras
    with torch._C.DisableTorchFunctionSubclass():
        set_extras(tensor, (grad, {}, hooks, after))
        _set_obj_state(tensor, state)


@known
def make_array(
    number: int,
    dtype: numpy.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    writeable: bool,
) -> Array:
    storage = current().storages[number]
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    array: Array = numpy.ndarray(shape, dtype, flat.numpy(), offset, strides)
    array.flags.writeable = writeable
    return array
