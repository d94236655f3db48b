"""Chooses the devices of a gang that needs as many of them on each of several hosts.

Such a gang names the number of its hosts (`devices.hosts` of a descriptor). All its devices are
chosen together, so what a round frees, keeps or counts for it is never one device too many on one
host and one too few on another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from app.core.scheduling.gangs.nearness import Location, nearest


class DeviceOffer(NamedTuple):
    """Says when a gang can have a device, and what that costs others; lower goes first.

    `order` decides between devices that are equal in both.
    """

    at_s: float
    cost: int
    order: tuple[float, ...]
    id: str
    is_idle: bool


@dataclass(frozen=True, slots=True)
class _HostPart:
    """The part of a gang that would lie on one host."""

    host: str
    rack: str
    devices: tuple[str, ...]
    at_s: float  # when the last of the devices can be had
    cost: int  # of all its devices
    left_over: int  # idle devices that the host would have left
    is_whole: bool  # True if the gang would have the whole host

    @property
    def rank(self) -> tuple[float, int, int]:
        return self.at_s, self.cost, self.left_over


def chosen_evenly(
    offers: Iterable[DeviceOffer],
    *,
    hosts: int,
    width: int,
    sizes: Mapping[str, int],
    locations: Mapping[str, Location],
) -> tuple[str, ...]:
    """Choose `width` of the devices on exactly `hosts` hosts, as many on each; () if none do.

    Hosts where the gang can have its devices first are taken, then those where this costs others
    least, then those with the fewest idle devices left over, so that few idle ones are broken up.
    Equal hosts are taken from as few racks as possible, and those first that the gang fills.
    `sizes` counts the devices of each host. The chosen devices of a host follow each other.
    """
    share, by_host = width // hosts, defaultdict[str, list[DeviceOffer]](list)
    for offer in offers:
        by_host[locations[offer.id][1]].append(offer)
    parts = [
        _part(host, sorted(there), share, locations, is_whole=sizes[host] == share)
        for host, there in sorted(by_host.items())
        if len(there) >= share
    ]
    if len(parts) < hosts:
        return ()
    taken = list[_HostPart]()
    for _, equal in groupby(sorted(parts, key=lambda part: part.rank), lambda part: part.rank):
        taken += _near_each_other([*equal], hosts - len(taken), taken)
        if len(taken) == hosts:
            break
    taken.sort(key=lambda part: part.host)
    return tuple(id for part in taken for id in part.devices)


def hosts_with(counts: Mapping[str, int], *, hosts: int, width: int) -> int:
    """Count the hosts that have the part of such a gang that would lie on one host."""
    return sum(count >= width // hosts for count in counts.values())


def _part(
    host: str,
    offers: Sequence[DeviceOffer],
    share: int,
    locations: Mapping[str, Location],
    *,
    is_whole: bool,
) -> _HostPart:
    """Choose the devices of one host, those near each other first if they are equal otherwise."""
    devices = list[str]()
    for _, equal in groupby(offers, lambda offer: offer[:3]):
        lacks = share - len(devices)
        devices += nearest([offer.id for offer in equal], lacks, devices, locations)
        if len(devices) == share:
            break
    taken = offers[:share]  # equal to the devices in all that is counted here
    return _HostPart(
        host=host,
        rack=locations[devices[0]][0],
        devices=tuple(devices),
        at_s=taken[-1].at_s,
        cost=sum(offer.cost for offer in taken),
        left_over=sum(offer.is_idle for offer in offers[share:]),
        is_whole=is_whole,
    )


def _near_each_other(
    parts: Sequence[_HostPart], count: int, beside: Sequence[_HostPart]
) -> list[_HostPart]:
    """Choose `count` of equal parts, or all if there are fewer: in the racks of those `beside`,
    then in the smallest rack that has enough, or else in the largest.
    """
    racks = {part.rack for part in beside}
    by_rack = defaultdict[str, list[_HostPart]](list)
    for part in parts:
        by_rack[part.rack].append(part)
    found = list[_HostPart]()

    def place(rack: str) -> tuple[bool, bool, int, str]:
        size, lacks = len(by_rack[rack]), count - len(found)
        return rack not in racks, size < lacks, size if size >= lacks else -size, rack

    while by_rack and len(found) < count:
        here = by_rack.pop(min(by_rack, key=place))
        here.sort(key=lambda part: (not part.is_whole, part.host))
        found += here[: count - len(found)]
    return found
