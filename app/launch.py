"""What a Launch order says: the task's descriptor with everything that it refers to looked up.

Task descriptors (US20170329632A1): the preset parameters of the task's type are looked up here, at
the moment of the launch, and configured on the device that will run it.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core import preset
from app.core.messages import JSON
from app.models import Checkpoint, Device, Need, Preset, Request, Task
from app.settings import settings

IMAGES_OFFERED = 3
RESENDS_SURE = 10  # fewer than after which a Launch that is never shown is given up


def body(session: Session, task: Task, device: Device) -> JSON:
    """The fields of `core.messages.Launch` beyond (task, epoch, seq)."""
    wanted = task.descriptor
    return {
        "tenant": task.tenant_id,
        "run": wanted["run"],
        "bundle": _bundle(session, task),
        "params": wanted.get("params", {}),
        "inputs": _inputs(session, task),
        "outputs": list(wanted.get("outputs", [])),
        "world_size": wanted.get("world_size", 1),
        "preset": preset_of(session, task.type, device),
        "images": _images(session, task),
        "budget_us": max(0, int(wanted["max_duration_s"] * 1e6) - task.total_held_us),
        "checkpoint_every_s": float(wanted["checkpoint"]["every_s"]),
        "memory_bytes": task.memory_bytes,
        "incarnation": device.incarnation,
        "surely_until_us": device.heard_us + int(_sure_s() * 1e6),
    }


def _sure_s() -> float:
    """How long after a device was heard nothing that was launched on it goes elsewhere.

    Its lease does not end before, by its own clock; and no Launch is counted as lost so early.
    """
    lease_s = settings().lease_s - settings().lease_margin_s
    return min(lease_s, RESENDS_SURE * settings().order_resend_s)


def preset_of(session: Session, task_type: str, device: Device) -> JSON:
    """The parameters for this type of task on this kind of device; "*" where it has none."""
    query = select(Preset).where(Preset.kind == device.kind)
    by_type = {row.task_type: row.params for row in session.scalars(query)}
    chosen = by_type.get(task_type, by_type.get("*", {}))
    return {**preset.defaults(device.kind, threads=device.threads), **chosen}


def _bundle(session: Session, task: Task) -> str:
    digest: str = session.get_one(Request, task.request_id).descriptor["bundle"]
    return digest.removeprefix("sha256:")


def _inputs(session: Session, task: Task) -> JSON:
    query = (
        select(Need.port, Need.output, Task.outputs)
        .join(Task, Task.id == Need.needs_id)
        .where(Need.task_id == task.id, Need.port != "")
    )
    return {port: outputs[output] for port, output, outputs in session.execute(query)}


def _images(session: Session, task: Task) -> list[JSON]:
    query = (
        select(Checkpoint.sha256, Checkpoint.step)
        .where(
            Checkpoint.task_id == task.id,
            Checkpoint.damaged_at.is_(None),
            Checkpoint.deleted_at.is_(None),
        )
        .order_by(Checkpoint.step.desc(), Checkpoint.created_at.desc())
        .limit(IMAGES_OFFERED)
    )
    return [{"sha256": sha256, "step": step} for sha256, step in session.execute(query)]
