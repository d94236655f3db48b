"""Chooses which devices go to which reservation, where a reservation takes only some of a kind.

A reservation may name its devices, or take any that have its labels. Several can want the same
devices, so this is a matching: as many are filled as can be, by augmenting paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple


class Demand(NamedTuple):
    """Says how many devices a reservation takes, and among which ones."""

    id: str
    number: int
    among: frozenset[str]


def matched(demands: Iterable[Demand], before: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return, by device, the id of the demand that takes it; no demand gets more than its number.

    A device stays with the demand that had it `before`, unless another demand can only be filled
    by a change. Apart from these, earlier demands are filled first.
    """
    matching = _Matching([*demands], before or {})
    for each in matching.demands.values():
        matching.fill(each)
    return {device: id for id, devices in matching.held.items() for device in devices}


def kept(
    demands: Iterable[tuple[str, Demand]], before: Mapping[str, str], *, but: Collection[str] = ()
) -> dict[str, str]:
    """Return, by device, the reservation that it is kept for; `demands` are (kind, demand).

    Devices in `but` do not serve, so others take their place if there are some.
    """
    by_kind = defaultdict[str, list[Demand]](list)
    for kind, each in demands:
        by_kind[kind].append(each._replace(among=each.among.difference(but)))
    found = (matched(mine, before) for mine in by_kind.values())
    return {device: id for each in found for device, id in each.items()}


class _Matching:
    """Knows which devices each demand holds, and gives more of them to one demand at a time."""

    def __init__(self, demands: list[Demand], before: Mapping[str, str]) -> None:
        self.demands = {each.id: each for each in demands}
        self.held: dict[str, set[str]] = {each.id: set() for each in demands}
        for device, id in sorted(before.items()):
            mine = self.demands.get(id)
            if mine and device in mine.among and len(self.held[id]) < mine.number:
                self.held[id].add(device)

    def fill(self, demand: Demand) -> None:
        """Give a demand as many devices as it wants and can have; no other loses in number."""
        mine = self.held[demand.id]
        free = sorted(demand.among.difference(*self.held.values()))
        mine.update(free[: demand.number - len(mine)])
        while len(mine) < demand.number and self._passes_on(demand):
            pass

    def _passes_on(self, first: Demand) -> bool:
        """Give `first` one device more, of which another demand takes a free one instead."""
        came_from, line = dict[str, str](), [first]
        for demand in line:
            if free := demand.among.difference(*self.held.values()):
                self._pass(first.id, demand.id, min(free), came_from)
                return True
            for id, devices in self.held.items():
                if id != first.id and id not in came_from and demand.among & devices:
                    came_from[id] = demand.id
                    line.append(self.demands[id])
        return False

    def _pass(self, first: str, last: str, free: str, came_from: Mapping[str, str]) -> None:
        """Give `last` a free device, and let each demand on the way back give up one of its own."""
        id, device = last, free
        while id != first:
            taker = came_from[id]
            given = min(self.demands[taker].among & self.held[id])
            self.held[id].add(device)
            self.held[id].remove(given)
            id, device = taker, given
        self.held[id].add(device)
