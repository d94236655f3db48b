"""Runs a scheduling round of an island: looks at the board, decides, and says why.

`decide` is pure: the same snapshot at the same instant gives the same plan, in whatever order its
mappings were filled. `cycle` runs the same round on a board that is kept up to date; its cost
depends on what changes and not on what waits. The steps are numbered and always run in this order.
docs/concepts/fair_share.md defines rules F1 to F10. `core.fairness.fair_tree` keeps the order,
`core.scheduling.reclaim.preemption` chooses victims, `core.explanation.waiting_reasons`
gives reasons.

Two guarantees always hold (tested with random islands). No task is paused for another task before
one full slice. No device stays free while a waiting task could run on it, unless the device is kept
for a gang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from app.core.explanation import waiting_reasons
from app.core.fairness.fair_tree import Branch, Lane, above, both_of, on_places
from app.core.model import lifecycle
from app.core.model.decision_rule import DecisionRule
from app.core.model.lifecycle import NOT_STARTED, ON_A_DEVICE, Move, State
from app.core.model.request_needs import RequestStanding
from app.core.model.snapshot import (
    BoardTask,
    IdleCreditFloor,
    Plan,
    PlanDecision,
    Snapshot,
    changed,
)
from app.core.scheduling import blockers, idle_credit
from app.core.scheduling.board import Board
from app.core.scheduling.gangs import gang_places, gang_waits, nearness
from app.core.scheduling.gangs.island_gangs import OVER
from app.core.scheduling.reclaim import elastic, over_limit, preemption, reserved_places
from app.core.scheduling.sharing import (
    function_batches,
    graph_moves,
    stranded_parts,
    time_sharing,
)
from app.core.scheduling.stays import NEVER, RESOLUTION_S, slice_us
from app.core.units import counted

BACKFILL_DEPTH = 16  # most tasks considered behind a gang for which devices are kept


def decide(snapshot: Snapshot, *, now_s: float) -> Plan:
    """Return what to do now, in order, and why the other tasks wait.

    The idle-credit floors of the snapshot are used as they are.
    """
    board = Board.of(snapshot, now_s=now_s)
    plan = cycle(board, lift=False)
    reasons = {task.id: waiting_reasons.start(task, now_s=now_s) for task in _not_started(board)}
    places = {}
    for place, (task, said) in enumerate(blockers.line(board), start=1):
        places[task.id] = place
        reasons[task.id] += said
    return replace(plan, reasons=reasons, places=places)


def cycle(board: Board, *, lift: bool = True) -> Plan:
    """Run one round at the board's time. Afterwards the board shows the decisions as if they were
    carried out.
    """
    draft = _DraftPlan(board)
    board.places.clear()
    if not board.memory.goes_on:
        board.memory.in_the_way, board.memory.tried = set(), {}
        board.memory.waits = tuple(board.waits.values())
        board.memory.batches, board.memory.leaders = {}, []
    # 1.  Mark tasks as lost if the lease of a device has ended.
    _count_the_lost(draft)
    # 2.  End tasks that were cancelled while they held no device, and tasks that can never start.
    # 3.  Unlock tasks if all start conditions hold; lock tasks with unmet conditions.
    # 4.  Carry out requested actions for tasks on devices; empty the devices that are drained.
    _look_at_news(draft)
    # Launch moving tasks that can start now on their new devices.
    _land(draft)
    # Pause tasks that may no longer share a device.
    _pause_unshared(draft)
    # Take back what exceeds a lowered limit.
    _take_back(draft)
    # Raise new arrivals to the idle-credit floor.
    if lift:
        idle_credit.welcome(board)
    if _nothing_moved(draft):
        return Plan(look_again_s=_look_again_s(board, {}, NEVER), now_s=board.now_s)
    for pool in board.pools.values():
        pool.closed.clear()
    # Give the devices that are reserved by name to those they are for.
    _seat_reserved(draft)
    # 5.  Seat the tasks that must not wait longer.
    urgent = _seat_urgent(draft)
    # Keep devices for the gangs whose turn has come.
    urgent |= _wait_for_devices(draft, urgent)
    # Launch graphs that can take turns with running graphs.
    kept = dict(urgent)
    _share(draft, kept)
    # 6.  Launch the least served tasks on free devices, or
    # 7. in the place of tasks that had more.
    _seat(draft, kept)
    # 8.  Let tasks of one branch take turns.
    _take_turns(draft, kept)
    # Victims may have released more than was needed: then other tasks may use it, or fit a limit
    # again.
    while draft.left_over:
        draft.left_over = False
        _seat(draft, kept)
        _take_turns(draft, kept)
    # All devices that can be taken are taken by now: launch functions behind others.
    _fill_batches(draft, kept)
    # Launch graphs beside others.
    _share(draft, kept)
    # 9.  Give what no waiting task could take to sharing graphs or to elastic tasks.
    moves = bool(board.beside) and not board.short and _regroup(draft, kept)
    if moves:
        _share(draft, kept)
    if board.elastic and not board.short and not moves:
        _grow(draft, kept)
    draft.offer_withheld()
    # 10. Charge fractions for what they make unusable.
    _charge_stranded(draft)
    gang_waits.note_idle(board, draft.held_back)
    board.memory.kept = frozenset(kept)
    board.memory.goes_on = bool(board.short)
    seen = not board.short and not board.longer  # are all waiting tasks loaded?
    if seen and not draft.decisions and not kept and not urgent and draft.again_s == NEVER:
        until_s = preemption.nobody_gains_until_s(board)
        if board.elastic:
            until_s = min(until_s, elastic.next_growth_s(board))
        board.memory.quiet = (board.tree.moved, until_s)
    return Plan(
        decisions=tuple(draft.decisions),
        before=draft.before,
        look_again_s=_look_again_s(board, urgent, draft.again_s),
        now_s=board.now_s,
        lifts=_taken(board.memory.lifted),
    )


def _nothing_moved(draft: _DraftPlan) -> bool:
    """True if since a round without effect only time has passed, and not enough to change anything.

    A task that has arrived meanwhile changes nothing if it is queued behind tasks that found no
    device.
    """
    board = draft.board
    moved, until_s = board.memory.quiet
    if (
        moved != board.tree.moved
        or board.now_s >= until_s
        or draft.decisions
        or board.memory.lifted
    ):
        return False
    return not board.urgency.tasks() and not any(wait.gang for wait in board.waits.values())


def _taken(
    lifted: dict[tuple[str, str, str], IdleCreditFloor],
) -> tuple[IdleCreditFloor, ...]:
    found = tuple(lifted[key] for key in sorted(lifted))
    lifted.clear()
    return found


class _DraftPlan:
    """The decisions of one round, before they are committed."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.decisions: list[PlanDecision] = []
        self.before: dict[str, BoardTask] = {}  # the moved tasks as they were before the round
        self.again_s = NEVER  # when a task that could not be seated must be looked at again
        self.left_over = False  # True if victims held more than the launched task took
        self.emptied: set[Lane] = set()  # lanes for whose first task a device is being emptied
        # kinds with free devices that a task did not get, as they are kept for a gang
        self.held_back: set[str] = set()
        self.withheld: list[str] = []  # free devices that only those may get they are reserved for

    def offer_withheld(self) -> None:
        while self.withheld:
            self.board.offer_again(self.withheld.pop())

    def move(
        self,
        task: BoardTask,
        move: Move,
        rule: DecisionRule,
        because: str,
        *,
        devices: tuple[str, ...] = (),
        against: str | None = None,
        cost: int = 0,
        shares: bool | None = None,
        **after: object,
    ) -> None:
        """Add a decision and apply it to the board.

        Raises IllegalMove if the task's state does not allow the move.
        """
        state = lifecycle.after(task.id, task.state, move)
        self.before.setdefault(task.id, task)
        self.decisions.append(
            PlanDecision(
                task=task.id,
                move=move,
                rule=rule,
                because=because,
                devices=devices,
                against=against,
                cost=cost,
                shares=bool(shares),
            )
        )
        if shares is not None:
            after["shares"] = shares
        if move in (Move.Launch, Move.Charge) or after.get("resized_s") is not None:
            after["cost"] = cost
        place = devices or task.seats
        self.board.story.note(
            round(self.board.now_s * 1e6), task.id, move, (rule, *place), state, against or ""
        )
        self.board.set_task(changed(task, state=state, **after))


