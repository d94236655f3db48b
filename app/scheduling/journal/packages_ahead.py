"""Have the packages of waiting tasks installed before the tasks get a device.

Each heartbeat tells which environments are ready on the device's host, and the state of those that
are not.  Each answer tells which ones tasks wait for there.  A task takes a device only on a host
where its environment is ready (`core.model.device_choice`).  If no host can build it, the tasks
that have not started yet fail in uv's own words, and no device was held.  A task that has state
waits on, with that reason.  Packages of a stored command are asked of hosts where its processes go
on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sqlalchemy import exists, func, or_, select, text
from sqlalchemy.orm import Session

from app.core.model.checkpoints.migration import MOVABLE
from app.core.model.device_choice import (
    PACKAGES,
    DeviceChoice,
    DeviceTraits,
    choice_in,
    traits_now,
)
from app.core.model.lifecycle import Move, State
from app.core.model.protocol.messages import Alive
from app.core.model.provisions.process_images import choice_where_it_goes_on
from app.core.scheduling import package_hosts
from app.core.scheduling.package_hosts import PackageHost
from app.db.lines import IN_LINE
from app.db.models import Device, Host, Placement, Task
from app.db.transactions import AnyRow
from app.scheduling.journal import task_writer

ENDED_AT_ONCE = 500  # tasks that one report ends
FIRST = 16  # tasks of a line that are looked at one by one
CAUSE = "environment"

_NOTHING = "", ""  # the state of a lock of which a host tells nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """Describes a device that is up. If it is drained it takes no work, but its host still reports
    packages.
    """

    host: str
    kind: str
    memory_bytes: int
    traits: DeviceTraits
    takes_work: bool
    is_idle: bool


@dataclass
class PackagesAhead:
    """Finds which packages the tasks of one island wait for, and which hosts are to install them,
    while some heartbeats are recorded.
    """

    session: Session
    island: str
    alives: Sequence[Alive] = field(repr=False)
    _known: dict[tuple[str, int, DeviceChoice], dict[str, tuple[int, int]]] = field(
        default_factory=dict, repr=False
    )

    def asked_of(self, device: Device) -> list[str]:
        """Return the locks that the device's host should have ready, the most urgent first."""
        if "builds" not in device.facts or not self._lines:
            return []
        locks = [lock for lock in self._turns if device.host in self._hosts_of_lock[lock]]
        return package_hosts.asked(locks, frozenset(device.facts.get("environments") or ()))

    def end_hopeless(self, device: Device) -> bool:
        """Fail the tasks whose packages failed on this device's host and can be built on no other
        host.
        """
        failed = {lock for lock, told in _builds(device.facts).items() if told[0] == "failed"}
        lines = [line for line in self._lines if _lock(line) in failed] if failed else []
        return any([self._end(line) for line in lines])

    def _end(self, line: AnyRow) -> bool:
        hosts = package_hosts.given_up(self._hosts(line, line.device_choice))
        if not hosts:
            return False
        names = " and ".join(sorted({host.name for host in hosts}))
        message = f"Its packages could not be installed on {names}."
        waiting = self.session.scalars(_NOT_STARTED, {"island": self.island, **_key(line)}).all()
        found = task_writer.locked_tasks(self.session, Task.id.in_(waiting), wait=False)
        for task in found.values():
            if task.state != State.waiting or task.epoch:
                continue
            task_writer.move_task(self.session, task, Move.GaveUp)
            task.cause, task.message, task.detail = CAUSE, message, hosts[0].told
            task_writer.end_task(self.session, task, "task.failed", message, cause=CAUSE)
        return bool(found)

    # --- what waits ---

    @cached_property
    def _lines(self) -> Sequence[AnyRow]:
        return self.session.execute(_LINES, {"island": self.island, "first": FIRST}).all()

    @cached_property
    def _turns(self) -> list[str]:
        since: dict[str, dict[str, float]] = defaultdict(dict)
        for line in self._lines:
            of_tenant, lock = since[line.tenant_id], _lock(line)
            of_tenant[lock] = min(of_tenant.get(lock, line.since_s), line.since_s)
        return package_hosts.in_turn(since)

    @cached_property
    def _hosts_of_lock(self) -> Mapping[str, set[str]]:
        found: dict[str, set[str]] = {lock: set() for lock in self._turns}
        for line in self._lines:
            if (lock := _lock(line)) not in found:
                continue
            for choice, tasks in self._choices(line):
                hosts = self._hosts(line, choice)
                found[lock] |= package_hosts.hosts_for(lock, hosts, tasks=tasks, width=line.width)
        return found

    def _choices(self, line: AnyRow) -> Iterator[tuple[str, int]]:
        """Yield how many tasks of a line wait, by choice.

        A stored command waits for devices where its processes can be restored, if there are enough
        of them. If there are enough only over several hosts, the task counts for the line's own
        choice too, as its devices may have to be on one host.
        """
        others = line.waiting
        for mark, tasks in Counter(line.marks or ()).items():
            choice = choice_where_it_goes_on(line.device_choice, mark)
            sizes = [host.devices for host in self._hosts(line, choice)]
            if sum(sizes) >= line.width:
                yield choice, tasks
            if max(sizes, default=0) >= line.width:
                others -= tasks
        if others > 0:
            yield line.device_choice, others

    # --- hosts ---

    def _hosts(self, line: AnyRow, choice: str) -> list[PackageHost]:
        """Return the hosts that build environments and have devices for such tasks of a line."""
        lock, places = _lock(line), self._places(line, choice_in(choice).lasting)
        return [
            PackageHost(name=name, devices=devices, idle=idle, state=state, told=told)
            for name, (devices, idle) in places.items()
            for state, told in [self._states[name].get(lock, _NOTHING)]
        ]

    def _places(self, line: AnyRow, choice: DeviceChoice) -> Mapping[str, tuple[int, int]]:
        """Return two counts for each host: suitable devices that take work, and how many of these
        are idle.
        """
        key = line.kind, line.memory_bytes, choice
        if key not in self._known:
            there: dict[str, list[_Seat]] = defaultdict(list)
            for seat in self._seats:
                fits = seat.kind == line.kind and seat.memory_bytes >= line.memory_bytes
                if fits and choice.suits(seat.traits):
                    there[seat.host].append(seat)
            self._known[key] = {name: _size(seats) for name, seats in sorted(there.items())}
        return self._known[key]

    @cached_property
    def _states(self) -> Mapping[str, Mapping[str, tuple[str, str]]]:
        """Return the state of each lock, by host.

        A failure counts more than a worker that still waits for its turn.
        """
        found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        for seat in self._seats:
            of_host = found[seat.host]
            for lock, state in _reported_locks(seat.traits):
                of_host[lock] = min(of_host.get(lock, _NOTHING), state, key=_nearest)
        return found

    @cached_property
    def _seats(self) -> list[_Seat]:
        """Return the devices that are up and build environments, with what the present heartbeats
        say of them.
        """
        told = {alive.device: alive.facts for alive in self.alives}
        busy = exists().where(Placement.device_id == Device.id, Placement.ended_at.is_(None))
        columns = (Device.id, Device.host, Device.kind, Device.memory_bytes, Device.facts)
        drained = or_(Device.cordoned, Host.cordoned)
        query = select(*columns, busy.label("busy"), drained.label("drained"))
        is_up = or_(Device.lease_until > func.now(), Device.id.in_(told))
        here = query.join(Host, Host.name == Device.host).where(Device.island == self.island, is_up)
        rows = self.session.execute(here.order_by(Device.id))
        return list(_seats(rows, told))


