"""Give the devices of idle sessions back.

`provisions.session` decides.  A session keeps its device for the idle time that it asked for, but
no longer than the lowest limit on idle tasks of its tenant and the tenants above.  The device says
for how long the processes have computed nothing, and the rows of tunnels when a person last sent
something.  A session is then held, as by a person, and the island pauses it; a keystroke releases
it (`app.intake.actions.wake_task`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.device.health_cordons import HealthReport
from app.core.model.lifecycle import State
from app.core.model.protocol.messages import ResidentView
from app.core.model.provisions.session import HOLD, LEAST_PAUSE_S, gives_way, idle_limit_s
from app.core.units import duration
from app.db import transactions
from app.db.models import Device, RequestEvent, Task, Tunnel
from app.scheduling.journal import task_writer
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.idle_tasks import idle_limits_s

#: events of a person who lets a session go on
RESUMED = ("task.release_asked", "request.release_asked", "task.woken")


def take_in(session: Session, house: DeviceRows, views: Sequence[ResidentView]) -> bool:
    """Judge the sessions on a device after its report; True if one is to be paused."""
    gone = [view for view in views if view.idle_us and _gives_way(session, house, view)]
    for view in gone:
        task = house.tasks[view.task]
        task.hold = HOLD
        idle = duration(view.idle_us / 1e6)
        told = (
            f"Idle: it has computed nothing for {idle}, so {house.device.id} was given back. It "
            "comes back at the next keystroke."
        )
        task_writer.tell(session, task, "task.idle_away", told, device=house.device.id)
    return bool(gone)


def _gives_way(session: Session, house: DeviceRows, view: ResidentView) -> bool:
    task = house.tasks.get(view.task)
    if task is None or task.epoch != view.epoch or task.hold or task.state != State.running:
        return False
    wanted = task.spec.session
    idle_s = view.idle_us / 1e6
    if wanted is None or idle_s < min(wanted.idle_s, LEAST_PAUSE_S) or _is_used(house.device):
        return False
    most_s = min(idle_limits_s(session, task), default=None)
    limit_s = idle_limit_s(wanted.idle_s, most_s)
    if idle_s < limit_s:
        return False
    silent_s = silent_for_s(session, task)
    return gives_way(limit_s, computed_nothing_s=idle_s, silent_s=silent_s)


def _is_used(device: Device) -> bool:
    """True if, by its monitor, the device computes, although the processes of its task do not."""
    report = HealthReport.of(device.health)
    return device.kind != "cpu" and report is not None and not report.idle


def silent_for_s(session: Session, task: Task) -> float:
    """Return how many seconds ago a person last sent something into the session, or resumed it.

    That a turn on a device begins says nothing about a person, so it does not count.
    """
    typed = select(func.max(Tunnel.active_at)).where(Tunnel.task_id == task.id)
    resumed = select(func.max(RequestEvent.at)).where(
        RequestEvent.request_id == task.request_id, RequestEvent.type.in_(RESUMED)
    )
    times = [task.first_started_at, session.scalar(typed), session.scalar(resumed)]
    last = max((at.timestamp() for at in times if at is not None), default=0.0)
    return transactions.now_s(session) - last
