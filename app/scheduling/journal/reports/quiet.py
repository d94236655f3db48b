"""Renews the leases of devices that send pulses, and writes the progress of their tasks in bulk.

One statement renews all leases of a round. It leaves out each device whose rows have changed since
its report was acknowledged: the device's own row, its stays, its unanswered orders, and the tasks
that are to be moved there. The report of such a device is recorded once more instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Text, cast, select, text
from sqlalchemy.orm import Session

from app.core.model.lifecycle import State
from app.core.model.protocol.messages import Alive, Answer, ResidentView
from app.core.model.provisions.mounts import FOLDER, IMAGE, digest
from app.core.scheduling.rounds import quiet_heartbeats
from app.core.scheduling.rounds.quiet_heartbeats import AcknowledgedReport, Beat
from app.data import mounts
from app.db.models import Device
from app.scheduling import ledger
from app.scheduling.island_pace import pace_of
from app.scheduling.journal.device_rows import DeviceRows


def report_to_remember(
    house: DeviceRows, alive: Alive, answer: Answer, *, txid: str
) -> AcknowledgedReport | None:
    """Return what to remember of the answer to a report; None if the report must be recorded once
    more at the next pulse.

    That is so if time alone, or rows that `renew` does not look at, may change the next answer.
    """
    device = house.device
    says = alive.events or alive.logs or alive.ahead or alive.hung or alive.health.get("findings")
    ends = alive.facts.get("leaving") or alive.facts.get("stopping")
    if says or ends or device.fitness or house.lent_to:
        return None
    asks = (answer.drop, answer.expect, answer.given, answer.environments)
    if any(asks) or answer.mounts is not None or answer.images is not None or answer.check:
        return None
    if any(order.answered_at is None for order in house.unanswered):
        return None
    held = {place for place, placement in house.open.items() if placement.ended_at is None}
    if held != {(view.task, view.epoch) for view in alive.residents}:
        return None
    if any(task.image_on == device.id or task.move_to == device.id for task in house.near):
        return None
    if not all(_goes_on(house, view) for view in alive.residents):
        return None
    if alive.residents and alive.health.get("idle"):
        return None  # the task may be idle for too long
    return quiet_heartbeats.acknowledged(alive, answer, txid=txid)


def _goes_on(house: DeviceRows, view: ResidentView) -> bool:
    """True if the resident runs alone, and nothing outside its device decides how it continues."""
    task = house.tasks[view.task]
    is_known = task.state == State.running and task.seat == house.device.id
    is_alone = task.resized_at is None and task.gang_id is None and not task.shares
    stays = task.move_to is None and task.cancel_asked_at is None and not task.hold
    runs = view.state == "running" and not view.lacks and not view.idle_us
    return is_known and is_alone and stays and runs


def written_by(session: Session, devices: Iterable[str]) -> dict[str, str]:
    """Return by device the transaction that changed its row last; renewals do not count."""
    query = select(Device.id, cast(Device.txid, Text)).where(Device.id.in_(list(devices)))
    return {id: txid for id, txid in session.execute(query)}


def renew(
    session: Session, asked: Sequence[tuple[Beat, AcknowledgedReport]], *, island: str
) -> dict[str, str]:
    """Renew the leases of these devices; returns, by device, the transaction that changed its row
    last.

    The reports of devices that are left out have to be recorded once more.
    """
    asked = _undisturbed(session, asked, island)
    values: dict[str, Any] = {
        "ids": [beat.device for beat, _ in asked],
        "processes": [beat.incarnation for beat, _ in asked],
        "sent": [beat.sent_us for beat, _ in asked],
        "txids": [report.txid for _, report in asked],
        "held": [report.held for _, report in asked],
        "lease_us": pace_of(session).lease_us,
    }
    return {id: txid for id, txid in session.execute(_RENEW, values)} if asked else {}


def _undisturbed(
    session: Session, asked: Sequence[tuple[Beat, AcknowledgedReport]], island: str
) -> list[tuple[Beat, AcknowledgedReport]]:
    """Leave out devices that may have to be told of other mounts, or of packages."""
    if any(report.mounts != (None, None) for _, report in asked):
        paths = mounts.paths(session)
        known = digest(paths.get(FOLDER, {})), digest(paths.get(IMAGE, {}))
        asked = [one for one in asked if all(map(_is_same, one[1].mounts, known))]
    if any(report.builds for _, report in asked) and session.scalar(_PACKAGES, {"island": island}):
        asked = [one for one in asked if not one[1].builds]
    return list(asked)


def _is_same(told: str | None, known: str) -> bool:
    return told is None or told == known


_RENEW = text(
    """
    with told as (
        select * from unnest(cast(:ids as text[]), cast(:processes as text[]),
            cast(:sent as bigint[]), cast(:txids as text[]), cast(:held as text[]))
            as told (device, incarnation, sent_us, txid, held)
    ), same as (
        select devices.id, told.sent_us
        from told join devices on devices.id = told.device
            and devices.incarnation = told.incarnation
            and devices.txid = cast(told.txid as xid8) and devices.heard_us < told.sent_us
        where told.held = coalesce((
                select string_agg(stay, ' ' order by stay collate "C")
                from placements, lateral concat(task_id, '/', epoch) as stay
                where device_id = devices.id and ended_at is null
            ), '')
            and not exists (
                select from orders where device_id = devices.id and answered_at is null
            )
            and not exists (select from tasks where move_to = devices.id)
        order by devices.id for no key update of devices
    )
    update devices set lease_until = now() + make_interval(secs => cast(:lease_us as float8) / 1e6),
        lease_us = :lease_us, heard_us = same.sent_us, seen_at = now()
    from same where devices.id = same.id
    returning devices.id, cast(devices.txid as text)
    """
)

_PACKAGES = text(
    "select exists (select from lines where island = :island and waiting > 0"
    " and device_choice like '%!packages:%')"
)


def write_progress(session: Session, beats: Collection[Beat]) -> None:
    """Write how long the tasks of these devices have held them, and how far they have come."""
    told = [(beat.device, task) for beat in beats for task in beat.progress]
    values: dict[str, Any] = {
        "tasks": [task.task for _, task in told],
        "epochs": [task.epoch for _, task in told],
        "devices": [device for device, _ in told],
        "steps": [task.step for _, task in told],
        "held": [task.held_us for _, task in told],
        "staged": [task.staged_us for _, task in told],
    }
    for user, tenant, kind, held_us, charged_us, over_us in session.execute(_PROGRESS, values):
        account, charged_us = (user, tenant, kind), int(charged_us)
        ledger.note_sums(session, account, int(held_us), charged_us, over_us=over_us)


# Tasks are locked in the order of their ids, as everywhere.
_PROGRESS = text(
    """
    with told as (
        select * from unnest(cast(:tasks as text[]), cast(:epochs as int[]),
            cast(:devices as text[]), cast(:steps as bigint[]), cast(:held as bigint[]),
            cast(:staged as bigint[])) as told (task, epoch, device, step, held_us, staged_us)
    ), mine as (
        select placements.id, told.*, placements.user_id, placements.tenant_id, placements.kind,
            placements.held_us as before_us, placements.charged_us as charged_before_us,
            placements.charged_us - cast(
                trunc(cast(placements.held_us as numeric) * placements.cost_milli / 1000)
                - trunc(cast(told.held_us as numeric) * placements.cost_milli / 1000)
                as bigint) as charged_us
        from told join tasks on tasks.id = told.task and tasks.epoch = told.epoch
            and tasks.seat = told.device and tasks.started_at is not null
            and tasks.resized_at is null and tasks.gang_id is null
        join placements on placements.task_id = told.task and placements.epoch = told.epoch
            and placements.device_id = told.device and not placements.guest
            and placements.ended_at is null and placements.held_us < told.held_us
        order by tasks.id for no key update of tasks, placements
    ), stays as (
        update placements set held_us = mine.held_us, charged_us = mine.charged_us,
            staged_us = greatest(placements.staged_us, mine.staged_us), last_step = mine.step
        from mine where placements.id = mine.id
    ), works as (
        update tasks set held_us = mine.held_us, step = greatest(tasks.step, mine.step)
        from mine where tasks.id = mine.task
    )
    select user_id, tenant_id, kind, sum(held_us - before_us), sum(charged_us - charged_before_us),
        max(held_us - before_us)
    from mine group by user_id, tenant_id, kind
    """
)
