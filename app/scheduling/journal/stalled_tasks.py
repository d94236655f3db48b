"""Tells channels of tasks that hold a device and make no progress.

`core.webhooks.stalls` decides. Only tasks are watched whose requests name a channel for it, so no
other task costs anything. Sessions are not watched: they wait for their users. The steps of a
command are its checkpoints, which the device saves though the command stands still; they do not
count.
"""

from __future__ import annotations

from sqlalchemy import delete, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED
from app.core.units import duration
from app.core.webhooks.stalls import SeenProgress, SignsOfProgress, judge_progress
from app.db.models import ProgressMark, Task
from app.scheduling.journal import task_writer
from app.settings import settings

STALLED = "task.stalled"
_LOOKING = 0x7374616C6C  # key of an advisory lock; unique in this database

_WATCHED = text(
    """
    select t.id,
        case when t.descriptor -> 'run' -> 'command' is null then t.step else 0 end as step,
        t.total_held_us + t.held_us as held_us,
        coalesce((select max(l.id) from logs l where l.task_id = t.id), 0) as line,
        coalesce((select max(m.step) from metrics m where m.task_id = t.id), 0) as row
    from tasks t
    where t.state = 'running' and t.descriptor ->> 'session' is null
        and (t.gang_id is null or t.gang_id = t.id)
        and exists (select from request_channels c
            where c.request_id = t.request_id and jsonb_exists(c.events, :type))
    order by t.id
    """
)


def tell_stalled(session: Session) -> None:
    """Note the progress of the watched tasks, and tell of those that have stalled.

    While another control looks, nothing is done.
    """
    if not session.scalar(text("select pg_try_advisory_xact_lock(:key)"), {"key": _LOOKING}):
        return
    ended = select(Task.id).where(Task.state.in_(ENDED))
    session.execute(delete(ProgressMark).where(ProgressMark.task_id.in_(ended)))
    marks = {mark.task_id: mark for mark in session.scalars(select(ProgressMark))}
    stalled_us, new, stalled = round(settings().stalled_s * 1e6), list[dict[str, object]](), []
    for row in session.execute(_WATCHED, {"type": STALLED}):
        before = _seen(marks[row.id]) if row.id in marks else None
        progress = SignsOfProgress(step=row.step, line=row.line, row=row.row)
        seen, is_due = judge_progress(before, progress, held_us=row.held_us, stalled_us=stalled_us)
        if seen != before:
            new.append({"task_id": row.id, **_columns(seen)})
        if is_due:
            stalled.append(row.id)
    if new:
        write = insert(ProgressMark).values(new)
        kept = {name: write.excluded[name] for name in new[0]}
        session.execute(write.on_conflict_do_update(index_elements=["task_id"], set_=kept))
    for task in session.scalars(select(Task).where(Task.id.in_(stalled)).order_by(Task.id)):
        for_s = duration(settings().stalled_s)
        told = f"It held a device for {for_s} without a new step, line or row of metrics."
        task_writer.tell(session, task, STALLED, told)
        task_writer.note_news(session, task, STALLED)


def _seen(mark: ProgressMark) -> SeenProgress:
    progress = SignsOfProgress(step=mark.step, line=mark.line, row=mark.row)
    return SeenProgress(progress=progress, held_us=mark.held_us, is_told=mark.is_told)


def _columns(seen: SeenProgress) -> dict[str, object]:
    at = seen.progress
    marked = {"step": at.step, "line": at.line, "row": at.row}
    return {**marked, "held_us": seen.held_us, "is_told": seen.is_told}
