"""Finds the other requests that tasks come after, and whose outputs they take.

A name means the newest request of that name of the same tenant. Found requests are locked against
deletion until the commit; then the new rows keep them (`app.scheduling.retention`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from app.core.model.descriptor import OF_REQUEST, Descriptor, Source, TaskDescriptor
from app.core.model.fields import Fault, escaped, near_name
from app.core.model.lifecycle import ENDED
from app.core.model.provisions.best_rule import OF_BEST, objective_in
from app.core.model.request_needs import DONE, FAIL, RUN
from app.db.models import Need, Request, RequestNeed, Task
from app.db.transactions import AnyRow
from app.scheduling.journal.lots import IS_NO_MEMBER

JSON = dict[str, Any]

MOST_NEEDS = 10_000  # of all tasks of a request
RECENT = 100  # newest requests among which a similar name is looked for


@dataclass(frozen=True, slots=True)
class FoundRequests:
    """Holds the needed requests: their names by id, and the tasks whose outputs are taken."""

    names: Mapping[str, str]
    # by the request's id and the task's name, or `LOT@best`
    tasks: Mapping[tuple[str, str], AnyRow]

    def rows(self, spec: TaskDescriptor) -> list[JSON]:
        """Return what the task awaits of other requests, as rows without the task's id."""
        rules = {each.request: each for each in spec.start.after_requests}
        found = [
            self._row(each.request, "", each.on, each.otherwise)
            for each in spec.start.after_requests
        ]
        for request, name in dict.fromkeys((s.request, s.name) for s in _taken(spec).values()):
            rule = rules.get(request)
            found.append(self._row(request, name, DONE, rule.otherwise if rule else FAIL))
        found.sort(key=lambda row: row["needs_task_id"])
        found.sort(key=lambda row: row["needs_request_id"], reverse=True)
        return found

    def _row(self, request: str, task: str, awaited: str, otherwise: str) -> JSON:
        return {
            "needs_request_id": request,
            "needs_task_id": self.tasks[request, task].id if task else "",
            "name": f"{self.names[request]}/{task}" if task else self.names[request],
            "awaited": awaited,
            "otherwise": otherwise,
        }

    def shown(self, spec: TaskDescriptor) -> list[JSON]:
        """Return the same as an answer shows it before anything is decided."""
        return [shown({**row, "outcome": ""}) for row in self.rows(spec)]

    def inputs(self, spec: TaskDescriptor) -> list[JSON]:
        """Return the task's inputs from other requests, as rows of `needs` without its id."""
        return [
            {
                "needs_id": self.tasks[source.request, source.name].id,
                "port": port,
                "output": source.output,
                "late": False,
            }
            for port, source in _taken(spec).items()
        ]

    def needs(self, spec: TaskDescriptor) -> list[JSON]:
        """Return the same as an answer shows it, in the order in which it is read later."""
        found = [(port, source, self._ordinal(source)) for port, source in _taken(spec).items()]
        found.sort(key=lambda one: (one[2], one[0]))
        found.sort(key=lambda one: one[1].request, reverse=True)
        return [
            {"task": s.task, "port": port, "output": s.output, "request_id": s.request}
            for port, s, _ in found
        ]

    def _ordinal(self, source: Source) -> int:
        return int(self.tasks[source.request, source.name].ordinal)


def shown(row: Mapping[str, Any]) -> JSON:
    """Return a row of `request_needs` as an answer shows it."""
    return {
        "request_id": row["needs_request_id"],
        "request": row["name"].partition("/")[0],
        "task": row["name"].partition("/")[2],
        "on": row["awaited"],
        "otherwise": row["otherwise"],
        "outcome": row["outcome"] or "waits",
    }


NONE = FoundRequests({}, {})


def comes_after(descriptor: Mapping[str, Any]) -> bool:
    """True if the stored descriptor of a task names other requests."""
    inputs = (descriptor.get("inputs") or {}).values()
    named = (descriptor.get("start") or {}).get("after_requests")
    return bool(named) or any("/" in source for source in inputs)


