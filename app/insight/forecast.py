"""Forecasts when a waiting task will have its next turn: gives rows to `core.explanation.estimator`
(rule F10).

Run times of tasks are learned from tasks that ended in the last 30 days. Errors of earlier answers
are learned from tasks that have started since this process gave the answers. The scene is the
island's board: the tasks on devices, how many tasks of each tenant go before the task
(`core.scheduling.blockers.before`), and the windows of reservations and maintenance. If many tasks
go before, only every n-th of them is simulated, and the wait is multiplied by n.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from statistics import median
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.explanation import estimator
from app.core.explanation.estimator import (
    Calibration,
    Estimate,
    Held,
    History,
    Scene,
    TenantLine,
    Unknown,
    WaitingTask,
    WithheldDevices,
)
from app.core.fairness import usage_decay
from app.core.fairness.fair_tree import Branch
from app.core.model.snapshot import BoardTask, changed
from app.core.scheduling import blockers
from app.core.scheduling.blockers import WaitingBefore
from app.core.scheduling.board import Board
from app.core.scheduling.stays import slice_us
from app.db.models import Placement
from app.db.models import Task as TaskRow
from app.db.transactions import AnyRow
from app.insight.windows_ahead import WindowAhead
from app.scheduling import gang_tickets

LEARNED_S = 60.0  # age at which a history is read again
NONE_LEARNED_S = 1.0  # the same while nothing has ended: the first end is to be known at once
HISTORY = timedelta(days=30)
PLACEMENTS = 20_000  # newest placements in which to look for tasks that ended
STARTS = 200  # newest placements that say how long a start takes
TOLD = 2000  # most answers remembered until their tasks have started
EVENTS = 600  # most tasks considered in the simulations for one answer; this takes about 2 ms
_GANG = ""  # stands for the tenant of a gang that goes first
_NOBODY = "nobody"  # no tenant has this id
PLAYED = 100  # largest number of tasks ahead that are simulated
MOST_STEPS = 2**63 - 1  # the column of steps holds no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The expected time of a task's next turn: 80 % of such tasks start within the interval."""

    p10_s: float
    p50_s: float
    p90_s: float
    starts_at: datetime  # the median
    earliest_at: datetime
    latest_at: datetime


#: What forecasts need of tasks, beside the columns of `snapshot_reader`.
COLUMNS = (
    TaskRow.name,
    TaskRow.lot_index,
    TaskRow.total_held_us,
    TaskRow.guest_held_us,
    TaskRow.unheard_us,
    TaskRow.descriptor["max_duration_s"].label("max_duration_s"),
    TaskRow.step,
    TaskRow.descriptor["params"]["steps"].label("steps"),
    TaskRow.descriptor["from_checkpoint"].label("from_checkpoint"),
)


# --- what has been learned ------------------------------------------------------------------------


@dataclass(slots=True)
class Learned:
    """Run times of tasks, and the errors of earlier answers."""

    read_s: float = 0.0
    history: History = field(default_factory=History)
    start_s: float = 0.0  # median time from a launch to the first step
    calibration: Calibration = field(default_factory=Calibration)
    told: OrderedDict[str, tuple[Estimate, float]] = field(default_factory=OrderedDict)

    def refreshed(self, session: Session) -> Learned:
        now_s = time.monotonic()
        has_none = self.history.median_s(((),)) is None
        if not self.read_s or now_s - self.read_s >= (NONE_LEARNED_S if has_none else LEARNED_S):
            self.read_s, self.history = now_s, _history(session)
            self.start_s = session.scalar(_START_S) or 0.0
            self._calibrate(session)
        return self

    def expected_s(self, row: Any) -> float | None:
        """Return how long such a task will still run on the number of devices that it needs."""
        return self.history.median_s(_history_keys(row))

    def usual_s(self, tenant: str, width: int) -> float | None:
        """Return how long the tenant's tasks of this width run."""
        return self.history.median_s(((tenant, width), (tenant,), ()))

    def remember(self, task: str, told: Estimate, at_s: float) -> None:
        """Remember the first answer about a task only, so that it does not matter how often users
        ask.
        """
        self.told.setdefault(task, (told, at_s))
        if len(self.told) > TOLD:
            self.told.popitem(last=False)

    def _calibrate(self, session: Session) -> None:
        if not self.told:
            return
        query = select(Placement.task_id, func.max(Placement.launched_at))
        mine = query.where(Placement.task_id == func.any(list(self.told)))
        for id, launched_at in session.execute(mine.group_by(Placement.task_id)):
            told, at_s = self.told[id]
            if launched_at.timestamp() > at_s:
                self.calibration.learn(told, launched_at.timestamp() - at_s)
                del self.told[id]