# --- 1. lost ------------------------------------------------------------------------------------


def _count_the_lost(draft: _DraftPlan) -> None:
    board = draft.board
    if board.now_s < board.leases_due_s and not board.astray:
        return
    later = False
    for id in board.look_at_leases():
        task = board.tasks[id]
        lost = [id for id in task.holds if board.is_lost(id)]
        because = f"The lease of {' and '.join(lost)} expired without a heartbeat"
        if _goes_on_without(draft, task, lost, DecisionRule.LEASE, because):
            later |= task.state != State.running
            continue
        if _leaves_its_home(board, task, lost):
            later = True
            if task.state == State.running:
                told = f"{because}; it resumes elsewhere."
                draft.move(task, Move.Pause, DecisionRule.LEASE, told, devices=task.seats)
            continue
        draft.move(
            task,
            Move.Lost,
            DecisionRule.LEASE,
            f"{because}.",
            seats=(),
            leaves=(),
            resized_s=None,
            image_on=None,
            saved=True,
            had_us=task.had_us + max(0, task.held_us - task.prepared_us),
            held_us=0,
            accrued_us=0,
            prepared_us=0,
            started_s=None,
        )
    board.astray |= later


def _leaves_its_home(board: Board, task: BoardTask, lost: list[str]) -> bool:
    """True if a command has lost devices, but its processes are at a home device that is alive.

    Until they are paused they may use its other devices, so no other task may get those.
    """
    here = task.state in (State.running, State.pausing)
    return here and task.restarts and len(task.seats) > 1 and board.alive(task.seats[0])


# --- 2. to 4. changed tasks ---------------------------------------------------------------------


def _look_at_news(draft: _DraftPlan) -> None:
    """Look once at each changed task; it is looked at again only after its next change."""
    board = draft.board
    news, board.news = sorted(board.news), set()
    for steps in (_end, _unlock_or_lock, _obey):
        for id in news:
            if id in board.tasks:
                steps(draft, board.tasks[id])
    board.news = set()


def _end(draft: _DraftPlan, task: BoardTask) -> None:
    if task.state not in NOT_STARTED:
        return
    broken = task.conditions.broken
    if task.cancel_asked:
        draft.move(
            task, Move.Cancel, DecisionRule.CANCEL, "It was cancelled while it held no device."
        )
    elif task.conditions.terms.lets_go:
        draft.move(task, Move.Cancel, DecisionRule.TICKETS, "Ended with its gang.")
    elif task.conditions.standing == RequestStanding.never:
        because = "Not started: what it awaits of another request can no longer happen."
        draft.move(task, Move.GaveUp, DecisionRule.REQUESTS, because)
    elif broken:
        begun = "resumed" if task.epoch else "started"
        because = f"Not {begun}: {', '.join(broken)} did not succeed."
        draft.move(task, Move.GaveUp, DecisionRule.NEEDS, because)


