"""Keeps the devices of one kind, and which of them can be assigned now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from app.core.fairness.fair_tree import Lane
from app.core.model.device_choice import NO_TRAITS, DeviceTraits, choice_in
from app.core.model.device_fraction import cap_bytes
from app.core.scheduling.gangs.even_hosts import DeviceOffer, chosen_evenly
from app.core.scheduling.gangs.nearness import Location, depth, nearest

MOST_HOSTS = 64  # most hosts, among equally good ones, whose devices are compared by nearness


@dataclass(frozen=True, slots=True)
class FreePart:
    """Describes what the fractions on a device leave free; a task may still be leaving this
    part.
    """

    milli: int
    memory_bytes: int
    leaving: bool = False


def part_bytes(lane: Lane, device_bytes: int) -> int:
    """Return the memory that a task of the lane gets on a device with `device_bytes`."""
    return cap_bytes(lane.milli, lane.memory_bytes, device_bytes)


@dataclass(slots=True)
class Pool:
    """Keeps the devices of one kind, and which of them can be assigned now.

    A device with a leaving task counts as free, unless another task was already launched on it. A
    device with fractions is not free, but has a free part. `closed` devices take no fractions in
    this round: they are emptied for a whole task. `ends` lists when stays are expected to end:
    (time, task, devices).
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
    # traits of all devices, open or not
    traits: dict[str, DeviceTraits] = field(default_factory=dict)
    # locations of all devices, open or not
    locations: dict[str, Location] = field(default_factory=dict)
    # True if some location says more than the host, such as a switch or a NUMA node
    knows_locations: bool = False
    # device with fractions -> the part that they leave free
    parts: dict[str, FreePart] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    # (memory, choice) -> number of open devices that fit; emptied when a device changes
    suited: dict[tuple[int, str], int] = field(default_factory=dict)

    def lies_at(self, id: str, location: Location) -> None:
        """Note where a device is."""
        self.locations[id] = location
        self.knows_locations |= len(location) > 2 or location[0] != ""

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
        """Count the free devices that fit the lane; if the lane names a host or places, only those
        there.

        For a fraction, devices whose free part is large enough count, too.
        """
        if self.parts and lane.is_fraction:
            beside = sum(self.fits_beside(id, lane) for id in self.parts)
            return beside + sum(self.takes(id, lane) for id in self.free)
        if lane.host is not None or lane.hosts:
            return sum(self.takes(id, lane) for id in self.free)
        if self._tells_apart(lane):
            return sum(self.fits(id, lane) for id in self.free)
        if not lane.memory_bytes:
            return len(self.free)
        return sum(n for memory, n in self.counts.items() if memory >= lane.memory_bytes)

    def _tells_apart(self, lane: Lane) -> bool:
        """True if traits decide which devices fit.

        They do not for a pinned task, which may continue where it was.
        """
        return bool(lane.choice) and lane.pin is None

    @property
    def whole(self) -> bool:
        """True if every known device accepts work."""
        return len(self.open) == self.known

    def size(self, lane: Lane | None = None) -> int:
        """Count the devices that accept work, free or not, and fit the lane and its host or
        places.
        """
        if lane is None:
            return len(self.open)
        if lane.host is not None or lane.hosts:
            return sum(self.takes(id, lane) for id in self.open)
        if self._tells_apart(lane):
            return sum(self.fits(id, lane) for id in self.open)
        if not lane.memory_bytes:
            return len(self.open)
        return sum(n for memory, n in self.sizes.items() if memory >= lane.memory_bytes)

    def suiting(self, lane: Lane) -> int:
        """Count the devices that accept work and fit the lane, whatever its pins and its host."""
        need = lane.memory_bytes, lane.choice
        if need not in self.suited:
            self.suited[need] = sum(self.fits(id, lane) for id in self.open)
        return self.suited[need]

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

    def by_host(self, ids: Iterable[str], lane: Lane) -> Counter[str]:
        """Count by host the given devices that accept work and fit the lane."""
        return Counter(self.hosts[id] for id in ids if self.fits(id, lane))

    def home(self, lane: Lane, lent: Iterable[tuple[int, Iterable[str]]]) -> str:
        """Return the host where the lane's devices are likely to be free first; "" if there is
        none.

        Hosts with enough devices come first. Among them a host where enough are free is preferred,
        then the host with the most devices that are free or `lent`, the most free ones, and the
        most devices; of equal hosts the one where enough free devices are nearest. Each entry of
        `lent` is (how many can be returned, the devices to choose from).
        """
        width = lane.width
        size = self.by_host(self.open, lane)
        free = self.by_host(self.free, lane)
        could = free.copy()
        for most, devices in lent:
            for host, n in self.by_host(devices, lane).items():
                could[host] += min(most, n)

        def place(host: str) -> tuple[int, bool, int, int, int]:
            enough, has = min(size[host], width), min(free[host], width)
            return -enough, has < width, -min(could[host], width), -has, -size[host]

        if not self.knows_locations:
            return min(size, key=lambda host: (place(host), host), default="")
        ranks = {host: place(host) for host in sorted(size)}
        best = min(ranks.values(), default=None)
        return self._nearest_host([host for host, rank in ranks.items() if rank == best], lane)

    def _nearest_host(self, hosts: Sequence[str], lane: Lane) -> str:
        """Return the host whose suitable free devices are nearest to each other; "" if there is
        none.

        Only the first MOST_HOSTS are compared.
        """
        free: dict[str, list[str]] = {host: [] for host in hosts[:MOST_HOSTS]}
        for id in self.free:
            if (there := free.get(self.hosts[id])) is not None and self.fits(id, lane):
                there.append(id)
        inside = {host: depth(ids, lane.width, self.locations) for host, ids in free.items()}
        return min(inside, key=lambda host: (-inside[host], host), default="")

    def evenly(self, lane: Lane, offers: Iterable[DeviceOffer]) -> tuple[str, ...]:
        """Choose as many devices on each of the lane's even hosts; () if there are too few."""
        return chosen_evenly(
            offers,
            hosts=lane.hosts,
            width=lane.width,
            sizes=Counter(self.hosts[id] for id in self.open),
            locations=self.locations,
        )

    def fits(self, id: str, lane: Lane) -> bool:
        """True if the device accepts work, has enough memory and suits the lane's choice."""
        return self.open.get(id, -1) >= lane.memory_bytes and self.meets_choice(id, lane)

    def meets_choice(self, id: str, lane: Lane) -> bool:
        """True if the device suits the lane's choice, whatever its memory."""
        if not lane.choice:
            return True
        return choice_in(lane.choice).suits(self.traits.get(id, NO_TRAITS), id)

    def takes(self, id: str, lane: Lane) -> bool:
        """True if the device may get a task of the lane: it fits the lane, its pin, its host and
        its places.

        A pinned task was on its device before, and may continue there even if the device's labels
        have changed.
        """
        if lane.pins:
            fits = id in lane.pins and self.open.get(id, -1) >= lane.memory_bytes
        else:
            fits = self.fits(id, lane)
        if lane.hosts and not lane.pins:
            return fits and id in lane.places
        return fits and lane.host in (None, self.hosts[id])

    def pins_free(self, lane: Lane) -> int:
        """Count the free devices among the only ones that suit the lane."""
        return sum(self._is_free(id, lane) and self.takes(id, lane) for id in lane.pins)

    def _is_free(self, id: str, lane: Lane) -> bool:
        return id in self.free or (lane.is_fraction and self.fits_beside(id, lane))

    def fits_beside(self, id: str, lane: Lane) -> bool:
        """True if a fraction fits into the free part of the device."""
        part = self.parts.get(id)
        if part is None or id in self.closed or part.milli < lane.milli:
            return False
        wanted = part_bytes(lane, self.open.get(id, 0))
        return part.memory_bytes >= wanted and self.takes(id, lane)

    def best(self, lane: Lane, image_on: str | None, pinned: frozenset[str]) -> list[str]:
        """Choose the devices for a task of this lane; [] if too few are free.

        Empty devices come before devices that a task is still leaving. After that the order is: the
        device that holds the task's image, unless another task is pinned to it; devices to which no
        waiting task is pinned; the smallest memory. Among devices that are equal in all this, a
        gang gets devices that are near each other. So nearness decides neither which task starts
        nor what is left for others.

        A fraction goes beside other fractions first, so that devices stay empty for whole tasks.
        """
        if lane.pins:
            return [*lane.pins] if self.pins_free(lane) == lane.width else []
        if self.fitting(lane) < lane.width:
            return []
        if lane.hosts:
            return [*lane.places]
        if self.parts and lane.is_fraction and (id := self._fullest(lane, image_on, pinned)):
            return [id]
        if image_on is not None and self._first_choice(image_on, lane, pinned):
            return [image_on]
        chosen = list[str]()
        for alike in self._classes(lane, pinned):
            lacks = lane.width - len(chosen)
            if lane.width > 1 and self.knows_locations:
                chosen += nearest(list(alike), lacks, chosen, self.locations)
            else:
                chosen += islice(alike, lacks)
            alike.close()
            if len(chosen) == lane.width:
                break
        return chosen

    def instead(self, chosen: list[str], lane: Lane, wanted: Collection[str]) -> list[str]:
        """Replace chosen devices by wanted ones that are free, suit the lane and are no larger.

        A gang that was given devices near each other, or as many on each host, keeps them.
        """
        if lane.is_fraction or lane.hosts or (lane.width > 1 and self.knows_locations):
            return chosen
        spare = (
            id
            for id in sorted(wanted)
            if id in self.free and id not in chosen and self.takes(id, lane)
        )
        found = list[str]()
        for id in chosen:
            small = (one for one in spare if self.open[one] <= self.open[id])
            found.append(id if id in wanted else next(small, id))
        return found

    def _has_other(self, lane: Lane, pinned: Collection[str]) -> bool:
        """True if a device is free and empty, suits the lane, and no waiting task is pinned to
        it.
        """
        return any(
            not leaving and id not in pinned and self.takes(id, lane)
            for id, leaving in self.free.items()
        )

    def _fullest(self, lane: Lane, image_on: str | None, pinned: Collection[str]) -> str:
        """Return the device with the smallest free part into which the fraction fits; "" if there
        is none.

        The device with the task's image goes first, and a device that a task is leaving last. A
        fraction does not go where another task is frozen while it fits elsewhere.
        """
        fitting = [id for id in self.parts if self.fits_beside(id, lane)]
        others = [id for id in fitting if id not in pinned]
        if others or self._has_other(lane, pinned):
            fitting = others
        if image_on in fitting:
            return str(image_on)
        return min(fitting, key=self._room_beside, default="")

    def _room_beside(self, id: str) -> tuple[bool, int, int, str]:
        part = self.parts[id]
        return part.leaving, part.milli, part.memory_bytes, id

    def _first_choice(self, id: str, lane: Lane, pinned: Collection[str]) -> bool:
        """True if the device is free for the task, and empty unless no free device is empty.

        A device to which another task is pinned is no first choice while another device is free.
        """
        leaving = self.free.get(id)
        if lane.width > 1 or leaving is None or not self.takes(id, lane):
            return False
        if id in pinned and self._has_other(lane, pinned):
            return False
        return not leaving or all(self.free.values())

    def _classes(self, lane: Lane, pinned: frozenset[str]) -> Iterator[Generator[str, None, None]]:
        """Yield the free devices that suit the lane in classes, best first."""
        for leaving in (False, True):
            memories = sorted(m for gone, m in self.heaps if gone == leaving)
            for is_pinned in (False, True) if pinned else (False,):
                for memory in memories:
                    if memory >= lane.memory_bytes:
                        among = (is_pinned, pinned) if pinned else None
                        yield self._free(leaving, memory, lane, among)

    def _free(
        self, leaving: bool, memory: int, lane: Lane, among: tuple[bool, frozenset[str]] | None
    ) -> Generator[str, None, None]:
        """Yield free devices in the order of their ids; out-of-date heap entries are dropped.

        `among` says whether they are in a set or not; None if either will do.
        """
        heap = self.heaps[leaving, memory]
        seen: list[str] = []
        try:
            while heap:
                id = heappop(heap)
                if self.free.get(id) is not leaving or (seen and seen[-1] == id):
                    continue
                seen.append(id)
                wanted = among is None or (id in among[1]) is among[0]
                if wanted and self.takes(id, lane):
                    yield id
        finally:
            for id in seen:
                heappush(heap, id)
