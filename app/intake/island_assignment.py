"""Assigns the tasks of requests to islands: the first of the two schedulers.

The tasks of a request and the data between them form a graph. Each island has a capacity for each
kind of device, which depends on the devices, the queued work and the tenant's fair share
(`core.placement.capacity`). `core.placement.islands` decides which task goes to which island. All
go to one island if that is as quick; several are used if kinds of devices or time require it. A
request of one task is a graph with one node. Outputs that a task on another island needs travel
through the store, as between two hosts of an island. Each island's own scheduler does the rest.

An island is *dark* if it has no leader and none of its devices sends heartbeats. After it was dark
for long enough, control declares it lost: its tasks that have not ended are assigned again
(`take_over`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from sqlalchemy import ColumnElement, Text, and_, any_, cast, func, literal, or_, select, text
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session, aliased

from app.core.model.device_choice import TRAITS, choice_in, traits_in
from app.core.model.graphs.dependencies import Alike, Offer
from app.core.model.lifecycle import ENDED
from app.core.model.protocol.messages import JSON
from app.core.model.snapshot import BoardTenant
from app.core.placement.capacity import Stock
from app.core.placement.islands import (
    KindCapacity,
    PlacementIsland,
    Portions,
    apportion,
    is_led,
    reassign,
)
from app.core.placement.local_search import Effort
from app.core.placement.partitions import LAUNCH_MS
from app.core.placement.planner import (
    PlannedBlock,
    PlannedGraph,
    PlannedLink,
    PlannedNode,
    Unplaceable,
)
from app.core.scheduling.gangs.island_gangs import divided
from app.db.models import Device, Host, Line, Need, Placement, Reservation, Task
from app.db.models import Island as IslandRow
from app.db.transactions import AnyRow, AnySelect
from app.insight import forecast
from app.intake import environments
from app.scheduling import gang_tickets, journal, snapshot_reader
from app.scheduling.journal import lots
from app.settings import settings

EFFORT = Effort(guard=1050, search=20_000, exact=10_000)  # 200 tasks take a sixth of a second
USUAL_NS = 60 * 10**9  # assumed time of an unknown task
USUAL_BYTES = 1 << 20  # assumed size of an output that was never made
# partitions are put on several islands if the request then takes at most this times as long
SEPARATE = 1.02
APART_NS = 10**8  # the plan treats blocks given within this time as given together
STAYS_BYTES = 1 << 50  # so large that the planner never separates the nodes of one task
MAX_PERMUTED = 4  # for up to so many islands all permutations of partitions are tried
PAGE = 100  # most requests of a lost island that one transaction takes over
NEW_PAGE = 500  # most requests that one transaction assigns


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWork:
    """Describes a request: its tasks, what each of them needs, and how long each is expected to
    take.

    `parted` has the gangs that are too wide for any one island, with their number of slots on each
    island. The last island by name is the gang's home.
    """

    tasks: Sequence[AnyRow]
    needs: Mapping[str, Sequence[AnyRow]]
    time_ns: Mapping[str, int]
    parted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def width(self, task: AnyRow) -> int:
        """The number of devices that the task needs at once on its island."""
        of = self.parted.get(task.id)
        return task.devices_min if of is None else of[max(of)]

    @property
    def tenant(self) -> str:
        return str(self.tasks[0].tenant_id)


def assign_new(session: Session, *, after: str = "") -> tuple[set[str], str | None]:
    """Assign tasks without an island, some requests at a time, starting behind the request `after`.

    Returns the islands that got something, and the request behind which to continue; None at the
    end.
    """
    query = select(Task.request_id).where(*_is_unassigned(), Task.request_id > after)
    ids = session.scalars(query.distinct().order_by(Task.request_id).limit(NEW_PAGE)).all()
    rows = session.execute(_unassigned(ids)).all() if ids else ()
    if not rows:
        return set(), None
    scene = AssignmentScene.of(session)
    assigned, parted = list[tuple[str, str, JSON, bool]](), dict[str, Mapping[str, int]]()
    for work in _works(session, rows, scene.learned):
        found = scene.decided(work)
        if found is None and any(task.cancel_asked_at for task in work.tasks):
            found = scene.anywhere(work)  # any island can end it
        if found is None:
            continue  # no island has such devices now; the request is tried again later
        scene.add(work, found)
        abroad = _needed_abroad(work, found)
        assigned += [(id, island, why, id in abroad) for id, (island, why) in found.items()]
        parted |= {id: why["tickets"] for id, (_, why) in found.items() if "tickets" in why}
    _write(session, assigned)
    gang_tickets.issue(session, parted)
    touched = {island for _, island, _, _ in assigned}.union(*parted.values())
    return touched, ids[-1] if len(ids) == NEW_PAGE else None


# --- why, for people ------------------------------------------------------------------------------

NOWHERE = "No set of islands has all devices of the request yet."
LOT_NOWHERE = "A lot has no island: each of its members gets one when it is made."


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedIsland:
    """Names the island of a task, and why; `crossing_bytes` is what was expected when that was
    decided.
    """

    task: str
    island: str | None
    because: str
    crossing_bytes: int


def places(session: Session, request_id: str) -> list[AssignedIsland]:
    mine = (Task.request_id == request_id, lots.IS_NO_MEMBER)
    query = select(Task.name, Task.island, Task.assigned, Task.lot_id).where(*mine)
    found = []
    for name, island, why, lot in session.execute(query.order_by(Task.id)):
        nowhere = NOWHERE if lot is None else LOT_NOWHERE
        because = (why or {}).get("because", nowhere if island is None else "")
        across = (why or {}).get("crossing_bytes", 0)
        found.append(
            AssignedIsland(task=name, island=island, because=because, crossing_bytes=across)
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Describes a task's output that is used on another island; one entry for each such island.

    `planned_bytes` is None unless the output belongs to a cut graph. `moved_bytes` is the size
    without the header of its file, `head_bytes` the size of that header; both are None until the
    output was used on the island. `ways` are the ways by which it came: "host" (from host to host),
    "store", or neither, if it was there already.
    """

    block: str
    source: str
    target: str
    planned_bytes: int | None
    moved_bytes: int | None
    head_bytes: int | None
    ways: list[str]