def _unlock_or_lock(draft: _DraftPlan, task: BoardTask) -> None:
    if task.state not in NOT_STARTED:
        return
    unmet = waiting_reasons.unmet_conditions(task, now_s=draft.board.now_s)
    if task.state == State.blocked and not unmet:
        draft.move(task, Move.Unlocked, DecisionRule.START, "All its start conditions hold.")
    elif task.state == State.waiting and unmet:
        draft.move(task, Move.Locked, DecisionRule.START, unmet[0].message)


def _obey(draft: _DraftPlan, task: BoardTask) -> None:
    if task.state not in ON_A_DEVICE or task.state == State.stopping:
        return
    if task.ticket:
        _keep_for_its_gang(draft, task)
    elif task.cancel_asked:
        held = task.holds
        because = "It was cancelled."
        draft.move(
            task, Move.Cancel, DecisionRule.CANCEL, because, devices=held, seats=held, leaves=()
        )
    elif task.state == State.running:  # in any other state, pause the task once it runs
        _obey_while_it_runs(draft, task)


def _obey_while_it_runs(draft: _DraftPlan, task: BoardTask) -> None:
    drained = _drained(draft, task)
    if task.conditions.hold:
        because = "Pausing, as requested. Resume the task to continue."
        draft.move(task, Move.Pause, DecisionRule.HOLD, because, devices=task.seats)
    elif task.conditions.reservation:
        because = "Preempted: its reservation has no window now. It goes on in the next one."
        draft.move(task, Move.Pause, DecisionRule.RESERVATION, because, devices=task.seats)
    elif broken := task.conditions.broken:
        because = f"Preempted: {', '.join(broken)} did not succeed, and cannot give its input."
        draft.move(task, Move.Pause, DecisionRule.NEEDS, because, devices=task.seats)
    elif island := task.conditions.terms.lets_go:
        because = f"Preempted: its gang spans islands, and {island} needs its devices."
        draft.move(task, Move.Pause, DecisionRule.TICKETS, because, devices=task.seats)
    elif task.moves_to is not None:
        if len(task.seats) > task.width:
            because = "Migrating: it keeps only the devices that it needs."
            _make_smaller(draft, task, task.seats[: task.width], DecisionRule.MOVE, because)
        elif task.stops:
            because = f"Migrating to {task.moves_to}: only its last changes are left to copy."
            draft.move(task, Move.Pause, DecisionRule.MOVE, because, devices=task.seats)
    elif drained:
        _drain(draft, task, drained)
    elif len(task.seats) > (most := max(task.width, task.width_max)):
        because = f"Reduced to {counted(most, 'device')}, as was asked."
        _make_smaller(draft, task, task.seats[:most], DecisionRule.WISH, because)


def _keep_for_its_gang(draft: _DraftPlan, ticket: BoardTask) -> None:
    """Keep a ticket's devices while its gang has ranks on them; then release them.

    A gang that has to leave the devices is paused first.
    """
    why = ticket.conditions.terms.lets_go
    nothing: dict[str, Any] = dict(
        seats=(),
        leaves=(),
        resized_s=None,
        held_us=0,
        accrued_us=0,
        prepared_us=0,
        started_s=None,
    )
    if why == OVER:
        draft.move(ticket, Move.Finished, DecisionRule.TICKETS, "Ended with its gang.", **nothing)
    elif why:
        because = "Paused: its gang does not use these devices at the moment."
        draft.move(ticket, Move.Paused, DecisionRule.TICKETS, because, **nothing)
        _unlock_or_lock(draft, draft.board.tasks[ticket.id])
    elif ticket.state == State.running and ticket.conditions.hold:
        because = "Pausing with its gang, as requested."
        draft.move(ticket, Move.Pause, DecisionRule.HOLD, because, devices=ticket.seats)
    elif ticket.state == State.running and _drained(draft, ticket):
        because = "Preempted: one of its devices is drained."
        draft.move(ticket, Move.Pause, DecisionRule.DRAIN, because, devices=ticket.seats)


def _drained(draft: _DraftPlan, task: BoardTask) -> list[str]:
    devices = draft.board.devices
    return [id for id in task.seats if not devices[id].takes_work]


def _drain(draft: _DraftPlan, task: BoardTask, drained: list[str]) -> None:
    because = f"{drained[0]} is being drained"
    if not _goes_on_without(draft, task, drained, DecisionRule.DRAIN, because):
        because = f"{because}; it resumes elsewhere."
        draft.move(task, Move.Pause, DecisionRule.DRAIN, because, devices=task.seats)


def _goes_on_without(
    draft: _DraftPlan, task: BoardTask, gone: list[str], rule: DecisionRule, because: str
) -> bool:
    """Let an elastic task continue on its other devices; False if they are too few.

    While the task is resized or leaves, its coordinator host has to finish first; the caller then
    looks at the task again.
    """
    left = tuple(id for id in task.seats if id not in gone)
    homeless = draft.board.policy.homebound and task.seat in gone
    if not task.elastic or len(left) < task.width or homeless:
        return False
    if task.state != State.running:
        return True
    if (
        rule == DecisionRule.LEASE
        and draft.board.policy.homebound
        and not _are_near(draft.board, task, gone)
    ):
        return False  # ranks have died with the lost devices
    _make_smaller(draft, task, left, rule, f"{because}; it continues with fewer devices.")
    return True


def _are_near(board: Board, task: BoardTask, devices: list[str]) -> bool:
    """True if the worker of the task's home device runs the ranks of these devices, too."""
    home, others = board.devices[task.seats[0]], [board.devices[id] for id in devices]
    return all(one.host == home.host for one in others)


