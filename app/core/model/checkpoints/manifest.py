"""Describes the contents of a checkpoint: its parts, the chunks with their bytes, and the names in
it.

An image has numbered parts: 0 is the pickled graph, n + 1 is storage n. `planned` cuts the parts
into chunks. A manifest records which bytes of which part lie in which chunk, so a reader needs no
plan.

Invariants: * The cut depends only on the sizes of the parts. So replicas of a job, and its
successive checkpoints, are cut alike, and equal bytes become equal chunks. * Every byte of every
part lies in exactly one chunk; otherwise the manifest is not valid. * `from_json(as_json(manifest))
== manifest`.

This module computes no bytes and no hashes. It trusts no input: a manifest was written on another
machine, and its table of tensors comes from a tenant's process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from app.core.model.protocol.wellformed import is_word

JSON = dict[str, Any]

FORMAT = "roundhouse manifest 1"

CHUNK_BYTES = 4 * 2**20  # bytes in each chunk of a large part
TAIL_BYTES = 2**20  # a last piece smaller than this joins the piece before
SMALL_BYTES = 2**16  # in bytes; parts below this size share chunks
# in bytes; limit of a shared chunk, which is written again if one of its parts changes
GROUP_BYTES = 2**18
LARGEST_CHUNK_BYTES = CHUNK_BYTES + TAIL_BYTES

#: Bytes of one element, by torch's name of the dtype.
DTYPES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}  # fmt: skip
_ADDRESS = re.compile(r"[0-9a-f]{64}")
_KEY_ID = re.compile(r"([0-9a-f]{32})?")
_LONGEST_NAME = 1024
_MOST_DIMENSIONS = 64
_LARGEST_TENSOR = 2**40
_GRAPH = 0


class BadManifest(Exception):
    """Raised for an invalid manifest; `path` is a place like "ranks[0].chunks[3].spans[1]"."""

    def __init__(self, path: str, told: str) -> None:
        self.path, self.told = path, told
        super().__init__(f"{path or 'the manifest'}: {told}")


# --- values -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """`size` bytes of part number `part`, from `offset` on."""

    part: int
    offset: int
    size: int


Cut = tuple[Span, ...]  # the bytes of the spans, in order, are one chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Names a content-addressed piece; `address` is the BLAKE3 hash of its spans' bytes, in order.

    In an encrypted image it is the keyed hash.
    """

    address: str
    spans: Cut

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Describes a graph or a storage; `device` is the kind of device on which the storage was."""

    size: int
    device: str = "cpu"
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The place of one tensor's elements; `stride` and `offset` count elements."""

    name: str
    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def elements(self) -> int:
        number = 1
        for length in self.shape:
            number *= length
        return number

    @property
    def size(self) -> int:
        """Bytes of all elements, each counted once."""
        return self.elements * DTYPES[self.dtype]

    @property
    def end(self) -> int:
        """The offset in the storage just after the last element, in bytes."""
        if not self.elements:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        last = self.offset + sum((length - 1) * stride for length, stride in steps)
        return (last + 1) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankImage:
    """Describes one rank's image. `parts[0]` is its graph, `parts[n + 1]` its storage number n.

    `tensors` are sorted by name.
    """

    parts: tuple[Part, ...]
    chunks: tuple[Chunk, ...]
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Names the image's owner, task and step; `fingerprint` is that of the process that staged it.

    `dump_damaged` says that a dump has damaged the processes of its command, this time or before.
    """

    tenant: str
    task: str
    epoch: int
    step: int
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    dump_damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describes a checkpoint: all its images.

    `image_key` is the id of the key with which all chunks are encrypted; "" if they are not.
    """

    about: About
    ranks: tuple[RankImage, ...]
    image_key: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the images themselves, however few of them were new in the store."""
        return sum(part.size for rank in self.ranks for part in rank.parts)

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(chunk.address for rank in self.ranks for chunk in rank.chunks)


# --- the plan -----------------------------------------------------------------------------------


def planned(sizes: Sequence[int]) -> list[Cut]:
    """Cut parts of these sizes into chunks; every byte lies in one chunk, in order.

    The graph (part 0) has its own chunks, because it changes with every step. Large parts are cut
    at fixed places. Small parts are gathered in order, also across large parts between them, so
    that a thousand tiny tensors do not become a thousand files.
    """
    cuts: list[Cut] = []
    group: list[Span] = []
    gathered = 0
    for part, size in enumerate(sizes):
        if part == _GRAPH or size >= SMALL_BYTES:
            cuts += [(span,) for span in _spans(part, size)]
        elif size:
            if gathered + size > GROUP_BYTES:
                cuts.append(tuple(group))
                group, gathered = [], 0
            group.append(Span(part, 0, size))
            gathered += size
    return [*cuts, tuple(group)] if group else cuts


def _spans(part: int, size: int) -> Iterator[Span]:
    at = 0
    while at < size:
        length = min(CHUNK_BYTES, size - at)
        if size - at - length < TAIL_BYTES:
            length = size - at
        yield Span(part, at, length)
        at += length


# --- to JSON ------------------------------------------------------------------------------------


def encode(manifest: Manifest) -> bytes:
    """Return the bytes that are signed and stored; equal manifests have equal bytes."""
    return json.dumps(as_json(manifest), sort_keys=True, separators=(",", ":")).encode()


def as_json(manifest: Manifest) -> JSON:
    about = manifest.about
    encrypted = {"image_key": manifest.image_key} if manifest.image_key else {}
    damaged = {"dump_damaged": True} if about.dump_damaged else {}
    return {
        **encrypted,
        **damaged,
        "format": FORMAT,
        "tenant": about.tenant,
        "task": about.task,
        "epoch": about.epoch,
        "step": about.step,
        "fingerprint": dict(about.fingerprint),
        "size_bytes": manifest.size_bytes,
        "ranks": [_rank_as_json(rank) for rank in manifest.ranks],
    }


def _rank_as_json(rank: RankImage) -> JSON:
    return {
        "parts": [[part.size, part.device, part.pinned] for part in rank.parts],
        "chunks": [
            [chunk.address, [[span.part, span.offset, span.size] for span in chunk.spans]]
            for chunk in rank.chunks
        ],
        "tensors": tensors_as_json(rank.tensors),
    }


def tensors_as_json(tensors: Sequence[Tensor]) -> JSON:
    return {t.name: [t.storage, t.dtype, list(t.shape), list(t.stride), t.offset] for t in tensors}


# --- from JSON ----------------------------------------------------------------------------------


def decode(body: bytes) -> Manifest:
    """Return the manifest from which `encode` made `body`; raises BadManifest."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadManifest("", f"it cannot be read: {error}") from error
    return from_json(parsed)


