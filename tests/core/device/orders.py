"""Orders and answers as an island sends them, for tests of a device's machine."""

from __future__ import annotations

from typing import Any

from app.core.model.protocol.messages import Answer, Launch
from tests.launches import launch_of

LEASE_US, MARGIN_US, GRACE_US, BUDGET_US = 6_000_000, 1_000_000, 1_000_000, 9_000_000
MINE = "life-2"  # the process of the device worker


def launch_order(task: str, epoch: int, *, milli: int = 1000, **more: Any) -> Launch:
    """Return a Launch of a task that takes `milli` thousandths of the device."""
    run = {"job": "jobs:Count"}
    usual = {"run": run, "budget_us": BUDGET_US, "fraction_milli": milli}
    return launch_of(task, epoch, **{**usual, **more})


def answer_to(sent_us: int, **more: Any) -> Answer:
    return Answer(
        **{
            "device": "h.0",
            "incarnation": MINE,
            "sent_us": sent_us,
            "lease_us": LEASE_US,
            "heard": {},
            "logged": {},
            "keep": [],
            "drop": [],
            **more,
        }
    )