def _taken(task: TaskDescriptor) -> dict[str, Source]:
    return {port: source for port, source in task.inputs.items() if source.kind == OF_REQUEST}


def resolve(
    session: Session, tenant_id: str, descriptor: Descriptor
) -> tuple[Descriptor, FoundRequests, list[Fault]]:
    """Find the requests; return the descriptor with their ids, and faults for what is unknown."""
    said = [*_said(descriptor)]
    if not said:
        return descriptor, NONE, []
    if len(said) > MOST_NEEDS:
        told = f"a request names at most {MOST_NEEDS:,} other requests; got {len(said):,}"
        return descriptor, NONE, [Fault("/tasks", told, "range")]
    ids, names = _requests(session, tenant_id, {name for _, name in said})
    if unknown := [(where, name) for where, name in said if name not in ids]:
        recent = _recent(session, tenant_id)
        faults = (
            Fault(where, _unknown(name, recent), "unknown-request") for where, name in unknown
        )
        return descriptor, NONE, [*faults]
    tasks = tuple(_with_ids(task, ids) for task in descriptor.tasks)
    found = FoundRequests(names, _tasks(session, tasks))
    return replace(descriptor, tasks=tasks), found, [*_faults(tasks, found)]


def _said(descriptor: Descriptor) -> Iterator[tuple[str, str]]:
    """Yield (pointer, name or id of another request)."""
    for n, task in enumerate(descriptor.tasks):
        for k, each in enumerate(task.start.after_requests):
            yield f"/tasks/{n}/start/after_requests/{k}/request", each.request
        for port, source in _taken(task).items():
            yield f"/tasks/{n}/inputs/{escaped(port)}", source.request


