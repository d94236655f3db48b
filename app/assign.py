"""A request's portions -> islands: the first of the two schedulers.

The tasks of a request and the data between them are a graph; each island has rooms, by what it has
of each kind of device, the work queued there and the tenant's fair share of it (`core.rooms`).
`core.portions` says which task goes where: all to one island if that is as quick, to several where
kinds of devices or time ask for it.  A request of one task is the same with one node.  What a task
on another island made arrives by the store, as between two hosts of an island.  Each island's own
scheduler does the rest.

An island that nobody leads, and of which no device is heard, is *dark*.  When control has seen it
so for long enough it is lost: its tasks that have not ended are assigned anew (`take_over`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from sqlalchemy import Row, Select, and_, func, literal, or_, select, text
from sqlalchemy.orm import Session, aliased

from app import forecast, journal, snapshot, span
from app.core.graph import Alike, Offer
from app.core.island import Tenant
from app.core.legs import LAUNCH_MS
from app.core.lifecycle import ENDED
from app.core.messages import JSON
from app.core.placement import Block, Graph, Link, Node, Unplaceable
from app.core.portions import Island, Portions, Room, apportion, reassign
from app.core.rooms import Stock
from app.core.search import Effort
from app.core.span import divided
from app.models import Device, Host, Line, Need, Placement, Task
from app.models import Island as IslandRow
from app.settings import settings

EFFORT = Effort(guard=1050, search=20_000, exact=10_000)  # 200 tasks take a sixth of a second
USUAL_NS = 60 * 10**9  # a task of which nothing is known
USUAL_BYTES = 1 << 20  # an output that nobody has seen yet
TOGETHER = 1.02  # of the time that a request takes, that portions of its graphs stay together
APART_NS = 10**8  # what a leg gives within such a time is given together, as far as is planned
STAYS_BYTES = 1 << 50  # what a leg holds between two of its outputs: it never changes its island
MAX_PERMUTED = 4  # islands, for the ways in which portions may lie on them
PAGE = 100  # requests of a lost island that one transaction takes over


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One request: its tasks, what each of them needs, and how long they are expected to take.

    `parted` are gangs that are too wide for any island: how many of their seats lie on each, the
    last of which is their home.
    """

    tasks: Sequence[Row[Any]]
    needs: Mapping[str, Sequence[Row[Any]]]
    time_ns: Mapping[str, int]
    parted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def width(self, task: Row[Any]) -> int:
        """How many devices it needs at once, on its island."""
        of = self.parted.get(task.id)
        return task.devices_min if of is None else of[max(of)]

    @property
    def tenant(self) -> str:
        return str(self.tasks[0].tenant_id)


def assign_new(session: Session) -> set[str]:
    """Give every task that has none an island; returns the islands that got something."""
    rows = session.execute(_unassigned()).all()
    if not rows:
        return set()
    scene = _Scene.of(session)
    assigned, parted = list[tuple[str, str, JSON, bool]](), dict[str, Mapping[str, int]]()
    for work in _works(session, rows, scene.learned):
        found = scene.decided(work)
        if found is None and any(task.cancel_asked_at for task in work.tasks):
            found = scene.anywhere(work)  # any will do to end it
        if found is None:
            continue  # no islands have such devices now; it is looked at again
        scene.add(work, found)
        abroad = _needed_abroad(work, found)
        assigned += [(id, island, why, id in abroad) for id, (island, why) in found.items()]
        parted |= {id: why["tickets"] for id, (_, why) in found.items() if "tickets" in why}
    _write(session, assigned)
    span.issue(session, parted)
    return {island for _, island, _, _ in assigned}.union(*parted.values())


# --- why, for people ------------------------------------------------------------------------------

NOWHERE = "So far no islands have the devices that all of its request needs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The island of a task, and why; `crossing_bytes` as expected when that was decided."""

    task: str
    island: str | None
    because: str
    crossing_bytes: int


