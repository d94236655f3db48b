"""Defines which waiting tasks are alike, so that they are counted in one line (`Line`).

A field that decides which devices suit a task is part of this key, as it is of its queue class
(`core.fairness.fair_tree.Lane`).
"""

from __future__ import annotations

from typing import Any

from app.db.models import Task

#: Column of the key of `lines` -> column of `tasks`.
KEY = {
    "island": "island",
    "user_id": "user_id",
    "kind": "kind",
    "memory_bytes": "memory_bytes",
    "width": "devices_min",
    "device_choice": "device_choice",
}

#: The condition, in SQL, that a task `t` belongs to the line `l`.
IN_LINE = " and ".join(f"t.{of_task} = l.{of_line}" for of_line, of_task in KEY.items())


def key_of(task: Task) -> dict[str, Any]:
    """Return the key of the line to which the task belongs while it waits."""
    return {of_line: getattr(task, of_task) for of_line, of_task in KEY.items()}