def from_json(body: Any) -> Manifest:
    """Return the manifest; raises BadManifest at the first fault."""
    fields = _object(body, "")
    if fields.get("format") != FORMAT:
        raise BadManifest("format", f"{fields.get('format')!r:.60}, not {FORMAT!r}")
    about = About(
        tenant=_text(fields.get("tenant"), "tenant"),
        task=_text(fields.get("task"), "task"),
        epoch=_count(fields.get("epoch"), "epoch"),
        step=_count(fields.get("step"), "step"),
        fingerprint=_object(fields.get("fingerprint"), "fingerprint"),
        dump_damaged=fields.get("dump_damaged") is True,
    )
    listed = _list(fields.get("ranks"), "ranks")
    ranks = tuple(_rank(one, f"ranks[{n}]") for n, one in enumerate(listed))
    image_key = fields.get("image_key", "")
    if not isinstance(image_key, str) or not _KEY_ID.fullmatch(image_key):
        raise BadManifest("image_key", f"expected the id of a key; got {image_key!r:.80}")
    manifest = Manifest(about=about, ranks=ranks, image_key=image_key)
    if fields.get("size_bytes") != manifest.size_bytes:
        told = f"{fields.get('size_bytes')!r:.40}, and its parts have {manifest.size_bytes}"
        raise BadManifest("size_bytes", told)
    return manifest


def _rank(body: Any, path: str) -> RankImage:
    fields = _object(body, path)
    listed = _list(fields.get("parts"), f"{path}.parts")
    parts = tuple(_part(one, f"{path}.parts[{n}]") for n, one in enumerate(listed))
    if not parts:
        raise BadManifest(
            f"{path}.parts", "must name at least one part, the object graph; got none"
        )
    listed = _list(fields.get("chunks"), f"{path}.chunks")
    chunks = tuple(_chunk(one, f"{path}.chunks[{n}]") for n, one in enumerate(listed))
    _must_cover(parts, chunks, f"{path}.chunks")
    tensors = tensors_from_json(fields.get("tensors"), parts[1:], path=f"{path}.tensors")
    return RankImage(parts=parts, chunks=chunks, tensors=tensors)


def _part(body: Any, path: str) -> Part:
    size, device, pinned = _tuple(body, 3, path)
    if not is_word(device) or type(pinned) is not bool:
        raise BadManifest(path, f"it lay on {device!r:.40}, pinned: {pinned!r:.40}")
    return Part(size=_count(size, path), device=device, pinned=pinned)