def _make_smaller(
    draft: _DraftPlan,
    task: BoardTask,
    seats: tuple[str, ...],
    rule: DecisionRule,
    because: str,
    against: str | None = None,
) -> None:
    draft.move(
        task,
        Move.Splice,
        rule,
        because,
        devices=seats,
        against=against,
        cost=draft.board.cost(task, seats),
        seats=seats,
        leaves=tuple(id for id in task.seats if id not in seats),
    )


def _land(draft: _DraftPlan) -> None:
    """Launch moving tasks on their new devices once the image is durable, or lost.

    They held a device until now, so they are not queued. Limits still apply.
    """
    board = draft.board
    for id in sorted(board.landing):
        task = board.tasks[id]
        to = str(task.moves_to)
        here = board.pin(task) is not None or to in board.seated or task.retry_at_s > board.now_s
        if here or preemption.shut_by(board, task) is not None:
            continue
        because = f"Migrating to {to}: all of its state has been copied there."
        _launch(draft, task, (to,), DecisionRule.MOVE, because, against=None)


def _take_back(draft: _DraftPlan) -> None:
    lowered = "Preempted: a limit of its user or tenant was lowered. Resumes when it has room."
    ended = "Preempted: a budget of its user or tenant is used. Resumes in the next period."
    while (stay := over_limit.next_to_pause(draft.board)) is not None:
        because = ended if any(over_limit.has_no_budget(b) for b in above(stay.leaf)) else lowered
        draft.move(stay.task, Move.Pause, DecisionRule.QUOTA, because, devices=stay.devices)


def _seat_reserved(draft: _DraftPlan) -> None:
    """Launch tasks on the devices that are reserved for them by name.

    If a task waits for the full slice of others there, no other task gets the free ones of its
    devices in this round.
    """
    board = draft.board
    for branch, devices in reserved_places.by_owner(board):
        kinds = {board.devices[id].kind for id in devices}
        open_ = dict.fromkeys(lane for lane in branch.lines if lane.kind in kinds)
        while open_ and branch.lines and not board.short:
            found = board.tree.first_below(branch, open_)
            if found is None:
                break
            _, lane, task = found
            board.memory.looked_at(task, *board.tree.led())
            place = reserved_places.place(board, task, devices)
            if place is not None and not place.lent:
                _launch_reserved(draft, task, place)
                continue
            if reserved_places.is_owed(board, task) and _launch_free(
                draft, task, DecisionRule.ORDER
            ):
                continue
            if place is not None and place.at_s <= board.now_s:
                _launch_reserved(draft, task, place)
                continue
            del open_[lane]
            draft.again_s = min(draft.again_s, NEVER if place is None else place.at_s)
            for id in () if place is None else place.devices:
                if id in board.pools[task.kind].free:
                    board.withhold(id)
                    draft.withheld.append(id)


def _launch_reserved(
    draft: _DraftPlan, task: BoardTask, place: reserved_places.ReservedPlace
) -> None:
    for stay in place.lent:
        gone = [id for id in stay.devices if id in place.devices]
        because = f"{gone[0]} is reserved for others, who want it"
        if _goes_on_without(draft, stay.task, gone, DecisionRule.RECLAIM, because):
            continue
        told = "Preempted: its device is reserved for others, who want it now."
        draft.move(
            stay.task,
            Move.Pause,
            DecisionRule.RECLAIM,
            told,
            devices=stay.devices,
            against=task.id,
        )
    against = place.lent[0].id if place.lent else None
    because = "Started: this device is reserved for it."
    _launch(draft, task, place.devices, DecisionRule.RECLAIM, because, against=against)


# --- 5. urgent ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KeptForGang:
    """Holds how many devices of one kind are kept for a gang; they suit its `lane` (rule F7).

    Enough devices are expected by `at_s`; `spare` more will be free by then.
    """

    gang: str
    lane: Lane
    at_s: float
    spare: int


def _seat_urgent(draft: _DraftPlan) -> dict[str, _KeptForGang]:
    """Seat the tasks that have waited too long; if one does not fit, keep devices for it (rules F7,
    F9).
    """
    board = draft.board
    kept: dict[str, _KeptForGang] = {}
    for task in board.urgency.tasks():
        rule = _urgent_by(board, task)
        if rule is None or task.kind in kept:
            continue
        shut = preemption.shut_by(board, task)
        if shut is None and _launch_free(draft, task, rule):
            continue
        if not _make_room(draft, task, rule) and shut is None:
            keeper = _keep(board, task, preemption.turns_end(board, task), urgent=True)
            if keeper.at_s < NEVER:
                kept[task.kind] = _placed(board, keeper)
                board.memory.in_the_way.add(task.id)
            else:  # the protection of running tasks ends at some time
                later_s = max(slice_us(board.policy, task) / 1e6, RESOLUTION_S)
                draft.again_s = min(draft.again_s, board.now_s + later_s)
    return kept


def _urgent_by(board: Board, task: BoardTask) -> DecisionRule | None:
    """Return the rule by which a task goes before all others; None if no rule says so, or the rule
    cannot be kept now.
    """
    if board.urgency.patience.ends_s(task) <= board.now_s and board.urgency.patience.may_age(task):
        return DecisionRule.GANG
    promised = board.urgency.slack_ends_s(task) <= board.now_s
    return (
        DecisionRule.TIER if promised and task.tier in board.urgency.honoured(task.kind) else None
    )


