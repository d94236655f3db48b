"""Files of tensors in a tenant's process: the inputs of a job or a function, and what it publishes.

A value is a dict of tensors by name, or a single tensor without a name. Inputs are in host memory
that belongs to the process. They are mapped copy-on-write, or copied as a whole. Nothing that
tenant code does to them reaches the file.

Tensors mapped from a datablock are `Lent`: an image of a job refers to them by name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import torch

from app.core.model.checkpoints import tensor_file
from app.core.model.checkpoints.tensor_file import HEAD_BYTES, SAID, FileTensor
from workers.capture.rebuild import Name

ALONE = "tensor"  # name in the file of a tensor that is published without a name
_PIECE_BYTES = 16 * 2**20

Value = torch.Tensor | dict[str, torch.Tensor]


class Unpublishable(Exception):
    """Raised for a value to publish that is no tensor or dict of tensors.

    The message says where and what to do.
    """


# --- in -------------------------------------------------------------------------------------------


def given(fd: int, *, mapped: bool) -> dict[str, torch.Tensor]:
    """Return the tensors in the file by name; raises BadTensorFile.

    Mapped tensors cost nothing until they are read; copied tensors are ordinary memory.
    """
    size = os.fstat(fd).st_size
    found = tensor_file.read(os.pread(fd, HEAD_BYTES, 0), size)
    whole = mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if mapped else None
    return {tensor.name: _tensor(tensor, fd, whole) for tensor in found.tensors}


def value(tensors: dict[str, torch.Tensor]) -> Value:
    """Return the tensors as tenant code gets them: a single tensor, or a dict by name."""
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


class Lent:
    """Remembers the tensors mapped from datablocks.

    An image refers to such a tensor by name, unless the tensor was ever written to.
    """

    def __init__(self) -> None:
        self._storages: dict[Name, torch.UntypedStorage] = {}
        self._names: dict[tuple[int, int], Name] = {}

    def add(self, block: str, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            self._storages[block, name] = storage
            if storage.nbytes():
                self._names[storage.data_ptr(), storage.nbytes()] = (block, name)

    def name_of(self, storage: torch.UntypedStorage) -> Name | None:
        place = storage.data_ptr(), storage.nbytes()
        name = self._names.get(place)
        return name if name is not None and _is_as_it_was_mapped(*place) else None

    def storage(self, name: Name) -> torch.UntypedStorage:
        try:
            return self._storages[name]
        except KeyError:
            told = f"the image refers to {name[1]!r} of {name[0]}, which is not among the inputs"
            raise LookupError(told) from None


def _is_as_it_was_mapped(address: int, size: int) -> bool:
    """True if every page still shows the file.

    A page that was ever written to is private memory of this process.
    """
    first, last = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            body = os.pread(file.fileno(), (last - first + 1) * 8, first * 8)
    except OSError:  # a sandbox without /proc: there is no way to tell
        return False
    pages = numpy.frombuffer(body, numpy.uint64)
    if len(pages) != last - first + 1:
        return False
    present, swapped, of_file = (pages >> numpy.uint64(bit) & numpy.uint64(1) for bit in _PAGE_BITS)
    return not (swapped | (present & (of_file ^ numpy.uint64(1)))).any()


_PAGE_BITS = (63, 62, 61)  # see proc(5): present, swapped, of a file or shared


def _tensor(tensor: FileTensor, fd: int, whole: mmap.mmap | None) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    if whole is not None and tensor.size and tensor.offset % dtype.itemsize == 0:
        count = prod(tensor.shape)
        flat = torch.frombuffer(whole, dtype=dtype, count=count, offset=tensor.offset)
    else:
        flat = torch.empty(prod(tensor.shape), dtype=dtype, device="cpu")
        _fill(flat, fd, tensor.offset)
    if tensor.reversed:
        return flat.reshape(tensor.shape[::-1]).permute(*reversed(range(len(tensor.shape))))
    return flat.reshape(tensor.shape)


def _fill(flat: torch.Tensor, fd: int, offset: int) -> None:
    body = _bytes(flat)
    at = 0
    while at < len(body):
        read = os.preadv(fd, [body[at : at + _PIECE_BYTES]], offset + at)
        if not read:
            raise OSError(f"an input is {len(body) - at} bytes too short")
        at += read


# --- out ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Out:
    name: str
    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def size(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize


class Published:
    """A value as the pieces of a safetensors file; raises Unpublishable."""

    def __init__(self, value: object, path: str) -> None:
        parts = value if isinstance(value, dict) else {ALONE: value}
        outs = [_out(name, part, path, value) for name, part in parts.items()]
        self.head, self.outs = tensor_file.written(outs, {"format": "pt"})

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(out.size for out in self.outs)

    @property
    def head_bytes(self) -> int:
        return len(self.head)

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.head)
        for out in self.outs:
            yield _bytes(out.tensor)


def _out(name: Any, part: Any, path: str, value: object) -> _Out:
    where = f"{path}[{name!r:.80}]" if part is not value else path
    if not isinstance(name, str):
        raise Unpublishable(
            f"{where}: the name of a tensor must be a text; got a {type(name).__name__}"
        )
    tensor = _from_numpy(part, where) if isinstance(part, numpy.ndarray) else part
    if not isinstance(tensor, torch.Tensor):
        told = "a datablock is a tensor, an array, or a dict of them by name"
        raise Unpublishable(f"{where} is a {type(part).__name__}: {told}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise Unpublishable(f"{where} is not a plain dense tensor: publish its parts")
    out = _Out(name, tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous())
    if out.dtype not in SAID:
        raise Unpublishable(
            f"{where}: safetensors does not support {out.dtype}; convert the tensor"
        )
    return out


def _from_numpy(array: Any, where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(numpy.array(array))
    except TypeError as error:
        raise Unpublishable(f"{where}: {error}") from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor without a copy; the view keeps the tensor alive."""
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(bytearray())
    array: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    array._tensor = tensor
    return memoryview(array).cast("B")
