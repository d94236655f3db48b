"""Seals the secrets that a task names to the host that will run it, at the moment of each launch.

The sealed text opens on that host only, and only for this epoch of this task on this device.  So
nothing that lies in Postgres or passes through Redis shows a value, and a replay opens nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy import func, update
from sqlalchemy.orm import Session

from app.core.model.protocol.messages import JSON, Launch, about_secrets
from app.core.model.protocol.wellformed import as_sentence
from app.db.models import Device, Secret, Task
from app.identity import audit, enrolment, secret_store
from app.storage.sealing import CannotOpen, NoKey, sealed_to
from app.storage.signing import BadSignature

log = logging.getLogger(__name__)


def with_secrets(session: Session, task: Task, device: Device, launch: Launch) -> Launch:
    """Return the launch with the secrets that its task names, sealed to the device's host.

    If the task cannot have them all, the launch says why; the device then fails the task.
    """
    names = launch.spec.secrets
    if not names:
        return launch
    found = secret_store.find(session, task.tenant_id, task.user_id, names)
    missing = sorted({*names} - found.keys())
    said: JSON = {"mark": _mark(found, missing)}
    if missing:
        said["refused"] = as_sentence(
            "neither its user nor its tenant has any more what it names; set it and submit again: "
            + ", ".join(missing)
        )
        return replace(launch, secrets=said)
    try:
        said["sealed"] = _sealed(session, found, device, launch)
    except (NoKey, CannotOpen, BadSignature) as error:
        log.error("task %s cannot have its secrets: %s", task.id, error)
        said["refused"] = as_sentence(f"they could not be sealed to {device.host}: {error}")
        return replace(launch, secrets=said)
    _note_use(session, found, task, device)
    return replace(launch, secrets=said)


def _mark(found: Mapping[str, Secret], missing: list[str]) -> str:
    """Return a short text that is another one whenever a value is."""
    versions = sorted(f"{row.id} {row.version}" for row in found.values())
    return hashlib.sha256("\n".join([*versions, *missing]).encode()).hexdigest()[:32]


def _sealed(session: Session, found: Mapping[str, Secret], device: Device, launch: Launch) -> str:
    keys = secret_store.keyring()
    values = {name: secret_store.decrypted(row, keys) for name, row in found.items()}
    about = about_secrets(launch.task, launch.epoch, device.id)
    return sealed_to_host(session, device, json.dumps(values), about)


def sealed_to_host(session: Session, device: Device, value: str, about: str) -> str:
    """Seal a value to the enrolled host of a device; raises BadSignature."""
    announced = device.facts.get("sealing_key", "")
    key = enrolment.host_key(session, device.id)
    return sealed_to(announced, value, about, host_key=key)


def _note_use(session: Session, found: Mapping[str, Secret], task: Task, device: Device) -> None:
    ids = [row.id for row in found.values()]
    used = update(Secret).where(Secret.id.in_(ids)).values(last_used_at=func.now())
    session.execute(used.execution_options(synchronize_session=False))
    audit.used(session, found.values(), task, device.id)