def _wait_for_devices(
    draft: _DraftPlan, urgent: dict[str, _KeptForGang]
) -> dict[str, _KeptForGang]:
    """Seat the gangs that wait for their last devices, or keep devices for them (rule F7).

    Devices that are kept for an `urgent` task are not kept for a gang, too.
    """
    board = draft.board
    kept: dict[str, _KeptForGang] = {}
    for kind in gang_waits.kinds(board):
        gang_waits.settle(board, kind)
        if kind in urgent:
            continue
        keeper = _goes_on_waiting(draft, kind) or _begins_to_wait(draft, kind)
        if keeper is None:
            continue
        kept[kind] = keeper
        board.memory.in_the_way.add(keeper.gang)
        draft.again_s = min(draft.again_s, gang_waits.looks_again_s(board, keeper.at_s))
    for ends_s in gang_waits.turns_end_s(board):
        if ends_s > board.now_s:
            draft.again_s = min(draft.again_s, ends_s)
    return kept


def _goes_on_waiting(draft: _DraftPlan, kind: str) -> _KeptForGang | None:
    board, task = draft.board, gang_waits.waiting_gang(draft.board, kind)
    if task is None or preemption.shut_by(board, task) is not None:
        gang_waits.end(board, kind)
        return None
    # Its turn has come, but no more: holders that are not better served keep their devices.
    if _launch_free(draft, task, DecisionRule.GANG) or _make_room(
        draft, task, DecisionRule.RECLAIM_OR_TURN
    ):
        gang_waits.end(board, kind, started=task)
        return None
    keeper = _KeptForGang(task.id, board.lane(task), board.waits[kind].at_s, 0)
    if task.hosts:
        ends = preemption.turns_end(board, task, urgent=False)
        keeper = _placed(board, replace(_keep(board, task, ends, urgent=False), at_s=keeper.at_s))
    if gang_waits.is_passed_over(board, task):
        gang_waits.end(board, kind)
        board.places.pop(task.id, None)
        return None
    return keeper


def _begins_to_wait(draft: _DraftPlan, kind: str) -> _KeptForGang | None:
    """Keep devices for the first gang, if within a full slice all holders must give way to it."""
    board, begins_s = draft.board, gang_waits.begins_s(draft.board, kind)
    if begins_s > board.now_s:
        draft.again_s = min(draft.again_s, begins_s)
        return None
    task = gang_waits.next_gang(board, kind)
    if task is None:
        return None
    ends = preemption.turns_end(board, task, urgent=False)
    keeper = _keep(board, task, ends, urgent=False)
    if not board.now_s < keeper.at_s <= board.now_s + board.policy.slice_max_s:
        draft.again_s = min(draft.again_s, gang_waits.put_off(board, kind, keeper.at_s))
        return None
    gang_waits.begin(board, task, keeper.at_s)
    return _placed(board, keeper)


def _keep(
    board: Board,
    task: BoardTask,
    ends: list[tuple[float, str, int]],
    *,
    urgent: bool,
    turns: bool = True,
) -> _KeptForGang:
    """Return when enough devices are expected for the task; `ends` are expected ends of turns or
    tasks.
    """
    pool, lane = board.pools[task.kind], board.lane(task)
    if lane.hosts and not lane.pins:
        places, at_s = gang_places.soonest(board, task, ends)
        return _KeptForGang(task.id, on_places(lane, places) if places else lane, at_s, 0)
    have = pool.pins_free(lane) if lane.pins else pool.fitting(lane)
    have += sum(offer.suits for offer in elastic.offers(board, task, urgent=urgent))
    for at_s, id, devices in ends:
        if lane.host is not None and not turns:
            stay = board.stays[id]  # extra devices of elastic tasks are counted above
            devices = max(0, sum(pool.takes(one, lane) for one in stay.devices) - stay.grown)
        have += devices
        if have >= lane.width:
            return _KeptForGang(task.id, lane, max(at_s, board.now_s), have - lane.width)
    return _KeptForGang(task.id, lane, NEVER, 0)


def _placed(board: Board, keeper: _KeptForGang) -> _KeptForGang:
    """Keep the very devices on even hosts that the gang will have; others take them last."""
    if keeper.lane.places:
        board.places[keeper.gang] = keeper.lane.places
    return keeper


# --- graphs that share a device -----------------------------------------------------------------


def _pause_unshared(draft: _DraftPlan) -> None:
    because = "Preempted: its device can no longer be shared. Resumes automatically."
    for stay in time_sharing.stays_that_must_part(draft.board) if draft.board.beside else ():
        draft.move(stay.task, Move.Pause, DecisionRule.SHARE, because, devices=stay.devices)


def _share(draft: _DraftPlan, kept: dict[str, _KeptForGang]) -> None:
    """Launch graphs beside running graphs.

    If a device is full, one of the graphs on it makes room.
    """
    board = draft.board
    for kind in [here.kind for here in time_sharing.places(board) if here.kind not in kept]:
        while (join := _next_join(board, kind)) is not None:
            _join(draft, join)


def _next_join(board: Board, kind: str) -> time_sharing.Join | None:
    here = next((here for here in time_sharing.places(board) if here.kind == kind), None)
    return None if here is None else time_sharing.next_join(here)


def _join(draft: _DraftPlan, join: time_sharing.Join) -> None:
    task, device = join.task, join.device
    for stay in draft.board.group(device):
        if not stay.task.shares:
            told = "Shares its device with another graph from now on."
            draft.move(stay.task, Move.Share, DecisionRule.SHARE, told, shares=True)
    for gone in join.gone:
        told = "Preempted: graphs with less usage share its device. Resumes automatically."
        draft.move(
            gone.task, Move.Pause, DecisionRule.SHARE, told, devices=(device,), against=task.id
        )
    because = "Started: shares a device with other graphs, in turns of milliseconds."
    against = join.gone[0].id if join.gone else None
    _launch(draft, task, (device,), DecisionRule.SHARE, because, against=against, shares=True)