def places(session: Session, request_id: str) -> list[Place]:
    query = select(Task.name, Task.island, Task.assigned).where(Task.request_id == request_id)
    found = []
    for name, island, why in session.execute(query.order_by(Task.id)):
        because = (why or {}).get("because", NOWHERE if island is None else "")
        across = (why or {}).get("crossing_bytes", 0)
        found.append(Place(task=name, island=island, because=because, crossing_bytes=across))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A task's output that is taken on another island; once for each such island.

    `planned_bytes` is None of what is no leg's, `moved_bytes` and `head_bytes` until it was
    taken there: what it is, and what its file says of it beside that.  `ways` are those by which it
    came: from "host" to host, from the "store", or neither, as it lay there.
    """

    block: str
    source: str
    target: str
    planned_bytes: int | None
    moved_bytes: int | None
    head_bytes: int | None
    ways: list[str]


def crossings(session: Session, request_id: str) -> list[Crossing]:
    """In the order of the tasks that take them; of several on one island the first."""
    maker, taker = aliased(Task), aliased(Task)
    part = maker.descriptor["run"]["part"]
    came = Placement.ways[Need.port].astext
    begun_with = taker.first_started_at.is_not(None) & ~Need.late
    query = (
        select(maker.name, Need.output, maker.island, taker.island, maker.outputs, part)
        .add_columns(func.bool_or(begun_with | came.is_not(None)))
        .add_columns(func.array_agg(came.distinct()))
        .join(maker, maker.id == Need.needs_id)
        .join(taker, taker.id == Need.task_id)
        .outerjoin(Placement, and_(Placement.task_id == taker.id, ~Placement.guest))
        .where(taker.request_id == request_id, Need.port != "", maker.island != taker.island)
        .group_by(maker.id, Need.output, taker.island)
        .order_by(func.min(taker.id), Need.output)
    )
    found = []
    for name, output, source, target, outputs, leg, taken, ways in session.execute(query):
        kept = outputs[output] if taken else {}
        head = kept.get("head_bytes", 0)  # not told by devices of older versions
        found.append(
            Crossing(
                block=f"{name}.{output}",
                source=source,
                target=target,
                planned_bytes=(leg or {}).get("bytes", {}).get(output),
                moved_bytes=kept["size_bytes"] - head if taken else None,
                head_bytes=head if taken else None,
                ways=sorted({"host", "store"}.intersection(ways)),
            )
        )
    return found


# --- islands that are lost ------------------------------------------------------------------------


def dark(session: Session) -> set[str]:
    """Islands with something to do that nobody leads, and of which no device is heard."""
    alive = select(Device.id).where(
        Device.island == IslandRow.name, Device.lease_until > func.now()
    )
    work = select(Task.id).where(Task.island == IslandRow.name, Task.state.not_in(ENDED))
    led = func.coalesce(IslandRow.leader_until > func.now(), False)
    query = select(IslandRow.name).where(~led, ~alive.exists(), work.exists())
    return set(session.scalars(query))


def take_over(session: Session, lost: str, *, after: str = "") -> tuple[set[str], str | None]:
    """Assign what a lost island has not ended anew, the requests behind `after`, some at a time.

    Returns the islands that got something, and behind which request to go on; None at the end.
    Its row is locked, as by its own scheduler, and looked at again: if it came back, all stays.
    """
    row = select(IslandRow.name).where(IslandRow.name == lost)
    session.execute(row.with_for_update(key_share=True))
    if lost not in dark(session):
        return set(), None
    touched = set[str]() if after else _release_gangs(session, lost)
    mine = (Task.island == lost, Task.state.not_in(ENDED), Task.gang_id.is_(None))
    query = select(Task.request_id).where(*mine, Task.request_id > after)
    ids = session.scalars(query.distinct().order_by(Task.request_id).limit(PAGE)).all()
    theirs = select(Task.id).where(Task.request_id.in_(ids), Task.island == lost)
    session.execute(theirs.order_by(Task.id).with_for_update(key_share=True))  # as wishes lock them
    scene = _Scene.of(session, without=lost)
    rows = session.execute(_tasks().where(Task.request_id.in_(ids)).order_by(Task.id)).all()
    for work in _works(session, rows, scene.learned):
        found = scene.decided(work, lost=lost)
        if found is None:
            continue  # nobody else has such devices: it waits for the island
        scene.add(work, found)
        anew = {id: (to, _anew(lost, to, why)) for id, (to, why) in found.items()}
        journal.hand_over(
            session, {id: (to, why["because"]) for id, (to, why) in anew.items()}, lost
        )
        abroad = _needed_abroad(work, found)
        _write(session, [(id, to, why, id in abroad) for id, (to, why) in anew.items()])
        touched |= {island for island, _ in found.values()}
    journal.settle(session)
    return touched, ids[-1] if len(ids) == PAGE else None


def _release_gangs(session: Session, lost: str) -> set[str]:
    """Members of gangs that span islands stay, as no other has room for all of one; but what they
    hold on a lost island is gone, and seats that are kept for them elsewhere are let go.
    """
    members = (Task.island == lost, Task.gang_id.is_not(None), Task.state.not_in(ENDED))
    query = select(Task.id).where(
        *members, or_(Task.seat.is_not(None), Task.cancel_asked_at.is_not(None))
    )
    ids = session.scalars(query.order_by(Task.id).limit(PAGE)).all()
    journal.unseat(session, ids, f"The island {lost} is lost, and its devices with it.")
    other = aliased(Task)
    theirs = select(other.gang_id).where(other.id.in_(ids))
    islands = select(Task.island).where(Task.gang_id.in_(theirs), Task.island != lost)
    return {str(island) for island in session.scalars(islands.distinct())}


def _anew(lost: str, island: str, why: JSON) -> JSON:
    told = f"The island {lost} is lost; {island} goes on with it. {why['because']}"
    return {**why, "because": told}


# --- what is decided ------------------------------------------------------------------------------

Seats = dict[str, tuple[str, JSON]]  # task -> its island, and why


@dataclass(slots=True)
class _Scene:
    """The islands as they are, with what was assigned in this transaction.

    `up` are devices that can take work now, of islands that are led; `all` those that once joined,
    and `offers` the same ones by (island, kind).
    """

    up: dict[str, dict[str, Stock]]
    all: dict[str, dict[str, Stock]]
    offers: Mapping[tuple[str, str], Offer]
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    learned: forecast.Learned | None = None
    links: dict[tuple[str, ...], tuple[Link, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session, *, without: str = "") -> _Scene:
        up, all_ = (
            defaultdict[str, dict[str, Stock]](dict),
            defaultdict[str, dict[str, Stock]](dict),
        )
        found = defaultdict[tuple[str, str], list[Row[Any]]](list)
        for row in session.execute(_devices(without)):
            found[row.island, row.kind].append(row)
        for (island, kind), rows in found.items():
            all_[island][kind] = Stock(kind=kind, devices=sum(row.devices for row in rows))
            if can := sum(row.up for row in rows):
                up[island][kind] = Stock(kind=kind, devices=can)
        offers = {
            of: Offer(tuple(Alike(of[0], row.host, row.memory_bytes, row.devices) for row in rows))
            for of, rows in found.items()
        }
        if len(all_) < 2:  # nothing is weighed where there is no choice
            return cls(up=up, all=all_, offers=offers)
        scene = cls(
            up=up,
            all=all_,
            offers=offers,
            tenants=snapshot.tenants(session),
            learned=_learned.refreshed(session),
        )
        scene._count_queues(session)
        return scene

    def decided(self, work: _Work, *, lost: str = "") -> Seats | None:
        """The island of each task, or of each on the lost one; None if there is none for some."""
        for stocks in (self.up, self.all):
            try:
                return self._decided(work, stocks, lost)
            except Unplaceable:
                continue
        return None

    def anywhere(self, work: _Work) -> Seats | None:
        island = min(self.all, default=None)
        why = {"because": "It is to be cancelled, and any island can end it."}
        return None if island is None else {task.id: (island, why) for task in work.tasks}

    def add(self, work: _Work, found: Seats) -> None:
        """What comes later finds this queued."""
        kinds = {task.id: task.kind for task in work.tasks}
        for id, (island, _) in found.items():
            self._queue(island, kinds[id], work.tenant, work.time_ns[id])

    def _queue(self, island: str, kind: str, tenant: str, work_ns: int) -> None:
        for stocks in (self.up, self.all) if self.tenants else ():
            if (stock := stocks.get(island, {}).get(kind)) is not None:
                stock.add(tenant, work_ns, self.tenants)

    def _count_queues(self, session: Session) -> None:
        for query in _queued():
            for island, kind, tenant, width, count in session.execute(query):
                usual_ns = _usual_ns(self.learned, tenant, width)
                self._queue(island, kind, tenant, count * width * usual_ns)

    def _decided(self, work: _Work, stocks: Mapping[str, Mapping[str, Stock]], lost: str) -> Seats:
        work = work if lost else replace(work, parted=self._parted(work, stocks))
        needed = Counter[str]()
        for task in work.tasks:
            if not _stays(task) and task.island in (None, lost):
                needed[task.kind] += work.time_ns[task.id] * work.width(task)
        islands = [
            Island(
                id=name,
                places=frozenset({name}),
                rooms={
                    kind: self._room(of_kind[kind], work.tenant, needed[kind])
                    for kind in {task.kind for task in work.tasks} & of_kind.keys()
                },
            )
            for name, of_kind in sorted(stocks.items())
        ]
        able = {task.id: self._able(task, stocks) for task in work.tasks}
        able |= {id: (max(of),) for id, of in work.parted.items()}
        graph = _graph(work, able, all_=[island.id for island in islands])
        found = self._portions(work, graph, islands)
        reads = {node.id: frozenset(node.reads) for node in graph.nodes}
        late = {task.id: _late_bytes(work, found, task.id) for task in work.tasks}
        return {
            task.id: (
                found.seats[task.id],
                _why(found, work, task, able[task.id], reads[task.id], late[task.id]),
            )
            for task in work.tasks
            if task.island in (None, lost) and task.id in found.seats and not task.gang_id
        }

    def _room(self, stock: Stock, tenant: str, work_ns: int) -> Room:
        if not self.tenants:
            return Room(devices=stock.devices, share=stock.devices)
        return stock.room(tenant, work_ns, self.tenants)

    def _able(self, task: Row[Any], stocks: Mapping[str, Mapping[str, Stock]]) -> tuple[str, ...]:
        """The islands with as many devices that are large enough, together if they must lie so."""
        return tuple(
            name
            for name, of_kind in sorted(stocks.items())
            if task.kind in of_kind and task.devices_min <= self._most(task, name)
        )

    def _most(self, task: Row[Any], island: str) -> int:
        """How many devices a task can have there at once."""
        offer = self.offers[island, task.kind]
        if task.across_hosts:
            return offer.by_island(task.memory_bytes)[island]
        return offer.together(task.memory_bytes)

    def _parted(
        self, work: _Work, stocks: Mapping[str, Mapping[str, Stock]]
    ) -> dict[str, dict[str, int]]:
        """Gangs that are too wide for any island, also when all its devices are up, and may lie on
        several.
        """
        parted = {}
        for task in work.tasks:
            if not task.may_span or self._able(task, self.all):
                continue
            there = {name for name, of_kind in stocks.items() if task.kind in of_kind}
            devices = {
                name: min(self._most(task, name), stocks[name][task.kind].devices) for name in there
            }
            if of := divided(task.devices_min, devices, task.islands):
                parted[task.id] = of
        return parted

    def _portions(self, work: _Work, graph: Graph, islands: Sequence[Island]) -> Portions:
        names = tuple(island.id for island in islands)
        links = self.links.setdefault(names, tuple(_links(names)))
        island = {task.id: task.island for task in work.tasks if task.island is not None}
        before = {n.id: island[_task_of(n)] for n in graph.nodes if _task_of(n) in island}
        if not before:
            free = apportion(graph, islands, links, EFFORT)
            ways = [apportion(way, islands, links, EFFORT) for way in _together(work, graph, names)]
            best = min(ways, key=lambda way: (way.makespan_ns, way.bytes), default=free)
            return best if best.makespan_ns <= TOGETHER * free.makespan_ns else free
        ended = {task.id for task in work.tasks if _stays(task)}
        done = [node.id for node in graph.nodes if _task_of(node) in ended]
        # What has ended lies in the store, which is as near to one island as to the other.
        at = {block: names for node in graph.nodes if node.id in done for block in node.writes}
        return reassign(graph, islands, links, before=before, done=done, at=at, effort=EFFORT)


def _graph(work: _Work, able: Mapping[str, tuple[str, ...]], *, all_: Sequence[str]) -> Graph:
    """Its tasks as nodes, the outputs that they take from each other as blocks.

    A leg gives some while it runs: it is several nodes there, one behind the other on one island.
    What comes to it late is left out: it runs beside who makes that.
    """
    blocks, nodes = dict[str, int](), list[Node]()
    writes = defaultdict[str, dict[str, None]](dict)
    known = {task.id: task for task in work.tasks}
    for need in (need for needs in work.needs.values() for need in needs if need.port):
        block = f"{need.needs_id}.{need.output}"
        writes[need.needs_id][block] = None
        blocks[block] = _bytes(known[need.needs_id], need.output)
    spells = {
        task.id: list(_spells(task, work.time_ns[task.id], writes[task.id])) for task in work.tasks
    }
    for task in work.tasks:
        if not able[task.id] and not _stays(task):
            raise Unplaceable(f"node {task.id}", "no island has such a device")
        needs = work.needs.get(task.id, ())
        early = [need for need in needs if need.port and not need.late]
        reads = dict.fromkeys(f"{need.needs_id}.{need.output}" for need in early)
        after = {need.needs_id: len(spells[need.needs_id]) - 1 for need in needs if not need.port}
        whole = Node(
            id=task.id,
            time_ns={task.kind: work.time_ns[task.id]},
            reads=tuple(reads),
            after=tuple(_spell(id, last) for id, last in after.items()),
            width=work.width(task),
            devices=() if len(able[task.id]) == len(all_) else able[task.id],
        )
        nodes += _in_turn(whole, spells[task.id])
    held = {block: STAYS_BYTES for node in nodes for block in node.writes if block not in blocks}
    sizes = tuple(Block(id=id, bytes=bytes_) for id, bytes_ in (blocks | held).items())
    return Graph(nodes=tuple(nodes), blocks=sizes)


def _stays(task: Row[Any]) -> bool:
    """Whatever becomes of its island: it has ended, or its gang spans islands."""
    return task.state in ENDED or task.gang_id is not None


def _in_turn(whole: Node, spells: Sequence[_Spell]) -> Iterator[Node]:
    """A task as nodes, each of which needs what the one before it holds."""
    taken = whole
    for n, (time_ns, given) in enumerate(spells):
        held = f"{_spell(whole.id, n)}.held"
        writes = (*given, held) if n + 1 < len(spells) else tuple(given)
        times = dict.fromkeys(whole.time_ns, time_ns)
        yield replace(taken, id=_spell(whole.id, n), time_ns=times, writes=writes)
        taken = replace(whole, reads=(held,), after=())


def _spell(task: str, n: int) -> str:
    return f"{task}/{n}" if n else task


def _task_of(node: Node) -> str:
    return node.id.partition("/")[0]


_Spell = tuple[int, list[str]]


def _spells(task: Row[Any], time_ns: int, blocks: Collection[str]) -> Iterator[_Spell]:
    """How long it runs on until it gives some of its blocks, again and again; what it gives soon
    one after the other is given together.
    """
    after_ms = {} if task.leg is None else task.leg.get("after_ms", {})
    at_ns = {}
    for block in blocks:
        ms = after_ms.get(block.rpartition(".")[2])
        at_ns[block] = time_ns if ms is None else min(time_ns, int((ms + LAUNCH_MS) * 1e6))
    ran_ns, together = 0, list[str]()
    for block, at in sorted(at_ns.items(), key=lambda one: one[1]):
        if together and at - at_ns[together[0]] > APART_NS:
            yield at_ns[together[-1]] - ran_ns, together
            ran_ns, together = at_ns[together[-1]], []
        together.append(block)
    if together and at_ns[together[-1]] + APART_NS < time_ns:
        yield at_ns[together[-1]] - ran_ns, together
        ran_ns, together = at_ns[together[-1]], []
    yield time_ns - ran_ns, together


def _together(work: _Work, graph: Graph, islands: Sequence[str]) -> Iterator[Graph]:
    """The graph with each portion of its graphs on an island of its own, in every way.

    They were cut so that this is as quick as can be.  Legs apart save bytes, which `apportion`
    weighs against the time of all: on the way from block to block, it adds up.
    """
    portion = {task.id: _portion(task) for task in work.tasks if task.leg is not None}
    count = max(portion.values(), default=0) + 1
    if count < 2 or count > len(islands) or len(islands) > MAX_PERMUTED:
        return
    for chosen in permutations(islands, count):
        seats = {id: chosen[n] for id, n in portion.items()}
        if all(
            seats.get(_task_of(node), "") in ("", *(node.devices or islands))
            for node in graph.nodes
        ):
            seated = (
                replace(node, devices=(seats[_task_of(node)],)) if _task_of(node) in seats else node
                for node in graph.nodes
            )
            yield replace(graph, nodes=tuple(seated))


def _portion(task: Row[Any]) -> int:
    """A leg is called NAME.PORTION.LEG."""
    return int(task.name.rsplit(".", 2)[1])


def _bytes(task: Row[Any], output: str) -> int:
    """As it was made, or as it was declared, or as usual."""
    if output in task.outputs:
        return int(task.outputs[output]["size_bytes"])
    declared = task.leg["bytes"] if task.leg is not None else {}
    return int(declared.get(output, USUAL_BYTES))


def _links(names: Sequence[str]) -> Iterator[Link]:
    """Every island to every other."""
    speed = settings().island_link_bytes_per_s
    for source in names:
        for target in names:
            if source != target:
                yield Link(source=source, target=target, bytes_per_s=speed)


def _late_bytes(work: _Work, found: Portions, id: str) -> int:
    """What comes to a task late, from other islands than its own."""
    known = {task.id: task for task in work.tasks}
    seats = {task.id: task.island for task in work.tasks} | dict(found.seats)
    return sum(
        _bytes(known[need.needs_id], need.output)
        for need in work.needs.get(id, ())
        if need.late and seats[need.needs_id] != seats[id]
    )


def _why(
    found: Portions,
    work: _Work,
    task: Row[Any],
    able: Sequence[str],
    reads: frozenset[str],
    late_bytes: int,
) -> JSON:
    island = found.seats[task.id]
    early = sum(c.bytes for c in found.crossings if c.target == island and c.block in reads)
    across = early + late_bytes
    ends_s = round(found.makespan_ns / 1e9, 3)
    why = {"ends_s": ends_s, "crossing_bytes": across}
    if task.id in work.parted:
        of = work.parted[task.id]
        seats = " and ".join(f"{n} of {name}" for name, n in of.items())
        told = f"No island has {task.devices_min} such devices: its gang spans {seats}."
        return {"because": told, **why, "tickets": of}
    if len(able) == 1:
        told = f"Only {island} has such devices."
    else:
        told = f"{len(able)} islands can run it; so the request is expected to end soonest, in "
        told += f"{ends_s:.0f} s." if ends_s >= 1 else "less than a second."
    return {"because": told, **why}


def _needed_abroad(work: _Work, found: Seats) -> set[str]:
    """Tasks whose end others wait for on another island than theirs."""
    island = {task.id: task.island for task in work.tasks}
    island |= {id: to for id, (to, _) in found.items()}
    return {
        need.needs_id
        for id, needs in work.needs.items()
        for need in needs
        if island[id] != island[need.needs_id]
    }


# --- rows -----------------------------------------------------------------------------------------

_learned = forecast.Learned()  # how long tasks run


def _tasks() -> Select[Any]:
    return select(
        Task.id, Task.request_id, Task.tenant_id, Task.user_id, Task.name, Task.island, Task.state,
        Task.kind, Task.memory_bytes, Task.devices_min, Task.across_hosts,
        Task.cancel_asked_at, Task.outputs,
        Task.descriptor["run"]["part"].label("leg"),
        Task.descriptor["islands"].as_integer().label("islands"),
        (Task.descriptor["run"].has_key("job") & Task.across_hosts).label("may_span"),
        Task.gang_id,
    )  # fmt: skip


def _unassigned() -> Select[Any]:
    """Locked in the order of their ids, as wishes lock them, and without leaving any out: all tasks
    of a request are assigned at once.
    """
    mine = _tasks().where(Task.island.is_(None), Task.state.not_in(ENDED)).order_by(Task.id)
    return mine.with_for_update(key_share=True)


def _works(
    session: Session, rows: Sequence[Row[Any]], learned: forecast.Learned | None
) -> Iterator[_Work]:
    """Request by request, in the order of their first tasks."""
    requests = defaultdict[str, list[Row[Any]]](list)
    for row in rows:
        requests[row.request_id].append(row)
    needs = defaultdict[str, list[Row[Any]]](list)
    several = [task.id for tasks in requests.values() if len(tasks) > 1 for task in tasks]
    if several:
        query = select(Need.task_id, Need.needs_id, Need.port, Need.output, Need.late)
        for row in session.execute(query.where(Need.task_id == func.any(several))):
            needs[row.task_id].append(row)
    for tasks in requests.values():
        yield _Work(
            tasks=tasks,
            needs={task.id: needs[task.id] for task in tasks if task.id in needs},
            time_ns={task.id: _expected_ns(learned, task) for task in tasks},
        )


def _usual_ns(learned: forecast.Learned | None, tenant: str, width: int) -> int:
    """Of the tenant's tasks of that width, whatever they are."""
    usual_s = learned.usual_s(tenant, width) if learned is not None else None
    return USUAL_NS if usual_s is None else max(1, int(usual_s * 1e9))


