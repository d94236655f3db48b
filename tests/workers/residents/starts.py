"""Starts of tasks for tests of residents."""

from __future__ import annotations

from typing import Any

from tests.launches import spec_of
from workers.process.task_start import TaskStart


def start_of_job(**more: Any) -> TaskStart:
    """Return the start of a job on a CPU device; `more` has further fields."""
    return TaskStart(
        task="t1",
        spec=spec_of({"job": "m:J"}),
        inputs={},
        preset={},
        kind="cpu",
        code="",
        scratch="",
        lease_margin_s=1.0,
        patience_s=1.0,
        **more,
    )
