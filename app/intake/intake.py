"""Accepts requests: checks each as a whole, then writes its rows in the caller's transaction.

What is accepted is durable when the API answers. An `Idempotency-Key` is a row of the same
transaction. So a second call with the same key waits for the first one and gets its answer. Every
task starts `blocked` and without an island; control assigns it, and the island does the rest.

A request that exceeds its tenant's share is queued, not refused. Refused are: a tier that the
tenant may not ask for; tasks above a limit on the number of waiting tasks; a publication above a
limit on the bytes of datablocks. An administrator sets those limits.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from itertools import chain
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app import log_patterns
from app.core.model import descriptor as descriptors
from app.core.model import lot_members
from app.core.model.descriptor import TIERS, BadDescriptor, Descriptor, Source, TaskDescriptor
from app.core.model.device_choice import TRAITS, traits_in
from app.core.model.fields import (
    MAX_COMPARED,
    MAX_FAULTS,
    Fault,
    escaped,
    near_name,
    shortened,
)
from app.core.model.graphs import dependencies, entry_signature
from app.core.model.graphs.entry_signature import Signature
from app.core.model.launchers import find_launcher
from app.core.model.protocol.messages import JSON
from app.core.model.provisions import collectives
from app.core.model.provisions.collectives import EXACT
from app.core.model.provisions.environment import TaskEnvironment
from app.core.model.provisions.network_policy import destination, is_allowed, listed
from app.core.model.provisions.notify import ChannelWish, Notify
from app.core.model.provisions.registry_image import allowed_registries, image_of, refusal
from app.core.security.addresses import networks
from app.core.webhooks import urls
from app.data import datablocks, graphs, mounts
from app.data.graphs import Sent
from app.db import tenant_tree
from app.db.ids import new_id
from app.db.models import Checkpoint, Datablock, Idempotency, Task, Tenant
from app.db.transactions import after_commit
from app.db.user_limits import LIMITS_OF_USER
from app.errors import AppError, BadInput, KeyReused, QueueFull, Unsatisfiable
from app.identity import secret_store
from app.intake import (
    environments,
    request_needs,
    reserved_tasks,
    starting_checkpoints,
    user_limits,
)
from app.intake.environments import WantedEnvironment
from app.intake.request_needs import FoundRequests
from app.messaging import channels, outbox, webhooks
from app.messaging.live_updates import changes
from app.scheduling import gang_tickets
from app.scheduling.journal import proposals
from app.scheduling.journal.lots import IS_NO_MEMBER
from app.settings import settings

TYPES_WITHOUT_PRESET = ("default", "train")  # a device's default preset is meant
LISTED = 10  # most entry points that a message names
MAX_DATABLOCKS = 10_000  # per request; one query takes at most 65,535 values
_SORT_OF = {"job": "class", "function": "function"}


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant and user that a request belongs to."""

    tenant_id: str
    user_id: str
    user_name: str


