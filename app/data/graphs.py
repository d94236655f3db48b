"""Handles graphs that tasks run: parses and checks them, stores them under their SHA-256, and finds
them.

A graph belongs to the tenant that sent it. Requests are checked against its row; its canonical
bytes lie in the store, where the devices fetch them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.descriptor import (
    BadDescriptor,
    Descriptor,
    RunSpec,
    TaskDescriptor,
    run_from_json,
)
from app.core.model.fields import Fault
from app.core.model.graphs import task_graph
from app.core.model.graphs.dependencies import Offer
from app.core.model.graphs.task_graph import MAX_NODES as MAX_KNOWN
from app.core.model.graphs.task_graph import TaskGraph, timed
from app.core.model.protocol.messages import JSON
from app.core.placement.executors import EVERYBODY, Copy, ExecutorSpread, copies, spread
from app.core.placement.partitions import MAX_NODES, Partition, expanded, late, of_run
from app.core.placement.partitions import cut as partitions_of
from app.core.placement.partitions import order as order_of_partition
from app.db.models import Graph, Task
from app.settings import settings
from app.storage.store import Store

NEWS = 1.25  # a value is stored if it differs from the known one by at least this factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Holds a graph as it was sent, and parsed; `is_new` means that the tenant does not have it
    yet.

    `took_ms` is how long its nodes took in earlier runs on such devices; `made_bytes` is how large
    their blocks were.
    """

    sha256: str
    body: JSON
    graph: TaskGraph
    is_new: bool = True
    took_ms: Mapping[str, float] = field(default_factory=dict)
    made_bytes: Mapping[str, int] = field(default_factory=dict)


def read(body: JSON, pointer: str = "") -> Sent:
    """Parse a graph.  Raises BadDescriptor with all its faults."""
    graph = task_graph.parse(body, pointer)
    sha256 = hashlib.sha256(task_graph.canonical(body)).hexdigest()
    return Sent(sha256=sha256, body=body, graph=graph)


def of_tasks(
    session: Session, tenant_id: str, descriptor: Descriptor
) -> tuple[dict[str, Sent], list[Fault]]:
    """Return the graph of each task that runs one, by the task's name, and the faults of the
    graphs.
    """
    found, faults = dict[str, Sent](), list[Fault]()
    for n, task in enumerate(descriptor.tasks):
        if task.run.kind != "graph":
            continue
        try:
            sent = _of_task(session, tenant_id, task, f"/tasks/{n}/run/graph")
        except BadDescriptor as error:
            faults += error.faults
        else:
            found[task.name] = sent
            faults += task_graph.check_task(sent.graph, task, f"/tasks/{n}")
    return found, faults


def _of_task(session: Session, tenant_id: str, task: TaskDescriptor, pointer: str) -> Sent:
    if not isinstance(task.run.graph, str):
        sent = read(task.run.graph, pointer)
        row = session.get(Graph, (tenant_id, sent.sha256))
    else:
        sha256 = task.run.graph.removeprefix("sha256:")
        row = session.get(Graph, (tenant_id, sha256))
        if row is None:
            told = (
                "your tenant has no such graph; submit the whole graph, or upload it with PUT "
                f"/v1/graphs/{sha256}"
            )
            raise BadDescriptor((Fault(pointer, told, "unknown-graph"),))
        sent = replace(read(row.body, pointer), sha256=sha256)
    if row is None:
        return sent
    took_ms = row.took_ms.get(task.devices.kind, {})
    graph = replace(timed(sent.graph, took_ms), made_bytes=row.made_bytes)
    return replace(sent, graph=graph, is_new=False, took_ms=took_ms, made_bytes=row.made_bytes)


