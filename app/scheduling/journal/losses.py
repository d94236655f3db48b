"""Take tasks off devices that are lost, and islands that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.fairness import usage_decay
from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.lifecycle import ENDED, Move, State
from app.core.model.protocol.messages import Alive
from app.core.model.provisions.retry import NEVER_MAX
from app.db import transactions
from app.db.models import Device, Placement, Task
from app.scheduling.journal import device_rows, task_writer
from app.scheduling.journal.device_rows import DeviceRows
from app.settings import settings

LOST = "lost"  # `Placement.end` if the device died, hung or was replaced
HUNG = "hung"  # `Placement.end` if the device reported later that the task made it hang
DEVICES_HUNG = 2  # number of devices that a task may make hang; after that it is not started again


def lose_all(session: Session, house: DeviceRows, unheard_us: int) -> bool:
    """Drop what a replaced worker process held. Its device was not heard for `unheard_us` of its
    lease.

    The new process holds the device's file lock, which the kernel passes on only when every process
    of the old worker is gone. So whatever was placed or paused there is lost, and the lease need
    not be awaited.
    """
    here = house.device.id
    lost = [task for task in house.near if task.seat == here]
    for task in lost:
        because = f"The worker of {here} was restarted."
        placement = house.placement(task)
        share_us = unheard_us // number_in_turns(house.open.values(), placement)
        lose(session, task, placement, because, unheard_us=share_us)
    for task in house.near:
        if task.image_on == here:
            task_writer.forget_image(session, task)
    return bool(lost)


def take_in_hung(session: Session, house: DeviceRows, alive: Alive) -> bool:
    """Record the tasks because of which the device hung; it reports them until it gets an answer.

    After the first hang the task continues on another device, and no attempt is used up. A task
    that makes a second device hang fails, because otherwise it could take one device after the
    other from all tenants.
    """
    changed = False
    for id, epoch in alive.hung:
        task, placement = house.tasks.get(id), device_rows.placement_of(session, house, id, epoch)
        if task is None or placement is None or placement.end != LOST:
            continue  # recorded before, or the stay ended in another way
        placement.end, changed = HUNG, True
        session.flush()
        where = select(Placement.device_id).where(
            Placement.task_id == id, Placement.end == HUNG, ~Placement.guest
        )
        devices = session.scalars(where.distinct().order_by(Placement.device_id)).all()
        if task.state in ENDED:
            continue
        if len(devices) < DEVICES_HUNG:
            told = f"{house.device.id} stopped working while this task ran on it. "
            told += "If another device also stops working, the task is not started again."
            task_writer.tell(
                session, task, "task.hung", told, device=house.device.id, step=task.step
            )
        else:
            _quarantine(session, task, devices)
    return changed


def _quarantine(session: Session, task: Task, devices: Sequence[str]) -> None:
    """Fail the task wherever it is; a device that holds the task drops it at the next answer."""
    told = (
        f"The devices {' and '.join(devices)} stopped working while this task ran on them, so it "
        "is not started again. Check its code for deadlocks, signals, and very many or very large "
        "messages; then submit it again."
    )
    for placement in task_writer.open_placements(session, Placement.task_id, [task.id]):
        task_writer.close_stay(session, task, placement, "failed")
    task_writer.move_task(session, task, Move.GaveUp)
    task_writer.forget_image(session, task)
    task.cause, task.message, task.detail = HUNG, told, None
    task_writer.end_task(
        session, task, f"task.{task.state}", told, cause=HUNG, devices=list(devices)
    )


def unheard_us_of_device(session: Session, device: Device | None) -> int:
    """Return for how long tasks have held a device since its last heartbeat, in microseconds.

    The time ends with the device's lease at the latest, because the device stopped its tasks then.
    The device does not know of a lease that was extended while Redis was away, so that extension is
    not counted.
    """
    if device is None or device.seen_at is None or device.lease_until is None:
        return 0
    return usage_decay.unheard_us(
        now_s=transactions.now_s(session),
        heard_s=device.seen_at.timestamp(),
        lease_ends_s=device.lease_until.timestamp(),
        lease_s=device.lease_us / 1e6 or settings().lease_s,
    )


def unheard_us_of_placement(
    session: Session, placement: Placement, lost: Iterable[Placement]
) -> int:
    """Return the same for one placement.

    Tasks that take turns on a device held it one at a time, tasks with fractions all at once.
    """
    if placement.started_at is None:
        return 0
    unheard_us = unheard_us_of_device(session, session.get(Device, placement.device_id))
    return unheard_us // number_in_turns(lost, placement)


def number_in_turns(placements: Iterable[Placement], mine: Placement) -> int:
    """Return how many of these tasks take turns with the task of `mine`, including that task."""
    if mine.fraction_milli < WHOLE_MILLI:
        return 1
    here = (row for row in placements if row.device_id == mine.device_id)
    return max(1, sum(row.started_at is not None for row in here))


def lose(
    session: Session, task: Task, placement: Placement, because: str, *, unheard_us: int = 0
) -> None:
    """Record that the device no longer holds the task, which goes back to the queue.

    The task will resume from its last checkpoint. With `retry: never` it fails instead, since its
    device may have run some of it.  `unheard_us` is how long it held the device
    after the device's last heartbeat (rule F1).
    """
    if placement.started_at is not None and unheard_us:
        task_writer.note_held(session, task, placement, placement.held_us + unheard_us)
        task.unheard_us += unheard_us
    device = task.seat
    task_writer.close_stay(session, task, placement, LOST)
    is_final = task.retry_max == NEVER_MAX
    task_writer.move_task(session, task, Move.GaveUp if is_final else Move.Lost)
    task_writer.forget_image(session, task)
    if task.state == State.failed:
        task.cause, task.message, task.detail = LOST, because, None
        told = f"{because} It is never started again (retry: never)."
        task_writer.end_task(session, task, "task.failed", told, cause=LOST, device=device)
    elif task.state in ENDED:
        task_writer.end_task(session, task, "task.cancelled", because)
    else:
        task_writer.tell(session, task, "task.lost", because, device=device, step=task.step)
        task_writer.note_news(session, task, "task.retrying")


def hand_over(session: Session, tasks: Mapping[str, tuple[str, str]], lost: str) -> None:
    """Move the tasks of a lost island to other islands, where each resumes from its last durable
    image.

    `tasks` maps each task to (its new island, why).  The caller has locked the row of the island
    `lost`.

    Whatever still reports for the old island is stale from now on: placements are closed, images in
    the memory of its hosts are forgotten, and the next launch has a higher epoch.
    """
    rows = task_writer.locked_tasks(session, Task.id.in_(tasks))
    _take_slots(session, rows, lambda task: f"The island {lost} is lost, and {task.seat} with it.")
    for id, task in rows.items():
        if task.state in ENDED:
            continue  # it was being cancelled
        if task.move_to is not None:
            task_writer.break_off(session, task, f"the island {lost} is lost")
        island, because = tasks[id]
        _change_island(session, task, island)
        task_writer.forget_image(session, task)
        task_writer.tell(session, task, "task.reassigned", because, island=island, lost=lost)


def unseat(session: Session, ids: Sequence[str], because: str) -> None:
    """Take the slots on a lost island from members of gangs over several islands; the tasks stay
    there.

    The caller has locked the row of that island. Tasks with a pending cancel end here.
    """
    rows = task_writer.locked_tasks(session, Task.id.in_(ids))
    _take_slots(session, rows, lambda task: because)
    for task in rows.values():
        if task.cancel_asked_at is not None and task.state not in ENDED:
            task_writer.move_task(session, task, Move.Cancel)
            task_writer.end_task(session, task, "task.cancelled", because)


def _change_island(session: Session, task: Task, island: str) -> None:
    """Move the task to another island's queue.

    The time that it has waited counts there, too.
    """
    if task.state == "waiting":
        task_writer.count_waiting(session, task, -1)
    task.island = island
    if task.state == "waiting":
        task_writer.count_waiting(session, task, 1)


def _take_slots(session: Session, rows: Mapping[str, Task], because: Callable[[Task], str]) -> None:
    """Take the slots from all of these tasks that have some."""
    home = {
        row.task_id: row
        for row in task_writer.open_placements(session, Placement.task_id, sorted(rows))
    }
    for id, task in rows.items():
        if id in home:
            unheard_us = unheard_us_of_placement(session, home[id], home.values())
            lose(session, task, home[id], because(task), unheard_us=unheard_us)