def _expected_ns(learned: forecast.Learned | None, task: Row[Any]) -> int:
    """What a leg of a graph declares is taken for its time, and its launch: it is short, and never
    ran before.
    """
    if task.leg is not None:
        return int((task.leg["ms"] + LAUNCH_MS) * 1e6)
    expected_s = learned.expected_s(task) if learned is not None else None
    return USUAL_NS if expected_s is None else max(1, int(expected_s * 1e9))


def _write(session: Session, assigned: Sequence[tuple[str, str, JSON, bool]]) -> None:
    """(task, island, why, do other islands need it)"""
    if not assigned:
        return
    ids, islands, whys, abroad = zip(*assigned, strict=True)
    values = {"ids": list(ids), "islands": list(islands), "abroad": list(abroad)}
    session.execute(_ASSIGN, {**values, "whys": [json.dumps(why) for why in whys]})


_ASSIGN = text(
    """
    update tasks set island = new.island, assigned = new.why, abroad = tasks.abroad or new.abroad
    from unnest(cast(:ids as text[]), cast(:islands as text[]), cast(:whys as jsonb[]),
        cast(:abroad as bool[])) as new (id, island, why, abroad)
    where tasks.id = new.id
    """
)


def _devices(without: str) -> Select[Any]:
    """Those of each other island that are alike, and lie on one host: how many, and how many of
    them can take work now.
    """
    can = and_(
        IslandRow.leader_until > func.now(),
        Device.lease_until > func.now(),
        ~Device.cordoned,
        ~Host.cordoned,
    )
    alike = (Device.island, Device.kind, Device.host, Device.memory_bytes)
    counts = (func.count().label("devices"), func.count().filter(can).label("up"))
    return (
        select(*alike, *counts)
        .join(Host, Host.name == Device.host)
        .join(IslandRow, IslandRow.name == Device.island)
        .where(Device.island != without)
        .group_by(*alike)
    )


def _queued() -> Iterator[Select[Any]]:
    """(island, kind, tenant, devices of each, how many) of all that waits, runs or is blocked."""
    yield select(Line.island, Line.kind, Line.tenant_id, Line.width, Line.waiting).where(
        Line.waiting > 0
    )
    open_ = (Placement.ended_at.is_(None), ~Placement.guest)
    running = (Device.island, Placement.kind, Placement.tenant_id, literal(1), func.count())
    by = (Device.island, Placement.kind, Placement.tenant_id)
    join = select(*running).join(Device, Device.id == Placement.device_id)
    yield join.where(*open_).group_by(*by)
    by_ = (Task.island, Task.kind, Task.tenant_id)
    blocked = select(*by_, literal(1), func.count()).where(Task.state == "blocked")
    yield blocked.where(Task.island.is_not(None)).group_by(*by_)