def unknown_functions(sent: Sent, entry_points: Mapping[str, str], listed: str) -> Iterator[Fault]:
    """Yield a fault for each node with a function that is not in the bundle; `listed` names those
    that are.
    """
    for node in sent.graph.nodes:
        sort = entry_points.get(node.function)
        if sort != "function":
            there = f"is a {sort}" if sort else "is not in the bundle"
            told = f"{node.function} {there}; the bundle has the functions {listed}"
            yield Fault(f"{node.where}/function", told, "unknown-entry-point")


def too_large(
    descriptor: Descriptor, sent: Mapping[str, Sent], kinds: Mapping[str, Offer]
) -> Iterator[Fault]:
    """Yield a fault for each graph with a node that fits no device of its kind.

    Only declared sizes of blocks are known.
    """
    for n, task in enumerate(descriptor.tasks):
        offer = kinds.get(task.devices.kind)
        if task.name not in sent or offer is None:
            continue
        offer = offer.chosen(task.devices.choice)
        node, least = task_graph.largest(sent[task.name].graph)
        if least > offer.memory_bytes:
            told = f"the node {node.name} needs at least {least} bytes at once"
            room = f"the largest {task.devices.kind} device has {offer.memory_bytes}"
            yield Fault(f"/tasks/{n}/run/graph", f"{told}, but {room}", "unsatisfiable")


def cut(
    descriptor: Descriptor, sent: Mapping[str, Sent], kinds: Mapping[str, Offer]
) -> tuple[Descriptor, list[Fault]]:
    """Replace each graph that may use several islands by its partitions.

    It is cut for at most as many islands as can run one such task.  If that is a single island, the
    graph stays whole.
    """
    cuts, faults = dict[str, tuple[Partition, ...]](), list[Fault]()
    for n, task in enumerate(descriptor.tasks):
        if task.islands == 1 or task.name not in sent:
            continue
        islands = min(task.islands, kinds[task.devices.kind].islands(task.devices))
        if islands < 2:
            continue
        graph = sent[task.name].graph
        if len(graph.nodes) > MAX_NODES:
            told = (
                f"a graph over islands must have at most {MAX_NODES} nodes; got {len(graph.nodes)}"
            )
            faults.append(Fault(f"/tasks/{n}/islands", told, "range"))
            continue
        speed = settings().island_link_bytes_per_s
        found = partitions_of(graph, islands, task.world_size, bytes_per_s=speed)
        if len(found) > 1:
            cuts[task.name] = found
    if not cuts:
        return descriptor, faults
    descriptor, more = expanded(descriptor, cuts)
    return descriptor, [*faults, *more]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """A copy of a block from one executor to another; a size is None while it is not known."""

    block: str
    source: int
    target: int
    planned_bytes: int | None
    moved_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """The plan of a task's graph: the order of its nodes, their executors, and the blocks copied
    between them.
    """

    task: str
    graph: str
    executors: int
    is_done: bool
    nodes: Sequence[tuple[str, int | None]]
    copies: Sequence[BlockCopy]


def plans(session: Session, request_id: str) -> list[StoredPlan]:
    """Return the plans of a request's graph tasks; a lot stands for its members.

    They are computed each time, with the same result.
    """
    mine = (Task.request_id == request_id, Task.lot_index.is_(None))
    its = select(Task).where(*mine).order_by(Task.id)
    with_graph = its.where(Task.descriptor["run"].has_key("graph"))
    return [_plan(session, task) for task in session.scalars(with_graph)]


def _plan(session: Session, task: Task) -> StoredPlan:
    spec = task.spec
    sha256 = spec.run.graph_sha256
    body = session.get_one(Graph, (task.tenant_id, sha256)).body
    planned, passing = _spread(
        json.dumps(body), json.dumps(task.descriptor["run"]), spec.world_size
    )
    moved = {_way(one): one["bytes"] for one in task.passed or ()}
    unmoved = None if task.passed is None else 0
    return StoredPlan(
        task=task.name,
        graph=sha256,
        executors=spec.world_size,
        is_done=task.passed is not None,
        nodes=[(name, _executor(planned.seats[name])) for name in planned.order],
        copies=[
            BlockCopy(
                block=copy.block,
                source=copy.source,
                target=copy.target,
                planned_bytes=copy.bytes,
                moved_bytes=moved.get((copy.block, copy.source, copy.target), unmoved),
            )
            for copy in passing
        ],
    )


