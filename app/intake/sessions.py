"""Ends sessions into which their users have not typed for as long as the tenant allows, after a
warning.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED
from app.core.model.provisions.session import SessionEnd, judge_silence
from app.core.units import duration
from app.db.models import RequestEvent, Task, Tenant, Tunnel
from app.db.transactions import now
from app.intake import actions

WARNED = "task.session_warned"
BY = "its tenant's limit of silent sessions"


def end_silent(session: Session) -> None:
    """Warn and cancel silent sessions; a chore of control, which may run twice without harm."""
    if not session.scalar(select(exists().where(Tenant.session_end_s.is_not(None)))):
        return
    started = (Task.first_started_at.is_not(None), Task.state.not_in(ENDED))
    is_session = Task.descriptor["session"].astext.is_not(None)
    for task in session.scalars(select(Task).where(*started, is_session).order_by(Task.id)).all():
        last = _last_input(session, task)
        silent_s = (now(session) - last).total_seconds()
        end_s = _end_s(session, task)
        warned = _is_warned(session, task, last)
        match judge_silence(silent_s, end_s, is_warned=warned):
            case SessionEnd.WARN:
                assert end_s is not None
                told = (
                    f"Nobody has typed for {duration(silent_s)}: it ends after {duration(end_s)}."
                )
                actions.tell(session, task, WARNED, told)
            case SessionEnd.END:
                actions.cancel_task(session, task, by=BY)


def _last_input(session: Session, task: Task) -> datetime:
    query = select(func.max(Tunnel.active_at)).where(Tunnel.task_id == task.id)
    times = [task.first_started_at, session.scalar(query)]
    return max(at for at in times if at is not None)


def _end_s(session: Session, task: Task) -> float | None:
    """Return after how many seconds without input the task's session ends; None if it never does.

    The task's tenant sets the limit, or else the nearest tenant above that has one.
    """
    tenant = session.get_one(Tenant, task.tenant_id)
    while tenant.session_end_s is None and tenant.parent_id is not None:
        tenant = session.get_one(Tenant, tenant.parent_id)
    return tenant.session_end_s


def _is_warned(session: Session, task: Task, since: datetime) -> bool:
    query = select(RequestEvent.id).where(
        RequestEvent.request_id == task.request_id,
        RequestEvent.task_id == task.id,
        RequestEvent.type == WARNED,
        RequestEvent.at > since - timedelta(seconds=1),
    )
    return session.scalar(query.limit(1)) is not None
