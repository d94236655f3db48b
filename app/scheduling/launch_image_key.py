"""Seals the key of a tenant's images to the host that will run a command.

The key opens on that host only, and only for this epoch of this task on this device. If there is no
key, the order says why: then the device stores no processes, and reads no encrypted image.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from sqlalchemy.orm import Session

from app.core.model.protocol.messages import JSON, ExpectedTask, Launch, about_image_key
from app.core.model.protocol.wellformed import as_sentence
from app.core.model.provisions.process_images import OFFER
from app.db.models import Device, Task
from app.identity import image_keys
from app.scheduling.launch_secrets import sealed_to_host
from app.storage.sealing import CannotOpen, NoKey
from app.storage.signing import BadSignature

log = logging.getLogger(__name__)


def with_image_key(session: Session, task: Task, device: Device, launch: Launch) -> Launch:
    """Return the launch with the key, if the task may have an encrypted image or may make one."""
    may_store = OFFER in device.facts.get("offers", [])
    if launch.host or not (launch.images or may_store) or not _takes_key(task, device):
        return launch
    return replace(launch, image_key=_key(session, task, device))


def expected_with_image_key(
    session: Session, task: Task, device: Device, expected: ExpectedTask
) -> ExpectedTask:
    """Return the announcement of the task with the key, if it names an image that may be
    encrypted.
    """
    if expected.image is None or not _takes_key(task, device):
        return expected
    return replace(expected, image_key=_key(session, task, device))


def _takes_key(task: Task, device: Device) -> bool:
    return task.spec.run.kind == "command" and bool(device.facts.get("image_key"))


def _key(session: Session, task: Task, device: Device) -> JSON:
    about = about_image_key(task.id, task.epoch, device.id)
    try:
        key = image_keys.of_tenant(session, task.tenant_id)
        return {"sealed": sealed_to_host(session, device, key, about)}
    except (NoKey, CannotOpen, BadSignature) as error:
        log.warning("task %s: its images have no key: %s", task.id, error)
        return {"refused": as_sentence(f"{error}")}