# --- the basis of the checks ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Once:
    """Describes a call that must take effect only once. A call without a key takes effect each
    time.
    """

    key: str | None
    route: str
    body: JSON

    @property
    def body_sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts of the database for a request; `now` is when the transaction began.

    `path` is the request's tenant and all tenants above it.  `entry_points` are those of its
    bundle, None if the tenant has no such bundle; `signatures` are those of the classes in the
    bundle.  `offers` are the devices by kind, whether up at this moment or not.  `is_first` is True
    unless an earlier call had the same Idempotency-Key.  `preset_types` are the task types that
    have a preset of their own. `user_limits` are those that hold for the user alone, and
    `usual_channels` are told unless the request says whom to notify.
    """

    now: datetime
    path: Sequence[tenant_tree.OnPath]
    entry_points: Mapping[str, str] | None
    signatures: Mapping[str, JSON]
    offers: Mapping[str, dependencies.Offer]
    is_first: bool
    preset_types: Sequence[str]
    user_limits: Mapping[str, Any]
    usual_channels: Sequence[ChannelWish] = ()


# Grouped as texts, because grouping by JSON takes four times as long for ten thousand devices.
_AS_TEXTS = ", ".join(f"cast(facts -> '{name}' as text) as {name}" for name in TRAITS)
_AS_JSON = ", ".join(f"'{name}', cast({name} as json)" for name in TRAITS)

# A single statement, because a round trip costs more than the reads.
_GROUND = text(
    f"""
    with recursive {tenant_tree.WAY},
    once as (
        insert into idempotency (user_id, key, route, body_sha256)
        select :user, cast(:key as text), cast(:route as text), cast(:body_sha256 as text)
        where cast(:key as text) is not null
        on conflict do nothing returning 1
    ),
    alike as (
        select kind, island, host, memory_bytes, {_AS_TEXTS}, count(*) as devices
        from devices group by kind, island, host, memory_bytes, {", ".join(TRAITS)}
    )
    select now(),
        (select json_agg(json_build_array(id, name, tier, max_queued, network) order by up)
            from way),
        (select entry_points from bundles where tenant_id = :id and sha256 = :bundle),
        (select signatures from bundles where tenant_id = :id and sha256 = :bundle),
        (select json_agg(json_build_array(kind, island, host, memory_bytes, devices,
            json_build_object({_AS_JSON}))) from alike),
        cast(:key as text) is null or exists (select from once),
        (select json_agg(distinct task_type) from presets),
        (select {LIMITS_OF_USER} from users u join tenants t on t.id = u.tenant_id
            where u.id = :user),
        (select notify from users where id = :user)
    """
)


def request_facts(session: Session, owner: Owner, once: Once) -> RequestFacts:
    """Read the facts for a call; waits for another call with the same key that is under way."""
    bundle = once.body.get("bundle")
    given = {
        "id": owner.tenant_id,
        "user": owner.user_id,
        "key": once.key,
        "route": once.route,
        "body_sha256": once.body_sha256 if once.key is not None else None,
        "bundle": bundle.removeprefix("sha256:") if isinstance(bundle, str) else "",
    }
    found = session.connection().execute(_GROUND, given).one()
    now, path, entry_points, signatures, alike, is_first, types, limits, notify = found
    return RequestFacts(
        now=now,
        path=[tenant_tree.OnPath(*row) for row in path],
        entry_points=entry_points,
        signatures=signatures or {},
        offers=_offers(alike or ()),
        is_first=is_first,
        preset_types=types or (),
        user_limits=limits or {},
        usual_channels=channels.wishes(notify or ()),
    )


def _offers(rows: Sequence[Sequence[Any]]) -> dict[str, dependencies.Offer]:
    by_kind = defaultdict[str, list[dependencies.Alike]](list)
    for kind, island, host, memory_bytes, devices, traits in rows:
        alike = dependencies.Alike(island, host, memory_bytes, devices, traits_in(traits))
        by_kind[kind].append(alike)
    return {kind: dependencies.Offer(tuple(found)) for kind, found in by_kind.items()}


# --- checking -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """A descriptor that could run here.

    `begun` are the checkpoints that tasks start from, and `graphs` the graphs that they run; both
    by the task's name.  `taken` are the datablocks that the inputs refer to, `after` the other
    requests that tasks need.  `notes` point out what is allowed but looks like a mistake.
    `channels` are told of the request.
    """

    descriptor: Descriptor
    begun: Mapping[str, Checkpoint]
    graphs: Mapping[str, Sent]
    taken: Mapping[Source, Datablock]
    notes: Sequence[str] = ()
    environment: WantedEnvironment | None = None
    after: FoundRequests = request_needs.NONE
    channels: Sequence[ChannelWish] = ()

    def shown(self) -> JSON:
        """Return the request with every default filled in."""
        needs = dependencies.needs(self.descriptor)
        tasks = [
            {
                "name": task.name,
                "type": task.type,
                "kind": task.devices.kind,
                "needs": [
                    *(
                        {"task": n.task, "port": n.port, "output": n.output}
                        for n in needs[task.name]
                    ),
                    *self.after.needs(task),
                ],
                "after_requests": self.after.shown(task),
                "descriptor": descriptors.as_json(task),
            }
            for task in self.descriptor.tasks
        ]
        name, tier = self.descriptor.name or "", self.descriptor.tier
        return {"name": name, "tier": tier, "tasks": tasks, "notes": [*self.notes]}


def checked(session: Session, owner: Owner, body: JSON, facts: RequestFacts) -> Checked:
    """Check a request.  Raises BadInput or Unsatisfiable with all faults, not only the first."""
    try:
        descriptor = descriptors.parse(body)
    except BadDescriptor as error:
        raise _refused(BadInput, error.faults) from error
    if wrong := [*lot_members.faults(descriptor), *_unproposable(descriptor)]:
        raise _refused(BadInput, wrong)
    if body.get("tier") is None:
        descriptor = replace(descriptor, tier=_lower(descriptor.tier, _best_tier(facts.path)))
    descriptor = user_limits.with_usual_durations(descriptor, body, facts.user_limits)
    sent, faults = graphs.of_tasks(session, owner.tenant_id, descriptor)
    faults += [
        *dependencies.check(descriptor),
        *_entry_faults(descriptor, facts.entry_points, sent),
    ]
    faults += _params_faults(lot_members.sampled(descriptor), facts.signatures)
    descriptor, begun, more = starting_checkpoints.find_checkpoints(
        session, owner.tenant_id, descriptor
    )
    descriptor, taken, unknown = _taken(session, owner, descriptor)
    descriptor, after, missing = request_needs.resolve(session, owner.tenant_id, descriptor)
    environment, bad = environments.wanted(session, owner.tenant_id, descriptor)
    more += [
        *unknown,
        *missing,
        *bad,
        *_secret_faults(session, owner, descriptor),
        *_tier_faults(descriptor.tier, facts.path),
        *_notify_faults(session, owner, descriptor),
        *_type_faults(descriptor, facts.preset_types),
    ]
    more += _network_faults(descriptor, facts.path)
    more += log_patterns.faults(descriptor)
    more += user_limits.faults(descriptor, facts.user_limits)
    path = [tenant.id for tenant in facts.path]
    more += mounts.faults(session, descriptor, path)
    more += _registry_faults(descriptor)
    more += reserved_tasks.faults(session, descriptor, path=path, user=owner.user_id)
    if faults := [*faults, *more]:
        raise _refused(BadInput, faults)
    descriptor = environments.entered(descriptor, environment)
    never = dependencies.unsatisfiable(lot_members.sampled(descriptor), facts.offers)
    if faults := [*never, *graphs.too_large(descriptor, sent, facts.offers)]:
        raise _refused(Unsatisfiable, faults)
    descriptor, uncut = graphs.cut(graphs.named(descriptor, sent), sent, facts.offers)
    if uncut:
        raise _refused(BadInput, uncut)
    told = _channels(descriptor, facts)
    return Checked(descriptor, begun, sent, taken, _notes(descriptor), environment, after, told)


def _channels(descriptor: Descriptor, facts: RequestFacts) -> Sequence[ChannelWish]:
    """Return the channels that are told of the request: its own, or the user's usual ones."""
    if descriptor.notify is None:
        return facts.usual_channels
    return () if isinstance(descriptor.notify, Notify) else descriptor.notify


