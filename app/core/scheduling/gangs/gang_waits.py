"""Decides how long devices stand free for a gang whose turn has come (rule F7).

Beside tasks that end one by one, the devices of a gang are hardly ever free together. So they are
kept for it as they become free, once all their holders have to give way to it after their turn (F5,
F6), within a full slice. Until the last device is there, devices whose tasks ended by themselves
stand idle: a wait for w devices costs them about half a typical stay each.

That cost alone decides how patient the gangs of a kind of device must be. Over time it may be
`Policy.wait_share` of the devices, as much as switching may cost (F8). The idle time is summed up.
The next wait begins when the sum is no more than that part of the devices' time since the last wait
began. So patience follows from the stays of the tasks, and is no setting: with D devices and stays
of L seconds it is about w * L / 2 / (wait_share * D), at most 12.5 minutes for 8 of 8 devices
beside tasks of 30 s. Stays that end together cost nothing, and need no patience.

A gang waits while it goes before all tasks that wait for the kind. Otherwise a tenant with several
gangs would wait with one of them while the others run, and other tenants would have no turns.

Only wide gangs wait: those that need 30 % of the devices that suit them, or more
(`Policy.waits_from`). No stay gives way to another task of its kind while a gang waits. On hundreds
of devices that would cost the others more than it gives to many small gangs, and these often find
their devices free together.

All gangs of a kind share the sum, so their number does not matter. In any time T the other tasks
lose at most wait_share * D * T, and one wait of w devices for a slice.

A gang that waited has a longer turn: half of the time that pays for its wait. If it gave way to the
first task that is less served, the waits would cost it what it is owed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from app.core.fairness.fair_tree import Lane
from app.core.model.snapshot import BoardTask, GangWait
from app.core.scheduling.board import Board
from app.core.scheduling.stays import NEVER, RESOLUTION_S, BoardStay, stale_s

WITHIN_S = 3600.0  # F7: in this time a gang gets what it is owed
LOOKS = 8  # checks in a minute of a gang that may not begin to wait yet


def waiting_gang(board: Board, kind: str) -> BoardTask | None:
    """Return the gang for which devices of the kind are kept; None if its wait is over."""
    wait = board.waits.get(kind)
    if wait is None or wait.gang not in board.tree:
        return None
    task = board.tasks[wait.gang]
    is_over = board.now_s >= wait.at_s + look_s(board)
    return None if is_over or task.epoch != wait.epoch else task


def next_gang(board: Board, kind: str) -> BoardTask | None:
    """Return the wide gang whose turn has come: it goes before all tasks which wait for the kind.

    A gang that began to wait before its turn would keep the others from theirs. The task that goes
    first is remembered for the record of the round, as no gang waits before it.
    """
    found = board.tree.first([lane for lane in board.tree.lanes if lane.kind == kind])
    if found is None:
        return None
    _, lane, task = found
    board.memory.in_the_way.add(task.id)
    board.memory.looked_at(task, *board.tree.led())
    return task if is_wide(board, lane) else None


def is_passed_over(board: Board, task: BoardTask) -> bool:
    """True if another task now goes before the waiting gang, and no device stands free for it.

    To wait on would keep the other task from its turn; to stop costs nothing.
    """
    if _free(board, task):
        return False
    first = next_gang(board, task.kind)
    return first is None or first.id != task.id


def is_wide(board: Board, here: Lane) -> bool:
    """True if the lane is of gangs that need `Policy.waits_from` of the devices that suit them.

    The bound is rounded down: with 0.3, 2 of 8 devices are enough.
    """
    if here.width == 1 or (pool := board.pools.get(here.kind)) is None:
        return False
    return here.width >= int(board.policy.waits_from * pool.suiting(here))


def kinds(board: Board) -> list[str]:
    """Return the kinds of device for which a gang waits, or waited a moment ago."""
    if not board.policy.turns or not board.policy.wait_share:
        return []
    wanted = {lane.kind for lane in board.tree.lanes if is_wide(board, lane)}
    return sorted(wanted | {kind for kind, wait in board.waits.items() if wait.gang})


def begins_s(board: Board, kind: str) -> float:
    """Return when the next wait may begin."""
    return board.waits[kind].again_s if kind in board.waits else -NEVER


def look_s(board: Board) -> float:
    """Return the time after which a gang is looked at again, in s."""
    return max(stale_s(board.policy) / LOOKS, RESOLUTION_S)


def looks_again_s(board: Board, at_s: float) -> float:
    """Return when to look at a gang whose last device is expected at `at_s`."""
    return at_s if at_s > board.now_s else at_s + look_s(board)


def put_off(board: Board, kind: str, at_s: float) -> float:
    """Let no gang of a kind begin to wait for a little while; return when to look if nothing moves.

    The next look is in an eighth of the time since the last task began, because the longer no task
    begins, the less changes. Otherwise most rounds of a quiet island would be such looks. A round
    after a minute looks in any case, because another gang may have arrived. Alone, a look need not
    be more exact than an eighth of the full slice in which all holders must give way, unless
    devices that are expected at `at_s` say when.
    """
    stays = [stay.task for stay in board.stays.values() if stay.lane.kind == kind]
    began_s = max((task.started_s or 0.0 for task in stays), default=0.0)
    quiet_s, slice_s = max(look_s(board), (board.now_s - began_s) / LOOKS), board.policy.slice_max_s
    again_s = board.now_s + min(quiet_s, stale_s(board.policy))
    known = board.waits.get(kind, GangWait(kind=kind, again_s=again_s))
    board.waits[kind] = replace(known, again_s=again_s)
    alone_s = board.now_s + min(quiet_s, slice_s / LOOKS)
    due_s = at_s - slice_s
    return max(again_s, min(alone_s, due_s) if due_s > board.now_s else alone_s)


def begin(board: Board, task: BoardTask, at_s: float) -> None:
    known = board.waits.get(task.kind, GangWait(kind=task.kind, again_s=board.now_s))
    board.waits[task.kind] = replace(
        known,
        again_s=board.now_s,
        gang=task.id,
        epoch=task.epoch,
        at_s=at_s,
        lost_s=0.0,
    )


def settle(board: Board, kind: str) -> None:
    """Add the idle time until now to the sum."""
    wait = board.waits.get(kind)
    if wait is None or not wait.idle:
        return
    lost_s = wait.idle * (board.now_s - wait.idle_since_s)
    again_s = wait.again_s + paid_in_s(board, kind, lost_s)
    board.waits[kind] = replace(wait, again_s=again_s, idle=0, lost_s=wait.lost_s + lost_s)


def paid_in_s(board: Board, kind: str, lost_s: float) -> float:
    """Return the time in which so many device-seconds may stand idle."""
    return lost_s / (board.policy.wait_share * max(1, board.pools[kind].size()))


def end(board: Board, kind: str, started: BoardTask | None = None) -> None:
    """End the wait for devices of a kind; `started` is the gang, if it has started."""
    wait = board.waits.get(kind)
    if wait is not None:
        each_s = wait.each_s if started is None else wait.lost_s / started.width
        board.waits[kind] = replace(wait, gang="", each_s=each_s)


def turn_ends_s(board: Board, stay: BoardStay) -> float:
    """Return the end of a gang's turn: until then it does not give way to other tasks (F6, F8), as
    it would have to wait for its devices again.

    The turn is half of the time that pays for a wait; the other half is for the other tasks. Both
    halves together are no longer than the time in which F7 promises a share.
    """
    wait, started_s = board.waits.get(stay.lane.kind), stay.task.started_s
    if wait is None or not wait.each_s or stay.lane.width == 1 or started_s is None:
        return -NEVER
    pays_s = paid_in_s(board, wait.kind, wait.each_s * stay.lane.width)
    return started_s + min(pays_s, WITHIN_S) / 2


def turns_end_s(board: Board) -> list[float]:
    """Return `turn_ends_s` of all gangs on devices; empty if no gang has ever waited."""
    return [turn_ends_s(board, stay) for stay in board.gangs.values()] if board.waits else []


def note_idle(board: Board, held_back: Collection[str]) -> None:
    """Record which devices stand idle from now on, for kinds of which other tasks were held
    back.
    """
    for kind, wait in board.waits.items():
        task = waiting_gang(board, kind)
        if task is not None and kind in held_back:
            idle = _free(board, task)
            board.waits[kind] = replace(wait, idle=idle, idle_since_s=board.now_s)


def _free(board: Board, task: BoardTask) -> int:
    """Count the free devices that suit the gang, without those that a task is still leaving."""
    pool, lane = board.pools[task.kind], board.lane(task)
    return sum(not leaving and pool.takes(id, lane) for id, leaving in pool.free.items())
