"""Decides who may open a tunnel into a task, and gives the reason if a caller may not."""

from __future__ import annotations

from collections.abc import Iterable

from app.api.access.caller import Caller
from app.api.access.visibility import may_act
from app.core.model.descriptor import RUNS
from app.core.model.provisions.tunnel import why_no_tunnel
from app.db.models import Task


def why_closed(caller: Caller, task: Task) -> str:
    """Return why this caller cannot open a shell or a port of the task; "" if the caller can.

    The descriptor is read as unchecked JSON, because checking each task of a list again would take
    too long.
    """
    if not may_act(caller, task):
        return "only its owner or an administrator may look into it"
    if why := why_secret(caller, task.user_id, task.descriptor.get("secrets") or ()):
        return why
    run = task.descriptor.get("run") or {}
    kind = next((kind for kind in RUNS if kind in run), "gang of several islands")
    devices = task.descriptor.get("devices") or {}
    return why_no_tunnel(
        task.state,
        kind,
        has_image=bool(task.descriptor.get("image")),
        device_kind=devices.get("kind", "cpu"),
        is_fraction=bool(devices.get("fraction")),
    )


def why_secret(caller: Caller, user_id: str | None, secrets: Iterable[str]) -> str:
    """Return a reason if a tunnel would show the caller the secrets of another user; "" if not."""
    names = ", ".join(secrets)
    if not names or user_id == caller.user_id:
        return ""
    return f"only its user may look into a task with secrets; it has {names}"