def crossings(session: Session, request_id: str) -> list[Crossing]:
    """Return the crossings in the order of the tasks that use them.

    If several tasks of an island use an output, the first counts.
    """
    maker, taker = aliased(Task), aliased(Task)
    part = maker.descriptor["run"]["part"]
    came = Placement.ways[Need.port].astext
    begun_with = taker.first_started_at.is_not(None) & ~Need.late
    # An array in addition to a join, so that the needs of no other request are read.
    takers = select(Task.id).where(Task.request_id == request_id, lots.IS_NO_MEMBER)
    query = (
        select(maker.name, Need.output, maker.island, taker.island, maker.outputs, part)
        .add_columns(func.bool_or(begun_with | came.is_not(None)))
        .add_columns(func.array_agg(came.distinct()))
        .join(maker, maker.id == Need.needs_id)
        .join(taker, taker.id == Need.task_id)
        .outerjoin(Placement, and_(Placement.task_id == taker.id, ~Placement.guest))
        .where(
            Need.task_id == any_(func.array(takers.scalar_subquery())),
            Need.port != "",
            maker.island != taker.island,
        )
        .group_by(maker.id, Need.output, taker.island)
        .order_by(func.min(taker.id), Need.output)
    )
    found = []
    for name, output, source, target, outputs, said, taken, ways in session.execute(query):
        kept = outputs[output] if taken else {}
        head = kept.get("head_bytes", 0)  # devices of older versions do not report this
        found.append(
            Crossing(
                block=f"{name}.{output}",
                source=source,
                target=target,
                planned_bytes=(said or {}).get("bytes", {}).get(output),
                moved_bytes=kept["size_bytes"] - head if taken else None,
                head_bytes=head if taken else None,
                ways=sorted({"host", "store"}.intersection(ways)),
            )
        )
    return found