def find_requests(
    session: Session, tenant_id: str, wanted: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ids of requests by what they were called, and why there is none for others."""
    ids, _ = _requests(session, tenant_id, wanted)
    missing = [name for name in wanted if name not in ids]
    recent = _recent(session, tenant_id) if missing else ()
    return ids, {name: _unknown(name, recent) for name in missing}


def _requests(
    session: Session, tenant_id: str, wanted: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ids of the requests by what they were called, and their names by id.

    One of which nothing but its row is left is about to be deleted.
    """
    mine = (Request.tenant_id == tenant_id, Request.delete_asked_at.is_(None))
    newest = select(func.max(Request.id)).where(*mine, Request.name.in_(wanted))
    which = or_(Request.id.in_(wanted), Request.id.in_(newest.group_by(Request.name)))
    query = select(Request.id, Request.name).where(*mine, which).order_by(Request.id)
    rows = session.execute(query.with_for_update(read=True, key_share=True)).all()
    tasks = select(Task.id).where(Task.request_id == Request.id, IS_NO_MEMBER).exists()
    ids = [row.id for row in rows]
    whole = set(session.scalars(select(Request.id).where(Request.id.in_(ids), tasks)))
    names = {row.id: row.name for row in rows if row.id in whole}
    by_name = {name: id for id, name in names.items() if name in wanted}
    return {**by_name, **{id: id for id in names if id in wanted}}, names


def _recent(session: Session, tenant_id: str) -> Sequence[str]:
    query = select(Request.name).where(Request.tenant_id == tenant_id)
    return session.scalars(query.order_by(Request.id.desc()).limit(RECENT)).all()


def _unknown(name: str, recent: Sequence[str]) -> str:
    if name in recent:
        return f"the request {name!r} is deleted, or about to be"
    near = near_name(name, dict.fromkeys(recent))
    hint = f"did you mean {near!r}?" if near else "GET /v1/requests lists them"
    return f"your tenant has no request {name!r}; {hint}"


def _with_ids(task: TaskDescriptor, ids: Mapping[str, str]) -> TaskDescriptor:
    after = tuple(replace(one, request=ids[one.request]) for one in task.start.after_requests)
    inputs = {
        port: replace(source, request=ids[source.request]) for port, source in _taken(task).items()
    }
    start = replace(task.start, after_requests=after)
    return replace(task, start=start, inputs={**task.inputs, **inputs})


def _tasks(session: Session, tasks: Sequence[TaskDescriptor]) -> dict[tuple[str, str], AnyRow]:
    wanted = {(s.request, s.name): s.task for task in tasks for s in _taken(task).values()}
    if not wanted:
        return {}
    query = select(Task.request_id, Task.name, Task.id, Task.ordinal, Task.lot_id)
    parts = ("outputs", "stop", "checkpoint")
    query = query.add_columns(*(Task.descriptor[part].label(part) for part in parts))
    of_them = (Task.request_id.in_({id for id, _ in wanted}), Task.name.in_({*wanted.values()}))
    by_name = {(row.request_id, row.name): row for row in session.execute(query.where(*of_them))}
    named = ((key, by_name.get((key[0], task))) for key, task in wanted.items())
    return {key: row for key, row in named if row is not None}


def _faults(tasks: Sequence[TaskDescriptor], found: FoundRequests) -> Iterator[Fault]:
    for n, task in enumerate(tasks):
        rules = dict[str, str]()
        for k, each in enumerate(task.start.after_requests):
            where = f"/tasks/{n}/start/after_requests/{k}"
            if each.request in rules:
                told = f"the request {each.request} is named twice"
                yield Fault(f"{where}/request", told, "twice")
            rules[each.request] = each.otherwise
        for port, source in _taken(task).items():
            if told := _bad_source(source, found, rules):
                yield Fault(f"/tasks/{n}/inputs/{escaped(port)}", told, "unknown-output")


def _bad_source(source: Source, found: FoundRequests, rules: Mapping[str, str]) -> str:
    """Return why the input can never come, or ""."""
    named = found.names[source.request]
    row = found.tasks.get((source.request, source.name))
    if row is None:
        is_member = source.name.rpartition(".")[2].isdecimal()
        hint = "; a member of a lot is there from when it may start" if is_member else ""
        return f"the request {named} ({source.request}) has no task {source.task!r}{hint}"
    if source.is_of_best and row.lot_id != row.id:
        return (
            f"{source.task!r} of {named} is not a lot, so no member is best; name its output "
            f"without {OF_BEST}"
        )
    if source.is_of_best and objective_in({"stop": row.stop, "checkpoint": row.checkpoint}) is None:
        return (
            f"the lot {source.task!r} of {named} was submitted with neither `stop` nor "
            "`checkpoint.best`, such as {metric: loss}, so no member is best. Name a member, such "
            f"as {source.task}.0"
        )
    if row.lot_id == row.id and not source.is_of_best:
        return (
            f"{source.name!r} of {named} is a lot: each of its members has outputs of its own. "
            f"Name a member, such as {source.name}.0, or the best, {source.name}{OF_BEST}, or "
            "publish the outputs as datablocks"
        )
    if source.output not in (row.outputs or []):
        return f"{source.task!r} of {named} has no {source.output!r} in its outputs"
    if rules.get(source.request) == RUN:
        return f"the task takes this of {named}, so it cannot run without: let else be fail or hold"
    return ""


# --- for requests that others need ----------------------------------------------------------------


def dependant_of(session: Session, request_id: str) -> AnyRow | None:
    """Return the name and the id of the first unfinished request that needs this one."""
    query = select(Request.id, Request.name).join(Task, Task.request_id == Request.id)
    query = query.join(RequestNeed, RequestNeed.task_id == Task.id)
    live = (RequestNeed.needs_request_id == request_id, Task.state.not_in(ENDED))
    return session.execute(query.where(*live).order_by(Request.id).limit(1)).first()


def lost_inputs(session: Session, tasks: Sequence[Task]) -> Task | None:
    """Return the first task that takes an output of a request which was deleted since."""
    for task in tasks:
        taken = {port for port, source in task.descriptor["inputs"].items() if "/" in source}
        if taken:
            query = select(Need.port).where(Need.task_id == task.id, Need.port.in_(taken))
            if taken - {*session.scalars(query)}:
                return task
    return None