def _chunk(body: Any, path: str) -> Chunk:
    address, listed = _tuple(body, 2, path)
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise BadManifest(path, f"expected the address of a chunk; got {address!r:.80}")
    spans = tuple(
        _span(one, f"{path}.spans[{n}]") for n, one in enumerate(_list(listed, f"{path}.spans"))
    )
    chunk = Chunk(address=address, spans=spans)
    if not 0 < chunk.size <= LARGEST_CHUNK_BYTES:
        raise BadManifest(path, f"a chunk of {chunk.size} bytes")
    return chunk


def _span(body: Any, path: str) -> Span:
    part, offset, size = (_count(number, path) for number in _tuple(body, 3, path))
    if not size:
        raise BadManifest(path, "it is empty")
    return Span(part, offset, size)


def _must_cover(parts: Sequence[Part], chunks: Sequence[Chunk], path: str) -> None:
    """Raise BadManifest unless every byte of every part lies in exactly one chunk."""
    ends = [0] * len(parts)
    for span in sorted(
        (span for chunk in chunks for span in chunk.spans),
        key=lambda span: (span.part, span.offset),
    ):
        if span.part >= len(parts):
            raise BadManifest(path, f"bytes of part {span.part}, and there are {len(parts)}")
        if span.offset != ends[span.part]:
            told = f"part {span.part} goes on at {span.offset}, not at {ends[span.part]}"
            raise BadManifest(path, told)
        ends[span.part] += span.size
    for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
        if part.size != end:
            raise BadManifest(path, f"part {number} ends at {end}, not at {part.size}")


def tensors_from_json(body: Any, storages: Sequence[Part], *, path: str) -> tuple[Tensor, ...]:
    """Read a table of tensors that lie inside `storages`, by name; raises BadManifest.

    The form is `{name: [storage, dtype, shape, stride, offset]}`, with the last three in elements.
    """
    named = sorted(_object(body, path).items())
    return tuple(_tensor(name, row, storages, f"{path}[{name!r:.80}]") for name, row in named)


def tensors_told(body: Any, storages: Sequence[Part]) -> tuple[Tensor, ...]:
    """Read such a table as a tenant's process sent it; rows that are not valid are left out."""
    found = []
    for name, row in sorted(body.items()) if isinstance(body, dict) else ():
        with suppress(BadManifest):
            found.append(_tensor(name, row, storages, ""))
    return tuple(found)


def _tensor(name: str, body: Any, storages: Sequence[Part], path: str) -> Tensor:
    storage, dtype, shape, stride, offset = _tuple(body, 5, path)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadManifest(path, f"expected a type of elements; got {dtype!r:.40}")
    tensor = Tensor(
        name=_text(name, path),
        storage=_count(storage, path),
        dtype=dtype,
        shape=_counts(shape, path),
        stride=_counts(stride, path),
        offset=_count(offset, path),
    )
    if len(tensor.shape) != len(tensor.stride):
        raise BadManifest(path, "its shape and its stride differ in length")
    if tensor.size > _LARGEST_TENSOR:  # strides of 0 let a few bytes pose as an endless tensor
        raise BadManifest(path, f"a tensor of {tensor.size} bytes")
    if tensor.storage >= len(storages):
        raise BadManifest(path, f"storage {tensor.storage}, and there are {len(storages)}")
    if tensor.end > (size := storages[tensor.storage].size):
        raise BadManifest(path, f"it ends at byte {tensor.end} of a storage of {size}")
    return tensor


def _object(body: Any, path: str) -> JSON:
    if not isinstance(body, dict):
        raise BadManifest(path, f"a {type(body).__name__}, not an object")
    return body


def _list(body: Any, path: str) -> list[Any]:
    if not isinstance(body, list):
        raise BadManifest(path, f"a {type(body).__name__}, not a list")
    return body


def _tuple(body: Any, length: int, path: str) -> list[Any]:
    if not isinstance(body, list) or len(body) != length:
        raise BadManifest(path, f"not a list of {length}")
    return body


def _counts(body: Any, path: str) -> tuple[int, ...]:
    listed = _list(body, path)
    if len(listed) > _MOST_DIMENSIONS:
        raise BadManifest(path, f"{len(listed)} dimensions")
    return tuple(_count(number, path) for number in listed)


def _count(body: Any, path: str) -> int:
    if type(body) is not int or not 0 <= body < 2**63:
        raise BadManifest(path, f"expected a whole number; got {body!r:.40}")
    return body


def _text(body: Any, path: str) -> str:
    if not isinstance(body, str) or not 0 < len(body) <= _LONGEST_NAME:
        raise BadManifest(path, f"expected a name; got {body!r:.40}")
    return body