# --- islands that are lost ------------------------------------------------------------------------


def dark(session: Session) -> set[str]:
    """Return islands that have work, but neither a leader nor a device with a valid lease or grace
    after it.
    """
    grace = Device.grace_us * text("interval '1 microsecond'")
    alive = select(Device.id).where(
        Device.island == IslandRow.name, Device.lease_until + grace > func.now()
    )
    work = select(Task.id).where(Task.island == IslandRow.name, Task.state.not_in(ENDED))
    led = func.coalesce(IslandRow.leader_until > func.now(), False)
    query = select(IslandRow.name).where(~led, ~alive.exists(), work.exists())
    return set(session.scalars(query))


def take_over(session: Session, lost: str, *, after: str = "") -> tuple[set[str], str | None]:
    """Assign the unfinished tasks of a lost island anew, some requests at a time, from behind
    `after`.

    Returns the islands that got something, and the request behind which to go on; None at the end.
    The island's row is locked, as its own scheduler does, and checked again: if the island is back,
    nothing changes.
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
    session.execute(theirs.order_by(Task.id).with_for_update(key_share=True))  # as actions do
    scene = AssignmentScene.of(session, without=lost)
    movable = (~lots.IS_LOT, or_(lots.IS_NO_MEMBER, Task.state.not_in(ENDED)))
    theirs_all = _tasks().where(Task.request_id.in_(ids), *movable).order_by(Task.id)
    rows = session.execute(theirs_all).all()
    for work in _works(session, rows, scene.learned):
        found = scene.decided(work, lost=lost)
        if found is None:
            continue  # no other island has such devices, so the task waits for the lost island
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
    """Release the slots on the lost island that members of gangs over several islands held.

    The members stay there, since no other island has room for the whole gang. Slots that are kept
    for them on other islands are released.
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
    told = f"The island {lost} is lost; the task continues on {island}. {why['because']}"
    return {**why, "because": told}


# --- what is decided ------------------------------------------------------------------------------

Seats = dict[str, tuple[str, JSON]]  # task -> its island, and why


