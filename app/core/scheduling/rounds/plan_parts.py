"""Cut a plan into parts, so that no transaction writes more than a bounded number of decisions.

A round of the scheduler writes one part and records heartbeats before the next.  So a plan that
launches thousands of tasks keeps no device from its lease.  A part is a beginning of what is left
of the plan, in the plan's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.core.model import lifecycle
from app.core.model.lifecycle import IllegalMove, Move
from app.core.model.snapshot import Plan, PlanDecision

# A task that makes room is moved before the task that gets its devices, and in the same part: the
# order to pause it names its successor.
_MAKES_ROOM = (Move.Pause, Move.Splice, Move.Share)


def cut(plan: Plan, most: int) -> tuple[Plan, Plan | None]:
    """Return a part of about `most` decisions, and the rest of the plan, if any.

    A part is longer if the tasks that make room for its last task need more decisions.
    """
    decisions = plan.decisions
    for at in range(max(1, most), len(decisions)):
        if decisions[at - 1].move not in _MAKES_ROOM:
            return _with(plan, decisions[:at]), _with(plan, decisions[at:])
    return plan, None


def _with(plan: Plan, decisions: tuple[PlanDecision, ...]) -> Plan:
    moved = {decision.task for decision in decisions}
    before = {id: task for id, task in plan.before.items() if id in moved}
    return replace(plan, decisions=decisions, before=before)


def is_legal(plan: Plan, states: Mapping[str, str]) -> bool:
    """True if tasks in these states can be moved as the plan says."""
    states = dict(states)
    try:
        for one in plan.decisions:
            states[one.task] = lifecycle.after(one.task, states[one.task], one.move)
    except IllegalMove:
        return False
    return True
