"""Describes stays of tasks on devices: their turns, and when they become preemptible."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.core.fairness.fair_tree import Branch, Lane
from app.core.model.lifecycle import ON_A_DEVICE, State
from app.core.model.snapshot import BoardTask, Policy

HOLDS_A_SEAT = frozenset({State.starting, State.running, State.splicing})
LEAVES_A_SEAT = frozenset({State.pausing, State.stopping})


NEVER = math.inf
RESOLUTION_S = 0.001  # computed instants are this exact
STALE_S = 60.0  # most seconds for which a round goes by what an earlier round measured


@dataclass(slots=True, eq=False)
class BoardStay:
    """Describes a task's stay on the devices that it holds.

    A stay is charged one full turn when the task is launched, and continuously after that turn.
    After the turn the stay is `ripe` (preemptible). `rate` is the cost of one second, in
    thousandths. `lane` is what the task needs; the task may hold more devices than that.
    """

    task: BoardTask
    leaf: Branch
    lane: Lane
    devices: tuple[str, ...]
    rate: int
    turn_us: int
    ripe: bool = False
    leaving: bool = False
    expected: tuple[float, str, int] | None = None  # the entry of this stay in `Pool.ends`
    leaves: tuple[str, ...] = ()  # devices that the task will release because it shrinks

    @property
    def id(self) -> str:
        return self.task.id

    @property
    def grown(self) -> int:
        """The number of devices that the task holds beyond its need."""
        return len(self.devices) - self.lane.width if self.task.elastic else 0


def is_lent(stay: BoardStay) -> bool:
    """True if the stay's branches all hold more than their guarantee."""
    branch, kind = stay.leaf, stay.lane.kind
    while branch.parent is not None:
        holds = branch.held[kind] + branch.grown.get(kind, 0)
        if branch.guarantee and holds <= branch.guarantee.get(kind, 0):
            return False
        branch = branch.parent
    return True


def is_same_epoch(stay: BoardStay, task: BoardTask) -> bool:
    return task.state in ON_A_DEVICE and stay.task.epoch == task.epoch


def is_same_stay(stay: BoardStay, task: BoardTask) -> bool:
    same = stay.devices == task.seats and stay.leaves == task.leaves
    return same and stay.task.shares == task.shares and is_same_epoch(stay, task)


def ripe_s(stay: BoardStay) -> float:
    """Return when the stay's turn is over; a resized task had its turn before it was resized."""
    started_s = stay.task.started_s
    if stay.task.resized_s is not None:
        return stay.task.resized_s
    return NEVER if started_s is None else started_s + stay.turn_us / 1e6


def fresh_us(policy: Policy, task: BoardTask) -> int:
    """Return how long, in µs, a task goes before its user's other tasks of equal urgency
    (rule F8).
    """
    return max(int(1e6 * policy.fresh_s), slice_us(policy, task))


def settled_s(policy: Policy, stay: BoardStay) -> float:
    """Return the time from which the stay has held its devices long enough to yield to its own
    user's tasks.
    """
    started_s = stay.task.started_s
    if started_s is None:
        return NEVER
    return max(ripe_s(stay), started_s + max(policy.fresh_s, stay.turn_us / 1e6))


def stale_s(policy: Policy) -> float:
    """Return after how many seconds a measurement of an earlier round is made again."""
    return min(STALE_S, policy.slice_max_s)


def slice_us(policy: Policy, task: BoardTask, other: BoardTask | None = None) -> int:
    """Return the length of a turn, so that switching costs at most `switch_share` of it (rule F8).

    Between two tasks the more expensive switch counts. A ticket's turn has the maximum length: its
    gang can start only after tasks on other islands have had their turns.
    """
    if task.ticket or (other is not None and other.ticket):
        return int(1e6 * policy.slice_max_s)
    switch_us = task.switch_us if other is None else max(task.switch_us, other.switch_us)
    turn_s = switch_us / 1e6 / policy.switch_share
    return int(1e6 * min(max(turn_s, policy.slice_min_s), policy.slice_max_s))