_NEWEST = (
    select(Placement.launched_at, Placement.started_at)
    .where(Placement.started_at.is_not(None), ~Placement.guest)
    .order_by(Placement.id.desc())
    .limit(STARTS)
    .subquery()
)
_START_S = select(
    func.percentile_cont(0.5).within_group(
        func.extract("epoch", _NEWEST.c.started_at - _NEWEST.c.launched_at)
    )
)


def _history(session: Session) -> History:
    """Build the history from the newest placements that ended a task, the oldest first."""
    columns = (Placement.task_id, Placement.end, Placement.ended_at)
    newest = (
        select(*columns)
        .where(~Placement.guest)
        .order_by(Placement.id.desc())
        .limit(PLACEMENTS)
        .subquery()
    )
    query = (
        select(
            TaskRow.tenant_id,
            TaskRow.user_id,
            TaskRow.name,
            TaskRow.lot_index,
            TaskRow.devices_min,
            TaskRow.total_held_us,
            TaskRow.guest_held_us,
            TaskRow.held_us,
        )
        .join(newest, newest.c.task_id == TaskRow.id)
        .where(
            newest.c.end.in_(("finished", "failed")),
            ~gang_tickets.IS_TICKET,
            newest.c.ended_at > func.now() - HISTORY,
            TaskRow.state.in_(("done", "failed")),
        )
        .order_by(newest.c.ended_at)
    )
    history = History()
    for row in session.execute(query):
        history.add(_history_keys(row), _worked_s(row, row.held_us))
    return history


def _worked_s(row: Any, held_us: int) -> float:
    """Return how long the task has worked, counted as if it had only the devices that it needs.

    The speed is assumed to grow in proportion to the devices; what ranks lose by communication is
    unknown.
    """
    return (row.total_held_us + held_us + row.guest_held_us) / 1e6 / row.devices_min  # type: ignore[no-any-return]


def _history_keys(row: Any) -> estimator.Who:
    tenant, width = row.tenant_id, row.devices_min
    # the members of a lot are alike
    name = row.name if row.lot_index is None else row.name.rpartition(".")[0]
    return (tenant, row.user_id, name, width), (tenant, width), (tenant,), ()


# --- the scene ------------------------------------------------------------------------------------


def start(
    board: Board,
    task: BoardTask,
    *,
    asked: AnyRow,
    on_devices: Sequence[AnyRow],
    own: int,
    crowd: WaitingBefore,
    unit: int,
    learned: Learned,
    gang: int = 0,
    windows: Sequence[WindowAhead] = (),
) -> Estimate | Unknown:
    """Forecast the start of a task behind `own` tasks of its top-level tenant, and those of the
    `crowd`.

    `asked` and `on_devices` are rows of tasks; `unit` is the charge for one device for one turn.
    `gang` is the width of a gang that the free devices are kept for; 0 if they are not.  `windows`
    are those of the island that are not over.
    """
    not_before_s = task.retry_at_s
    if (let_in_s := board.let_in_s(task)) > board.now_s:
        task, not_before_s = changed(task, avoids=()), max(not_before_s, let_in_s)
    stretch = max(1, math.ceil((own + sum(crowd[1])) / PLAYED))
    before = own // stretch
    me = _queued(asked)
    lines = dict(_lines(board, crowd, stretch=stretch, unit=unit))
    lines |= _of_holders(board, task.kind, lines)
    mine = _line(board.leaf(task).top, board, task.kind, stretch)
    lines[board.leaf(task).top.name] = replace(
        mine, tasks=[WaitingTask(who=me.who[1:], width=task.width)] * before + [me]
    )
    if gang:
        lines[_GANG] = TenantLine(score_s=-math.inf, tasks=[WaitingTask(who=((),), width=gang)])
    scene = _scene(board, task, lines, on_devices, start_s=learned.start_s)
    found = estimator.starts_in(
        _foreseeing(windows, board, task, scene, stretch) if windows else scene,
        board.leaf(task).top.name,
        before,
        learned.history,
        calibration=learned.calibration,
        events=EVENTS,
    )
    if isinstance(found, Unknown):
        return found
    answer = _stretched(found, stretch)
    learned.remember(task.id, answer, board.now_s)
    return estimator.bounded(_not_before(answer, not_before_s - board.now_s))


