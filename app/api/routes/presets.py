"""Presets: the parameters configured on a device of one kind for tasks of one type."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from sqlalchemy import func, select, text

from app.api.access.auth import Authed, PlatformAdmin
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.fleet import PresetIn, PresetOut
from app.core.model import preset
from app.db.models import Device, Preset
from app.db.transactions import Db
from app.errors import BadInput, NotFound

router = v1_router("presets")

TaskType = Annotated[
    str,
    Path(
        pattern=r"^([a-z0-9][a-z0-9._-]{0,62}|\*)$",
        description="The task type; `*`: all types without a preset of their own.",
    ),
]
Kind = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="The device kind.")]


# The audit log records the state before each change, so writers take turns; readers go on.
_ONE_WRITER = text("lock table presets in share row exclusive mode")


@router.get("/presets", response_model=Page[PresetOut], summary="List presets")
def list_presets(caller: Authed, session: Db) -> dict[str, Any]:
    """Lists all presets; there are few."""
    query = select(Preset).order_by(Preset.task_type, Preset.kind)
    return {"items": list(session.scalars(query)), "next_cursor": None}


@router.get(
    "/presets/{task_type}/{kind}",
    response_model=PresetOut,
    summary="Show a preset",
    responses=declared(404),
)
def get_preset(task_type: TaskType, kind: Kind, caller: Authed, session: Db) -> Preset:
    """Shows the parameters set on a device of that kind before such a task runs."""
    found = session.get(Preset, (task_type, kind))
    if found is None:
        raise NotFound("preset", f"{task_type}/{kind}")
    return found


@router.put(
    "/presets/{task_type}/{kind}",
    response_model=PresetOut,
    summary="Set a preset",
    responses=declared(403),
)
def put_preset(
    task_type: TaskType, kind: Kind, body: PresetIn, caller: PlatformAdmin, session: Db
) -> Preset:
    """Applies from the next launch on.  If a device does not take a value, the task fails.

    The failure's detail shows the difference.  Parameters of the device's driver, such as
    `power_limit_w`, are put back when no task that wants them holds the device.
    """
    kinds = {*preset.KINDS, *session.scalars(select(Device.kind).distinct())}
    if kind not in kinds:
        known = ", ".join(sorted(kinds))
        raise BadInput.at(
            "{kind}", f"must be a known device kind ({known}); got {kind!r}", "unknown"
        )
    if faults := preset.check(body.params, kind=kind):
        raise BadInput(f"{faults[0].pointer}: {faults[0].detail}", errors=faults)
    session.execute(_ONE_WRITER)
    row = session.get(Preset, (task_type, kind))
    if row is None:
        row = Preset(task_type=task_type, kind=kind, params=body.params)
        session.add(row)
    else:
        row.params, row.version, row.updated_at = body.params, row.version + 1, func.now()
    session.flush()
    session.refresh(row)
    return row


@router.delete(
    "/presets/{task_type}/{kind}",
    status_code=204,
    summary="Delete a preset",
    responses=declared(403, 404),
)
def delete_preset(task_type: TaskType, kind: Kind, caller: PlatformAdmin, session: Db) -> None:
    """Applies from the next launch on: such tasks get the preset of the type `*`, or else the
    defaults.
    """
    session.execute(_ONE_WRITER)
    session.delete(get_preset(task_type, kind, caller, session))
