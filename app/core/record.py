"""A snapshot as JSON, as much of it as one round's decisions need to be made again.

`seen_by` cuts a board down to what mattered: the tasks that were moved or held devices, whom they
were compared with, their users and tenants, all devices of their kinds.  Who waited and was not
picked changes nothing, so it is left out: `decide` gives the same decisions of what is left
(tested).  Fields with their default are left out too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from app.core.board import Board
from app.core.island import Conditions, Device, Lift, Plan, Policy, Snapshot, Task, Tenant, User

JSON = dict[str, Any]


def seen_by(board: Board, plan: Plan, before: Mapping[str, Task], *, island: str) -> Snapshot:
    """What a round saw that made `plan`; `before` has the moved tasks as they were."""
    moved = [before[decision.task] for decision in plan.decisions if decision.task in before]
    held = [before.get(id, stay.task) for id, stay in board.stays.items()]
    tasks = {task.id: task for task in (*held, *moved)}
    users = {task.user: board.users[task.user] for task in tasks.values()}
    kinds = {task.kind for task in tasks.values()}
    tenants = _with_those_above(board.tenants, {task.tenant for task in tasks.values()})
    return Snapshot(
        island=island,
        policy=board.policy,
        tenants=tenants,
        users=users,
        devices={d.id: d for d in board.devices.values() if d.kind in kinds},
        tasks=tasks,
        lifts=tuple(_lifts(board, tenants, users, kinds)),
    )


def _lifts(
    board: Board, tenants: Iterable[str], users: Mapping[str, User], kinds: Iterable[str]
) -> Iterator[Lift]:
    whose = [(id, "") for id in tenants] + [(user.tenant, user.id) for user in users.values()]
    for key in sorted((*who, kind) for who in whose for kind in kinds):
        if key in board.lifts:
            yield board.lifts[key]


def _with_those_above(tenants: Mapping[str, Tenant], ids: Iterable[str]) -> dict[str, Tenant]:
    found: dict[str, Tenant] = {}
    for id in sorted(ids):
        above: str | None = id
        while above is not None and above not in found:
            found[above] = tenants[above]
            above = tenants[above].parent
    return found


def as_json(snapshot: Snapshot) -> JSON:
    return {
        "island": snapshot.island,
        "policy": _plain(snapshot.policy),
        **{
            name: [_plain(getattr(snapshot, name)[id]) for id in sorted(getattr(snapshot, name))]
            for name in _KINDS
        },
        "lifts": [_plain(lift) for lift in snapshot.lifts],
    }


def from_json(body: JSON) -> Snapshot:
    """The snapshot again; raises KeyError or TypeError for what is none."""
    parts: dict[str, Any] = {
        name: {item["id"]: _value(kind, item) for item in body[name]}
        for name, kind in _KINDS.items()
    }
    parts["lifts"] = tuple(_value(Lift, item) for item in body.get("lifts", ()))
    return Snapshot(island=body["island"], policy=_value(Policy, body["policy"]), **parts)


_KINDS: dict[str, type] = {"tenants": Tenant, "users": User, "devices": Device, "tasks": Task}


def _plain(value: Any) -> Any:
    """Numbers beyond 2^53 are kept as text: JSON readers would round them."""
    if is_dataclass(value) and not isinstance(value, type):
        named = ((name, getattr(value, name), usual) for name, usual in _defaults(type(value)))
        return {name: _plain(v) for name, v, usual in named if v != usual}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """The names of the fields, each with its default."""
    return tuple((f.name, _default(f)) for f in fields(kind))


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def _value(kind: type, item: JSON) -> Any:
    values = dict(item)
    for name in ("faded_us",):
        if name in values:
            values[name] = int(values[name])
    if "conditions" in values:
        conditions: JSON = values["conditions"]
        as_tuples: JSON = {k: tuple(v) if isinstance(v, list) else v for k, v in conditions.items()}
        values["conditions"] = Conditions(**as_tuples)
    if "seats" in values:
        values["seats"] = tuple(values["seats"])
    if "away" in values:
        values["away"] = tuple((a, b) for a, b in values["away"])
    return kind(**values)