def _notes(descriptor: Descriptor) -> list[str]:
    """Return a sentence for each task whose ranks could be faster: they share one device, as the
    task starts them by itself, or have a GPU each and sum in host memory; and for each process
    that has several devices and may not know it.
    """
    devices = {task.name: task.devices.min for task in descriptor.tasks}
    launchers = {
        task.name: launcher
        for task in descriptor.tasks
        if task.run.kind == "command" and (launcher := find_launcher(task.run.argv))
    }
    alone = [
        f"{name}: the ranks that {launcher.name} starts share one device. So that each has one:"
        f" --devices {launcher.ranks or 'N'}; and so that the task can shrink and grow:"
        f" {launcher.advice}"
        for name, launcher in launchers.items()
        if launcher.ranks != 1 and devices[name] == 1
    ]
    one_process = [
        f"{task.name}: it is one process with {task.devices.min} devices. To have a rank started on"
        f" each, set world_size (--ranks {task.devices.min})"
        for task in descriptor.tasks
        if task.run.kind == "command"
        and task.world_size == 1 < task.devices.min
        and task.name not in launchers
    ]
    apart = [
        f"{task.name}: its ranks have a GPU each, and their sums go through host memory. With"
        " collectives: native they use NCCL, at its speed and with its bits"
        for task in descriptor.tasks
        if task.run.kind in collectives.NEEDS
        and task.world_size == task.devices.min > 1
        and task.devices.kind == "cuda"
        and task.collectives == EXACT
    ]
    return alone + one_process + apart


