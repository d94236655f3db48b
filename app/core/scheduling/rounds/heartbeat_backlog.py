"""Chooses which of the waiting heartbeats a round takes, so that the round ends in time.

If a round took all waiting heartbeats, a long round would make the next one longer. So a round
takes at most `bound`, the longest waiting first. The bound follows the durations of the last
rounds. A heartbeat with events counts more than one without: the end of a task needs more
statements, and mostly leads to the launch of another task.

The order of service: a round first renews leases, then records ends and other events, then plans
and launches, then writes progress. While heartbeats have waited for long, a round does not plan.
"""

from __future__ import annotations

from app.core.model.protocol.messages import Alive

FIRST, LEAST, MOST = 256, 128, 1024  # the first bound, and its limits
EVENT_WEIGHT = 20  # an event, and a launch that follows, count as so many heartbeats
LATE_PART = 4  # a heartbeat that has waited for this part of a lease is late


def launches_wait(
    *, oldest_s: float | None, planned_s: float, now_s: float, lease_s: float
) -> bool:
    """True if a round should leave the plan and its launches to a later round.

    `oldest_s` is the time since which the longest waiting heartbeat waits, None if none waits.  A
    late heartbeat goes before launches, as a lease or an end depends on it.  But launches wait at
    most one lease after `planned_s`, when a round planned last.
    """
    is_late = oldest_s is not None and now_s - oldest_s > lease_s / LATE_PART
    return is_late and now_s - planned_s < lease_s


class HeartbeatBacklog:
    """Keeps the newest heartbeat of every device process, since it has all that earlier ones had.

    A newer heartbeat takes the place of the older one, so a device that beats often waits no less
    and no longer than the others. All times are by one monotonic clock of the caller.
    """

    def __init__(self) -> None:
        self.bound = FIRST
        # by process: its newest heartbeat, when that came, and since when the process waits
        self._waiting: dict[tuple[str, str], tuple[Alive, float, float]] = {}
        self._taken: list[tuple[Alive, float, float]] = []  # heartbeats taken by the last round
        self._is_cut_short = False  # True if the last round left some

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, alive: Alive, came_s: float, since_s: float | None = None) -> None:
        process, since_s = (alive.device, alive.incarnation), came_s if since_s is None else since_s
        known = self._waiting.get(process)
        if known is None:
            self._waiting[process] = alive, came_s, since_s
        else:
            newest = (alive, came_s) if known[0].sent_us < alive.sent_us else known[:2]
            self._waiting[process] = *newest, min(since_s, known[2])

    def oldest_s(self) -> float | None:
        """Return since when the longest waiting process waits; None if none waits."""
        return min((since_s for _, _, since_s in self._waiting.values()), default=None)

    def take(self) -> list[Alive]:
        """Take the heartbeats for one round.

        If two processes of a device have sent some, the older process's comes first.
        """
        taken, weight = list[tuple[str, str]](), 0
        for process, (alive, _, _) in self._waiting.items():
            weight += 1 + EVENT_WEIGHT * len(alive.events)
            if taken and weight > self.bound:
                break
            taken.append(process)
        self._taken = [self._waiting.pop(process) for process in sorted(taken)]
        self._is_cut_short = bool(self._waiting)
        return [alive for alive, _, _ in self._taken]

    def put_back(self) -> None:
        """Put back what the last round took, because the round failed."""
        for taken in self._taken:
            self.put(*taken)
        self._taken = []

    def alive_since(self) -> list[tuple[Alive, float]]:
        """Return the waiting heartbeats that prove that a device is alive, and when each arrived.

        If a later process of the same device has reported, the earlier process is gone, and does
        not count. A device that leaves asks for no lease.
        """
        newest: dict[str, tuple[Alive, float]] = {}
        for _, (alive, came_s, _) in sorted(self._waiting.items()):
            newest[alive.device] = alive, came_s
        return [one for one in newest.values() if not one[0].facts.get("leaving")]

    def adapt(self, took_s: float, *, most_s: float) -> None:
        """Set the bound after a round that took `took_s` and should take at most `most_s`."""
        if took_s > most_s:
            self.bound = max(LEAST, self.bound // 2)
        elif self._is_cut_short and took_s < most_s / 2:
            self.bound = min(MOST, self.bound * 2)
