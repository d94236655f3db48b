"""Who held a device when: its placements in a period."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

STAYS_READ = 10_000  # most stays read in all; each device has an equal part


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStay:
    """A task's stay on a device. `shared`: others could hold the device at the same time."""

    tenant: str
    task_id: str
    launched_at: datetime
    ended_at: datetime | None
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHistory:
    """Holds all stays on a device that reach beyond `since`, by launch.

    `since` is later than what was asked for if the device was new (`joined`) or had too many
    stays to read (`cut`).
    """

    device: str
    since: datetime
    joined: bool
    cut: bool
    stays: tuple[DeviceStay, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskName:
    request_id: str
    request: str
    task: str


def device_histories(
    session: Session, devices: Sequence[str], since: datetime, *, most: int = STAYS_READ
) -> list[DeviceHistory]:
    """Return the history of each device since then, in the order of `devices`."""
    each = max(1, most // max(1, len(devices)))
    found: dict[str, list[DeviceStay]] = {id: [] for id in devices}
    joined_at: dict[str, datetime] = {}
    values = {"devices": list(devices), "since": since, "each": each}
    for row in session.execute(text(STAYS), values):
        joined_at[row.device] = row.created_at
        if row.task_id is not None:
            found[row.device].append(
                DeviceStay(
                    tenant=row.tenant,
                    task_id=row.task_id,
                    launched_at=row.launched_at,
                    ended_at=row.ended_at,
                    shared=row.shared,
                )
            )
    return [
        _history(id, found[id], joined_at[id], since, each) for id in devices if id in joined_at
    ]


def _history(
    device: str, stays: list[DeviceStay], joined_at: datetime, since: datetime, most: int
) -> DeviceHistory:
    ends = [stay.ended_at for stay in stays if stay.ended_at is not None]
    cut = len(ends) >= most
    begins = max(since, joined_at, min(ends)) if cut else max(since, joined_at)
    kept = [stay for stay in stays if stay.ended_at is None or stay.ended_at > begins]
    return DeviceHistory(
        device=device,
        since=begins,
        joined=joined_at > since,
        cut=cut,
        stays=tuple(sorted(kept, key=lambda stay: (stay.launched_at, stay.task_id))),
    )


def task_names(session: Session, tasks: Collection[str]) -> dict[str, TaskName]:
    return {
        row.id: TaskName(request_id=row.request_id, request=row.request, task=row.task)
        for row in session.execute(_NAMES, {"tasks": list(tasks)})
    }


# One subquery per device and index: open placements by `ix_placements_open`, ended ones by
# `ix_placements_ended`.
STAYS = """
    select device.id as device, device.created_at, tenant.name as tenant, stay.task_id,
        stay.launched_at, stay.ended_at, stay.shares or stay.fraction_milli < 1000 as shared
    from devices device
    left join lateral (
        (
            select * from placements
            where device_id = device.id and ended_at is null
        ) union all (
            select * from placements
            where device_id = device.id and ended_at > :since
            order by ended_at desc limit :each
        )
    ) stay on true
    left join tenants tenant on tenant.id = stay.tenant_id
    where device.id = any(cast(:devices as text[]))
"""

_NAMES = text(
    """
    select task.id, task.request_id, request.name as request, task.name as task
    from unnest(cast(:tasks as text[])) as wanted (id)
    join tasks task on task.id = wanted.id
    join requests request on request.id = task.request_id
    """
)