def _seats(rows: Any, told: Mapping[str, Any]) -> Iterator[_Seat]:
    for row in rows:
        facts = told.get(row.id, row.facts)
        if not facts.get("leaving") and facts.get("builds") is not None:
            yield _Seat(
                host=row.host,
                kind=facts.get("kind", row.kind),
                memory_bytes=facts.get("memory_bytes", row.memory_bytes),
                traits=traits_now(facts),
                takes_work=not row.drained,
                is_idle=not row.busy,
            )


def _size(seats: Sequence[_Seat]) -> tuple[int, int]:
    working = [seat for seat in seats if seat.takes_work]
    return len(working), sum(seat.is_idle for seat in working)


def _nearest(found: tuple[str, str]) -> int:
    """Return a sort key: a failure comes before the state of a device worker that does not know of
    it yet.
    """
    order = ("ready", "building", "failed", "waiting", "")
    return order.index(found[0])


def _reported_locks(traits: DeviceTraits) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each lock that a device reports, with its state and the message about it."""
    for offer in traits.offers:
        if offer.startswith(PACKAGES):
            yield offer.removeprefix(PACKAGES), ("ready", "")
    for one in traits.builds or ():
        yield one.lock, (one.state, one.told)


def _builds(facts: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    return facts.get("builds") or {}


def _lock(line: AnyRow) -> str:
    return choice_in(line.device_choice).lock


def _key(line: AnyRow) -> dict[str, Any]:
    names = ("user_id", "kind", "memory_bytes", "width", "device_choice")
    return {**{name: getattr(line, name) for name in names}, "most": ENDED_AT_ONCE}


_LINES = text(
    f"""
    select l.user_id, l.kind, l.memory_bytes, l.width, l.device_choice, l.tenant_id, l.waiting,
        first.since_s, first.marks
    from lines l cross join lateral (
        select extract(epoch from min(t.submitted_at))::float as since_s,
            array_agg(t.goes_on_with) filter (
                where t.goes_on_with <> '' and t.capabilities ? '{MOVABLE}'
            ) as marks
        from (
            select t.submitted_at, t.goes_on_with, t.capabilities
            from tasks t where t.state = 'waiting' and {IN_LINE}
            order by t.priority desc, t.submitted_at, t.id limit :first
        ) t
    ) first
    where l.island = :island and l.waiting > 0 and l.device_choice like '%!packages:%'
        and first.since_s is not null
    """
)

_NOT_STARTED = text(
    """
    select id from tasks t
    where t.state = 'waiting' and t.epoch = 0 and t.island = :island and t.user_id = :user_id
        and t.kind = :kind and t.memory_bytes = :memory_bytes and t.devices_min = :width
        and t.device_choice = :device_choice
    order by id limit :most
    """
)


def are_news(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if other packages are ready on the host than before."""
    return (before.get("environments") or {}).keys() != (now.get("environments") or {}).keys()