def _type_faults(descriptor: Descriptor, preset_types: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each unknown task type with a name close to a type that has a preset."""
    known = [name for name in preset_types if name != "*"]
    meant = {
        name: near_name(name, known)
        for name in {task.type for task in descriptor.tasks} - {*known, *TYPES_WITHOUT_PRESET}
    }
    for n, task in enumerate(descriptor.tasks):
        if near := meant.get(task.type):
            told = f"no preset has the type {task.type!r}; did you mean {near!r}?"
            yield Fault(f"/tasks/{n}/type", told, "unknown-type")


def _unproposable(descriptor: Descriptor) -> Iterator[Fault]:
    """Yield faults for searches whose values this service cannot propose."""
    for n, task in enumerate(descriptor.tasks):
        if task.search is not None and task.search.learns and not proposals.is_available():
            told = f"this service lacks the package {proposals.PACKAGE}, which proposes values for "
            told += "tpe. Use random or grid, or let its operator install roundhouse[search]"
            yield Fault(f"/tasks/{n}/search/method", told, "not-installed")


def _best_tier(path: Sequence[tenant_tree.OnPath]) -> str:
    """Return the best tier that a tenant may ask for: the lowest of its own tier and those of the
    tenants above.
    """
    return max((tenant.tier for tenant in path), key=TIERS.index)


def _lower(tier: str, other: str) -> str:
    return max(tier, other, key=TIERS.index)


def _secret_faults(session: Session, owner: Owner, descriptor: Descriptor) -> Iterator[Fault]:
    """Yield faults for secrets that neither the user nor the tenant has."""
    names = {name for task in descriptor.tasks for name in task.secrets}
    if not names:
        return
    known = secret_store.find(session, owner.tenant_id, owner.user_id, names)
    for n, task in enumerate(descriptor.tasks):
        for m, name in enumerate(task.secrets):
            if name not in known:
                told = f"neither you nor your tenant has a secret {name}"
                told = f"{told}; set it with `roundhouse secret set {name}`"
                yield Fault(f"/tasks/{n}/secrets/{m}", told, "unknown-secret")


def _tier_faults(tier: str, path: Sequence[tenant_tree.OnPath]) -> list[Fault]:
    best = _best_tier(path)
    if _lower(tier, best) == tier:
        return []
    allowed = " or ".join(TIERS[TIERS.index(best) :])
    told = f"requests of {path[0].name} may ask for {allowed}, not for {tier}"
    return [Fault("/tier", f"{told}; ask an administrator to raise it", "tier")]


def _network_faults(descriptor: Descriptor, path: Sequence[tenant_tree.OnPath]) -> Iterator[Fault]:
    """Yield a fault for each destination that the policies of the tenants do not allow."""
    if not any(task.network.allow for task in descriptor.tasks):
        return
    allow = tenant_tree.network_of(path)
    told = f"{path[0].name} may reach {listed(allow)}; an administrator can change that"
    for n, task in enumerate(descriptor.tasks):
        for at, wanted in enumerate(task.network.allow):
            if not is_allowed(allow, destination(wanted)):
                where = f"/tasks/{n}/network/allow/{at}"
                yield Fault(where, f"{wanted} is not allowed: {told}", "network")


def _registry_faults(descriptor: Descriptor) -> Iterator[Fault]:
    """Yield a fault for each container image of a registry that is not allowed."""
    for n, task in enumerate(descriptor.tasks):
        if (image := image_of(task.image or "")) is not None and (
            told := refusal(image, allowed_registries(settings().image_registries))
        ):
            yield Fault(f"/tasks/{n}/image", told, "registry")


def _notify_faults(session: Session, owner: Owner, descriptor: Descriptor) -> Iterator[Fault]:
    if isinstance(descriptor.notify, Notify):
        told = urls.refusal(descriptor.notify.webhook, networks(settings().webhook_networks))
        if told is not None:
            yield Fault("/notify/webhook", told, "address")
    elif descriptor.notify:
        yield from channels.faults(session, owner.tenant_id, descriptor.notify, "/notify")


def _refused(kind: type[AppError], faults: Sequence[Fault]) -> AppError:
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    first = f"{faults[0].pointer or 'the body'}: {faults[0].detail}"
    return kind(first + more, errors=shortened(faults))


def _entry_faults(
    descriptor: Descriptor, entry_points: Mapping[str, str] | None, sent: Mapping[str, Sent]
) -> list[Fault]:
    """Return faults for entry points that `run` names but the bundle does not contain."""
    if descriptor.bundle is None:
        return []
    if entry_points is None:
        sha256 = descriptor.bundle.removeprefix("sha256:")
        told = f"your tenant has no such bundle; upload it with PUT /v1/bundles/{sha256}"
        return [Fault("/bundle", told, "unknown-bundle")]
    found = (_entry_fault(n, task, entry_points) for n, task in enumerate(descriptor.tasks))
    of_nodes = (
        graphs.unknown_functions(one, entry_points, _listed(entry_points, "function"))
        for one in sent.values()
    )
    return [*(fault for fault in found if fault is not None), *chain.from_iterable(of_nodes)]


def _entry_fault(n: int, task: TaskDescriptor, entry_points: Mapping[str, str]) -> Fault | None:
    wanted = _SORT_OF.get(task.run.kind)
    if wanted is None:
        return None
    pointer = f"/tasks/{n}/run/{task.run.kind}"
    sort = entry_points.get(task.run.entry)
    if sort == wanted:
        return None
    if sort is not None:
        told = f"a {task.run.kind} must be a {wanted}; {task.run.entry} is a {sort}"
        return Fault(pointer, told, "unknown-entry-point")
    told = f"the bundle has no {wanted} {task.run.entry}; it has: "
    told += _listed(entry_points, wanted, task.run.entry)
    return Fault(pointer, told, "unknown-entry-point")


def _params_faults(descriptor: Descriptor, signatures: Mapping[str, JSON]) -> Iterator[Fault]:
    """Yield faults for parameters that the class of a new job does not take, or that are
    missing.
    """
    for n, task in enumerate(descriptor.tasks):
        found = signatures.get(task.run.entry)
        if found is None or task.run.kind != "job" or task.from_checkpoint is not None:
            continue
        known = Signature(**{**found, "takes": tuple(found["takes"])})
        for word, told in entry_signature.faults(task.run.entry, known, task.params):
            pointer = f"/tasks/{n}/params/{escaped(word)}" if word else f"/tasks/{n}/params"
            yield Fault(pointer, told, "parameter")


def _listed(entry_points: Mapping[str, str], wanted: str, named: str = "") -> str:
    """Return the names as a text; of more than ten, the ten most similar to `named` and the number
    of the others.
    """
    there = sorted(name for name, sort in entry_points.items() if sort == wanted)
    if not there:
        return "none (a job is a top-level class with a step method)"
    compared = there[:MAX_COMPARED]
    close = get_close_matches(named, compared, LISTED, 0.0) if len(there) > LISTED else there
    more = len(there) - len(close)
    return ", ".join(close) + (f" and {more} more" if more else "")


def _taken(
    session: Session, owner: Owner, descriptor: Descriptor
) -> tuple[Descriptor, dict[Source, Datablock], list[Fault]]:
    """Find the versions of datablocks that the inputs mean.

    Returns the descriptor with these versions, the versions, and faults for unknown ones. The
    versions cannot be deleted before it is recorded that they are needed.
    """
    wanted = {
        source
        for task in descriptor.tasks
        for source in task.inputs.values()
        if source.kind == "datablock"
    }
    if len(wanted) > MAX_DATABLOCKS:
        told = f"a request names at most {MAX_DATABLOCKS} datablocks; got {len(wanted)}"
        return descriptor, {}, [Fault("/tasks", told, "range")]
    found = datablocks.found(session, owner.tenant_id, wanted, keep=True)
    unknown = [
        (f"/tasks/{n}/inputs/{escaped(port)}", source)
        for n, task in enumerate(descriptor.tasks)
        for port, source in task.inputs.items()
        if source.kind == "datablock" and source not in found
    ]
    faults = [
        Fault(where, datablocks.missing(session, owner.tenant_id, source), "unknown-datablock")
        for where, source in unknown[:MAX_FAULTS]  # each of these asks the database
    ]
    exact = {source: replace(source, version=row.version) for source, row in found.items()}
    tasks = tuple(
        replace(task, inputs={p: exact.get(source, source) for p, source in task.inputs.items()})
        for task in descriptor.tasks
    )
    taken = {exact[source]: row for source, row in found.items()}
    return replace(descriptor, tasks=tasks), taken, faults


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task that is to be written; `step` is that of the checkpoint from which it starts, or 0."""

    id: str
    ordinal: int
    spec: TaskDescriptor
    step: int

    @property
    def hold(self) -> str:
        return "user" if self.spec.start.hold else ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that is to be written, with its tasks.

    Values that are equal in every new row are left out.  `needs` is by the task's name.
    """

    owner: Owner
    request: dict[str, Any]
    tasks: Sequence[NewTask]
    needs: Mapping[str, Sequence[dependencies.DependencyEdge]]
    found: Checked


def accept(session: Session, owner: Owner, body: JSON, facts: RequestFacts) -> Accepted:
    """Check a request and build its rows.  Raises BadInput, Unsatisfiable, QueueFull or
    QuotaExceeded.
    """
    found = checked(session, owner, body, facts)
    descriptor = found.descriptor
    _check_room(session, facts.path, len(descriptor.tasks))
    whose = owner.tenant_id, owner.user_id
    user_limits.check_room(session, *whose, descriptor, facts.user_limits)
    if any(task.publish for task in descriptor.tasks):
        datablocks.check_room(session, owner.tenant_id, 0)
    request = _request(owner, descriptor, body, facts.now)
    tasks = [
        _new_task(spec, ordinal, found.begun.get(spec.name))
        for ordinal, spec in enumerate(descriptor.tasks)
    ]
    ordinals = {task.name: n for n, task in enumerate(descriptor.tasks)}
    needs = {
        name: sorted(needed, key=lambda n: (ordinals[n.task], n.port))
        for name, needed in dependencies.needs(descriptor).items()
    }
    return Accepted(owner, request, tasks, needs, found)


# Writes all rows of a request in one statement. They are passed as JSON, so that the number of rows
# does not change the statement. Only here are the values by which scheduling filters read out of
# the descriptors.
_WRITE = text(
    """
    with request as (
        insert into requests
            (id, tenant_id, user_id, name, tier, priority, labels, descriptor, environment_id,
             submitted_at)
        values (:id, :tenant, :user, :name, :tier, :priority, cast(:labels as jsonb),
            cast(:descriptor as jsonb), :environment, :at)
    ),
    task as (
        insert into tasks
            (id, request_id, tenant_id, user_id, ordinal, name, type, kind, descriptor,
             memory_bytes, devices_min, devices_max, across_hosts, device_choice, tier, priority,
             hold, standing, not_before, retry_max, step, lot_id, abroad, reservation_id,
             reservation_state, submitted_at)
        select t.id, :id, :tenant, :user, t.ordinal, t.spec ->> 'name', t.spec ->> 'type',
            devices.kind, t.spec, devices.memory_bytes, devices.min, devices.max,
            devices.across_hosts,
            concat_ws(',', nullif(t.choice, ''), case when r.device_ids != '[]' or r.labels != '[]'
                then '@' || r.id end), :tier, :priority,
            case when start.hold then 'user' else '' end,
            case when t.awaits then 'waits' else '' end, start.not_before,
            coalesce(cast(t.spec #>> '{retry,max}' as int), -1), t.step,
            case when t.spec ->> 'array' is not null then t.id end, t.abroad, r.id,
            case when r.id is null or exists (select from reservation_windows w
                where w.reservation_id = r.id and w.in_force) then '' else 'planned' end, :at
        from json_to_recordset(cast(:tasks as json)) as t
            (id text, ordinal int, spec jsonb, choice text, step bigint, abroad bool, awaits bool)
            left join reservations r on r.name = t.spec ->> 'reservation',
            jsonb_to_record(t.spec -> 'devices') as devices
            (kind text, memory_bytes bigint, min int, max int, across_hosts bool),
            jsonb_to_record(t.spec -> 'start') as start (hold bool, not_before timestamptz)
    ),
    lot as (
        insert into lots (id, count, at_once, failures_allowed)
        select l.id, l.count, l.at_once, l.failures_allowed
        from json_to_recordset(cast(:lots as json)) as l
            (id text, count int, at_once int, failures_allowed int)
    ),
    need as (
        insert into needs (task_id, needs_id, port, output, late)
        select n.task_id, n.needs_id, n.port, n.output, n.late
        from json_to_recordset(cast(:needs as json)) as n
            (task_id text, needs_id text, port text, output text, late bool)
    ),
    awaited as (
        insert into request_needs
            (task_id, needs_request_id, needs_task_id, name, awaited, otherwise)
        select a.task_id, a.needs_request_id, a.needs_task_id, a.name, a.awaited, a.otherwise
        from json_to_recordset(cast(:awaited as json)) as a
            (task_id text, needs_request_id text, needs_task_id text, name text, awaited text,
             otherwise text)
    ),
    once as (
        update idempotency
        set status = :status, response = cast(:answer as jsonb), location = :location
        where user_id = :user and key = cast(:key as text)
    )
    insert into events (tenant_id, request_id, type, message)
    values (:tenant, :id, 'request.submitted', :told)
    """
)


def write(session: Session, accepted: Accepted, once: Once, answer: IntakeResponse) -> None:
    """Write what was accepted, and the answer to the call.

    Control is nudged after the commit.
    """
    owner, request, found = accepted.owner, accepted.request, accepted.found
    graphs.keep(session, owner.tenant_id, found.graphs.values())
    if isinstance(found.descriptor.notify, Notify):
        webhooks.expect_addresses(session, owner.tenant_id)
    environment, locked = None, None
    if found.environment is not None:
        environment, lock = environments.take(
            session, owner.tenant_id, owner.user_id, found.environment
        )
        locked = found.environment.of_task(lock)
    ids = {task.spec.name: task.id for task in accepted.tasks}
    needs = [
        {
            "task_id": ids[name],
            "needs_id": ids[n.task],
            "port": n.port,
            "output": n.output,
            "late": n.late,
        }
        for name, needed in accepted.needs.items()
        for n in needed
    ]
    awaited = [
        {"task_id": task.id, **row}
        for task in accepted.tasks
        for row in found.after.rows(task.spec)
    ]
    # no island looks for the ends of these: what takes them is released when they are done
    needs += [
        {"task_id": task.id, **row}
        for task in accepted.tasks
        for row in found.after.inputs(task.spec)
    ]
    n = sum(1 if task.spec.array is None else task.spec.array.count for task in accepted.tasks)
    lots = [_lot(task) for task in accepted.tasks if task.spec.array is not None]
    # islands do not know lots: they look for the ends of lots, and of what lots need
    abroad = {lot["id"] for lot in lots}
    abroad |= {need["needs_id"] for need in needs if need["task_id"] in abroad}
    awaiting = {row["task_id"] for row in awaited}
    tasks = [
        {**_row(one, locked), "abroad": one.id in abroad, "awaits": one.id in awaiting}
        for one in accepted.tasks
    ]
    given = {
        "id": request["id"],
        "tenant": owner.tenant_id,
        "user": owner.user_id,
        "name": request["name"],
        "tier": request["tier"],
        "priority": request["priority"],
        "labels": json.dumps(request["labels"]),
        "descriptor": json.dumps(request["descriptor"]),
        "environment": environment,
        "at": request["submitted_at"],
        "tasks": json.dumps(tasks),
        "needs": json.dumps(needs),
        "awaited": json.dumps(awaited),
        "lots": json.dumps(lots),
        "key": once.key,
        "status": answer.status,
        "answer": answer.body if once.key is not None else None,
        "location": answer.location,
        "told": f"{owner.user_name} submitted {request['name']}: {n:,} task{'s' * (n > 1)}.",
    }
    session.connection().execute(_WRITE, given)
    if found.channels:
        channels.subscribe(session, owner.tenant_id, request["id"], found.channels)
    session.add_all(
        starting_checkpoints.copied(row, ids[name]) for name, row in found.begun.items()
    )
    for task in found.descriptor.tasks:
        taken = {port: found.taken.get(source) for port, source in task.inputs.items()}
        datablocks.use(session, ids[task.name], {p: row for p, row in taken.items() if row})
    after_commit(session, outbox.nudge_control)
    after_commit(session, lambda: changes.tell(owner.tenant_id, request["id"]))


def _lot(task: NewTask) -> JSON:
    """Return the values of a lot's row beside that of its task."""
    array = task.spec.array
    assert array is not None
    return {
        "id": task.id,
        "count": array.count,
        "at_once": array.at_once,
        "failures_allowed": array.failures_allowed,
    }


def _row(task: NewTask, environment: TaskEnvironment | None) -> JSON:
    """Return the values of a task's row, with the environment as it is locked now."""
    spec = task.spec
    if environment is not None:
        spec = replace(spec, environment=environment)
    return {
        "id": task.id,
        "ordinal": task.ordinal,
        "spec": descriptors.as_json(spec),
        "choice": descriptors.choice_text(spec),
        "step": task.step,
    }


def _check_room(session: Session, path: Sequence[tenant_tree.OnPath], wanted: int) -> None:
    """Raise QueueFull if `wanted` more tasks exceed the limit of the tenant or of one above it.

    Tenants with a limit are locked until the commit, always in the order of their ids. So of two
    requests for the last place, the second counts the first. Without a limit there is no lock.
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
    waits = (Task.state.in_(("blocked", "waiting")), ~gang_tickets.IS_TICKET, IS_NO_MEMBER)
    which = (tenant_tree.within(Task.tenant_id, tenant_id), *waits)
    return session.scalar(select(func.count()).select_from(Task).where(*which)) or 0


def _no_room(name: str, queued: int, wanted: int, most: int) -> str:
    told = f"{name} has {queued} queued tasks of at most {most}; this request has {wanted}"
    if wanted > most:
        return (
            f"{told}, which exceeds the limit by itself: split the request, or ask an "
            "administrator to raise max_queued"
        )
    return (
        f"{told}: cancel some tasks, wait until some have started, or ask an administrator to "
        "raise max_queued"
    )


def _request(owner: Owner, descriptor: Descriptor, body: JSON, now: datetime) -> dict[str, Any]:
    """Return the values of the request's row."""
    id = new_id("req")
    return dict(
        id=id,
        tenant_id=owner.tenant_id,
        user_id=owner.user_id,
        name=descriptor.name or f"{descriptor.tasks[0].name}-{id[-6:]}",
        tier=descriptor.tier,
        priority=descriptor.priority,
        labels=dict(descriptor.labels),
        descriptor=body,
        submitted_at=now,
    )


def _new_task(spec: TaskDescriptor, ordinal: int, begun: Checkpoint | None) -> NewTask:
    step = 0 if begun is None else begun.step
    return NewTask(id=new_id("tsk"), ordinal=ordinal, spec=spec, step=step)


# --- once only ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IntakeResponse:
    """The response to a call; `body` is JSON."""

    status: int
    body: str
    location: str


def replay(session: Session, owner: Owner, once: Once) -> IntakeResponse:
    """Return the answer that the first call with this key got; raises KeyReused."""
    before = session.get_one(Idempotency, (owner.user_id, once.key), populate_existing=True)
    if (before.route, before.body_sha256) != (once.route, once.body_sha256):
        told = "this Idempotency-Key was used with another body before; use a new key for new work"
        raise KeyReused.at("Idempotency-Key:", told, "reused")
    assert before.status is not None, "a key is committed together with its answer"
    return IntakeResponse(before.status, json.dumps(before.response), before.location or "")