def _fill_batches(draft: _DraftPlan, kept: dict[str, _KeptForGang]) -> None:
    """Launch the next functions of a user behind one that was launched in this round."""
    because = "Started: runs on this device after the functions before it."
    for leader, task in function_batches.next_functions(draft.board):
        if task.kind in kept:
            return
        _launch(draft, task, leader.devices, DecisionRule.BATCH, because, against=None, shares=True)


def _regroup(draft: _DraftPlan, kept: dict[str, _KeptForGang]) -> bool:
    """Pause graphs that share devices, so that they can move to other devices; False if none
    moves.
    """
    moves = False
    for here in time_sharing.places(draft.board):
        found = None if here.kind in kept else graph_moves.graph_to_move(here)
        if found is not None:
            stay, because = found
            draft.move(stay.task, Move.Pause, DecisionRule.REGROUP, because, devices=stay.devices)
            moves = True
    return moves


# --- 6. launch ----------------------------------------------------------------------------------


def _seat(draft: _DraftPlan, kept: dict[str, _KeptForGang]) -> None:
    """Launch tasks, the least served first. If a task finds no device, its lane is closed for this
    round.
    """
    board, tree = draft.board, draft.board.tree
    open_, aside = _lanes(board, kept), list[BoardTask]()
    while not board.short and (found := tree.first(open_)) is not None:
        _, lane, task = found
        board.memory.looked_at(task, *tree.led())
        keeper = None if _is_owed(board, task, kept) else kept.get(task.kind)
        taken = 0 if keeper is None else _takes(board, task, lane, keeper)
        if keeper is not None and taken > keeper.spare:
            draft.held_back.add(task.kind)
            if len(aside) < BACKFILL_DEPTH and lane.width <= _free(board, lane):
                tree.drop(task.id)
                aside.append(task)
                board.memory.in_the_way.add(task.id)
            else:
                del open_[lane]
        elif _launch_free(draft, task, DecisionRule.ORDER):
            if keeper is not None:
                kept[task.kind] = replace(keeper, spare=keeper.spare - taken)
        elif keeper is not None or not _make_room(draft, task, DecisionRule.RECLAIM_OR_TURN):
            del open_[lane]
            if keeper is None:
                _empty_a_device(draft, lane, task)
            _find_no_seat(board, kept, open_, task)
    for task in aside:
        board.set_task(task)


def _is_owed(board: Board, task: BoardTask, kept: dict[str, _KeptForGang]) -> bool:
    """True if the task stays within a guarantee while the waiting gang would borrow (F4).

    Such a task need not wait for the gang.
    """
    keeper, gang = kept.get(task.kind), gang_waits.waiting_gang(board, task.kind)
    if not board.guarantees or gang is None or keeper is None or keeper.gang != gang.id:
        return False
    mine, theirs = preemption.sides(board.leaf(task), board.leaf(gang))
    return theirs.borrows(keeper.lane) and not mine.borrows(board.lane_in_line(task))


def _empty_a_device(draft: _DraftPlan, lane: Lane, task: BoardTask) -> None:
    """Let no more fractions begin on the device that could be whole first, if a task needs a whole
    one.
    """
    board, pool = draft.board, draft.board.pools.get(task.kind)
    if pool is None or not pool.parts or not draft.emptied.isdisjoint(both_of(lane)):
        return
    device = preemption.device_to_empty(board, task)
    if device is not None:
        draft.emptied.add(lane)
        pool.closed.add(device)
        board.memory.in_the_way.add(task.id)


def _lanes(board: Board, kept: dict[str, _KeptForGang]) -> dict[Lane, None]:
    """Return the lanes in which a task could get a free device or replace a task that had more."""
    lanes, policy = board.tree.lanes, board.policy
    if not policy.turns or policy.backfill == "strict":
        return {lane: None for lane in lanes if not _nothing_free(board, lane)}
    free = dict.fromkeys(lane for lane in lanes if _free(board, lane) >= lane.width)
    gain = [
        lane for lane in lanes if lane not in free and board.ripe and _may_gain(board, lane, kept)
    ]
    if board.fractions:
        gain += [lane for lane in lanes if lane.width == 1 and _waits_for_fractions(board, lane)]
    return _with_twins(free) | dict.fromkeys(gain)


def _waits_for_fractions(board: Board, lane: Lane) -> bool:
    """True if fractions may have to leave a device, so that a task of the lane can have it."""
    pool = board.pools.get(lane.kind)
    return pool is not None and bool(pool.parts) and not lane.is_fraction


def _with_twins(lanes: Iterable[Lane]) -> dict[Lane, None]:
    """Add to each lane the one that differs only in being fresh: a launch may move sibling tasks
    there (F8).
    """
    return {twin: None for lane in lanes for twin in both_of(lane)}


def _may_gain(board: Board, lane: Lane, kept: dict[str, _KeptForGang]) -> bool:
    """True if tasks of a lane may take the place of others, although devices may be kept for a
    gang.
    """
    if lane.kind in kept:
        found = board.tree.first((lane,)) if board.guarantees else None
        if found is None or not _is_owed(board, found[2], kept):
            return False
    return _could_gain(board, lane)


def _could_gain(board: Board, lane: Lane) -> bool:
    """True if the first task of a lane might be able to take the place of another task."""
    found = board.tree.first((lane,))
    if found is None:
        return False
    board.memory.looked_at(found[2])
    return not preemption.hopeless(board, found[2])