@lru_cache(maxsize=64)
def _spread(body: str, run: str, executors: int) -> tuple[ExecutorSpread, tuple[Copy, ...]]:
    """Plan the graph that a task with this `run` runs, both as JSON; a large graph takes
    seconds.
    """
    how = run_from_json(json.loads(run))
    graph = of_run(task_graph.parse(json.loads(body)), how)
    planned = spread(graph, executors, order=order_of_partition(how.part))
    return planned, copies(graph, planned, late(how.part))


def _way(passed: JSON) -> tuple[str, int, int]:
    return passed["block"], passed["source"], passed["target"]


def _executor(seat: int) -> int | None:
    return None if seat == EVERYBODY else seat


def named(descriptor: Descriptor, sent: Mapping[str, Sent]) -> Descriptor:
    """Replace each graph in the descriptor by its hash."""
    tasks = (
        replace(task, run=_run(task.run, sent[task.name])) if task.name in sent else task
        for task in descriptor.tasks
    )
    return replace(descriptor, tasks=tuple(tasks))


def _run(run: RunSpec, sent: Sent) -> RunSpec:
    """Replace the graph by its hash; add known times and sizes of its nodes, so that every process
    plans it in the same way.
    """
    nodes = sent.graph.nodes
    took_ms = {node.name: sent.took_ms[node.name] for node in nodes if node.name in sent.took_ms}
    blocks = [block for node in nodes for block in node.writes if block in sent.made_bytes]
    made_bytes = {block: sent.made_bytes[block] for block in blocks}
    return replace(run, graph=f"sha256:{sent.sha256}", took_ms=took_ms, made_bytes=made_bytes)


def learn(
    session: Session, task: Task, took_ms: Mapping[str, float], made_bytes: Mapping[str, int]
) -> None:
    """Store how long nodes of this task's graph took, and how large their blocks were, for later
    plans.

    If another transaction has locked the row, nothing is stored: the next run will store it.
    """
    sha256 = task.spec.run.graph_sha256
    mine = select(Graph).where(Graph.tenant_id == task.tenant_id, Graph.sha256 == sha256)
    row = session.scalar(mine.with_for_update(skip_locked=True))
    if row is None:
        return
    known_ms = row.took_ms.get(task.kind, {})
    if slower := _news(known_ms, took_ms):
        row.took_ms = {**row.took_ms, task.kind: known_ms | slower}
    if larger := _news(row.made_bytes, made_bytes):
        row.made_bytes = row.made_bytes | larger


def _news(known: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Return the values that differ from the known ones by NEWS.

    The values come from the tenant's process, so the number of names is limited.
    """
    may_add = len(known) < MAX_KNOWN
    return {
        name: value
        for name, value in told.items()
        if (may_add if name not in known else _differs(known[name], value))
    }


def _differs(known: float, value: float) -> bool:
    return not known / NEWS <= value <= known * NEWS


def keep(session: Session, tenant_id: str, sent: Iterable[Sent]) -> bool:
    """Put the bytes into the store, then insert the rows; True if any graph was new to the
    tenant.
    """
    fresh = {s.sha256: s for s in sent if s.is_new}.values()
    if not fresh:
        return False
    store = Store.at(settings().store_address)
    for s in fresh:
        if not store.has(s.sha256):
            store.put([task_graph.canonical(s.body)])
    rows = [
        {"tenant_id": tenant_id, "sha256": s.sha256, "nodes": len(s.graph.nodes), "body": s.body}
        for s in fresh
    ]
    made = insert(Graph).values(rows).on_conflict_do_nothing().returning(Graph.sha256)
    return bool(session.execute(made).all())
