"""Takes back, after a full slice, the devices that exceed a limit that was lowered (rule F4).

No launch exceeds a limit, so a branch exceeds one only after a change of the limit, or of its place
in the tree. A budget that is used and pauses is such a limit, of 0, and takes back at once. The
board records such branches (`Board.over`). A task that is leaving its devices no longer counts, so
the next task takes its place (`places_to_take`).
"""

from __future__ import annotations

from collections.abc import Iterator

from app.core.fairness.fair_tree import ALL, Branch, above
from app.core.model.lifecycle import State
from app.core.model.snapshot import TIERS, BoardTask
from app.core.scheduling.board import Board
from app.core.scheduling.stays import BoardStay


def next_to_pause(board: Board) -> BoardStay | None:
    """Return a stay that must give its devices back because of a limit; None if none has to now.

    Tiers and patience protect no stay from this. Stays that free no more than the excess go first;
    then basic tasks before standard ones, the lowest priority, and the latest start.
    """
    for branch in sorted(board.over, key=lambda branch: branch.path):
        if not branch.exceeds:
            del board.over[branch]
        elif (stay := _cheapest(board, branch)) is not None:
            return stay
    return None


def _cheapest(board: Board, branch: Branch) -> BoardStay | None:
    over = {kind: branch.held[kind] - most for kind, most in branch.taken_back()}
    too_many = branch.most_running is not None and branch.running > branch.most_running
    helps = [
        stay
        for stay in _below(board, branch)
        if stay.task.state == State.running
        and (too_many or over.get(stay.lane.kind, 0) > 0 or over.get(ALL, 0) > 0)
    ]
    return min(helps, key=lambda stay: _key(stay, over), default=None)


def has_no_budget(branch: Branch) -> bool:
    """True if the budget of the branch is used, and pauses what runs."""
    return "pause" in branch.exhausted.values()


def _below(board: Board, branch: Branch) -> Iterator[BoardStay]:
    """Yield the stays below a branch that may be paused now: after a full slice, or all of them if
    its budget has ended.
    """
    if has_no_budget(branch):
        mine = board.stays.values()
        yield from (stay for stay in mine if stay.leaf.path[: branch.depth] == branch.path)
    else:
        for leaf, stays in board.ripe.items():
            if leaf.path[: branch.depth] == branch.path:
                yield from stays.values()


def _key(stay: BoardStay, over: dict[str, int]) -> tuple[bool, int, int, float, str]:
    most = max(over.get(stay.lane.kind, 0), over.get(ALL, 0))
    task = stay.task
    started_s = task.started_s or 0.0
    return stay.lane.width > most, TIERS.index(task.tier), task.priority, -started_s, task.id


def places_to_take(board: Board, task: BoardTask) -> set[str]:
    """Return devices that a task should take before free ones, lest it exceed a limit for a while.

    Tasks below the limit are leaving these devices, and hold them until they are gone. Empty if the
    limit has room for the task beside them.
    """
    places = set[str]()
    for branch in above(board.leaf(task)):
        left = board.left.get(branch)
        if left and _exceeds_beside(branch, task, left):
            places.update(left)
    return places


def _exceeds_beside(branch: Branch, task: BoardTask, left: dict[str, BoardStay]) -> bool:
    """True if the branch would hold more than its limits with the task beside what is left."""
    tasks = {stay.id for stay in left.values() if stay.leaving}
    if branch.most_running is not None and branch.running + len(tasks) >= branch.most_running:
        return True
    of_kind = sum(stay.lane.kind == task.kind for stay in left.values())
    return any(
        branch.held[kind] + count + task.width > branch.limit[kind]
        for kind, count in ((task.kind, of_kind), (ALL, len(left)))
        if kind in branch.limit
    )
