"""Finds the checkpoints from which tasks start, and copies them and what they fix to these tasks.

`NAME@best` means the best checkpoint that the newest request of this name has at the submission.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, aliased

from app.core.model.checkpoints.best import RankedCheckpoint, best_checkpoints
from app.core.model.descriptor import Descriptor, Source, TaskDescriptor
from app.core.model.fields import Fault, escaped
from app.core.model.provisions.best_rule import OF_BEST, best_rule_in
from app.db.ids import new_id
from app.db.models import Checkpoint, Task
from app.db.transactions import AnyRow
from app.intake import request_needs
from app.scheduling.journal.lots import IS_NO_MEMBER

_CHECKPOINTING = Task.descriptor["checkpoint"].label("checkpoint")
_IS_WHOLE = Checkpoint.damaged_at.is_(None), Checkpoint.deleted_at.is_(None)


def _with_ids(
    session: Session, tenant_id: str, descriptor: Descriptor
) -> tuple[Descriptor, list[Fault]]:
    """Put the id of a checkpoint in the place of each `NAME@best`; return faults for those that
    mean none.
    """
    said = [
        (n, task.from_checkpoint.removesuffix(OF_BEST))
        for n, task in enumerate(descriptor.tasks)
        if task.from_checkpoint is not None and task.from_checkpoint.endswith(OF_BEST)
    ]
    if not said:
        return descriptor, []
    names = {name.partition("/")[0] for _, name in said}
    ids, unknown = request_needs.find_requests(session, tenant_id, names)
    tasks, faults = [*descriptor.tasks], []
    chosen, siblings = dict[str, str](), {task.name for task in descriptor.tasks}
    for n, name in said:
        where = f"/tasks/{n}/from_checkpoint"
        request, _, task = name.partition("/")
        if request not in ids:
            told = _OF_ITS_OWN if request in siblings else unknown[request]
            faults.append(Fault(where, told, "unknown-request"))
            continue
        try:
            if name not in chosen:
                chosen[name] = find_best(session, request, ids[request], task)
        except NoBest as error:
            faults.append(Fault(where, str(error), "no-best-checkpoint"))
            continue
        tasks[n] = replace(tasks[n], from_checkpoint=chosen[name])
    return replace(descriptor, tasks=tuple(tasks)), faults


_OF_ITS_OWN = (
    "names a task of this request, of which no checkpoint is known yet: submit this task in a "
    "request of its own once that task has checkpoints"
)


class NoBest(Exception):
    """Raised where `NAME@best` means no checkpoint; the text says why, and what to do."""


def find_best(session: Session, name: str, request_id: str, task: str) -> str:
    """Return the id of the best checkpoint of a request, or of one of its tasks, lots or members;
    raises NoBest.
    """
    by_task = defaultdict[str, list[AnyRow]](list)
    for row in _marked(session, request_id, task):
        by_task[row.of].append(row)
    if not by_task:
        raise NoBest(_why_none(session, name, request_id, task))
    if len(by_task) > 1:
        named = ", ".join(f"{name}/{each}{OF_BEST}" for each in sorted(by_task))
        raise NoBest(f"several tasks of {name} have a best checkpoint; name one of them: {named}")
    [rows] = by_task.values()
    rule = best_rule_in({"checkpoint": rows[0].checkpoint})
    assert rule is not None, "only a task with a rule has best checkpoints"
    ranks = (RankedCheckpoint(id=row.id, step=row.step, value=row.ranked_value) for row in rows)
    [best] = best_checkpoints(replace(rule, keep=1), ranks)
    return best


def _marked(session: Session, request_id: str, task: str) -> Sequence[AnyRow]:
    """Return the best checkpoints of a request's tasks, each with the name `of` its task or lot;
    only those of this task, lot or member, unless it is "".
    """
    lot = aliased(Task)
    columns = (Checkpoint.id, Checkpoint.step, Checkpoint.ranked_value)
    of_task = (func.coalesce(lot.name, Task.name).label("of"), _CHECKPOINTING)
    query = select(*columns, *of_task).join(Task, Task.id == Checkpoint.task_id)
    query = query.outerjoin(lot, lot.id == Task.lot_id)
    query = query.where(Task.request_id == request_id, Checkpoint.best, *_IS_WHOLE)
    if task:
        query = query.where(or_(Task.name == task, lot.name == task))
    return session.execute(query).all()


def _why_none(session: Session, name: str, request_id: str, task: str) -> str:
    """Say why a request, or this task of it, has no best checkpoint, and what to do."""
    which = IS_NO_MEMBER if not task else Task.name == task
    query = select(Task.name, _CHECKPOINTING).where(Task.request_id == request_id, which)
    tasks = session.execute(query).all()
    if not tasks:
        return f"the request {name} has no task {task!r}"
    rules = (best_rule_in({"checkpoint": row.checkpoint}) for row in tasks)
    metrics = sorted({rule.metric for rule in rules if rule is not None})
    whose = f"{name}/{task}" if task else name
    if metrics:
        told = f"no checkpoint of {whose} has a number as its {' or '.join(metrics)} yet"
        return f"{told}; POST /v1/tasks/{{id}}/checkpoint saves one"
    return (
        f"{whose} was submitted without checkpoint.best, such as {{metric: loss}}, so none of its "
        "checkpoints is best. Name one by its id: GET /v1/tasks/{id}/checkpoints lists them"
    )


def find_checkpoints(
    session: Session, tenant_id: str, descriptor: Descriptor
) -> tuple[Descriptor, dict[str, Checkpoint], list[Fault]]:
    """Find the checkpoints from which tasks start, if they are this tenant's and still exist.

    Returns the descriptor with their ids, their parameters and their datablocks, to which the
    images may refer; the checkpoints by the task's name; and faults.
    """
    descriptor, unknown = _with_ids(session, tenant_id, descriptor)
    begun = _found(session, tenant_id, descriptor)
    descriptor, faults = _continued(session, descriptor, begun)
    return descriptor, begun, [*unknown, *faults]


def _found(session: Session, tenant_id: str, descriptor: Descriptor) -> dict[str, Checkpoint]:
    wanted = {t.from_checkpoint for t in descriptor.tasks if t.from_checkpoint is not None}
    if not wanted:
        return {}
    mine = (Checkpoint.id.in_(wanted), Checkpoint.tenant_id == tenant_id)
    by_id = {row.id: row for row in session.scalars(select(Checkpoint).where(*mine, *_IS_WHOLE))}
    named = ((task.name, by_id.get(task.from_checkpoint or "")) for task in descriptor.tasks)
    return {name: row for name, row in named if row is not None}


def _continued(
    session: Session, descriptor: Descriptor, begun: Mapping[str, Checkpoint]
) -> tuple[Descriptor, list[Fault]]:
    faults: list[Fault] = []
    tasks = []
    for n, task in enumerate(descriptor.tasks):
        if task.from_checkpoint is not None and task.name in begun:
            before = session.get_one(Task, begun[task.name].task_id).spec
            if before.run.kind != task.run.kind:
                told = f"is a checkpoint of a {before.run.kind}, and this is a {task.run.kind}"
                faults.append(Fault(f"/tasks/{n}/from_checkpoint", told, "another-kind"))
            if task.run.kind == "command":  # the folder of a command refers to no datablocks
                tasks.append(replace(task, params=task.params or before.params))
                continue
            lent = {p: it for p, it in before.inputs.items() if it.kind == "datablock"}
            faults += _fork_faults(f"/tasks/{n}", task, before, lent)
            task = replace(task, params=before.params, inputs={**task.inputs, **lent})
        elif task.from_checkpoint is not None and not task.from_checkpoint.endswith(OF_BEST):
            told = "your tenant has no such checkpoint"
            faults.append(Fault(f"/tasks/{n}/from_checkpoint", told, "unknown-checkpoint"))
        tasks.append(task)
    return replace(descriptor, tasks=tuple(tasks)), faults


def _fork_faults(
    pointer: str, task: TaskDescriptor, before: TaskDescriptor, lent: Mapping[str, Source]
) -> Iterator[Fault]:
    """Return faults for settings that differ from those of the task that made the checkpoint."""
    if task.run.kind == "job" and task.run.entry != before.run.entry:
        told = f"must be {before.run.entry}, the job of the checkpoint"
        yield Fault(f"{pointer}/run/job", told, "another-job")
    if task.params and task.params != before.params:
        told = (
            "the checkpoint's job has other parameters, which cannot be changed: omit `params`, "
            "or change the values in the code of the job"
        )
        yield Fault(f"{pointer}/params", told, "other-parameters")
    for port, source in lent.items():
        if task.inputs.get(port, source) != source:
            told = (
                f"the checkpoint's job has datablock:{source.block} here, which cannot be changed: "
                "omit this input or name the same version"
            )
            yield Fault(f"{pointer}/inputs/{escaped(port)}", told, "other-input")
    if task.world_size != before.world_size:
        told = f"must be {before.world_size}, as in the checkpoint"
        yield Fault(f"{pointer}/world_size", told, "other-ranks")


def copied(begun: Checkpoint, task_id: str) -> Checkpoint:
    """Return the new task's own first checkpoint: a copy of the row, so that the bytes stay,
    whatever happens to the other task.

    All that the new task prints comes after it.
    """
    printed = None if begun.printed_epoch is None else 0
    return Checkpoint(
        id=new_id("ckp"),
        task_id=task_id,
        tenant_id=begun.tenant_id,
        epoch=0,
        step=begun.step,
        sha256=begun.sha256,
        size_bytes=begun.size_bytes,
        took_us=begun.took_us,
        host=begun.host,
        key=begun.key,
        printed_epoch=printed,
        printed_lines=printed,
    )
