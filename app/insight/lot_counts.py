"""Counts the members of lots by phase, and forecasts their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import (
    Boolean,
    ColumnElement,
    func,
    literal_column,
    or_,
    select,
)
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED, State
from app.core.model.lot_members import LotCounts
from app.core.model.phase import Phase, request_phase
from app.core.model.provisions.stop_rule import StopRule, rule_in
from app.core.model.rungs import HELD_AT_RUNG
from app.db.models import Lot, RungResult, Task
from app.insight import phases
from app.scheduling.journal.lots import counts_of

LATEST = 100  # members of which the median is taken
_IS_LIVE_MEMBER: ColumnElement[bool] = literal_column(
    "tasks.lot_index is not null and tasks.state not in ('done', 'failed', 'cancelled')", Boolean
)
_ON_DEVICES = (Phase.starting, Phase.running)


@dataclass(frozen=True, slots=True)
class RungCount:
    """Counts the members that reached a rung, at `step` or after it; `best` is None if no value is
    a finite number.
    """

    step: int
    reached: int = 0
    passed: int = 0
    best: float | None = None


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
    stop: StopRule | None = None
    rungs: Sequence[RungCount] = ()


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
    found = _with_rungs(session, {lot.id: _ended(lot) for lot in rows})
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


def _with_rungs(session: Session, found: Mapping[str, LotState]) -> dict[str, LotState]:
    """Add the rungs of the lots that have a rule `stop`."""
    is_ruled = (Task.id.in_(found), Task.descriptor["stop"]["metric"].astext.is_not(None))
    rows = session.execute(select(Task.id, Task.descriptor).where(*is_ruled)).all()
    rules = {id: rule for id, descriptor in rows if (rule := rule_in(descriptor)) is not None}
    if not rules:
        return dict(found)
    sums = (func.count(), func.count().filter(RungResult.passed))
    bests = (func.min(RungResult.value), func.max(RungResult.value))
    query = select(RungResult.lot_id, RungResult.rung, *sums, *bests)
    query = query.where(RungResult.lot_id.in_(rules)).group_by(RungResult.lot_id, RungResult.rung)
    reached = {(lot, rung): more for lot, rung, *more in session.execute(query)}
    counted = dict(found)
    for id, rule in rules.items():
        rungs = [*rungs_of(rule)]
        for rung, count in enumerate(rungs):
            if (id, rung) in reached:
                n, passed, lowest, highest = reached[id, rung]
                best = lowest if rule.goal == "min" else highest
                rungs[rung] = RungCount(count.step, int(n or 0), int(passed or 0), best)
        counted[id] = replace(found[id], stop=rule, rungs=rungs)
    return counted


def rungs_of(rule: StopRule | None) -> Iterator[RungCount]:
    """Yield the rungs of a rule, before any member reached them."""
    for step in rule.rungs if rule is not None else ():
        yield RungCount(step=step)


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


def ends_in_s(session: Session, id: str, state: LotState) -> float | None:
    """Return the expected time until the last member ends, in seconds; None if it is not known.

    It is what remains, times the median of the members that are done, divided by those that run.
    With a rule `stop`, most members do not run to their ends: it takes the mean device time of
    those that are done or rest at a rung.
    """
    counts = state.counts
    remain = counts.left + counts.live - counts.resting + counts.promoted
    width = sum(state.phases.get(phase, 0) for phase in _ON_DEVICES) or counts.at_once
    if not remain or not width or counts.has_failed_too_often:
        return None
    if state.stop is not None:
        is_over = or_(Task.state == "done", Task.hold == HELD_AT_RUNG)
        members = (Task.lot_id == id, Task.lot_index.is_not(None), is_over)
        mean_us = session.scalar(select(func.avg(Task.total_held_us)).where(*members))
        return None if mean_us is None else round(remain * float(mean_us) / 1e6 / width, 3)
    ran_s = func.extract("epoch", Task.ended_at - Task.first_started_at)
    mine = (Task.lot_id == id, Task.lot_index.is_not(None), Task.state == "done")
    latest = select(ran_s.label("ran_s")).where(*mine).order_by(Task.lot_index.desc())
    newest = latest.limit(LATEST).subquery()
    median = session.scalar(select(func.percentile_cont(0.5).within_group(newest.c.ran_s)))
    return None if median is None else round(remain * float(median) / width, 3)
