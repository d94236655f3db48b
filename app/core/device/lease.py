"""The lease of a device: until when it may act without hearing from its island."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.model.messages import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The time limits within which the device may act on its own.

    A step may begin until `trusted_until_us`.  From `ends_us` the island may give the work away.
    Both count from the *sending* of the answered report, so they hold however long the messages
    took.
    """

    trusted_until_us: int = 0
    ends_us: int = 0
    answered_us: int = 0  # send time of the newest answered report

    def after(self, answer: Answer, *, margin_us: int) -> Lease:
        if answer.sent_us < self.answered_us:
            return self
        ends_us = answer.sent_us + answer.lease_us
        return Lease(
            trusted_until_us=ends_us - margin_us, ends_us=ends_us, answered_us=answer.sent_us
        )