def _find_no_seat(
    board: Board, kept: dict[str, _KeptForGang], open_: dict[Lane, None], task: BoardTask
) -> None:
    """For the first task that does not fit: keep devices for it, or close the lanes behind it."""
    backfill = board.policy.backfill
    # If tasks take turns, a gang gets its devices by turns, at the latest when its patience ends.
    easy = backfill == "easy" and not board.policy.turns
    if task.width > 1 and easy and task.kind not in kept:
        ends = board.pools[task.kind].ends
        keeper = _keep(board, task, ends, urgent=False, turns=False)
        kept[task.kind] = _placed(board, keeper)
        board.memory.in_the_way.add(task.id)
    for lane in [lane for lane in open_ if lane.kind == task.kind]:
        hopeless = _nothing_free(board, lane) and preemption.nobody_can_gain(board, task)
        if backfill == "strict" or hopeless:
            del open_[lane]
            board.memory.in_the_way.add(task.id)


def _nothing_free(board: Board, lane: Lane) -> bool:
    pool = board.pools.get(lane.kind)
    return pool is None or not (pool.free or pool.grown or pool.parts)


def _free(board: Board, lane: Lane) -> int:
    """Return the largest number of devices that one task of this lane could get now.

    Devices that elastic tasks hold beyond their need count, as they may be taken back.
    """
    pool = board.pools.get(lane.kind)
    return 0 if pool is None else pool.fitting(board.bound(lane)) + pool.grown


def _takes(board: Board, task: BoardTask, lane: Lane, kept: _KeptForGang) -> int:
    """Count the devices for the gang that the task would hold too long (rule F7, EASY)."""
    ends_s = NEVER if task.expected_s is None else board.now_s + task.expected_s
    if ends_s <= kept.at_s:
        return 0
    pool = board.pools.get(lane.kind)
    if pool is None or not (kept.lane.memory_bytes or kept.lane.host or kept.lane.choice):
        return lane.width
    devices = _best(board, task, board.lane(task))
    return sum(pool.takes(id, kept.lane) for id in devices) if devices else lane.width


def _launch_free(draft: _DraftPlan, task: BoardTask, rule: DecisionRule) -> bool:
    """Launch a task on free devices or on surplus devices of elastic tasks; False if there are too
    few.
    """
    board = draft.board
    pool = board.pools.get(task.kind)
    if pool is None:
        return False
    against, lane = None, board.lane(task)
    if board.grown:
        offered = elastic.offers(board, task, urgent=rule != DecisionRule.ORDER)
        back = elastic.given_back(board, task, offered)
        if back is None:
            return False
        _give_back(draft, back, task, rule)
        against = back[0].stay.id if back else None
    devices = _best(board, task, lane)
    if not devices:
        return False
    because = {
        DecisionRule.ORDER: "Started: a device was free and this task was next.",
        DecisionRule.GANG: "Started: it had waited too long for several devices.",
        DecisionRule.TIER: "Started: its tier guarantees it this part of the hour.",
    }[rule]
    if against is not None and rule == DecisionRule.ORDER:
        because = "Started: another task returned a device that it did not need."
    _launch(draft, task, tuple(devices), rule, because, against=against)
    if rule == DecisionRule.ORDER and function_batches.may_lead(board, task, *devices):
        board.memory.leaders.append(task.id)
    return True


def _best(board: Board, task: BoardTask, lane: Lane) -> list[str]:
    """Choose the devices for a task; [] if too few are free."""
    pool = board.pools[task.kind]
    devices = pool.best(lane, task.image_on, board.pinned())
    kept = {id for gang, places in board.places.items() if gang != task.id for id in places}
    for others in (board.reserved.keys(), kept):
        if others and not others.isdisjoint(devices):
            devices = pool.instead(devices, lane, pool.free.keys() - others)
    if board.left and (wanted := over_limit.places_to_take(board, task)):
        return pool.instead(devices, lane, wanted)
    return devices


def _launch(
    draft: _DraftPlan,
    task: BoardTask,
    devices: tuple[str, ...],
    rule: DecisionRule,
    because: str,
    *,
    against: str | None,
    shares: bool = False,
) -> None:
    board = draft.board
    cost = board.cost(task, devices)
    if near := nearness.told([board.devices[id].location for id in devices]):
        because += f" {near}"
    since_s = task.waits_since_s
    draft.move(
        task,
        Move.Launch,
        rule,
        because,
        devices=devices,
        against=against,
        cost=cost,
        shares=shares,
        seats=devices,
        epoch=task.epoch + 1,
        launched_s=board.now_s,
        started_s=None,
        resized_s=None,
        held_us=0,
        accrued_us=0,
        prepared_us=0,
        waited_s=task.waited_s + max(0.0, board.now_s - since_s),
    )


# --- 7. make room -------------------------------------------------------------------------------


def _make_room(
    draft: _DraftPlan, task: BoardTask, rule: DecisionRule, *, within: Branch | None = None
) -> bool:
    """Launch a task in the place of tasks that had more or borrowed.

    Returns False if too few tasks give way. For a one-host task every host with enough devices is
    tried, and for a task on even hosts those where it can have its devices now.
    """
    board = draft.board
    if not board.policy.turns:
        return False
    if task.hosts and not board.pins(task):
        return _make_room_on_hosts(draft, task, rule, within)
    if _make_room_there(draft, task, rule, within):
        return True
    for host in board.others(task):
        board.sought[task.id] = host
        has_room = _make_room_there(draft, task, rule, within)
        del board.sought[task.id]
        if has_room:
            return True
    return False


def _make_room_on_hosts(
    draft: _DraftPlan, task: BoardTask, rule: DecisionRule, within: Branch | None
) -> bool:
    board = draft.board
    places = gang_places.can_have_now(board, task, within=within, urgent=rule.goes_first)
    if not places:
        return False
    board.places[task.id] = places
    has_room = _make_room_there(draft, task, rule, within)
    del board.places[task.id]
    return has_room


