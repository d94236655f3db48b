"""Decides which hosts must have packages ready for the tasks that wait, and which packages go
first.

Hosts are asked until they have as many devices as the tasks need. Hosts that have the packages or
build them already come first, then hosts with idle devices. The order of the others differs from
lock to lock, so that locks spread over the hosts. A host that failed tries again but does not
count, so another host is asked in addition. A host that takes no work is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

TRIED = 3  # number of hosts that must fail before a lock is given up, if there are as many
OPEN = 8  # most unready locks that a host is asked for at a time
LOOKED_AT = 2 * OPEN  # most locks of a tenant for which hosts are chosen at a time

#: States of a lock on a host, the one nearest to being ready first.
STATES = ("ready", "building", "waiting", "", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageHost:
    """Describes a host for a group of tasks: `devices` suit them, `idle` of these run nothing.

    `state` is one of STATES, the state of their lock there; `told` is the message of a failure.
    """

    name: str
    devices: int
    idle: int
    state: str = ""
    told: str = ""


def hosts_for(lock: str, hosts: Sequence[PackageHost], *, tasks: int, width: int) -> frozenset[str]:
    """Return the hosts that are to have a lock ready for tasks of `width` devices each."""
    chosen = {one.name for one in hosts if one.state in ("ready", "failed")}
    places = [one for one in hosts if one.devices and one.state != "failed"]
    wide = [one for one in places if one.devices >= width]
    line = sorted(
        wide or places,
        key=lambda one: (STATES.index(one.state), sha256(f"{lock} {one.name}".encode()).digest()),
    )
    left = tasks * width
    usable = {one.name: one.idle // width * width if wide else one.idle for one in line}
    for one in line:
        if left > 0 and usable[one.name]:
            chosen.add(one.name)
            left -= usable[one.name]
    for one in line:  # tasks that no idle device can run wait for busy devices
        if left > 0:
            chosen.add(one.name)
            left -= one.devices - usable[one.name]
    return frozenset(chosen)


def given_up(hosts: Sequence[PackageHost]) -> list[PackageHost]:
    """Return the hosts that failed, if no host can be expected to have the packages."""
    failed = [one for one in hosts if one.state == "failed"]
    if any(one.state in ("ready", "building", "waiting") for one in hosts):
        return []
    return failed if len(failed) >= min(TRIED, len(hosts)) else []


def in_turn(since: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return locks in the order in which they are built.

    `since` has, by tenant and lock, since when tasks wait. The first lock of every tenant comes
    before the second of any tenant. Of each tenant only the first LOOKED_AT locks are considered.
    """
    best: dict[str, tuple[int, float, str]] = {}
    for of_tenant in since.values():
        first = sorted(of_tenant, key=lambda lock: (of_tenant[lock], lock))[:LOOKED_AT]
        for place, lock in enumerate(first):
            key = (place, of_tenant[lock], lock)
            best[lock] = min(best.get(lock, key), key)
    return sorted(best, key=lambda lock: best[lock])


def asked(locks: Iterable[str], ready: frozenset[str]) -> list[str]:
    """Return the locks to ask a host for: all that it has, and the first OPEN that it does not
    have.
    """
    found, open_ = list[str](), 0
    for lock in locks:
        open_ += lock not in ready
        if lock in ready or open_ <= OPEN:
            found.append(lock)
    return found
