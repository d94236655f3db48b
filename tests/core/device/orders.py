"""Orders and answers as an island sends them, for tests of a device's machine."""

from __future__ import annotations

from typing import Any

from app.core.model.messages import Answer, Launch

LEASE_US, MARGIN_US, GRACE_US, BUDGET_US = 6_000_000, 1_000_000, 1_000_000, 9_000_000
MINE = "life-2"  # the process of the device worker


def launch_order(task: str, epoch: int, **more: Any) -> Launch:
    return Launch(
        **{
            "task": task,
            "epoch": epoch,
            "seq": 1,
            "tenant": "ten",
            "run": {"job": "jobs:Count"},
            "bundle": "",
            "params": {},
            "inputs": {},
            "outputs": [],
            "world_size": 1,
            "preset": {},
            "images": [],
            "budget_us": BUDGET_US,
            "checkpoint_every_s": 0.0,
            "memory_bytes": 0,
            **more,
        }
    )


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
