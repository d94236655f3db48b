"""Decides how long a gang waits whose turn does not come, until it goes before all others (rule
F7).

`gang_waits` decides for how long devices are kept for a gang whose turn has come.

Patience is the total time that a gang may wait. The narrower the gang, the longer it is patient.
Once the patience of a wide gang has ended, the gang is not preempted; how many devices such gangs
may hold is limited (`aged_share`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from app.core.model.snapshot import BoardTask, Policy
from app.core.scheduling.pool import Pool
from app.core.scheduling.stays import NEVER


class GangPatience:
    """Computes the patience of the gangs on a board. The board keeps `pools` up to date."""

    def __init__(self, policy: Policy, pools: Mapping[str, Pool]) -> None:
        self.policy, self.pools = policy, pools
        # kind -> the gangs on its devices
        self._gangs: defaultdict[str, dict[str, BoardTask]] = defaultdict(dict)
        self._aged: dict[str, tuple[int, int]] = {}  # kind -> (open devices, result of `aged`)

    def hold(self, gang: BoardTask) -> None:
        """Note that a gang holds devices."""
        self._gangs[gang.kind][gang.id] = gang
        self._aged.pop(gang.kind, None)

    def let_go(self, gang: BoardTask) -> None:
        """Note that a gang holds no devices any more."""
        del self._gangs[gang.kind][gang.id]
        self._aged.pop(gang.kind, None)

    def aged(self, kind: str) -> int:
        """Return how many devices are held by gangs whose patience has ended.

        Patience depends on the number of open devices: if that changes, all gangs are checked
        again.
        """
        devices = self.pools[kind].size() if kind in self.pools else 0
        known = self._aged.get(kind)
        if known is None or known[0] != devices:
            held = sum(gang.width for gang in self._gangs[kind].values() if self.protected(gang))
            known = self._aged[kind] = (devices, held)
        return known[1]

    def total_s(self, task: BoardTask) -> float:
        """Return how long a gang waits in total before it goes before all others, in s.

        Narrower gangs wait longer, because a few devices often become free together.  A task with
        one device is no gang and has no patience: NEVER.
        """
        pool = self.pools.get(task.kind)
        if task.width == 1 or pool is None:
            return NEVER
        wide = self.policy.wide_share * len(pool.open)
        return self.policy.patience_s * max(1.0, wide / task.width)

    def ends_s(self, task: BoardTask) -> float:
        """Return when the waiting gang becomes urgent; NEVER for a task with one device."""
        since_s = task.waits_since_s
        waited_s = task.waited_s if self._ages(task) else 0.0
        return since_s + max(0.0, self.total_s(task) - waited_s)

    def protected(self, task: BoardTask) -> bool:
        """True if a wide gang's patience has ended before: then the gang is not preempted."""
        return self._ages(task) and task.waited_s >= self.total_s(task)

    def _ages(self, task: BoardTask) -> bool:
        """True if the gang's waits are added up; if not, its patience starts again after each turn.

        Waits are not added up for narrow gangs, which may be many, nor for a gang that alone
        exceeds the share of devices that such gangs may hold.
        """
        return self.total_s(task) <= self.policy.patience_s and not self._too_wide(task)

    def _too_wide(self, task: BoardTask) -> bool:
        pool = self.pools.get(task.kind)
        return pool is not None and task.width > self.policy.aged_share * pool.size()

    def may_age(self, task: BoardTask) -> bool:
        """Return whether this gang may go ahead of others now that its patience has ended.

        Such gangs together hold at most the share `aged_share` of the devices of their kind.
        """
        pool = self.pools.get(task.kind)
        if pool is None or not self._ages(task):
            return pool is not None
        return self.aged(task.kind) + task.width <= self.policy.aged_share * pool.size()
