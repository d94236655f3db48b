"""Chooses devices that lie near each other.

A location is a path from wide to narrow: rack, host, and what the host has inside, such as a NUMA
node and a PCIe switch. The more parts of their paths devices have in common, the nearer they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Location = tuple[str, ...]


def common(locations: Iterable[Location]) -> Location:
    """Return the parts that all the locations have in common; () without locations."""
    first, *others = [*locations] or [()]
    depth = len(first)
    for other in others:
        depth = min(depth, _shared(first, other))
    return first[:depth]


def nearest(
    ids: Sequence[str], count: int, beside: Sequence[str], locations: Mapping[str, Location]
) -> list[str]:
    """Choose `count` of the devices, or all if there are fewer; the result keeps their order.

    If devices `beside` are chosen already, devices near one of these come first. If not, the
    devices come from the narrowest location that has enough, and among such locations from the one
    with the fewest. Within a location they come from as few of its parts as possible.
    """
    if count >= len(ids):
        return [*ids]
    if beside:
        theirs = {locations[other] for other in beside}
        shared = {id: max(_shared(locations[id], other) for other in theirs) for id in ids}
        chosen = {*sorted(ids, key=lambda id: -shared[id])[:count]}
    else:
        _, narrowest = _Part.of(ids, locations).narrowest(count)
        chosen = {*narrowest.take(count)}
    return [id for id in ids if id in chosen]


def depth(ids: Sequence[str], count: int, locations: Mapping[str, Location]) -> int:
    """Return how many parts the nearest `count` of the devices have in common; 0 if there are too
    few.
    """
    if len(ids) < count:
        return 0
    return _Part.of(ids, locations).narrowest(count)[0]


def told(locations: Sequence[Location]) -> str:
    """Return a sentence on how near the devices of a task are; "" if that is not known."""
    if len(locations) < 2 or not any(rack or inside for rack, _, *inside in locations):
        return ""
    shared, n = common(locations), len(locations)
    if len(shared) > 2:
        return f"Its {n} devices are near each other: {'/'.join(shared[2:])} of {shared[1]}."
    if len(shared) == 2:
        return f"Its {n} devices are on {shared[1]}, in different parts of it."
    hosts = len({location[:2] for location in locations})
    if shared and shared[0]:
        return f"Its {n} devices are on {hosts} hosts of rack {shared[0]}."
    return f"Its {n} devices are on {hosts} hosts."


def _shared(one: Location, other: Location) -> int:
    """Count the parts that two locations have in common."""
    depth = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        depth += 1
    return depth


class _Part:
    """Groups the devices of a location: those in its parts, and those without a narrower
    location.
    """

    __slots__ = ("here", "parts", "size")

    def __init__(self, here: Iterable[str] = ()) -> None:
        self.parts: dict[str, _Part] = {}
        self.here = [*here]
        self.size = len(self.here)  # number of devices in it

    @classmethod
    def of(cls, ids: Iterable[str], locations: Mapping[str, Location]) -> _Part:
        whole = cls()
        for id in ids:
            part = whole
            part.size += 1
            for name in locations[id]:
                inner = part.parts.get(name)
                if inner is None:
                    inner = part.parts[name] = cls()
                part = inner
                part.size += 1
            part.here.append(id)
        return whole

    def narrowest(self, count: int, at: int = 0) -> tuple[int, _Part]:
        """Return the deepest location that has enough devices, and its depth.

        If there are several, it is the one with the fewest devices.
        """
        large = [part for _, part in sorted(self.parts.items()) if part.size >= count]
        found = [part.narrowest(count, at + 1) for part in large]
        return min(found, key=lambda one: (-one[0], one[1].size), default=(at, self))

    def take(self, count: int) -> list[str]:
        """Choose devices from as few parts as possible, the largest part first.

        The last part is the narrowest location that has enough for the rest.
        """
        if not self.parts:
            return self.here[:count]
        parts = [part for _, part in sorted(self.parts.items())]
        parts += [_Part(self.here)] if self.here else []
        parts.sort(key=lambda part: part.size)
        chosen = list[str]()
        while parts and len(chosen) + parts[-1].size <= count:
            largest = parts.pop()
            chosen += largest.take(largest.size)
        lacks = count - len(chosen)
        if not lacks:
            return chosen
        found = [part.narrowest(lacks) for part in parts if part.size >= lacks]
        _, last = min(found, key=lambda one: (-one[0], one[1].size))
        return chosen + last.take(lacks)
