"""Starts of tasks for tests of residents and stubs."""

from __future__ import annotations

from typing import Any

from tests.launches import spec_of
from workers.process.task_start import TaskStart


def start_of(
    run: dict[str, Any], *, of_spec: dict[str, Any] | None = None, **more: Any
) -> TaskStart:
    """Return the start of a task on a CPU device.

    `run` says what the task runs; `of_spec` and `more` have further fields of its spec and start.
    """
    return TaskStart(
        task="t1",
        spec=spec_of(run, **(of_spec or {})),
        inputs={},
        preset={},
        kind="cpu",
        code="",
        scratch="",
        lease_margin_s=1.0,
        patience_s=1.0,
        **more,
    )