def _queued(row: AnyRow) -> WaitingTask:
    return WaitingTask(
        who=_history_keys(row),
        width=row.devices_min,
        elapsed_s=_worked_s(row, row.held_us),
        max_duration_s=row.max_duration_s,
    )


def _of_holders(board: Board, kind: str, known: Mapping[str, TenantLine]) -> dict[str, TenantLine]:
    """Return lines for tenants that only hold devices.

    These tenants wait again when their turn is over.
    """
    tops = {stay.leaf.top: None for stay in board.stays.values()}
    return {top.name: _line(top, board, kind) for top in tops if top.name not in known}


def _line(top: Branch, board: Board, kind: str, stretch: int = 1) -> TenantLine:
    score_s = blockers.seconds(board, board.tree.score(top, kind=kind))
    return TenantLine(score_s=score_s, tasks=(), weight=top.weight / 1000 / stretch)


def _scene(
    board: Board,
    task: BoardTask,
    lines: dict[str, TenantLine],
    on_devices: Sequence[AnyRow],
    *,
    start_s: float,
) -> Scene:
    pool = board.pools.get(task.kind)
    return Scene(
        free=pool.fitting(board.lane(task)) if pool is not None else 0,
        held=list(_held(board, task, on_devices)),
        lines=lines,
        slice_s=_slice_s(board, task),
        fresh_s=board.policy.fresh_s,
        start_s=start_s,
        half_life_s=board.policy.half_life_s,
    )


def _foreseeing(
    windows: Iterable[WindowAhead], board: Board, task: BoardTask, scene: Scene, stretch: int
) -> Scene:
    """Add to a scene what the windows withhold, and the devices that serve again after one.

    In the scene time passes `stretch` times as fast.
    """
    withheld, free = list[WithheldDevices](), scene.free
    for window in windows:
        if window.owners:
            owner, number = _owner(window, board, task), window.number_by_kind.get(task.kind, 0)
            if window.in_force:  # what its tasks do not want is lent
                number = min(number, _wanted(scene, owner))
        else:
            owner, number = _NOBODY, _maintained(window, board, task.kind)
            free += number if window.in_force else 0
        if number:
            each = WithheldDevices(
                tenant=owner,
                number=number,
                begins_s=0.0 if window.in_force else (window.begins_s - board.now_s) / stretch,
                ends_s=(window.ends_s - board.now_s) / stretch,
            )
            withheld.append(each)
    return replace(scene, free=free, withheld=withheld)


def _owner(window: WindowAhead, board: Board, task: BoardTask) -> str:
    """Return the line that may have the devices of the window.

    If the window is for others of the task's own line, no line may.
    """
    path = board.path_of(task.tenant)
    top = window.owners[-1]
    return top if window.is_for(path, task.user) or top not in path else _NOBODY


def _wanted(scene: Scene, tenant: str) -> int:
    """Return how many devices a line holds and waits for; 0 if it waits for none."""
    waiting = sum(task.width for task in scene.lines[tenant].tasks) if tenant in scene.lines else 0
    holding = sum(held.width for held in scene.held if held.tenant == tenant)
    return waiting and waiting + holding


def _maintained(window: WindowAhead, board: Board, kind: str) -> int:
    """Return how many devices of a kind are out of service in a window; if it is in force, those
    that are empty already.
    """
    known = (board.devices[id] for id in window.ids if id in board.devices)
    still_held = board.seated if window.in_force else ()
    return sum(each.kind == kind and each.id not in still_held for each in known)


def _slice_s(board: Board, task: BoardTask) -> float:
    """Return the usual length of a turn; infinite if tasks take none.

    A task that has not run does not know yet what its switches cost, so those on devices count.
    """
    if not board.policy.turns:
        return math.inf
    turns_us = [slice_us(board.policy, stay.task) for stay in board.stays.values()]
    usual_us = median(turns_us) if turns_us else 0
    return max(usual_us, slice_us(board.policy, task)) / 1e6


