"""Stores an image as one file: writes what `context_switch` staged, and reads it back.

The file is a line of magic, a JSON header, the pickled object graph, and the raw bytes of every
storage, in this order. The first storage is aligned like the memory of a tensor, so that it can be
used in place. Nothing here unpickles: a process can read the step and the fingerprint without
running tenant code. (A checkpoint is chunks and a manifest: `workers.transfer.checkpoint`.)
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"roundhouse image 1\n"
# torch aligns memory so, too; with another alignment, kernels may add in another order
ALIGN_BYTES = 64
_LENGTH = struct.Struct("!Q")


class Unreadable(Exception):
    """Raised when a file is not an image of Roundhouse, or its end is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBlock:
    """A storage's bytes, and the kind of device that it was on."""

    data: memoryview
    device: str = "cpu"
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Holds a job's state off the device, in host memory that the job cannot change.

    `step` is the last finished step; `fingerprint` is `preset.fingerprint()` of the process that
    staged the image.
    """

    step: int
    fingerprint: dict[str, Any]
    graph: memoryview
    blocks: tuple[ImageBlock, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces())

    @property
    def head_bytes(self) -> int:
        """The bytes of the file that are not bytes of storages."""
        return self.size_bytes - sum(len(block.data) for block in self.blocks)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file's bytes, in order, without copying a storage."""
        header = {
            "step": self.step,
            "fingerprint": self.fingerprint,
            "graph": len(self.graph),
            "blocks": [[len(b.data), b.device, b.pinned] for b in self.blocks],
        }
        body = json.dumps(header, sort_keys=True).encode()
        before = len(MAGIC) + _LENGTH.size + len(body) + len(self.graph)
        body += b" " * (-before % ALIGN_BYTES)
        yield memoryview(MAGIC + _LENGTH.pack(len(body)) + body)
        yield self.graph
        for block in self.blocks:
            yield block.data


def save(image: Image, path: Path) -> None:
    with path.open("xb") as file:
        for piece in image.pieces():
            file.write(piece)


def load(file: Path | int) -> Image:
    """Map the file (a path or a descriptor) into memory; raises Unreadable.

    The mapping is copy-on-write: what is written to it never reaches the file.
    """
    if isinstance(file, Path):
        fd = os.open(file, os.O_RDONLY)
        try:
            return load(fd)
        finally:
            os.close(fd)
    if os.fstat(file).st_size < len(MAGIC) + _LENGTH.size:
        raise Unreadable("the file is too short to be an image")
    return _parse(memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY)))


def _parse(whole: memoryview) -> Image:
    start = len(MAGIC) + _LENGTH.size
    if whole[: len(MAGIC)] != MAGIC:
        raise Unreadable("the file does not begin like an image")
    (length,) = _LENGTH.unpack(whole[len(MAGIC) : start])
    header = _header(whole[start : start + length])
    parts, at = [], start + length
    for size in (header["graph"], *(size for size, _, _ in header["blocks"])):
        parts.append(whole[at : at + size])
        at += size
    if at != len(whole):
        raise Unreadable(f"the image should have {at} bytes and has {len(whole)}")
    places = [(device, pinned) for _, device, pinned in header["blocks"]]
    return Image(
        step=header["step"],
        fingerprint=header["fingerprint"],
        graph=parts[0],
        blocks=tuple(
            ImageBlock(data=data, device=device, pinned=pinned)
            for data, (device, pinned) in zip(parts[1:], places, strict=True)
        ),
    )


def _header(body: memoryview) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(bytes(body))
    except ValueError as error:
        raise Unreadable(f"the image's header cannot be read: {error}") from error
    return header
