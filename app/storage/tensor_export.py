"""Stream a checkpoint's tensors as one safetensors file, without running or unpickling anything.

The table of a manifest says where each tensor's elements lie in its storage.  A contiguous tensor
is sent chunk by chunk.  For any other tensor, the bytes between its first and its last element are
written to a temporary file, and the elements are gathered from there.  So memory use is limited to
a few chunks, however large the checkpoint is.

Safetensors cannot express all dtypes of torch (`STRANGE`); tensors of those are left out, and the
file's metadata names them.
"""

from __future__ import annotations

import mmap
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from app.core.model.checkpoints import tensor_file
from app.core.model.checkpoints.manifest import DTYPES, Chunk, Manifest, Tensor
from app.core.model.checkpoints.tensor_file import SAID
from app.storage.chunks import Chunks

STRANGE = frozenset(DTYPES) - SAID.keys()

_CHUNKS_HELD = 4
_BLOCK = 2**17  # elements
_PIECE_BYTES = 2**18  # approximate size of the pieces into which gathered elements are joined
_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Unsayable(Exception):
    """The checkpoint has no tensor `name`, or safetensors cannot express it."""

    def __init__(self, name: str, told: str) -> None:
        self.name = name
        super().__init__(f"{name}: {told}")


class Export:
    """A file of `size` bytes, which `pieces` yields; Unsayable is raised only for given `names`."""

    def __init__(
        self, manifest: Manifest, chunks: Chunks, *, names: Sequence[str] | None = None
    ) -> None:
        self.rank = manifest.ranks[0]
        tensors = {tensor.name: tensor for tensor in self.rank.tensors}
        if names is not None:
            _check(tensors, names)
            tensors = {name: tensors[name] for name in names}
        said = [tensor for tensor in tensors.values() if tensor.dtype in SAID]
        left_out = sorted(tensors.keys() - {tensor.name for tensor in said})
        about = _metadata(manifest, left_out)
        self.header, self.tensors = tensor_file.written(said, about)
        self._bytes = _Bytes(self.rank.chunks, chunks)

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor in self.tensors)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the file.  Raises app.storage.store.Damaged or OSError on the way if a chunk cannot
        be read.
        """
        yield self.header
        for tensor in self.tensors:
            if tensor.size:
                yield from _joined(self._elements(tensor))

    def _elements(self, tensor: Tensor) -> Iterator[bytes | memoryview]:
        width, part = DTYPES[tensor.dtype], tensor.storage + 1
        start = tensor.offset * width
        if _contiguous(tensor.shape, tensor.stride):
            yield from self._bytes.read(part, start, tensor.end)
            return
        with tempfile.TemporaryFile(prefix="roundhouse-") as file:
            for piece in self._bytes.read(part, start, tensor.end):
                file.write(piece)
            file.flush()
            lying = mmap.mmap(file.fileno(), tensor.end - start, prot=mmap.PROT_READ)
            yield from gathered(memoryview(lying), width, tensor.shape, tensor.stride)


def _check(tensors: dict[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        if name not in tensors:
            raise Unsayable(name, "the checkpoint has no tensor of this name")
        if tensors[name].dtype in STRANGE:
            raise Unsayable(name, f"safetensors does not support {tensors[name].dtype}")


def _metadata(manifest: Manifest, left_out: Sequence[str]) -> dict[str, str]:
    about = manifest.about
    return {
        "format": "pt",
        "roundhouse.task": about.task,
        "roundhouse.step": str(about.step),
        **({"roundhouse.left_out": ", ".join(left_out)} if left_out else {}),
    }


class _Bytes:
    """The bytes of an image, by part and offset; the last few chunks are cached."""

    def __init__(self, listed: Sequence[Chunk], chunks: Chunks) -> None:
        self.chunks = chunks
        self.lying: dict[int, list[tuple[int, int, Chunk, int]]] = {}
        for chunk in listed:
            at = 0
            for span in chunk.spans:
                where = (span.offset, span.offset + span.size, chunk, at)
                self.lying.setdefault(span.part, []).append(where)
                at += span.size
        for found in self.lying.values():
            found.sort(key=lambda where: where[0])
        self.held: OrderedDict[str, memoryview] = OrderedDict()

    def read(self, part: int, start: int, end: int) -> Iterator[memoryview]:
        """Yield the part's bytes from `start` to `end`, piece by piece."""
        for lies_from, lies_to, chunk, at in self.lying.get(part, ()):
            first, last = max(start, lies_from), min(end, lies_to)
            if first < last:
                shift = at - lies_from
                yield self._body(chunk)[first + shift : last + shift]

    def _body(self, chunk: Chunk) -> memoryview:
        if chunk.address not in self.held:
            self.held[chunk.address] = memoryview(self.chunks.get(chunk.address, chunk.size))
            if len(self.held) > _CHUNKS_HELD:
                self.held.popitem(last=False)
        return self.held[chunk.address]


# --- tensors that are not contiguous ------------------------------------------------------------


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return _run(shape, stride)[0] == 0


def _run(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """Return (d, n): the dimensions from d on are contiguous, with n elements."""
    dimension, elements = len(shape), 1
    while dimension and (shape[dimension - 1] == 1 or stride[dimension - 1] == elements):
        dimension -= 1
        elements *= shape[dimension]
    return dimension, elements


def gathered(
    lying: memoryview, width: int, shape: Sequence[int], stride: Sequence[int]
) -> Iterator[bytes | memoryview]:
    """Yield the elements, each `width` bytes wide, in the order of their indices.

    `lying` begins with the first element.  Slices of memory views handle the innermost dimension.
    """
    dimension, run = _run(shape, stride)
    if run > 1 or not dimension:
        for at in _starts(shape[:dimension], stride[:dimension]):
            for first, last in _blocks(run):
                yield lying[(at + first) * width : (at + last) * width]
        return
    words: Any = lying[: len(lying) // width * width]
    typed = words.cast(_FORMATS[width])
    length, step = shape[dimension - 1], stride[dimension - 1]
    for at in _starts(shape[: dimension - 1], stride[: dimension - 1]):
        for first, last in _blocks(length):
            if step:
                yield typed[at + first * step : at + (last - 1) * step + 1 : step].tobytes()
            else:
                yield typed[at : at + 1].tobytes() * (last - first)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """Split a row into ranges of limited length."""
    for first in range(0, length, _BLOCK):
        yield first, min(first + _BLOCK, length)


def _starts(shape: Sequence[int], stride: Sequence[int], at: int = 0) -> Iterator[int]:
    """Yield the offset of each row; a generator, because a list may not fit into memory."""
    if not shape:
        yield at
        return
    for n in range(shape[0]):
        yield from _starts(shape[1:], stride[1:], at + n * stride[0])


def _joined(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes, with small pieces joined."""
    some, size = list[bytes | memoryview](), 0
    for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            yield piece if len(some) == 1 else b"".join(some)
            some, size = [], 0
    if some:
        yield b"".join(some)
