"""Runs the Celery worker of one device.  It hosts the supervisor, and its messages only wake it.

    celery -A workers.device.worker worker --pool threads -c 2 -Q device.<id>

Orders and answers that the island signed go into the supervisor's inbox
(`workers.device.supervisor`).  Nothing else happens in this module.  The device's reports
are proved by a key of its host.  This module imports no torch and opens no database.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from celery import bootsteps

from app.core.model.protocol.messages import Alive
from app.core.model.protocol.wellformed import BadMessage
from app.messaging import broker
from app.messaging.signed_messages import Mail, sealed_heartbeat
from app.settings import settings
from app.storage.signing import BadSignature, public_key
from workers.device.device_check import find_device
from workers.device.supervisor import Supervisor
from workers.process.celery_inbox import hears
from workers.transfer.host_context import CannotServe, House

log = logging.getLogger(__name__)

celery = broker.make_celery("device", settings().redis_url.get_secret_value(), settings().redis_tls)


class ToIsland:
    """Sends reports to the island's queue, sealed, as hints that may be lost."""

    def __init__(self, island: str, mail: Mail) -> None:
        self.queue, self.mail = broker.island_queue(island), mail

    def send(self, alive: Alive) -> None:
        text = sealed_heartbeat(self.mail.keys, alive, to=self.mail.addressee())
        broker.send(celery, broker.ISLAND_ALIVE, self.queue, text)


class Serve(bootsteps.StartStopStep):
    """Starts and stops the supervisor with the Celery worker, so that it outlives any loss of
    Redis.
    """

    requires = {"celery.worker.components:Pool"}
    supervisor: Supervisor | None = None
    mail: Mail | None = None

    def start(self, parent: Any) -> None:
        if not settings().device:
            raise RuntimeError("ROUNDHOUSE_DEVICE must be set to the id of this device")
        house = House.of(settings(), find_device(settings()))
        Serve.mail = Mail(house.message_keys, house.device, _island_key())
        to_island = ToIsland(house.island, Serve.mail)
        Serve.supervisor = Supervisor(house, to_island, on_fatal=_end_worker)
        Serve.supervisor.start()

    def stop(self, parent: Any) -> None:
        if Serve.supervisor is not None:
            Serve.supervisor.stop()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)


def _island_key() -> str:
    """Return the public key of the island.  Without it the device obeys no orders."""
    try:
        return public_key(settings().its_island_key)
    except ValueError as error:
        raise CannotServe(
            f"cannot read the public key of island {settings().island}: {error}; set "
            "ROUNDHOUSE_ISLAND_PUBLIC_KEY to the key that `roundhouse device island-key` prints"
        ) from error


def _end_worker() -> None:
    os._exit(1)  # the worker's service manager starts it again; no state is worth keeping


celery.steps["worker"].add(Serve)
refused = broker.Complaint(log, "rejected a message")


@hears(celery, broker.DEVICE_NEWS)
def news(text: str) -> None:
    if Serve.mail is None or Serve.supervisor is None:
        return
    try:
        messages = Serve.mail.opened(text)
    except (BadSignature, BadMessage) as error:
        refused.say(error)
        return
    for message in messages:
        Serve.supervisor.receive(message)
