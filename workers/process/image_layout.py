"""Describes where an image lies in a slab: the interface between staging and checkpointing.

A slab is one block of host memory that a resident and its device worker share.  The graph comes
first.  The storages follow at multiples of `ALIGNMENT`, in the order of capture, so replicas that
capture the same job have the same bytes at the same places.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from app.core.model.protocol.wellformed import is_word

JSON = dict[str, Any]

ALIGNMENT = 4096  # in bytes: one page, so that a page that was written belongs to one storage only


class BadLayout(Exception):
    """Raised when a resident described an image that cannot be in its slab; says which part is
    wrong.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A range of `size` bytes at `offset`; `device` is the kind of device of the storage."""

    offset: int
    size: int
    device: str = "cpu"
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Lists the places of the graph and of each storage, by number. No two overlap."""

    graph: Extent
    storages: tuple[Extent, ...]

    @property
    def end(self) -> int:
        """The length in bytes that a slab needs to hold the image."""
        return max((_end(part) for part in (self.graph, *self.storages)), default=0)

    @property
    def held_bytes(self) -> int:
        """The size of the image itself, without the gaps."""
        return self.graph.size + sum(part.size for part in self.storages)

    def as_json(self) -> JSON:
        return asdict(self)


def laid_out(graph_bytes: int, storages: list[tuple[int, str, bool]]) -> Layout:
    """Place a graph, and storages given as (bytes, device, pinned), one after the other."""
    graph, at, placed = Extent(offset=0, size=graph_bytes), _aligned(graph_bytes), []
    for size, device, pinned in storages:
        placed.append(Extent(offset=at, size=size, device=device, pinned=pinned))
        at = _aligned(at + size)
    return Layout(graph=graph, storages=tuple(placed))


def from_json(body: Any, *, limit_bytes: int) -> Layout:
    """Return a layout that a resident sent, after checking all of it; raises BadLayout."""
    try:
        graph = _extent(body["graph"], limit_bytes)
        storages = tuple(_extent(part, limit_bytes) for part in body["storages"])
    except (KeyError, TypeError) as error:
        raise BadLayout(f"invalid layout of an image: {error!r}") from error
    at = 0
    for part in sorted((graph, *storages), key=lambda part: (part.offset, part.size)):
        if part.offset < at:
            raise BadLayout(f"two parts of an image overlap at byte {part.offset}")
        at = _end(part)
    return Layout(graph=graph, storages=storages)


def _extent(body: Any, limit_bytes: int) -> Extent:
    extent = Extent(**body)
    numbers = (extent.offset, extent.size)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise BadLayout(f"invalid offset and size of a part of an image: {numbers!r}")
    if not is_word(extent.device) or type(extent.pinned) is not bool:
        raise BadLayout(f"invalid device of a storage: {extent.device!r:.40}")
    if _end(extent) > limit_bytes:
        raise BadLayout(
            f"a part of an image ends at {_end(extent)}; its slab has {limit_bytes} bytes"
        )
    return extent


def _end(part: Extent) -> int:
    return part.offset + part.size


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
