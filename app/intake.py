"""A request becomes rows: checked as a whole, then written in the caller's transaction.

What is accepted is durable when the API answers.  An `Idempotency-Key` is a row of the same
transaction, so a twin that comes meanwhile waits for the first and gets the first one's answer.
Every task starts `blocked` and on no island; control assigns it, and the island does the rest.

A request that passes its tenant's share is queued.  Refused is only a tier that its tenant may not
ask for, and what passes a bound on the number of waiting tasks, or would publish beyond one on the
bytes of datablocks, where an administrator has set one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain

import uuid_utils
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app import datablocks, graphs, outbox, tree, webhooks
from app.changes import changes
from app.core import descriptor as descriptors
from app.core import graph, webhook
from app.core.descriptor import (
    TIERS,
    BadDescriptor,
    Descriptor,
    Fault,
    Source,
    TaskDescriptor,
    escaped,
)
from app.core.messages import JSON
from app.core.webhook import networks
from app.db import after_commit
from app.errors import AppError, BadInput, KeyReused, QueueFull, Unsatisfiable
from app.graphs import Sent
from app.models import (
    Bundle,
    Checkpoint,
    Datablock,
    Device,
    Event,
    Idempotency,
    Need,
    Request,
    Task,
    Tenant,
)
from app.settings import settings

_SORT_OF = {"job": "class", "function": "function"}


@dataclass(frozen=True, slots=True)
class Owner:
    """On whose behalf a request is taken in."""

    tenant_id: str
    user_id: str
    user_name: str


# --- checking -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """A descriptor that could run here; `path` are its tenant and all above it.

    `begun` are the checkpoints from which tasks go on, by the task's name, `graphs` what they run;
    `taken` the datablocks that inputs mean.
    """

    descriptor: Descriptor
    path: Sequence[tree.OnPath]
    begun: Mapping[str, Checkpoint]
    graphs: Mapping[str, Sent]
    taken: Mapping[Source, Datablock]

    def shown(self) -> JSON:
        """The request with every default filled in."""
        needs = graph.needs(self.descriptor)
        tasks = [
            {
                "name": task.name,
                "type": task.type,
                "kind": task.devices.kind,
                "needs": [
                    {"task": n.task, "port": n.port, "output": n.output} for n in needs[task.name]
                ],
                "descriptor": descriptors.as_json(task),
            }
            for task in self.descriptor.tasks
        ]
        name, tier = self.descriptor.name or "", self.descriptor.tier
        return {"name": name, "tier": tier, "tasks": tasks}


def checked(session: Session, owner: Owner, body: JSON) -> Checked:
    """Raises BadInput or Unsatisfiable with everything that is wrong, never only the first."""
    try:
        descriptor = descriptors.parse(body)
    except BadDescriptor as error:
        raise _refused(BadInput, error.faults) from error
    path = tree.path(session, owner.tenant_id)
    if body.get("tier") is None:
        descriptor = replace(descriptor, tier=_lower(descriptor.tier, _best_tier(path)))
    sent, faults = graphs.of_tasks(session, owner.tenant_id, descriptor)
    faults += [*graph.check(descriptor), *_entry_faults(session, owner, descriptor, sent)]
    begun = _begun(session, owner, descriptor)
    descriptor, more = _continued(session, descriptor, begun)
    descriptor, taken, unknown = _taken(session, owner, descriptor)
    more += [*unknown, *_tier_faults(descriptor.tier, path), *_notify_faults(descriptor)]
    if faults := [*faults, *more]:
        raise _refused(BadInput, faults)
    offers = _offers(session)
    never = graph.unsatisfiable(descriptor, offers)
    if faults := [*never, *graphs.too_large(descriptor, sent, offers)]:
        raise _refused(Unsatisfiable, faults)
    return Checked(graphs.named(descriptor, sent), path, begun, sent, taken)


def _best_tier(path: Sequence[tree.OnPath]) -> str:
    """The best that a tenant may ask for is the least of what it and those above it may."""
    return max((tenant.tier for tenant in path), key=TIERS.index)


def _lower(tier: str, other: str) -> str:
    return max(tier, other, key=TIERS.index)


def _tier_faults(tier: str, path: Sequence[tree.OnPath]) -> list[Fault]:
    best = _best_tier(path)
    if _lower(tier, best) == tier:
        return []
    allowed = " or ".join(TIERS[TIERS.index(best) :])
    told = f"requests of {path[0].name} may ask for {allowed}, not for {tier}"
    return [Fault("/tier", f"{told}; ask an administrator", "tier")]


def _notify_faults(descriptor: Descriptor) -> Iterator[Fault]:
    if descriptor.notify is not None:
        told = webhook.refusal(descriptor.notify.webhook, networks(settings().webhook_networks))
        if told is not None:
            yield Fault("/notify/webhook", told, "address")


def _refused(kind: type[AppError], faults: Sequence[Fault]) -> AppError:
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    first = f"{faults[0].pointer or 'the body'}: {faults[0].detail}"
    return kind(first + more, errors=tuple(faults))


def _entry_faults(
    session: Session, owner: Owner, descriptor: Descriptor, sent: Mapping[str, Sent]
) -> list[Fault]:
    """What `run` names and the bundle does not hold."""
    if descriptor.bundle is None:
        return []
    sha256 = descriptor.bundle.removeprefix("sha256:")
    bundle = session.get(Bundle, (owner.tenant_id, sha256))
    if bundle is None:
        told = f"your tenant has no such bundle; upload it with PUT /v1/bundles/{sha256}"
        return [Fault("/bundle", told, "unknown-bundle")]
    found = (_entry_fault(n, task, bundle) for n, task in enumerate(descriptor.tasks))
    of_nodes = (
        graphs.unknown_functions(one, bundle.entry_points, _listed(bundle, "function"))
        for one in sent.values()
    )
    return [*(fault for fault in found if fault is not None), *chain.from_iterable(of_nodes)]


def _entry_fault(n: int, task: TaskDescriptor, bundle: Bundle) -> Fault | None:
    wanted = _SORT_OF.get(task.run.kind)
    if wanted is None:
        return None
    pointer = f"/tasks/{n}/run/{task.run.kind}"
    sort = bundle.entry_points.get(task.run.entry)
    if sort == wanted:
        return None
    if sort is not None:
        told = f"{task.run.entry} is a {sort}, and a {task.run.kind} must be a {wanted}"
        return Fault(pointer, told, "unknown-entry-point")
    told = f"the bundle has no {wanted} {task.run.entry}; it has: {_listed(bundle, wanted)}"
    return Fault(pointer, told, "unknown-entry-point")


def _listed(bundle: Bundle, wanted: str) -> str:
    there = sorted(name for name, sort in bundle.entry_points.items() if sort == wanted)
    return ", ".join(there[:10]) or "none (a job is a top-level class with a step method)"


def _begun(session: Session, owner: Owner, descriptor: Descriptor) -> dict[str, Checkpoint]:
    """The checkpoints that tasks go on from, of this tenant and still to be had."""
    wanted = {t.from_checkpoint: t.name for t in descriptor.tasks if t.from_checkpoint is not None}
    query = select(Checkpoint).where(
        Checkpoint.id.in_(wanted),
        Checkpoint.tenant_id == owner.tenant_id,
        Checkpoint.damaged_at.is_(None),
        Checkpoint.deleted_at.is_(None),
    )
    by_id = {row.id: row for row in session.scalars(query)} if wanted else {}
    named = ((task.name, by_id.get(task.from_checkpoint or "")) for task in descriptor.tasks)
    return {name: row for name, row in named if row is not None}


def _continued(
    session: Session, descriptor: Descriptor, begun: Mapping[str, Checkpoint]
) -> tuple[Descriptor, list[Fault]]:
    """Tasks that go on from a checkpoint have the parameters and the datablocks that its job was
    made with: its image may refer to them.
    """
    faults: list[Fault] = []
    tasks = []
    for n, task in enumerate(descriptor.tasks):
        if task.from_checkpoint is not None and task.name in begun:
            before = session.get_one(Task, begun[task.name].task_id).descriptor
            lent = _datablocks_of(before)
            faults += _fork_faults(f"/tasks/{n}", task, before, lent)
            task = replace(task, params=before["params"], inputs={**task.inputs, **lent})
        elif task.from_checkpoint is not None:
            told = "your tenant has no such checkpoint (any more)"
            faults.append(Fault(f"/tasks/{n}/from_checkpoint", told, "unknown-checkpoint"))
        tasks.append(task)
    return replace(descriptor, tasks=tuple(tasks)), faults


def _datablocks_of(before: JSON) -> dict[str, Source]:
    said = before.get("inputs") or {}
    sources = {port: descriptors.source_of(source) for port, source in said.items()}
    return {port: it for port, it in sources.items() if it is not None and it.kind == "datablock"}


def _fork_faults(
    pointer: str, task: TaskDescriptor, before: JSON, lent: Mapping[str, Source]
) -> Iterator[Fault]:
    """The objects in a checkpoint were made by that job with those parameters, long ago."""
    if task.run.kind == "job" and task.run.entry != before["run"].get("job"):
        told = f"the checkpoint is one of {before['run'].get('job')}"
        yield Fault(f"{pointer}/run/job", told, "another-job")
    if task.params and dict(task.params) != before["params"]:
        told = (
            "its job was made with other parameters, and goes on with those: leave them out, or"
            " change what they set in the job's own code"
        )
        yield Fault(f"{pointer}/params", told, "other-parameters")
    for port, source in lent.items():
        if task.inputs.get(port, source) != source:
            told = f"its job was made with datablock:{source.block} here: leave it out, or say so"
            yield Fault(f"{pointer}/inputs/{escaped(port)}", told, "other-input")
    if task.world_size != before["world_size"]:
        told = f"the checkpoint has {before['world_size']} ranks"
        yield Fault(f"{pointer}/world_size", told, "other-ranks")


def _taken(
    session: Session, owner: Owner, descriptor: Descriptor
) -> tuple[Descriptor, dict[Source, Datablock], list[Fault]]:
    """The tasks with each datablock's version said, those versions, and what means nothing.

    They are not deleted before it is written down that they are needed.
    """
    wanted = {
        source
        for task in descriptor.tasks
        for source in task.inputs.values()
        if source.kind == "datablock"
    }
    found = datablocks.found(session, owner.tenant_id, wanted, keep=True)
    faults = [
        Fault(
            f"/tasks/{n}/inputs/{escaped(port)}",
            datablocks.missing(session, owner.tenant_id, source),
            "unknown-datablock",
        )
        for n, task in enumerate(descriptor.tasks)
        for port, source in task.inputs.items()
        if source in wanted - found.keys()
    ]
    exact = {source: replace(source, version=row.version) for source, row in found.items()}
    tasks = tuple(
        replace(task, inputs={p: exact.get(source, source) for p, source in task.inputs.items()})
        for task in descriptor.tasks
    )
    taken = {exact[source]: row for source, row in found.items()}
    return replace(descriptor, tasks=tasks), taken, faults


_OFFERS = select(Device.kind, func.count(), func.max(Device.memory_bytes)).group_by(Device.kind)


def _offers(session: Session) -> dict[str, graph.Offer]:
    """What there is of each device kind, whether it is up at this moment or not."""
    return {
        kind: graph.Offer(devices=devices, memory_bytes=memory_bytes)
        for kind, devices, memory_bytes in session.execute(_OFFERS)
    }


# --- writing ------------------------------------------------------------------------------------


def submit(session: Session, owner: Owner, body: JSON) -> Request:
    """Raises BadInput, Unsatisfiable, QueueFull or QuotaExceeded; control hears of it after the
    commit.
    """
    found = checked(session, owner, body)
    descriptor = found.descriptor
    _check_room(session, found.path, len(descriptor.tasks))
    graphs.keep(session, owner.tenant_id, found.graphs.values())
    if any(task.publish for task in descriptor.tasks):
        datablocks.check_room(session, owner.tenant_id, 0)
    request = _request(session, owner, descriptor, body)
    if descriptor.notify is not None:
        webhooks.expect_addresses(session, owner.tenant_id)
    ids = {task.name: _new_id("tsk") for task in descriptor.tasks}
    tasks = [
        _task(request, task, ids[task.name], ordinal, found.begun.get(task.name))
        for ordinal, task in enumerate(descriptor.tasks)
    ]
    # As values: objects would have every default of a hundred rows read back.
    session.execute(insert(Task), tasks)
    session.add_all(_copied(row, ids[name]) for name, row in found.begun.items())
    needs = [
        {"task_id": ids[name], "needs_id": ids[n.task], "port": n.port, "output": n.output}
        for name, needed in graph.needs(descriptor).items()
        for n in needed
    ]
    if needs:
        session.execute(insert(Need), needs)
    for task in descriptor.tasks:
        taken = {port: found.taken.get(source) for port, source in task.inputs.items()}
        datablocks.use(session, ids[task.name], {p: row for p, row in taken.items() if row})
    n = len(ids)
    session.add(
        Event(
            tenant_id=owner.tenant_id,
            request_id=request.id,
            type="request.submitted",
            message=f"{owner.user_name} submitted {request.name}: {n} task{'s' * (n > 1)}.",
        )
    )
    session.flush()
    after_commit(session, outbox.nudge_control)
    after_commit(session, lambda: changes.tell(request.tenant_id, request.id))
    return request


def _check_room(session: Session, path: Sequence[tree.OnPath], wanted: int) -> None:
    """Raises QueueFull if `wanted` more tasks pass the bound of the tenant or of one above it.

    Bounded tenants are locked until the commit, always in the order of their ids, so of two
    requests for the last place the second counts the first.  Without a bound nobody waits.
    """
    bounded = [tenant.id for tenant in path if tenant.max_queued is not None]
    if not bounded:
        return
    columns = (Tenant.id, Tenant.name, Tenant.max_queued)
    locked = select(*columns).where(Tenant.id.in_(bounded)).order_by(Tenant.id)
    for id, name, most in session.execute(locked.with_for_update(key_share=True)).all():
        queued = _queued(session, id)
        if most is not None and queued + wanted > most:
            raise QueueFull(_no_room(name, queued, wanted, most))


def _queued(session: Session, tenant_id: str) -> int:
    which = (tree.within(Task.tenant_id, tenant_id), Task.state.in_(("blocked", "waiting")))
    return session.scalar(select(func.count()).select_from(Task).where(*which)) or 0


def _no_room(name: str, queued: int, wanted: int, most: int) -> str:
    told = f"{name} has {queued} tasks waiting, of at most {most}; this request has {wanted}"
    if wanted > most:
        return f"{told}, which never fit: split it, or have max_queued raised"
    return f"{told}: cancel some, wait until some have started, or have max_queued raised"


def _request(session: Session, owner: Owner, descriptor: Descriptor, body: JSON) -> Request:
    id = _new_id("req")
    request = Request(
        id=id,
        tenant_id=owner.tenant_id,
        user_id=owner.user_id,
        name=descriptor.name or f"{descriptor.tasks[0].name}-{id[-6:]}",
        state="queued",
        tier=descriptor.tier,
        priority=descriptor.priority,
        labels=dict(descriptor.labels),
        descriptor=body,
        submitted_at=func.now(),
    )
    session.add(request)
    session.flush()
    return request


def _copied(begun: Checkpoint, task_id: str) -> Checkpoint:
    """The new task's own first checkpoint: the bytes stay, whatever becomes of the other task."""
    return Checkpoint(
        id=_new_id("ckp"),
        task_id=task_id,
        tenant_id=begun.tenant_id,
        epoch=0,
        step=begun.step,
        sha256=begun.sha256,
        size_bytes=begun.size_bytes,
        took_us=begun.took_us,
        host=begun.host,
        key=begun.key,
    )


