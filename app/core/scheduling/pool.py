"""The devices of one kind, and which of them can be assigned now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from app.core.fairness.fair_tree import Lane


@dataclass(slots=True)
class Pool:
    """The devices of one kind, and which of them can be assigned now.

    A device with a leaving task counts as free, unless another task was already launched on it.
    `ends` lists when stays are expected to end: (time, task, devices).
    """

    kind: str
    # device that accepts work -> memory in bytes
    open: dict[str, int] = field(default_factory=dict)
    # free device -> is its last task still leaving?
    free: dict[str, bool] = field(default_factory=dict)
    heaps: dict[tuple[bool, int], list[str]] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)  # memory -> number of free devices
    sizes: Counter[int] = field(default_factory=Counter)  # memory -> number of open devices
    ends: list[tuple[float, str, int]] = field(default_factory=list)
    known: int = 0  # number of devices, open or not
    hosts: dict[str, str] = field(default_factory=dict)  # device, open or not -> host
    grown: int = 0  # devices that tasks hold beyond their need
    # cost in thousandths -> number of open devices
    costs: Counter[int] = field(default_factory=Counter)

    def add(self, id: str, *, leaving: bool) -> None:
        memory = self.open[id]
        if id not in self.free:
            self.counts[memory] += 1
        self.free[id] = leaving
        heappush(self.heaps.setdefault((leaving, memory), []), id)

    def remove(self, id: str) -> None:
        if self.free.pop(id, None) is not None:
            self.counts[self.open[id]] -= 1

    def fitting(self, lane: Lane) -> int:
        """Count the free devices with enough memory, on the host if the lane names one."""
        if lane.host is not None:
            return sum(self.suits(id, lane) for id in self.free)
        if not lane.memory_bytes:
            return len(self.free)
        return sum(n for memory, n in self.counts.items() if memory >= lane.memory_bytes)

    @property
    def whole(self) -> bool:
        """True if every known device accepts work."""
        return len(self.open) == self.known

    def size(self, lane: Lane | None = None) -> int:
        """Count the devices that accept work, free or not, and suit the lane's memory and host."""
        if lane is not None and lane.host is not None:
            return sum(self.suits(id, lane) for id in self.open)
        if lane is None or not lane.memory_bytes:
            return len(self.open)
        return sum(n for memory, n in self.sizes.items() if memory >= lane.memory_bytes)

    @property
    def all_cost(self) -> int:
        """The cost of one second on all devices that accept work, in thousandths."""
        return sum(cost * n for cost, n in self.costs.items())

    @property
    def all_memory_bytes(self) -> int:
        """The memory of all devices that accept work; 0 if one of them doesn't report it."""
        if self.sizes[0]:
            return 0
        return sum(memory * n for memory, n in self.sizes.items())

    def by_host(self, ids: Iterable[str], memory_bytes: int) -> Counter[str]:
        """Count by host the given devices that accept work and have at least `memory_bytes`."""
        fits = (id for id in ids if self.open.get(id, -1) >= memory_bytes)
        return Counter(self.hosts[id] for id in fits)

    def home(self, width: int, memory_bytes: int, lent: Iterable[tuple[int, Iterable[str]]]) -> str:
        """Return the host where `width` devices are likely to be free first; "" without devices.

        Hosts with enough devices come first.  Among them a host where enough are free is preferred,
        then the host with the most devices that are free or `lent`, the most free ones, and the
        most devices.  Each entry of `lent` is (how many can be returned, the devices to choose
        from).
        """
        size = self.by_host(self.open, memory_bytes)
        free = self.by_host(self.free, memory_bytes)
        could = free.copy()
        for most, devices in lent:
            for host, n in self.by_host(devices, memory_bytes).items():
                could[host] += min(most, n)

        def place(host: str) -> tuple[int, bool, int, int, int, str]:
            enough, has = min(size[host], width), min(free[host], width)
            return -enough, has < width, -min(could[host], width), -has, -size[host], host

        return min(size, key=place, default="")

    def suits(self, id: str, lane: Lane) -> bool:
        fits = self.open.get(id, -1) >= lane.memory_bytes and lane.pin in (None, id)
        return fits and lane.host in (None, self.hosts[id])

    def best(self, lane: Lane, image_on: str | None, pinned: Iterable[str]) -> list[str]:
        """Choose the devices for a task of this lane; an empty list if too few are free.

        Empty devices come before devices that a task is still leaving.  After that the order is:
        the device that holds the task's image; devices to which no waiting task is pinned; the
        smallest memory.
        """
        if lane.pin is not None:
            return [lane.pin] if self.suits(lane.pin, lane) and lane.pin in self.free else []
        if self.fitting(lane) < lane.width:
            return []
        if lane.width == 1 and image_on is not None and self._first_choice(image_on, lane):
            return [image_on]
        free = self._in_order(lane, frozenset(pinned))
        chosen = list(islice(free, lane.width))
        free.close()
        return chosen

    def _first_choice(self, id: str, lane: Lane) -> bool:
        """True if the device is free, and it is empty or no other free device is."""
        leaving = self.free.get(id)
        if leaving is None or not self.suits(id, lane):
            return False
        return not leaving or all(self.free.values())

    def _in_order(self, lane: Lane, pinned: frozenset[str]) -> Generator[str, None, None]:
        """Yield the free devices that suit the lane, best first."""
        for leaving in (False, True):
            yield from self._free(leaving, lane, lambda id: id not in pinned)
            if pinned:
                yield from self._free(leaving, lane, lambda id: id in pinned)

    def _free(
        self, leaving: bool, lane: Lane, wanted: Callable[[str], bool]
    ) -> Generator[str, None, None]:
        """Yield free devices by memory, then by id; stale heap entries are dropped on the way."""
        for memory in sorted(m for gone, m in self.heaps if gone == leaving):
            if memory < lane.memory_bytes:
                continue
            heap = self.heaps[leaving, memory]
            seen: list[str] = []
            try:
                while heap:
                    id = heappop(heap)
                    if self.free.get(id) is not leaving or (seen and seen[-1] == id):
                        continue
                    seen.append(id)
                    if wanted(id) and lane.host in (None, self.hosts[id]):
                        yield id
            finally:
                for id in seen:
                    heappush(heap, id)
