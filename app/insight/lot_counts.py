"""Counts the members of lots by phase, and forecasts their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Numeric, case, cast, func, literal_column, select
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED, State
from app.core.model.lot_members import LotCounts
from app.core.model.phase import Phase, request_phase
from app.db.models import Lot, Task
from app.insight import phases
from app.scheduling.journal.lots import counts_of

LATEST = 100  # members of which the median is taken
_IS_LIVE_MEMBER: ColumnElement[bool] = literal_column(
    "tasks.lot_index is not null and tasks.state not in ('done', 'failed', 'cancelled')", Boolean
)
_ON_DEVICES = (Phase.starting, Phase.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class LotState:
    """Counts the members of one lot by phase and by state, and adds up what all of them took.

    Members that are no tasks yet count as queued.
    """

    counts: LotCounts
    phases: Mapping[str, int]
    states: Mapping[str, int]
    held_us: int = 0
    pauses: int = 0
    lost_steps: int = 0


def lot_states(session: Session, ids: Collection[str]) -> dict[str, LotState]:
    """Return the states of the lots among these tasks, by id."""
    if not ids:
        return {}
    rows = session.scalars(select(Lot).where(Lot.id.in_(ids))).all()
    if not rows:
        return {}
    sums = (func.sum(Task.total_held_us + Task.held_us), func.sum(Task.pauses))
    live = select(
        Task.lot_id,
        Task.state,
        phases.TASK_PHASE.label("phase"),
        func.count(),
        *sums,
        func.sum(Task.lost_steps),
    )
    live = live.where(Task.lot_id.in_([lot.id for lot in rows]), _IS_LIVE_MEMBER)
    found = {lot.id: _ended(lot) for lot in rows}
    for id, state, phase, n, *more in session.execute(
        live.group_by(Task.lot_id, Task.state, "phase")
    ):
        lot = found[str(id)]
        states, of_phase = Counter(lot.states), Counter(lot.phases)
        states[state] += n
        of_phase[phase] += n
        held_us, pauses, lost_steps = map(int, more)
        found[str(id)] = replace(
            lot,
            states=states,
            phases=of_phase,
            held_us=lot.held_us + held_us,
            pauses=lot.pauses + pauses,
            lost_steps=lot.lost_steps + lost_steps,
        )
    return found


def _ended(lot: Lot) -> LotState:
    """Return the lot's state without the members that are tasks and have not ended."""
    counts = counts_of(lot)
    ended = {state.value: getattr(lot, state) for state in ENDED if getattr(lot, state)}
    left = counts.left if lot.is_open else 0
    return LotState(
        counts=counts,
        phases={**ended, **({Phase.queued.value: left} if left else {})},
        states={**ended, **({State.blocked.value: left} if left else {})},
        held_us=lot.held_us,
        pauses=lot.pauses,
        lost_steps=lot.lost_steps,
    )


def phase_of(state: LotState, hold: str) -> Phase:
    """Return the phase of a lot that has not ended: that of its most advanced member."""
    found = request_phase("running", state.phases)
    if found != Phase.queued:
        return found
    is_held = hold or state.counts.has_failed_too_often or not state.counts.at_once
    return Phase.paused if is_held else Phase.queued


def metric_value(name: str) -> ColumnElement[Any]:
    """Return the last value of a task's metric, as a column; null if it is not a number."""
    value = Task.metrics[name]
    return case((func.jsonb_typeof(value) == "number", cast(value.astext, Numeric)))


def ends_in_s(session: Session, id: str, state: LotState) -> float | None:
    """Return the expected time until the last member ends, in seconds; None if it is not known.

    It is what remains, times the median of the members that are done, divided by those that run.
    """
    counts = state.counts
    remain = counts.left + counts.live
    width = sum(state.phases.get(phase, 0) for phase in _ON_DEVICES) or counts.at_once
    if not remain or not width or counts.has_failed_too_often:
        return None
    ran_s = func.extract("epoch", Task.ended_at - Task.first_started_at)
    mine = (Task.lot_id == id, Task.lot_index.is_not(None), Task.state == "done")
    latest = select(ran_s.label("ran_s")).where(*mine).order_by(Task.lot_index.desc())
    newest = latest.limit(LATEST).subquery()
    median = session.scalar(select(func.percentile_cont(0.5).within_group(newest.c.ran_s)))
    return None if median is None else round(remain * float(median) / width, 3)
