"""Finds the waiting tasks that must go before all others, and how long the others may wait (rules
F7, F9).

A gang becomes urgent when its patience ends (F7, `gang_patience`). A task of a tier with a promised
share becomes urgent shortly before it would have waited more than its promise allows (F9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heappop, heappush

from app.core.fairness.fair_tree import FairTree
from app.core.model.snapshot import TIERS, BoardTask, Policy
from app.core.scheduling.gangs.gang_patience import GangPatience
from app.core.scheduling.pool import Pool
from app.core.scheduling.stays import NEVER, RESOLUTION_S

AWAY_PARTS = 64  # number of parts into which a window is divided to remember it
# The smallest part of a window's waiting time that is allowed at once, so that turns can end.
LEAST_BURST = 1 / 16


class Urgency:
    """Keeps the waiting tasks of a board that must go before all others.

    `tree`, `pools` and `all_tasks` are those of the board, which keeps them up to date.
    """

    def __init__(
        self,
        policy: Policy,
        tree: FairTree[BoardTask],
        pools: Mapping[str, Pool],
        all_tasks: Mapping[str, BoardTask],
    ) -> None:
        self.policy, self.tree, self.pools, self.all_tasks = policy, tree, pools, all_tasks
        self.patience = GangPatience(policy, pools)
        # (kind, tier) -> devices needed by tasks that have started once (F9)
        self.started: Counter[tuple[str, str]] = Counter()
        self._aging: list[tuple[float, str, int]] = []
        self._due: dict[str, float] = {}  # urgent task -> when it became urgent
        # (kind, tier) -> waiting tasks that ran before and have a promised share (F9)
        self._behind: dict[tuple[str, str], dict[str, None]] = {}
        self._promise_due_s = NEVER  # when the next task of `_behind` becomes urgent

    def next_s(self) -> float:
        """Return when time alone next makes a task urgent; NEVER if it will not."""
        while self._aging and not self._may_age(*self._aging[0][1:]):
            heappop(self._aging)
        return min(self._promise_due_s, self._aging[0][0]) if self._aging else self._promise_due_s

    def _may_age(self, id: str, epoch: int) -> bool:
        """True if the task still waits, as it did when its patience was noted."""
        return id in self.tree and self.all_tasks[id].epoch == epoch

    def watch(self, task: BoardTask) -> None:
        if not self.policy.turns and task.width == 1:
            return
        due_s = self.patience.ends_s(task)
        if due_s <= self.tree.now_s:  # the patience is over already, so no timer is needed
            self._due[task.id] = min(due_s, self._due.get(task.id, NEVER))
        elif due_s < NEVER:
            heappush(self._aging, (due_s, task.id, task.epoch))
        if task.epoch and self.policy.tier_share.get(task.tier):
            self._behind.setdefault((task.kind, task.tier), {})[task.id] = None

    def forget(self, task: BoardTask) -> None:
        """Forget the promise of a task that left its queue."""
        if task.epoch:
            self._behind.get((task.kind, task.tier), {}).pop(task.id, None)

    def tasks(self) -> list[BoardTask]:
        """Return the waiting tasks that must go before all others now, longest due first."""
        while self._aging and self._aging[0][0] <= self.tree.now_s:
            due_s, id, epoch = heappop(self._aging)
            if self._may_age(id, epoch):
                self._due[id] = min(due_s, self._due.get(id, NEVER))
        for id in [id for id in self._due if id not in self.tree]:
            del self._due[id]
        due = self._due | self._promises_due()
        return [self.all_tasks[id] for id in sorted(due, key=lambda id: (due[id], id))]

    def _promises_due(self) -> dict[str, float]:
        """Return the tasks that must go first by their tier's promise, and since when (rule F9).

        Only tiers with promises that can all be kept count. So there are fewer such tasks than
        devices.
        """
        self._promise_due_s, found = NEVER, {}
        for (kind, tier), ids in self._behind.items():
            if not ids or tier not in self.honoured(kind):
                continue
            for id in ids:
                due_s = self.slack_ends_s(self.all_tasks[id])
                if due_s <= self.tree.now_s:
                    found[id] = due_s
                else:
                    self._promise_due_s = min(self._promise_due_s, due_s)
        return found

    def honoured(self, kind: str) -> tuple[str, ...]:
        """Return the tiers whose promises can be kept with the devices; the lowest are shed (rule
        F9).
        """
        share, pool = self.policy.tier_share, self.pools.get(kind)
        left = float(pool.size()) if pool is not None else 0.0
        kept = []
        for tier in reversed(TIERS):
            left -= share.get(tier, 0.0) * self.started[kind, tier]
            if left < 0 or not share.get(tier):
                break
            kept.append(tier)
        return tuple(kept)

    def lead_s(self, task: BoardTask) -> float:
        """Return how early a task counts as urgent, since a turn and a switch may come first (rule
        F9).
        """
        burst_s, _ = self._bucket(task)
        return min(self.policy.slice_max_s, burst_s / 4)

    def _bucket(self, task: BoardTask) -> tuple[float, float]:
        """Return (seconds that a task may wait at once, seconds more for each second that passes);
        rule F9.

        Both together are the waiting time that a window allows. If there are at least as many
        devices as tasks with a promise, a task may use all of it at once. If there are fewer
        devices, the tasks need a part p of it for taking turns among themselves: if all had already
        waited that long for other tasks, their promises could not be kept.
        """
        share, window_s = self.policy.tier_share.get(task.tier, 0.0), self.policy.tier_window_s
        pool, may_s = self.pools.get(task.kind), (1.0 - share) * window_s
        counts = [(self.started[task.kind, tier], tier) for tier in self.honoured(task.kind)]
        too_many = sum(count for count, _ in counts) - (pool.size() if pool is not None else 0)
        part = 0.0
        if too_many > 0:
            away = sum(count * (1.0 - self.policy.tier_share[tier]) for count, tier in counts)
            part = min(1.0, too_many / away)
        burst_s = may_s * max((1.0 - part) ** 2, LEAST_BURST)
        return burst_s, (may_s - burst_s) / window_s

    def slack_s(self, task: BoardTask, *, at_s: float | None = None) -> float:
        """Return how much longer the task may wait without a break and keep its share in every
        window (rule F9).
        """
        at_s = self.tree.now_s if at_s is None else at_s
        burst_s, rate = self._bucket(task)
        waits = not task.seats and task.waiting_since_s is not None
        away = [*task.away, (task.waiting_since_s or 0.0, at_s)] if waits else task.away
        since_s, total_s, used_s = at_s - self.policy.tier_window_s, 0.0, 0.0
        for from_s, to_s in reversed(away):
            if to_s <= since_s:
                break
            begin_s = max(from_s, since_s)
            total_s += to_s - begin_s
            used_s = max(used_s, total_s - rate * (at_s - begin_s))
        return burst_s - used_s

    def is_due_after(self, held: BoardTask, away_us: int) -> bool:
        """True if a holder that gave its devices away for so long would be urgent at once (F9)."""
        left_s = self.slack_s(held) - away_us / 1e6
        return left_s <= self.lead_s(held) + RESOLUTION_S

    def slack_ends_s(self, task: BoardTask) -> float:
        """Return when a waiting task must go first, early enough to be seated in time (rule F9)."""
        if task.epoch == 0 or not self.policy.tier_share.get(task.tier):
            return NEVER
        since_s = self.tree.now_s if task.waiting_since_s is None else task.waiting_since_s
        left_s = self.slack_s(task, at_s=since_s) - self.lead_s(task)
        return since_s + max(0.0, left_s) / (1.0 - self._bucket(task)[1])


def been_away(
    away: tuple[tuple[float, float], ...], from_s: float, to_s: float, *, window_s: float
) -> tuple[tuple[float, float], ...]:
    """Return `BoardTask.away` with one more interval, without those that left the window (F9).

    Intervals that end in the same part of a window are merged into one. The remembered time is
    therefore never too short, and at most one part too long.
    """
    lasting = [(a, b) for a, b in away if b > to_s - window_s]
    part_s = window_s / AWAY_PARTS
    if lasting and lasting[-1][1] // part_s == to_s // part_s:
        before_from_s, before_to_s = lasting.pop()
        from_s -= before_to_s - before_from_s
    return (*lasting, (from_s, to_s))
