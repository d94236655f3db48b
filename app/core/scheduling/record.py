"""Turns a snapshot into JSON, reduced to what is needed to make one round's decisions again.

`seen_by` reduces a board to what mattered: tasks that were moved or held devices, the tasks they
were compared with, their users and tenants, and all devices of their kinds. Waiting tasks that were
not picked stay only if they changed something: a task tried without success before others of its
lane; a task for which devices were kept; a task that stood before a branch about to borrow; a task
pinned to one device. The rest counts only in sums: the usage of the users, the guarantees of the
tenants, and the devices promised in part to started tasks. `decide` makes the same decisions from
the reduced snapshot (tested). Fields at their default are omitted too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from app.core.fairness.fair_tree import Branch, Lane, Path, both_of
from app.core.model import codec
from app.core.model.lifecycle import State
from app.core.model.snapshot import (
    BatchSize,
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Conditions,
    GangWait,
    IdleCreditFloor,
    Plan,
    Policy,
    Snapshot,
    changed,
)
from app.core.scheduling.board import MILLI, Board

JSON = dict[str, Any]


def seen_by(board: Board, plan: Plan, before: Mapping[str, BoardTask], *, island: str) -> Snapshot:
    """Return what was seen by the round that made `plan`; `before` has the moved tasks as they
    were.
    """
    moved = [before[decision.task] for decision in plan.decisions if decision.task in before]
    held = [before.get(id, stay.task) for id, stay in board.stays.items()]
    # devices are kept for these tasks
    on_the_way = [board.tasks[id] for id in board.kept_for.values()]
    waited = _waited(board, moved)
    tasks = {task.id: task for task in (*waited, *on_the_way, *held, *moved)}
    users = {task.user: board.users[task.user] for task in tasks.values()}
    kinds = {task.kind for task in tasks.values()}
    tenants = _with_those_above(board.tenants, {task.tenant for task in tasks.values()})
    users |= {user.id: user for user in _others(board, tenants, users)}
    tenants |= {tenant.id: tenant for tenant in _guaranteed(board, tenants, kinds)}
    tasks |= {task.id: task for task in _in_sums(board, tasks)}
    return Snapshot(
        island=island,
        policy=board.policy,
        tenants=tenants,
        users=users,
        devices={d.id: d for d in board.devices.values() if d.kind in kinds},
        tasks=tasks,
        lifts=tuple(_lifts(board, tenants, users, kinds)),
        waits=tuple(wait for wait in board.memory.waits if wait.kind in kinds),
        batches=tuple(_batches(board, users, kinds)),
    )


def _waited(board: Board, moved: Iterable[BoardTask]) -> list[BoardTask]:
    """Return the tasks that waited, were not picked, and changed what others got."""
    tasks, tried = board.tasks, defaultdict[Lane, list[str]](list)
    for id in board.memory.tried.keys() & tasks.keys():
        tried[_need(board, tasks[id])].append(id)
    ids = (board.memory.in_the_way | set(_pinned(board))) & tasks.keys()
    found, new = dict[str, BoardTask](), [*moved, *(tasks[id] for id in ids)]
    while new:
        task = new.pop()
        if task.id not in found:
            found[task.id] = task
            # A task that went first in its lane and failed closed the lane to the tasks behind it.
            others = (*tried.pop(_need(board, task), ()), *board.memory.tried.get(task.id, ()))
            # Two tasks of a request that have begun are enough to tell whether its tasks are fresh
            # (F8).
            begun = islice(board.begun(task.request), 2)
            new += [tasks[id] for id in (*others, *begun) if id in tasks]
    return [found[id] for id in sorted(found)]


def _need(board: Board, task: BoardTask) -> Lane:
    """Return the task's lane without its freshness, which the round may have changed (F8)."""
    return both_of(board.lane_in_line(task))[1]


def _pinned(board: Board) -> Iterator[str]:
    """Yield one task for each device to which waiting tasks are pinned, as other tasks avoid the
    device.
    """
    for here in board.tree.lanes:
        for device in here.pins:
            yield from board.pinned_to(device)[:1]


def _guaranteed(
    board: Board, tenants: Mapping[str, BoardTenant], kinds: Iterable[str]
) -> Iterator[BoardTenant]:
    """Yield tenants that stand for all omitted siblings, with their guarantees in total."""
    kept = Counter[tuple[Path, str]]()
    for tenant in tenants.values():
        for kind in kinds:
            kept[board.path_of(tenant.id)[:-1], kind] += tenant.guarantee.get(kind, 0)
    left = defaultdict[Path, dict[str, int]](dict)
    for (above, kind), devices in kept.items():
        if board.promised[above, kind] > devices:
            left[above][kind] = board.promised[above, kind] - devices
    for above, guarantee in left.items():
        parent = above[-1] if above else None
        id = f"tenants beside those of {parent or 'the island'}"
        yield BoardTenant(id=id, name=id, weight=1, parent=parent, guarantee=guarantee)