@dataclass(slots=True)
class AssignmentScene:
    """Holds the islands as they are, including what was assigned in this transaction.

    `up` has the devices that can take work now, of islands that count as led. `all` has every
    device that ever joined, and `offers` the same devices by (island, kind).
    """

    up: dict[str, dict[str, Stock]]
    all: dict[str, dict[str, Stock]]
    offers: Mapping[tuple[str, str], Offer]
    tenants: Mapping[str, BoardTenant] = field(default_factory=dict)
    learned: forecast.Learned | None = None
    links: dict[tuple[str, ...], tuple[PlannedLink, ...]] = field(default_factory=dict)
    able: dict[tuple[Hashable, ...], tuple[str, ...]] = field(default_factory=dict)  # by need

    @classmethod
    def of(cls, session: Session, *, without: str = "") -> AssignmentScene:
        up, all_ = (
            defaultdict[str, dict[str, Stock]](dict),
            defaultdict[str, dict[str, Stock]](dict),
        )
        found = defaultdict[tuple[str, str], list[Alike]](list)
        led = _led(session)
        for row in session.execute(_hosts(without)):
            for group in map(json.loads, row.groups):
                devices, can, memory_bytes, *traits = group
                named = {
                    name: json.loads(one or "null")
                    for name, one in zip(TRAITS, traits, strict=True)
                }
                alike = Alike(
                    row.island, row.host, memory_bytes, devices, traits_in(named), row.hosts
                )
                found[row.island, row.kind].append(alike)
                _add_devices(all_[row.island], row.kind, devices * row.hosts)
                if can and row.island in led:
                    _add_devices(up[row.island], row.kind, can * row.hosts)
        offers = {of: Offer(tuple(alike)) for of, alike in found.items()}
        if len(all_) < 2:  # with a single island there is no choice to weigh
            return cls(up=up, all=all_, offers=offers)
        scene = cls(
            up=up,
            all=all_,
            offers=offers,
            tenants=snapshot_reader.tenants(session, ""),
            learned=_learned.refreshed(session),
        )
        scene._count_queues(session)
        return scene

    def decided(self, work: RequestWork, *, lost: str = "") -> Seats | None:
        """Return the island of each new task, or of each task on the `lost` island.

        Returns None if no island can run one of them.
        """
        for stocks in (self.up, self.all):
            try:
                return self._decided(work, stocks, lost)
            except Unplaceable:
                continue
        return None

    def anywhere(self, work: RequestWork) -> Seats | None:
        island = min(self.all, default=None)
        why = {"because": "The task is being cancelled; any island can end it."}
        return None if island is None else {task.id: (island, why) for task in work.tasks}

    def add(self, work: RequestWork, found: Seats) -> None:
        """Count the request as queued work, for the requests that are decided after it."""
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

    def _decided(
        self, work: RequestWork, stocks: Mapping[str, Mapping[str, Stock]], lost: str
    ) -> Seats:
        work = work if lost else replace(work, parted=self._parted(work, stocks))
        needed = Counter[str]()
        for task in work.tasks:
            if not _stays(task) and task.island in (None, lost):
                needed[task.kind] += work.time_ns[task.id] * work.width(task)
        islands = [
            PlacementIsland(
                id=name,
                places=frozenset({name}),
                rooms={
                    kind: self._room(of_kind[kind], work.tenant, needed[kind])
                    for kind in {task.kind for task in work.tasks} & of_kind.keys()
                },
            )
            for name, of_kind in sorted(stocks.items(), key=_by_load)
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

    def _room(self, stock: Stock, tenant: str, work_ns: int) -> KindCapacity:
        if not self.tenants:
            return KindCapacity(devices=stock.devices, share=stock.devices)
        return stock.room(tenant, work_ns, self.tenants)

    def _able(self, task: AnyRow, stocks: Mapping[str, Mapping[str, Stock]]) -> tuple[str, ...]:
        """Return the islands that have enough devices of sufficient size, on one host or as many
        on each of several if the task needs that; if it names a reservation, only the island that
        it is of.
        """
        traits = (task.device_choice, task.across_hosts, task.memory_bytes, task.devices_min)
        need = (stocks is self.up, task.kind, *traits, task.reserved_on)
        if (able := self.able.get(need)) is None:
            able = self.able[need] = tuple(
                name
                for name, of_kind in sorted(stocks.items())
                if task.kind in of_kind and task.devices_min <= self._most(task, name)
                if task.reserved_on in (None, name)
            )
        return able

    def _most(self, task: AnyRow, island: str) -> int:
        """The number of devices that the task can have at once on the island."""
        choice = choice_in(task.device_choice)
        offer = self.offers[island, task.kind].chosen(choice)
        if choice.hosts:
            share: int = task.devices_min // choice.hosts
            able = offer.hosts_with(share, task.memory_bytes)[island]
            return share * min(able, choice.hosts)
        if task.across_hosts:
            return offer.by_island(task.memory_bytes)[island]
        return offer.together(task.memory_bytes)

    def _parted(
        self, work: RequestWork, stocks: Mapping[str, Mapping[str, Stock]]
    ) -> dict[str, dict[str, int]]:
        """Divide the gangs that may use several islands and are too wide for any single one.

        Too wide means: wider than any island even with all its devices up.
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

    def _portions(
        self, work: RequestWork, graph: PlannedGraph, islands: Sequence[PlacementIsland]
    ) -> Portions:
        names = tuple(sorted(island.id for island in islands))
        if (links := self.links.get(names)) is None:
            links = self.links[names] = tuple(_links(names))
        island = {task.id: task.island for task in work.tasks if task.island is not None}
        before = {n.id: island[_task_of(n)] for n in graph.nodes if _task_of(n) in island}
        if not before:
            free = apportion(graph, islands, links, EFFORT)
            ways = [apportion(way, islands, links, EFFORT) for way in _together(work, graph, names)]
            best = min(ways, key=lambda way: (way.makespan_ns, way.bytes), default=free)
            return best if best.makespan_ns <= SEPARATE * free.makespan_ns else free
        ended = {task.id for task in work.tasks if _stays(task)}
        done = [node.id for node in graph.nodes if _task_of(node) in ended]
        # Outputs of ended tasks lie in the store, which is equally near to all islands.
        at = {block: names for node in graph.nodes if node.id in done for block in node.writes}
        return reassign(graph, islands, links, before=before, done=done, at=at, effort=EFFORT)


def _by_load(named: tuple[str, Mapping[str, Stock]]) -> tuple[int, str]:
    """Order islands by their queued work for each device; of equals the first is taken."""
    name, of_kind = named
    devices = sum(stock.devices for stock in of_kind.values())
    return sum(stock.total_ns for stock in of_kind.values()) // devices, name


def _graph(
    work: RequestWork, able: Mapping[str, tuple[str, ...]], *, all_: Sequence[str]
) -> PlannedGraph:
    """Build the placement graph: tasks as nodes, the outputs that they take from each other as
    blocks.

    A task of a cut graph gives some outputs while it runs.  So it becomes several nodes in sequence
    on one island.  Inputs that come late are left out, because the task runs at the same time as
    the task that makes them.
    """
    blocks, nodes = dict[str, int](), list[PlannedNode]()
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
        whole = PlannedNode(
            id=task.id,
            time_ns={task.kind: work.time_ns[task.id]},
            reads=tuple(reads),
            after=tuple(_spell(id, last) for id, last in after.items()),
            width=work.width(task),
            devices=() if len(able[task.id]) == len(all_) else able[task.id],
        )
        nodes += _in_turn(whole, spells[task.id])
    held = {block: STAYS_BYTES for node in nodes for block in node.writes if block not in blocks}
    sizes = tuple(PlannedBlock(id=id, bytes=bytes_) for id, bytes_ in (blocks | held).items())
    return PlannedGraph(nodes=tuple(nodes), blocks=sizes)


def _stays(task: AnyRow) -> bool:
    """True if the task cannot change its island: it has ended, or its gang uses several islands."""
    return task.state in ENDED or task.gang_id is not None


def _in_turn(whole: PlannedNode, spells: Sequence[_Spell]) -> Iterator[PlannedNode]:
    """Yield a task as a chain of nodes, each of which needs a block that the previous node
    holds.
    """
    taken = whole
    for n, (time_ns, given) in enumerate(spells):
        held = f"{_spell(whole.id, n)}.held"
        writes = (*given, held) if n + 1 < len(spells) else tuple(given)
        times = dict.fromkeys(whole.time_ns, time_ns)
        yield replace(taken, id=_spell(whole.id, n), time_ns=times, writes=writes)
        taken = replace(whole, reads=(held,), after=())


def _spell(task: str, n: int) -> str:
    return f"{task}/{n}" if n else task


def _task_of(node: PlannedNode) -> str:
    return node.id.partition("/")[0]


_Spell = tuple[int, list[str]]


def _spells(task: AnyRow, time_ns: int, blocks: Collection[str]) -> Iterator[_Spell]:
    """Yield (run time, blocks) for each time that the task gives blocks while it runs.

    Blocks that it gives within `APART_NS` are given together.
    """
    after_ms = {} if task.part is None else task.part.get("after_ms", {})
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


def _together(
    work: RequestWork, graph: PlannedGraph, islands: Sequence[str]
) -> Iterator[PlannedGraph]:
    """Yield the graph in every way in which each partition of its graph tasks has an island of its
    own.

    Graphs were cut so that this is as quick as possible. Partitions on one island save bytes, which
    `apportion` weighs against the total time; the delays from block to block add up.
    """
    parts = {task.id: _number(task) for task in work.tasks if task.part is not None}
    count = max(parts.values(), default=0) + 1
    if count < 2 or count > len(islands) or len(islands) > MAX_PERMUTED:
        return
    for chosen in permutations(islands, count):
        seats = {id: chosen[n] for id, n in parts.items()}
        if all(
            seats.get(_task_of(node), "") in ("", *(node.devices or islands))
            for node in graph.nodes
        ):
            seated = (
                replace(node, devices=(seats[_task_of(node)],)) if _task_of(node) in seats else node
                for node in graph.nodes
            )
            yield replace(graph, nodes=tuple(seated))


def _number(task: AnyRow) -> int:
    """The number of a partition; the task is called NAME.NUMBER."""
    return int(task.name.rpartition(".")[2])


def _bytes(task: AnyRow, output: str) -> int:
    """Return the size of an output: as it was made, or as it was declared, or else the usual
    size.
    """
    if output in task.outputs:
        return int(task.outputs[output]["size_bytes"])
    declared = task.part["bytes"] if task.part is not None else {}
    return int(declared.get(output, USUAL_BYTES))


def _links(names: Sequence[str]) -> Iterator[PlannedLink]:
    """Yield a link from every island to every other."""
    speed = settings().island_link_bytes_per_s
    for source in names:
        for target in names:
            if source != target:
                yield PlannedLink(source=source, target=target, bytes_per_s=speed)


def _late_bytes(work: RequestWork, found: Portions, id: str) -> int:
    """The bytes that come to the task late from other islands."""
    late = [need for need in work.needs.get(id, ()) if need.late]
    if not late:
        return 0
    known = {task.id: task for task in work.tasks}
    seats = {task.id: task.island for task in work.tasks} | dict(found.seats)
    return sum(
        _bytes(known[need.needs_id], need.output)
        for need in late
        if seats[need.needs_id] != seats[id]
    )


def _why(
    found: Portions,
    work: RequestWork,
    task: AnyRow,
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
    if task.reserved_on is not None:
        told = f"Its reservation is of {island}."
    elif len(able) == 1:
        told = f"Only {island} has such devices."
    else:
        told = (
            f"{len(able)} islands can run the task; here the request is expected to end first, in "
        )
        told += f"{ends_s:.0f} s." if ends_s >= 1 else "less than a second."
    return {"because": told, **why}


def _needed_abroad(work: RequestWork, found: Seats) -> set[str]:
    """Return the tasks that other tasks, on another island, wait for."""
    island = {task.id: task.island for task in work.tasks}
    island |= {id: to for id, (to, _) in found.items()}
    return {
        need.needs_id
        for id, needs in work.needs.items()
        for need in needs
        if island[id] != island[need.needs_id]
    }


def _add_devices(of_kind: dict[str, Stock], kind: str, devices: int) -> None:
    of_kind.setdefault(kind, Stock(kind=kind, devices=0)).devices += devices


# --- rows -----------------------------------------------------------------------------------------

_learned = forecast.Learned()  # usual run times of tasks


_RESERVED_ON = (
    select(Reservation.island)
    .where(Reservation.id == Task.reservation_id)
    .scalar_subquery()
    .label("reserved_on")
)


def _tasks() -> AnySelect:
    return select(
        Task.id, Task.request_id, Task.tenant_id, Task.user_id, Task.name, Task.island, Task.state,
        Task.kind, Task.memory_bytes, Task.devices_min, Task.across_hosts, Task.device_choice,
        Task.cancel_asked_at, Task.outputs,
        Task.descriptor["run"]["part"].label("part"),
        Task.descriptor["islands"].as_integer().label("islands"),
        (Task.descriptor["run"].has_key("job") & Task.across_hosts).label("may_span"),
        Task.gang_id, Task.lot_index, _RESERVED_ON,
    )  # fmt: skip


def _is_unassigned() -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that no island has the task yet, that its environment, if any, is
    locked, and that it is no lot.
    """
    is_pending = func.coalesce(environments.IS_PENDING, False)
    return Task.island.is_(None), Task.state.not_in(ENDED), ~is_pending, ~lots.IS_LOT


def _unassigned(requests: Sequence[str]) -> AnySelect:
    """Select and lock the tasks of these requests that have no island, in the order of their ids.

    Users' actions lock in the same order, so there is no deadlock. No row is skipped: all tasks of
    a request are assigned at once.
    """
    mine = _tasks().where(*_is_unassigned(), Task.request_id.in_(requests))
    return mine.order_by(Task.id).with_for_update(key_share=True)


def _works(
    session: Session, rows: Sequence[AnyRow], learned: forecast.Learned | None
) -> Iterator[RequestWork]:
    """Yield the requests in the order of their first tasks."""
    requests = defaultdict[str, list[AnyRow]](list)
    for row in rows:
        requests[row.request_id].append(row)
    needs = defaultdict[str, list[AnyRow]](list)
    # A lot is not among them, nor is what its members, which come later, need.
    known = {row.id for row in rows}
    several = [task.id for tasks in requests.values() if len(tasks) > 1 for task in tasks]
    if several:
        query = select(Need.task_id, Need.needs_id, Need.port, Need.output, Need.late)
        for row in session.execute(query.where(Need.task_id == func.any(several))):
            if row.needs_id in known:
                needs[row.task_id].append(row)
    for tasks in requests.values():
        yield RequestWork(
            tasks=tasks,
            needs={task.id: needs[task.id] for task in tasks if task.id in needs},
            time_ns={task.id: _expected_ns(learned, task) for task in tasks},
        )


def _usual_ns(learned: forecast.Learned | None, tenant: str, width: int) -> int:
    """The usual time of the tenant's tasks of that width, of whatever type."""
    usual_s = learned.usual_s(tenant, width) if learned is not None else None
    return USUAL_NS if usual_s is None else max(1, int(usual_s * 1e9))


def _expected_ns(learned: forecast.Learned | None, task: AnyRow) -> int:
    """The expected time of a task, in nanoseconds.

    For a task of a cut graph it is the declared time plus a launch: such a task is short and never
    ran before.
    """
    if task.part is not None:
        return int((task.part["ms"] + LAUNCH_MS) * 1e6)
    expected_s = learned.expected_s(task) if learned is not None else None
    return USUAL_NS if expected_s is None else max(1, int(expected_s * 1e9))


def _write(session: Session, assigned: Sequence[tuple[str, str, JSON, bool]]) -> None:
    """Write (task, island, why, whether other islands need the task)."""
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


def _led(session: Session) -> set[str]:
    """Return the islands that count as led."""
    left_s = func.extract("epoch", IslandRow.leader_until - func.now())
    rows = session.execute(select(IslandRow.name, left_s))
    lease_s = settings().leader_s
    return {name for name, left_s in rows if is_led(left_s, lease_s=lease_s)}


def _hosts(without: str) -> AnySelect:
    """Select the hosts of all islands except `without`, grouped by equal devices of a kind.

    Each of `groups` has a number of devices of such a host, how many of them can take work now if
    the island is led, their memory and their traits.
    """
    can = and_(
        Device.lease_until > func.now(),
        ~Device.cordoned,
        ~Host.cordoned,
    )
    # as texts: grouping by JSON takes longer
    traits = [cast(Device.facts[name], Text) for name in TRAITS]
    counts = (func.count(), func.count().filter(can))
    alike = (
        select(Device.island, Device.kind, Device.host)
        .add_columns(
            cast(func.jsonb_build_array(*counts, Device.memory_bytes, *traits), Text).label("group")
        )
        .join(Host, Host.name == Device.host)
        .where(Device.island != without)
        .group_by(Device.island, Device.kind, Device.host, Device.memory_bytes, *traits)
        .subquery()
    )
    groups = func.array_agg(aggregate_order_by(alike.c.group, alike.c.group)).label("groups")
    host = (alike.c.island, alike.c.kind, alike.c.host)
    hosts = select(*host, groups).group_by(*host).subquery()
    same = (hosts.c.island, hosts.c.kind, hosts.c.groups)
    names = (func.min(hosts.c.host).label("host"), func.count().label("hosts"))
    return select(*same, *names).group_by(*same)


def _queued() -> Iterator[AnySelect]:
    """Yield queries of (island, kind, tenant, devices of each, count) for all that waits, runs or
    is blocked.
    """
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