def _task(
    request: Request, task: TaskDescriptor, id: str, ordinal: int, begun: Checkpoint | None
) -> dict[str, object]:
    """The values of a row."""
    not_before_s = task.start.not_before_s
    return dict(
        id=id,
        request_id=request.id,
        tenant_id=request.tenant_id,
        user_id=request.user_id,
        ordinal=ordinal,
        name=task.name,
        type=task.type,
        kind=task.devices.kind,
        descriptor=descriptors.as_json(task),
        memory_bytes=task.devices.memory_bytes,
        devices_min=task.devices.min,
        devices_max=task.devices.max,
        across_hosts=task.devices.across_hosts,
        tier=request.tier,
        priority=request.priority,
        hold="user" if task.start.hold else "",
        not_before=None if not_before_s is None else datetime.fromtimestamp(not_before_s, UTC),
        retry_max=task.retry_max,
        step=0 if begun is None else begun.step,
    )


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid_utils.uuid7().hex}"


# --- once only ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Once:
    """A call that is to be done once; without a key it is done each time."""

    user_id: str
    key: str | None
    route: str
    body: JSON

    @property
    def body_sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: JSON
    location: str


def replay(session: Session, once: Once) -> Answer | None:
    """The answer given before, or None: then do it, and `remember` the answer.

    Waits for a twin that is being done at this moment.  Raises KeyReused.
    """
    if once.key is None:
        return None
    row = insert(Idempotency).values(
        user_id=once.user_id, key=once.key, route=once.route, body_sha256=once.body_sha256
    )
    made = session.execute(row.on_conflict_do_nothing().returning(Idempotency.key)).one_or_none()
    if made is not None:
        return None
    before = session.get_one(Idempotency, (once.user_id, once.key), populate_existing=True)
    if (before.route, before.body_sha256) != (once.route, once.body_sha256):
        told = "this Idempotency-Key came with another body before; take a new key for new work"
        raise KeyReused.at("Idempotency-Key:", told, "reused")
    assert before.status is not None, "a key is committed together with its answer"
    return Answer(before.status, before.response or {}, before.location or "")


def remember(session: Session, once: Once, answer: Answer) -> None:
    if once.key is None:
        return
    this = (Idempotency.user_id == once.user_id, Idempotency.key == once.key)
    values = {"status": answer.status, "response": answer.body, "location": answer.location}
    session.execute(update(Idempotency).where(*this).values(**values))