def _make_room_there(
    draft: _DraftPlan, task: BoardTask, rule: DecisionRule, within: Branch | None
) -> bool:
    board = draft.board
    if task.graph and not rule.goes_first and time_sharing.has_a_place(board, task):
        return False
    urgent = rule.goes_first
    offered = elastic.offers(board, task, urgent=urgent) if board.grown else []
    counts = Counter(offer.stay.id for offer in offered if offer.suits) if offered else {}
    victims = preemption.victims(board, task, within=within, urgent=urgent, offered=counts)
    if victims is None:
        return False
    # read before the victims are paused, as their devices would change the task's lane
    lane = board.lane(task)
    if board.grown:
        back = elastic.given_back(board, task, offered, [victim.stay for victim in victims])
        if back is None:
            return False
        _give_back(draft, back, task, rule)
    given = sum(victim.stay.lane.width + victim.stay.grown for victim in victims)
    draft.left_over |= given > task.width or len(victims) > 1 or lane.is_fraction
    for victim in victims:
        told = "Preempted: time slice over. Resumes automatically."
        if victim.rule == DecisionRule.RECLAIM:
            told = "Preempted: borrowed device returned to its guaranteed owner."
        stay = victim.stay
        draft.move(
            stay.task,
            Move.Pause,
            victim.rule if rule == DecisionRule.RECLAIM_OR_TURN else rule,
            told,
            devices=stay.devices,
            against=task.id,
        )
    devices = _best(board, task, lane)
    # what the victims release, and this task did not take, may suit another one
    draft.left_over |= not {id for one in victims for id in one.stay.devices}.issubset(devices)
    first = victims[0]
    because = {
        DecisionRule.RECLAIM: "Started: got back a device that is guaranteed to its tenant.",
        DecisionRule.GANG: "Started: it had waited too long for several devices.",
        DecisionRule.TIER: "Started: its tier guarantees it this part of the hour.",
    }.get(
        first.rule if rule == DecisionRule.RECLAIM_OR_TURN else rule,
        "Started: replaced a task whose time slice was over.",
    )
    chosen = first.rule if rule == DecisionRule.RECLAIM_OR_TURN else rule
    _launch(draft, task, tuple(devices), chosen, because, against=first.stay.id)
    return True


def _give_back(
    draft: _DraftPlan, back: list[elastic.ElasticResize], task: BoardTask, rule: DecisionRule
) -> None:
    """Shrink elastic tasks first, because that is the cheapest way to make room (rules F5, F6)."""
    told = "Returned devices that it does not need to waiting tasks."
    for resize in back:
        draft.left_over = True  # a device may suit another task, or a limit may have room
        by = rule if rule.goes_first else DecisionRule.RECLAIM if resize.lent else DecisionRule.TURN
        _make_smaller(draft, resize.stay.task, resize.devices, by, told, task.id)


def _take_turns(draft: _DraftPlan, kept: dict[str, _KeptForGang]) -> None:
    """Let tasks of one branch take each other's place (rules F6 and F8, below the top).

    This step gives the turns that no other branch could take. A kind for which a gang waits is left
    out, since a new turn would delay the gang.
    """
    board = draft.board
    if not board.policy.turns or not board.tree.lanes:
        return
    for branch in preemption.shared(board):
        waits = [kind for kind in kept if gang_waits.waiting_gang(board, kind) is not None]
        open_ = _with_twins(lane for lane in branch.lines if lane.kind not in waits)
        while open_ and branch.lines:
            found = board.tree.first_below(branch, open_)
            if found is None:
                break
            _, lane, task = found
            board.memory.looked_at(task, *board.tree.led())
            is_next = branch.inner or preemption.goes_before_some(board, branch, lane, task)
            if not is_next or not _make_room(
                draft, task, DecisionRule.RECLAIM_OR_TURN, within=branch
            ):
                del open_[lane]


# --- 9. grow ------------------------------------------------------------------------------------


def _grow(draft: _DraftPlan, kept: dict[str, _KeptForGang]) -> None:
    """Give elastic tasks more devices.

    They are charged for these from now on, whether they use them yet or not.
    """
    board = draft.board
    told = "Uses these devices until another task needs them."
    for resize in elastic.growth(board, kept):
        task = resize.stay.task
        cost = board.cost(task, resize.devices)
        draft.move(
            task,
            Move.Splice,
            DecisionRule.GROW,
            told,
            devices=resize.devices,
            cost=cost,
            seats=resize.devices,
            resized_s=board.now_s,
            held_us=0,
            accrued_us=0,
        )


# --- 10. charge fractions -----------------------------------------------------------------------


def _charge_stranded(draft: _DraftPlan) -> None:
    board = draft.board
    if board.short:
        return
    for stay, cost in list(stranded_parts.changed_costs(board)):
        because = "Pays for its part of the device, as the rest can be used."
        if cost > stay.rate:
            because = "Pays for the rest of the device, too: a task waits that does not fit there."
        if stay.id not in draft.before:
            draft.move(
                stay.task,
                Move.Charge,
                DecisionRule.CHARGE,
                because,
                devices=stay.devices,
                cost=cost,
            )


# --- when to look again -------------------------------------------------------------------------


def _look_again_s(board: Board, urgent: dict[str, _KeptForGang], again_s: float) -> float | None:
    """Return the next time at which something may change because time passes; None if there is
    none.
    """
    later = (kept.at_s for kept in urgent.values() if kept.at_s > board.now_s)
    at_s = min(board.next_s(), again_s, *later)
    if board.elastic:
        at_s = min(at_s, elastic.next_growth_s(board))
    if board.policy.turns and board.tree.lanes and board.ripe:
        at_s = min(at_s, preemption.next_turn_s(board))
    return at_s if at_s < NEVER else None


def _not_started(board: Board) -> list[BoardTask]:
    return [task for task in board.tasks.values() if task.state in NOT_STARTED]
