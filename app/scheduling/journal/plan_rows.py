"""Load and lock the rows that a plan needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model import lifecycle
from app.core.model.device_choice import WHOLE_MILLI, choice_in
from app.core.model.lifecycle import Move
from app.core.model.snapshot import Plan
from app.db.models import Device, Placement, Task
from app.scheduling import gang_tickets, guest_placements, launch_order
from app.scheduling.journal import task_writer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRows:
    """Holds the rows that a plan needs: its tasks, their open placements, and the devices that it
    assigns.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    open: dict[str, Placement] = field(default_factory=dict)
    guests: dict[str, list[Placement]] = field(default_factory=dict)
    seats: Mapping[str, str] = field(default_factory=dict)  # launched task -> its device
    lent: set[str] = field(default_factory=set)  # devices on which a guest of another task still is
    devices: Mapping[str, Device] = field(default_factory=dict)
    divided: set[str] = field(default_factory=set)  # devices of which tasks hold fractions
    shelf: launch_order.LaunchFacts = field(default_factory=launch_order.LaunchFacts)
    releases: bool = False  # True if a decision may release a slot


def load(session: Session, plan: Plan) -> PlanRows | None:
    """Load and lock the rows of a plan.

    None if another transaction has locked one of its tasks, or if the conditions of a gang have
    changed.
    """
    wanted = {decision.task for decision in plan.decisions}
    if not wanted:
        return PlanRows()
    gangs = {task.gang for task in plan.before.values() if task.gang}
    tasks = task_writer.locked_tasks(session, Task.id.in_(wanted | gangs), wait=False)
    if len(tasks) < len(wanted | gangs) or not _are_as_seen(session, plan, gangs):
        return None
    seated = [id for id, task in tasks.items() if task.state in lifecycle.ON_A_DEVICE]
    seats = {each.task: str(each.device) for each in plan.decisions if each.move == Move.Launch}
    given = [each for each in plan.decisions if each.move in (Move.Launch, Move.Splice)]
    query = select(
        Device,
        guest_placements.is_lent(Device.id),
        guest_placements.has_fractions(Device.id),
    )
    here = query.where(Device.id.in_([id for each in given for id in each.devices]))
    found = session.execute(here).all() if given else ()
    devices = {row.id: row for row, *_ in found}
    to_divide = {seats[id] for id, task in tasks.items() if id in seats and _is_fraction(task)}
    launches = [
        (tasks[each.task], devices[str(each.device)])
        for each in given
        if each.move == Move.Launch or tasks[each.task].across_hosts
    ]
    return PlanRows(
        tasks=tasks,
        open={
            row.task_id: row
            for row in task_writer.open_placements(session, Placement.task_id, seated)
        },
        guests=guest_placements.guests(
            session, [id for id in seated if tasks[id].resized_at is not None]
        ),
        seats=seats,
        lent={row.id for row, is_lent, _ in found if is_lent},
        divided=to_divide | {row.id for row, _, is_divided in found if is_divided},
        devices=devices,
        shelf=launch_order.look_up(session, launches),
        releases=any(each.move not in _KEEPS_SLOTS for each in plan.decisions),
    )


_KEEPS_SLOTS = (Move.Launch, Move.Unlocked, Move.Locked)


def _is_fraction(task: Task) -> bool:
    return choice_in(task.device_choice).fraction_milli < WHOLE_MILLI


def _are_as_seen(session: Session, plan: Plan, gangs: Collection[str]) -> bool:
    """True if the conditions of gangs over several islands, and of their tickets, are as the plan
    saw them.

    The gangs are locked, so that no other island decides about them meanwhile.
    """
    terms = gang_tickets.terms_among(gang_tickets.of_gangs(session, gangs))
    return all(
        task.conditions.terms == terms[id] for id, task in plan.before.items() if id in terms
    )
