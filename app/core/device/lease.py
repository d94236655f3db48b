"""Computes the lease of a device: how long the device may act without hearing from its island.

`device_machine` asks it before it gives the slot to a process, and kills the process in the slot
when the lease and its grace are over.

A step may begin until the lease is nearly over, and may last longer than the lease. So in each
report a device asks its island for a grace: a time after the lease in which the island does not
give the work away, since a long step may still run. The device kills the step only when the grace
ends too.

The island applies the grace of the newest report that it recorded. The device does not know which
report that is until the answer comes. So the device counts on the least grace among the newest
answered report and all later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.model.protocol.messages import Answer

# in microseconds: steps up to this length end within the margin that every lease has
SHORT_STEP_US = 1_000_000
GRACE_MAX_US = 2**30  # 18 minutes; an island may allow less (`ROUNDHOUSE_STEP_GRACE_S`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Holds the time limits within which the device may act on its own.

    A step may begin until `trusted_until_us`. From `ends_us` the device takes no new work, and from
    `ends_us + grace_us` the island may give its work away. All count from the *sending* of the
    answered report, so they hold however long the messages took.

    `asked` are the graces that the device asked for in reports: (since when, grace), oldest first.
    The last one is still valid.
    """

    trusted_until_us: int = 0
    ends_us: int = 0
    answered_us: int = 0  # send time of the newest answered report
    granted_us: int = 0  # grace by the newest answer
    asked: tuple[tuple[int, int], ...] = field(default=((0, 0),))

    @property
    def asked_us(self) -> int:
        """The grace for which the next report asks."""
        return self.asked[-1][1]

    @property
    def grace_us(self) -> int:
        return min(self.granted_us, *(grace_us for _, grace_us in self.asked))

    @property
    def work_ends_us(self) -> int:
        """The time from which another device may have the work."""
        return self.ends_us + self.grace_us

    def after(self, answer: Answer, *, margin_us: int) -> Lease:
        """Return the lease after the answer; a late or repeated answer changes nothing."""
        if answer.sent_us < self.answered_us:
            return self
        ends_us = answer.sent_us + answer.lease_us
        return Lease(
            trusted_until_us=ends_us - margin_us,
            ends_us=ends_us,
            answered_us=answer.sent_us,
            granted_us=answer.grace_us,
            asked=_since(self.asked, answer.sent_us),
        )

    def permits_steps(self, now_us: int) -> bool:
        return now_us < self.trusted_until_us

    def is_over(self, now_us: int) -> bool:
        """True if the island may have given the work to another device, so that nothing may run
        here.
        """
        return now_us >= self.work_ends_us

    def asking(self, grace_us: int, now_us: int) -> Lease:
        """Return the lease for a device whose reports ask for this grace from now on."""
        if grace_us == self.asked_us:
            return self
        return Lease(
            trusted_until_us=self.trusted_until_us,
            ends_us=self.ends_us,
            answered_us=self.answered_us,
            granted_us=self.granted_us,
            asked=(*self.asked, (now_us, grace_us)),
        )


def _since(asked: tuple[tuple[int, int], ...], us: int) -> tuple[tuple[int, int], ...]:
    """Leave out graces for which no report after `us` asked."""
    ends = [*(since_us for since_us, _ in asked[1:]), None]
    return tuple(one for one, end in zip(asked, ends, strict=True) if end is None or end > us)


def grace_for(step_us: int) -> int:
    """Return the grace in which a step of this length can end; 0 for a short step.

    It is twice the length, rounded up to a power of two, so that it seldom changes.
    """
    if step_us <= SHORT_STEP_US:
        return 0
    return min(GRACE_MAX_US, 1 << (2 * step_us - 1).bit_length())