def _lines(
    board: Board, crowd: WaitingBefore, *, stretch: int, unit: int
) -> Iterator[tuple[str, TenantLine]]:
    """Yield lines that have one of every `stretch` tasks; it moves its tenant as far as all of them
    would.
    """
    ends = list(accumulate(crowd[1]))
    last = ends[-1] if ends else 0
    chosen = Counter(bisect_left(ends, at) for at in range(stretch, last + 1, stretch))
    for at, count in chosen.items():
        party = crowd[0][at]
        task = WaitingTask(who=((party.name,), ()), width=max(1, round(party.fee / unit)))
        score_s = blockers.seconds(board, usage_decay.score(party.faded, party.weight))
        weight = party.weight / 1000 / stretch
        yield party.name, TenantLine(score_s=score_s, tasks=[task] * count, weight=weight)


def _held(board: Board, task: BoardTask, rows: Sequence[AnyRow]) -> Iterator[Held]:
    """Yield the tasks on devices."""
    by_id = {row.id: row for row in rows}
    # each device is simulated once
    beside = {id for others in board.beside.values() for id in others}
    for device, here in board.fractions.items():
        beside |= here.keys() - {board.seated[device]}
    for stay in board.stays.values():
        holder = stay.task
        if holder.kind != task.kind or stay.leaving or stay.id in beside:
            continue
        row = by_id[stay.id]
        since_s = board.now_s if holder.started_s is None else holder.started_s
        speed = len(stay.devices) / holder.width
        worked_s = _worked_s(row, holder.held_us)
        yield Held(
            tenant=stay.leaf.top.name,
            who=_history_keys(row),
            width=len(stay.devices),
            elapsed_s=worked_s,
            left_s=_left_s(row, worked_s),
            turn_s=max(0.0, board.now_s - since_s),
            slice_s=stay.turn_us / 1e6,
            max_duration_s=_most_s(row, holder.held_us - holder.prepared_us, worked_s, speed),
            speed=speed,
        )


def _left_s(row: Any, worked_s: float) -> float | None:
    """Return how long the task still works at its pace so far; None if it does not tell its
    steps, or has not made all of them itself.
    """
    steps = steps_to_make(row.steps, row.step)
    if steps is None or not row.step or row.from_checkpoint:
        return None
    made: int = row.step
    return worked_s * (steps - made) / made


def left_s(row: Any, learned: Learned) -> float | None:
    """Return how long the task will still run, once it does; None if nobody knows."""
    worked_s = _worked_s(row, row.held_us)
    left = _left_s(row, worked_s)
    if left is not None:
        return left
    found = learned.history.remaining(_history_keys(row), elapsed_s=worked_s, quantiles=(0.5,))
    return None if found is None else found[0]


def steps_to_make(told: object, step: int) -> int | None:
    """Return the number of steps that a task will make, which its parameter `steps` has `told`;
    None if that is not a number that the task can still reach.
    """
    return told if type(told) is int and max(step, 1) <= told <= MOST_STEPS else None


def _most_s(row: Any, held_us: int, worked_s: float, speed: float) -> float | None:
    """Return how long the task can work in all before it has held its home for `max_duration_s`."""
    if row.max_duration_s is None:
        return None
    left_s: float = row.max_duration_s - (row.total_held_us - row.unheard_us + held_us) / 1e6
    return worked_s + max(0.0, left_s) * speed


def _stretched(found: Estimate, stretch: int) -> Estimate:
    return replace(
        found,
        p10_s=found.p10_s * stretch,
        p50_s=found.p50_s * stretch,
        p90_s=found.p90_s * stretch,
        model_s=found.model_s * stretch,
    )


def _not_before(told: Estimate, backoff_s: float) -> Estimate:
    """Move the answer behind the time of the next attempt, which may have passed."""
    p10_s, p50_s, p90_s = (max(part, backoff_s) for part in (told.p10_s, told.p50_s, told.p90_s))
    return replace(told, p10_s=p10_s, p50_s=p50_s, p90_s=p90_s)


def in_order(told: Sequence[Estimate], now_s: float) -> list[Start]:
    """Return the starts of tasks that are given in the order of their places.

    None is later than that of a worse place. Each estimate was made alone, so its errors are its
    own.
    """
    parts = ([one.p10_s for one in told], [one.p50_s for one in told], [one.p90_s for one in told])
    return [
        Start(
            p10_s=p10_s,
            p50_s=p50_s,
            p90_s=p90_s,
            starts_at=_at(now_s + p50_s),
            earliest_at=_at(now_s + p10_s),
            latest_at=_at(now_s + p90_s),
        )
        for p10_s, p50_s, p90_s in zip(*map(estimator.in_order, parts), strict=True)
    ]


def _at(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
