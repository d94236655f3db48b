"""Reads and writes the headers of tensor files: safetensors and npy.

Nothing is unpickled or run, and every value of a header is checked.  Invariants of a file that was
read: every tensor lies inside it, no two overlap, together they fill it to its last byte, and each
has a type that torch knows.
"""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar

from app.core.model.checkpoints.manifest import DTYPES
from app.core.model.storable_text import is_storable

JSON = dict[str, Any]

SAFETENSORS, NPY = "safetensors", "npy"
FORMATS = (SAFETENSORS, NPY)
HEAD_BYTES = 4 * 2**20  # a header must end within this many bytes of the file
LISTED = 100  # most tensors listed in a summary

#: torch's dtype -> its name in safetensors; safetensors has no name for other dtypes.
SAID = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_MEANT = {said: dtype for dtype, said in SAID.items()}
_NUMPY = {
    "|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16", "<u4": "uint32",
    "<i4": "int32", "<u8": "uint64", "<i8": "int64", "<f2": "float16", "<f4": "float32",
    "<f8": "float64", "<c8": "complex64", "<c16": "complex128",
}  # fmt: skip
_MAGIC = b"\x93NUMPY"
_LONGEST_NAME = 1024
_MOST_DIMENSIONS = 64


class BadTensorFile(Exception):
    """Raised for a file that is neither safetensors nor npy, or is not complete; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """Describes a tensor of the file; `dtype` is torch's name; the data begins at byte `offset`.

    The last index varies fastest; with `reversed`, the first one does.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    reversed: bool = False

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    format: str  # one of FORMATS
    size_bytes: int
    tensors: tuple[FileTensor, ...]

    def summary(self) -> JSON:
        """Return what is shown of the file without its data."""
        listed = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for tensor in self.tensors[:LISTED]
        ]
        return {"format": self.format, "tensors": listed, "tensor_count": len(self.tensors)}


# --- read ---------------------------------------------------------------------------------------


def read(head: bytes, size_bytes: int) -> TensorFile:
    """Read a header; raises BadTensorFile.

    `head` is the beginning of a file of `size_bytes`: the whole file, or at least HEAD_BYTES.
    """
    format = NPY if head.startswith(_MAGIC) else SAFETENSORS
    tensors, end = _npy(head) if format == NPY else _safe(head)
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != end:
            raise BadTensorFile(f"{tensor.name!r:.200} begins at {tensor.offset}, not at {end}")
        end += tensor.size
    if end != size_bytes:
        raise BadTensorFile(f"its header speaks of {end} bytes, and it has {size_bytes}")
    return TensorFile(format=format, size_bytes=size_bytes, tensors=tuple(tensors))


_Found = tuple[list[FileTensor], int]  # the tensors, and where the first one begins


def _safe(head: bytes) -> _Found:
    if len(head) < 8:
        raise BadTensorFile("neither safetensors nor npy: it is too short")
    (length,) = struct.unpack_from("<Q", head)
    begin = 8 + length
    if begin > HEAD_BYTES:
        told = f"a safetensors header of {length} bytes; {HEAD_BYTES - 8} are the most"
        raise BadTensorFile(f"neither npy nor one that is taken: {told}")
    if begin > len(head):
        raise BadTensorFile(f"its header has {length} bytes, and it ends before")
    header = _header(head[8:begin])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadTensorFile("__metadata__ must be an object of strings")
    return [_tensor(name, said, begin) for name, said in header.items()], begin


def _header(body: bytes) -> JSON:
    try:
        header = json.loads(body.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise BadTensorFile(f"its header is not JSON: {error}"[:300]) from error
    if not isinstance(header, dict):
        raise BadTensorFile("its header must be a JSON object")
    return header


def _once(pairs: list[tuple[str, Any]]) -> JSON:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _tensor(name: str, said: Any, begin: int) -> FileTensor:
    if len(name) > _LONGEST_NAME or not is_storable(name):
        raise BadTensorFile(
            f"{name!r:.200} cannot be a name: too long, a NUL, half a surrogate pair"
        )
    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadTensorFile(f"{name!r:.200} has not exactly dtype, shape and data_offsets")
    dtype = _MEANT.get(str(said["dtype"]))
    if dtype is None:
        raise BadTensorFile(f"{name!r:.200} has the type {said['dtype']!r:.50}, which is not known")
    shape, offsets = _sizes(said["shape"]), _sizes(said["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2:
        raise BadTensorFile(f"{name!r:.200}: its shape and offsets must be lists of sizes")
    tensor = FileTensor(name=name, dtype=dtype, shape=shape, offset=begin + offsets[0])
    if offsets[1] - offsets[0] != tensor.size:
        told = f"{tensor.size} bytes by its type and shape, {offsets[1] - offsets[0]} by its place"
        raise BadTensorFile(f"{name!r:.200} has {told}")
    return tensor


def _sizes(said: Any) -> tuple[int, ...] | None:
    if not isinstance(said, list | tuple) or len(said) > _MOST_DIMENSIONS:
        return None
    if not all(type(size) is int and 0 <= size < 2**60 for size in said):
        return None
    return tuple(said)


def _npy(head: bytes) -> _Found:
    version = head[6:8]
    wide = version in (b"\x02\x00", b"\x03\x00")
    if not wide and version != b"\x01\x00":
        raise BadTensorFile(f"an npy of version {version!r}, which is not known")
    start = 12 if wide else 10
    if len(head) < start:
        raise BadTensorFile("an npy that ends in its header")
    (length,) = struct.unpack_from("<I" if wide else "<H", head, 8)
    begin = start + length
    if begin > min(len(head), HEAD_BYTES):
        raise BadTensorFile(f"an npy whose header of {length} bytes is not whole, or too long")
    header = _literal(head[start:begin])
    if header.keys() != {"descr", "fortran_order", "shape"}:
        raise BadTensorFile("an npy whose header has not exactly descr, fortran_order and shape")
    descr, shape = header["descr"], _sizes(header["shape"])
    dtype = _NUMPY.get(descr) if isinstance(descr, str) else None
    if dtype is None:
        told = "plain numbers, little endian, are taken: no objects, texts or records"
        raise BadTensorFile(f"an npy of type {descr!r:.80}; {told}")
    if shape is None or not isinstance(header["fortran_order"], bool):
        raise BadTensorFile("the shape of an npy must be a tuple of sizes")
    reversed_ = header["fortran_order"]
    return [FileTensor(name="", dtype=dtype, shape=shape, offset=begin, reversed=reversed_)], begin


def _literal(body: bytes) -> JSON:
    """Parse the header of an npy file: a Python literal, which is parsed but never run."""
    if len(body) > 2**16:
        raise BadTensorFile(f"an npy with a header of {len(body)} bytes")
    try:
        found = ast.literal_eval(body.decode("utf-8").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise BadTensorFile(f"an npy whose header cannot be read: {error}"[:300]) from error
    if not isinstance(found, dict):
        raise BadTensorFile("the header of an npy must be a dictionary")
    return found


# --- write --------------------------------------------------------------------------------------


class Sayable(Protocol):
    """A tensor to be written; `size` is its bytes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def size(self) -> int: ...


S = TypeVar("S", bound=Sayable)


def written(tensors: Iterable[S], metadata: Mapping[str, str]) -> tuple[bytes, list[S]]:
    """Return the header of a safetensors file, and the tensors in the order of their data.

    As in the format's own writer, wider elements come first, so that all are aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype], tensor.name))
    told: JSON = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in ordered:
        end = at + tensor.size
        told[tensor.name] = {
            "dtype": SAID[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    body = json.dumps(told, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body, ordered
