"""Islands drawn as text, for tests that can be read at a glance.

`island("a b' . x", queue="c a2")` has four devices d0..d3: a task of tenant a runs on d0, one of
tenant b on d1 in its first slice, d2 is free and d3 is down; a task of tenant c waits, and one of
the second user of tenant a.  A cell is a letter (the tenant), an optional digit (its user, else 1)
and marks:

    .  free     x  down     #  free, but cordoned
    a  running, has held 10 s    a'  running, in its first slice    a*  starting
    a/ pausing                   a!  stopping                       a#  running, device cordoned

Tasks are named after their cell ("a", then "a.2", "a.3" for more of the same user), devices d0, d1.
`seats(plan)` draws what was decided: "b>a" is a pause of b for a, "a" on a free device.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from app.core.fairness.usage_decay import FIXED_POINT_BITS
from app.core.model.lifecycle import Move
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Plan,
    Policy,
    Snapshot,
)

NOW_S = 1000.0
SECOND = 1_000_000  # µs

_CELL = re.compile(r"(?P<tenant>[a-z])(?P<user>\d?)(?P<mark>['*/!#]?)")
_STATES = {"": "running", "'": "running", "*": "starting", "/": "pausing", "!": "stopping"}


def island(
    cells: str,
    *,
    queue: str = "",
    used: dict[str, float] | None = None,
    weights: dict[str, float] | None = None,
    policy: Policy | None = None,
    tasks: dict[str, dict[str, Any]] | None = None,
) -> Snapshot:
    """A snapshot at NOW_S, with usage that does not fade.

    `used` is in device-seconds, by tenant ("a") or user ("a2"); what a user used, its tenant used
    too.  `tasks` changes fields of tasks by name.
    """
    names: Counter[str] = Counter()
    devices, drawn = {}, []
    for n, cell in enumerate(cells.split()):
        id = f"d{n}"
        devices[id] = _device(id, cell)
        if cell not in (".", "x", "#"):
            drawn.append(_seated(_name(cell, names), cell, id))
    for n, cell in enumerate(queue.split()):
        drawn.append(_task(_name(cell, names), cell, state="waiting", submitted_s=float(n)))
    changed = {task.id: replace(task, **(tasks or {}).get(task.id, {})) for task in drawn}
    tenants, users = _parties(drawn, used or {}, weights or {})
    return Snapshot(
        island="drawn",
        policy=policy or Policy(half_life_s=0.0),
        tenants=tenants,
        users=users,
        devices=devices,
        tasks=changed,
    )


def seats(plan: Plan) -> str:
    """The launches by device: "d0: b>a  d1: c"."""
    pauses = {d.against: d.task for d in plan.decisions if d.move == Move.Pause and d.against}
    launches = sorted((d.device or "", d.task) for d in plan.decisions if d.move == Move.Launch)
    drawn = [f"{device}: {_change(pauses.get(task), task)}" for device, task in launches]
    return "  ".join(drawn)


def moves(plan: Plan) -> list[tuple[str, str]]:
    """(task, move) in the order in which they were decided."""
    return [(decision.task, str(decision.move)) for decision in plan.decisions]


def codes(plan: Plan, task: str) -> list[str]:
    return [reason.code for reason in plan.reasons[task]]


def _change(victim: str | None, task: str) -> str:
    return f"{victim}>{task}" if victim else task


def _device(id: str, cell: str) -> BoardDevice:
    return BoardDevice(
        id=id,
        host="h",
        kind="cpu",
        up=cell != "x",
        cordoned=cell.endswith("#"),
        memory_bytes=8_000_000_000,
        lease_until_s=NOW_S + 10,
    )


def _seated(name: str, cell: str, device: str) -> BoardTask:
    mark = _parts(cell)["mark"].replace("#", "")
    held_us = {"'": SECOND // 2, "*": 0}.get(mark, 10 * SECOND)
    return _task(
        name,
        cell,
        state=_STATES[mark],
        epoch=1,
        seats=(device,),
        held_us=held_us,
        started_s=NOW_S - held_us / SECOND,
    )


def _task(name: str, cell: str, **details: Any) -> BoardTask:
    parts = _parts(cell)
    tenant = parts["tenant"]
    user = tenant + (parts["user"] or "1")
    values = {"epoch": 0, "kind": "cpu", "request": name, **details}
    return BoardTask(id=name, tenant=tenant, user=user, **values)


def _parts(cell: str) -> dict[str, str]:
    found = _CELL.fullmatch(cell)
    assert found, f"{cell!r} is no cell"
    return found.groupdict()


def _name(cell: str, names: Counter[str]) -> str:
    parts = _parts(cell)
    base = parts["tenant"] + parts["user"]
    names[base] += 1
    return base if names[base] == 1 else f"{base}.{names[base]}"


def _parties(
    tasks: list[BoardTask], used: dict[str, float], weights: dict[str, float]
) -> tuple[dict[str, BoardTenant], dict[str, BoardUser]]:
    """Tenants and users of the tasks; what seated tasks held is booked to them already."""
    faded: Counter[str] = Counter()
    for name, seconds in used.items():
        amount = int(seconds * SECOND) << FIXED_POINT_BITS
        faded[name if len(name) > 1 else f"{name}1"] += amount
    for task in tasks:
        faded[task.user] += task.held_us << FIXED_POINT_BITS
    tenants = {
        id: BoardTenant(id=id, name=id, weight=int(1000 * weights.get(id, 1)))
        for id in {task.tenant for task in tasks}
    }
    users = {
        task.user: BoardUser(id=task.user, tenant=task.tenant, faded_us=faded[task.user])
        for task in tasks
    }
    return tenants, users
