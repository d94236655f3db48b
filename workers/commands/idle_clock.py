"""Measures for how long the processes of a command have computed nothing.

Only the time on the device counts, summed over turns: a turn may be shorter than the time after
which a session is idle.
"""

from __future__ import annotations

import os
import resource
import time

from app.core.model.provisions.session import LEAST_SHARE
from workers.commands.freezer import Tree

LOOK_S = 1.0  # least time between two looks
_TICKS = os.sysconf("SC_CLK_TCK")


class IdleClock:
    """Follows the processor time of a tree of processes; processes that have ended count too."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._seen_s = self._since_s = time.monotonic()
        self._used_s = self._now_used_s()

    def leave_out_stop(self) -> None:
        """Leave out the time since the last look; the tree was stopped during it."""
        now_s = time.monotonic()
        self._since_s += now_s - self._seen_s
        self._seen_s, self._used_s = now_s, self._now_used_s()

    def idle_us(self) -> int:
        """Return for how long the tree has used less than LEAST_SHARE of a processor."""
        now_s = time.monotonic()
        if now_s - self._seen_s >= LOOK_S:
            used_s = self._now_used_s()
            if used_s - self._used_s >= LEAST_SHARE * (now_s - self._seen_s):
                self._since_s = now_s
            self._seen_s, self._used_s = now_s, used_s
        return round((self._seen_s - self._since_s) * 1e6)

    def _now_used_s(self) -> float:
        """Return the processor time of the tree.

        The count of a process includes its children that have ended.
        """
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ours.ru_utime + ours.ru_stime + sum(map(_used_s, self.tree.pids()))


def _used_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0  # the process has just ended
    return sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime, cstime