def _in_sums(board: Board, tasks: Mapping[str, BoardTask]) -> Iterator[BoardTask]:
    """Yield held tasks that stand for the sums of all omitted tasks.

    By rule F9, it depends on all started tasks of a tier whether its promises can be kept, and so
    which tasks are protected. If there is more than one priority, another task shows that.
    """
    left = Counter(board.urgency.started)
    for id in tasks.keys() & board.tasks.keys():
        now = board.tasks[id]
        if now.epoch:
            left[now.kind, now.tier] -= now.width
    kinds = {task.kind: task for task in tasks.values()}
    for (kind, tier), width in sorted(left.items()):
        if width > 0 and kind in kinds and board.policy.tier_share.get(tier):
            id = f"others of {tier} on {kind}"
            yield _held(id, kinds[kind], epoch=1, tier=tier, width=width)
    priorities = {task.priority for task in tasks.values()}
    others = board.priorities.keys() - priorities
    if len(priorities) == 1 and others:
        like = next(iter(kinds.values()))
        yield _held("others of another priority", like, epoch=0, priority=min(others))


def _held(id: str, like: BoardTask, **after: object) -> BoardTask:
    held = BoardTask(
        id=id,
        request="",
        tenant=like.tenant,
        user=like.user,
        state=State.blocked,
        epoch=0,
        kind=like.kind,
        priority=like.priority,
        conditions=Conditions(hold="admin"),
    )
    return changed(held, **after)


def _others(
    board: Board, tenants: Iterable[str], users: Mapping[str, BoardUser]
) -> Iterator[BoardUser]:
    """Yield one user in place of all omitted users below a tenant, with their total usage.

    Omitted users hold no device, so their usage did not change in the round.
    """
    branches = board.tree.branches
    kept: dict[Path, set[Path]] = {}
    for user in users.values():
        path = (*board.path_of(user.tenant), user.id)
        for depth in range(1, len(path)):
            kept.setdefault(path[:depth], set()).add(path[: depth + 1])
    for id in tenants:
        branch = branches[board.path_of(id)]
        below = kept.get(branch.path, ())
        if branch.children > len(below):
            left = _charged(board, branch) - sum(_charged(board, branches[one]) for one in below)
            yield BoardUser(id=f"others of {id}", tenant=id, faded_us=left // MILLI)


def _charged(board: Board, branch: Branch) -> int:
    return board.tree.usage(branch) - branch.carried


def _lifts(
    board: Board, tenants: Iterable[str], users: Mapping[str, BoardUser], kinds: Iterable[str]
) -> Iterator[IdleCreditFloor]:
    whose = [(id, "") for id in tenants] + [(user.tenant, user.id) for user in users.values()]
    for key in sorted((*who, kind) for who in whose for kind in kinds):
        if key in board.lifts:
            yield board.lifts[key]


def _batches(board: Board, users: Iterable[str], kinds: Iterable[str]) -> Iterator[BatchSize]:
    """Yield the sizes of batches as they were when the round began."""
    before = board.batches | board.memory.batches
    for key in sorted((user, kind) for user in users for kind in kinds):
        if key in before and before[key].size > 1:
            yield before[key]


def _with_those_above(
    tenants: Mapping[str, BoardTenant], ids: Iterable[str]
) -> dict[str, BoardTenant]:
    found: dict[str, BoardTenant] = {}
    for id in sorted(ids):
        above: str | None = id
        while above is not None and above not in found:
            found[above] = tenants[above]
            above = tenants[above].parent
    return found


_KINDS: dict[str, type[Any]] = {
    "tenants": BoardTenant,
    "users": BoardUser,
    "devices": BoardDevice,
    "tasks": BoardTask,
}


def as_json(snapshot: Snapshot) -> JSON:
    listed = {name: sorted(getattr(snapshot, name).items()) for name in _KINDS}
    parts = {
        "island": snapshot.island,
        "policy": codec.to_json(snapshot.policy),
        **{name: [codec.to_json(item) for _, item in items] for name, items in listed.items()},
        "lifts": codec.to_json(snapshot.lifts),
        "waits": codec.to_json(snapshot.waits),
        "batches": codec.to_json(snapshot.batches),
    }
    body: JSON = codec.with_texts(parts)
    return body


def from_json(body: JSON) -> Snapshot:
    """Return the snapshot that this JSON describes; raises KeyError or BadValue."""
    parts: dict[str, Any] = {
        name: {item["id"]: codec.from_json(kind, item, f"/{name}") for item in body[name]}
        for name, kind in _KINDS.items()
    }
    lifts = tuple(codec.from_json(IdleCreditFloor, item) for item in body.get("lifts", ()))
    waits = tuple(codec.from_json(GangWait, item) for item in body.get("waits", ()))
    batches = tuple(codec.from_json(BatchSize, item) for item in body.get("batches", ()))
    policy = codec.from_json(Policy, body["policy"])
    sums: dict[str, Any] = {"lifts": lifts, "waits": waits, "batches": batches}
    return Snapshot(island=body["island"], policy=policy, **sums, **parts)
